"""A step that takes far too long: who is accused, who is not, and what long pauses are none of its business."""

import json

import pytest

from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest, RankSigns, StartSigns
from gangline.supervise.hang import EVIDENCE_S, FIRST_S, LOADING_S, PAUSE_S, SILENT_S, STARVED_S, STEP_S, Hang
from tests.unit.supervise.test_board import Clock

HOSTS = {"pc1": (0,), "pc2": (1,), "pc3": (2,)}
DDP = "forward_backward (ddp.py:61)"


class Gang:
    """Ranks that do what a test says. Their host agents tell of it every second, by clocks of their own."""

    def __init__(self, hosts=HOSTS, *, program="worker"):
        self.clock = Clock()
        self.clock.now = 1000.0
        self.hosts = hosts
        self.program = program
        self.ranks = {rank: ["joined", 0, 0] for ranks in hosts.values() for rank in ranks}
        self.since = dict.fromkeys(self.ranks, 1000.0)
        self.starved, self.shares = dict.fromkeys(self.ranks, 0.0), {}
        self.gone, self.frozen, self.ended = set(), set(), set()
        self.told = {}
        self.beat = 0
        self.step = 1
        self.events = []
        self.watched_by_a_new_supervisor()

    def watched_by_a_new_supervisor(self):
        parts = [
            HostRequest(host=host, folder="/", rank_files="/", argv=(), env={}, ranks=ranks, program=self.program)
            for host, ranks in self.hosts.items()
        ]
        self.hang = Hang(LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts)), clock=self.clock)

    def enter(self, phase, *ranks, step=None):
        for rank in ranks or self.ranks:
            self.ranks[rank] = [phase, step or self.step, self.ranks[rank][2] + (phase == "exchange")]
            self.since[rank] = self.clock.now

    def beats(self, *ranks):
        self.since |= dict.fromkeys(ranks, self.clock.now)

    def passes(self, seconds, every=0.5, beating=()):
        """Let time go by; the events of that time."""
        before, end = len(self.events), self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + every)
            for rank, share in self.shares.items():
                self.starved[rank] += every * share
            self.beats(*beating)
            self.look()
        return self.events[before:]

    def look(self):
        self.beat += 1
        self.events += self.hang.note([self.status(host) for host in self.hosts], joined=True)

    def status(self, host):
        if host in self.ended:
            return HostStatus(host=host, phase="ended", returncode=0)
        if host in self.gone:
            return HostStatus(host=host, phase="unreachable", why="no answer")
        if host not in self.frozen:
            signs = StartSigns(launcher=True, met=True, ranks=tuple(map(self.signs, self.hosts[host])))
            self.told[host] = HostStatus(host=host, phase="running", beat=self.beat, signs=signs)
        return self.told[host]

    def signs(self, rank):
        phase, step, collectives = self.ranks[rank]
        same_s = round(self.clock.now - self.since[rank], 1)
        return RankSigns(
            rank=rank,
            phase=phase,
            has_torch=True,
            has_met=True,
            step=step,
            collectives=collectives,
            same_s=same_s,
            starved_s=self.starved[rank],
        )

    def steps(self, number, seconds):
        """All do so many steps of this length."""
        for _ in range(number):
            self.enter("data")
            self.passes(seconds / 2)
            self.enter("exchange")
            self.passes(seconds / 2)
            self.enter("update")
            self.step += 1
        self.enter("data")
        self.look()

    def stands(self, rank, phase="data"):
        """Of a step, this rank does no more than begin this phase; all others wait for it in the exchange."""
        self.enter(phase, rank)
        self.enter("exchange", *(other for other in self.ranks if other != rank))

    def shows(self, **rows):
        """Hand in what ranks' processes say; all others wait in the exchange."""
        found = {f"r{rank}": stack() for rank in self.ranks} | rows
        self.hang.take({host: {"ranks": {str(r): found[f"r{r}"] for r in ranks}} for host, ranks in self.hosts.items()})
        return self.hang.failure()


def stack(state="S", where=DDP, waits=None, unheard=(), **more):
    frames = ["wait (graph.py:1)", where] if where else []
    own = waits if waits is not None else where == DDP
    row = {"pid": 4711, "state": state, "wchan": "", "where": where, "waits": own, "stack": frames}
    return {**row, "others": 3, "unheard": list(unheard), **more}


def names(events):
    return [name for name, _ in events]


@pytest.fixture
def gang():
    """Three ranks that have done five steps of 2 s each."""
    gang = Gang()
    gang.passes(5)
    gang.steps(5, 2.0)
    assert gang.events == []
    return gang


def test_a_process_that_was_stopped_is_named_with_its_host_and_what_lets_it_go_on(gang):
    gang.stands(2)
    assert gang.passes(STEP_S - 1) == []
    ((name, details),) = gang.passes(2)
    assert name == "hanging"
    assert details["what"] == "rank 2 on pc3 stands in `data` of step 6 since 30 s"
    assert [details[key] for key in ("host", "rank", "phase", "step")] == ["pc3", 2, "data", 6]
    assert details["seconds"] == pytest.approx(30, abs=1)
    error = gang.shows(r2=stack("T", where=""))
    assert error.what.startswith("rank 2 on pc3 is stopped (SIGSTOP) in `data` of step 6 since 31 s; ")
    assert error.what.endswith("; rank 0 on pc1 and rank 1 on pc2 wait")
    assert error.fix == "somebody stopped the process; let it continue on pc3: kill -CONT 4711"
    assert (error.details["host"], error.details["rank"]) == ("pc3", 2)


def test_an_endless_loop_is_named_by_function_and_line(gang):
    gang.stands(2)
    gang.passes(STEP_S + 11)
    error = gang.shows(r2=stack("R", where="load_rows (rows.py:88)"))
    assert "rank 2 on pc3 stands in `data` of step 6 since 41 s, at load_rows (rows.py:88); " in error.what
    rows = error.seen.splitlines()
    assert rows[0] == "step 6 takes 41 s; the slowest of the last 20 took 2 s"
    assert rows[2] == f"rank 0 on pc1 stands in `exchange` of step 6 since 41 s, at {DDP}"
    assert rows[-3:] == ["stack of rank 2 on pc3, innermost first:", "  wait (graph.py:1)", "  load_rows (rows.py:88)"]
    said = json.loads(json.dumps(error.to_json()))
    assert (said["host"], said["rank"]) == ("pc3", 2)
    assert [row["where"] for row in said["stacks"]] == ["load_rows (rows.py:88)", DDP, DDP]


def test_a_rank_that_waits_for_a_disk_says_so(gang):
    gang.stands(1)
    gang.passes(STEP_S + 1)
    error = gang.shows(r1=stack("D", where="read (rows.py:3)"))
    assert "rank 1 on pc2 waits for a disk or a network file system in `data` of step 6" in error.what
    assert "look at the disk of pc2" in error.fix


def test_one_that_left_an_exchange_out_is_found_by_where_it_stands_else(gang):
    """All have entered the same; one of them is already at the next thing that all do together."""
    gang.enter("exchange")
    ((name, details),) = gang.passes(STEP_S + 2)
    assert name == "hanging"
    assert "all 3 ranks wait in the same exchange; suspect the network between hosts" in details["what"]
    assert (details["host"], details["rank"]) == (None, None)
    error = gang.shows(r1=stack(where="agree (agree.py:62)", waits=True))
    assert (error.details["host"], error.details["rank"]) == ("pc2", 1)


def test_one_of_two_that_does_not_wait_in_our_own_calls_is_the_one():
    gang = Gang({"pc1": (0,), "pc2": (1,)})
    gang.steps(3, 1.0)
    gang.enter("exchange")
    gang.passes(STEP_S + 2)
    error = gang.shows(r1=stack("R", where="forward (model.py:7)"))
    assert (error.details["host"], error.details["rank"]) == ("pc2", 1)


def test_a_process_that_was_stopped_within_the_exchange_is_found_by_its_state(gang):
    gang.enter("exchange")
    gang.passes(STEP_S + 2)
    error = gang.shows(r0=stack("T", where=""))
    assert (error.details["host"], error.details["rank"]) == ("pc1", 0)


def test_where_all_wait_the_host_whose_packets_get_lost_is_the_one(gang):
    gang.enter("exchange")
    gang.passes(STEP_S + 2)
    lost = [stack(unheard=["10.0.0.3"]), stack(unheard=["10.0.0.3"]), stack(unheard=["10.0.0.1", "10.0.0.2"])]
    error = gang.shows(r0=lost[0], r1=lost[1], r2=lost[2])
    assert (error.details["host"], error.details["rank"]) == ("pc3", 2)
    assert "what it sends to 10.0.0.1 and 10.0.0.2 is not acknowledged" in error.seen
    assert "the network of pc3" in error.fix


def test_where_all_wait_and_nothing_tells_them_apart_nobody_is_accused(gang):
    gang.enter("exchange")
    gang.passes(STEP_S + 2)
    error = gang.shows()
    assert error.what == "all 3 ranks wait in the same exchange; suspect the network between hosts"
    assert (error.details["host"], error.details["rank"]) == (None, None)


def test_ranks_that_all_stand_elsewhere_are_all_named(gang):
    gang.enter("data")
    gang.passes(STEP_S + 2)
    error = gang.shows(**{f"r{rank}": stack("D", where="read (rows.py:3)") for rank in range(3)})
    assert error.what.count("waits for a disk or a network file system in `data`") == 3


def test_the_slower_the_steps_were_the_longer_one_may_take():
    gang = Gang()
    gang.steps(4, 40.0)
    gang.stands(1)
    assert gang.passes(3 * 40 - 1) == []
    assert names(gang.passes(2)) == ["hanging"]


def test_only_the_last_twenty_steps_count():
    gang = Gang()
    gang.steps(3, 2.0)
    gang.steps(1, 80.0)
    gang.steps(19, 2.0)
    assert gang.hang._steps.limit_s == pytest.approx(240, rel=0.05)
    gang.steps(2, 2.0)
    assert gang.hang._steps.limit_s == STEP_S


def test_who_is_slow_but_gets_on_is_not_accused(gang):
    gang.enter("exchange", 0, 1)
    for _ in range(30):
        gang.enter("data", 2)
        assert gang.passes(1) == []
        gang.enter("compute", 2)
        assert gang.passes(8) == []
    assert names(gang.passes(10)) == ["hanging"]


def test_the_first_step_may_be_slow():
    gang = Gang()
    gang.passes(200)  # loading
    gang.stands(1)
    assert gang.passes(FIRST_S - 1) == []
    ((_, details),) = gang.passes(2)
    assert "rank 1 on pc2 stands in `data` of step 1" in details["what"]


def test_after_a_slow_first_step_the_second_may_be_as_slow():
    gang = Gang()
    gang.passes(5)
    gang.steps(1, 150.0)
    gang.stands(1)
    assert gang.passes(440) == []
    assert names(gang.passes(20)) == ["hanging"]


def test_one_rank_that_loads_for_long_is_waited_for():
    gang = Gang()
    gang.enter("data", 0, 1)
    assert gang.passes(LOADING_S - 5) == []
    assert names(gang.passes(10)) == ["hanging"]


def test_ranks_that_compile_have_the_time_of_loading(gang):
    gang.enter("compile")
    assert gang.passes(LOADING_S - 10) == []
    assert names(gang.passes(20)) == ["hanging"]
    assert "ranks compile" in gang.shows().seen


def test_a_long_evaluation_gives_signs_of_life(gang):
    gang.enter("evaluate")
    for _ in range(240):
        assert gang.passes(5, every=1) == []
        gang.beats(2)  # the others have ended theirs
    assert gang.passes(PAUSE_S - 8, every=1) == []
    assert names(gang.passes(20)) == ["hanging"]
    assert "ranks evaluate" in gang.shows().seen


def test_after_an_evaluation_a_step_has_its_whole_time(gang):
    gang.enter("evaluate")
    gang.passes(400, every=1)
    gang.stands(1)
    assert gang.passes(STEP_S - 1) == []
    assert names(gang.passes(2)) == ["hanging"]


def test_while_one_rank_saves_the_others_wait_for_it(gang):
    gang.enter("save", 0)
    gang.enter("exchange", 1, 2)
    assert gang.passes(PAUSE_S - 5) == []
    ((_, details),) = gang.passes(10)
    assert (details["host"], details["phase"]) == ("pc1", "save")


def test_saves_at_every_step_hide_how_long_a_step_takes_and_nobody_is_accused_too_soon():
    gang = Gang()
    for _ in range(4):
        gang.enter("save", 0)
        gang.enter("data", 1, 2)
        gang.passes(50)
        gang.enter("exchange", 0)
        assert gang.passes(45) == []
        gang.enter("exchange", 1, 2)
        gang.passes(1)
        gang.step += 1
    gang.stands(1)
    assert gang.passes(STEP_S + 30) == []


def test_a_host_that_does_not_answer_while_all_others_wait_is_the_cause(gang):
    gang.stands(2)
    gang.gone.add("pc3")
    assert gang.passes(SILENT_S - 0.5) == []
    ((name, details),) = gang.passes(1)
    assert (name, details["host"], details["rank"]) == ("hanging", "pc3", None)
    error = gang.hang.failure()  # there is nothing to wait for
    assert error.what == "pc3 does not answer, and the others wait for it"
    assert (error.details["host"], error.details["rank"]) == ("pc3", None)
    assert "stands in `exchange` of step 6" in error.seen
    assert error.seen.endswith("rank 2 on pc3 was last seen in `data` of step 6")


def test_a_link_that_is_gone_for_five_seconds_is_no_hang(gang):
    for _ in range(5):
        gang.stands(2)
        gang.gone.add("pc3")
        assert gang.passes(5) == []
        gang.gone.clear()
        gang.step += 1
        gang.enter("data")
        assert gang.passes(1) == []


def test_a_host_that_does_not_answer_but_computes_is_left_alone(gang):
    gang.gone.add("pc3")
    gang.steps(40, 2.0)
    assert gang.events == []


def test_a_host_that_does_not_answer_has_the_time_that_its_steps_take():
    gang = Gang()
    gang.steps(4, 60.0)
    gang.stands(2)
    gang.gone.add("pc3")
    assert gang.passes(85) == []
    assert names(gang.passes(10)) == ["hanging"]


def test_a_rank_that_still_works_is_what_they_wait_for_not_the_host_that_is_silent(gang):
    gang.enter("exchange", 0)
    gang.enter("compute", 1)
    gang.gone.add("pc3")
    assert gang.passes(STEP_S - 2) == []
    ((_, details),) = gang.passes(4)
    assert (details["host"], details["rank"]) == ("pc2", 1)


def test_where_no_host_answers_our_own_link_is_cut(gang):
    gang.stands(2)
    gang.gone |= set(HOSTS)
    assert gang.passes(4000, every=5) == []
    assert gang.hang.failure() is None


def test_a_host_agent_that_stands_still_says_nothing_of_its_ranks(gang):
    gang.frozen.add("pc3")
    gang.steps(40, 2.0)
    assert gang.events == []
    gang.stands(2)
    gang.passes(SILENT_S + 1)
    assert gang.hang.failure().what == "the gangline agent on pc3 does not respond, and the others wait for it"


def test_what_resolves_by_itself_is_told_and_is_no_failure(gang):
    gang.stands(2)
    assert names(gang.passes(STEP_S + 2)) == ["hanging"]
    gang.enter("exchange", 2)
    gang.step += 1
    gang.enter("data")
    assert names(gang.passes(1)) == ["going on"]
    assert gang.hang.failure() is None
    assert gang.hang.suspicion is None
    gang.steps(3, 2.0)
    assert names(gang.events) == ["hanging", "going on"]


def test_evidence_is_waited_for_a_few_seconds_and_not_longer(gang):
    gang.stands(2)
    gang.passes(STEP_S + 1)
    assert gang.hang.suspicion == 1
    assert gang.hang.failure() is None
    gang.hang.take({"pc1": {"ranks": {"0": stack()}}, "pc2": {"ranks": {"1": stack()}}})
    assert gang.hang.failure() is None
    gang.passes(EVIDENCE_S)
    error = gang.hang.failure()
    assert error.what.startswith("rank 2 on pc3 stands in `data`")
    assert [row["rank"] for row in error.to_json()["stacks"]] == [0, 1]


def test_another_suspicion_has_another_number_and_no_old_evidence(gang):
    gang.stands(2)
    gang.passes(STEP_S + 1)
    assert gang.shows(r2=stack("T", where="")) is not None
    gang.step += 1
    gang.enter("data")
    gang.passes(1)
    gang.stands(1)
    while gang.hang.suspicion is None:  # the step before was long, so this one may be longer
        gang.passes(1)
    assert gang.hang.suspicion == 2
    assert gang.hang.failure() is None


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        [],
        {"ranks": 3},
        {"ranks": {"two": stack(), "2": None}},
        {"ranks": {"2": stack(state=7)}},
        {"ranks": {"2": {**stack(), "pid": "4711"}}},
        {"ranks": {"2": {**stack(), "stack": 5}}},
    ],
)
def test_a_host_that_talks_nonsense_gives_no_evidence(gang, nonsense):
    gang.stands(2)
    gang.passes(STEP_S + 1)
    gang.hang.take(dict.fromkeys(HOSTS, nonsense))
    assert gang.hang.failure().what.startswith("rank 2 on pc3 stands in `data` of step 6 since 31 s; ")


def test_what_a_host_says_is_bounded_and_without_control_characters(gang):
    gang.stands(2)
    gang.passes(STEP_S + 1)
    error = gang.shows(r2=stack(where="\x1b[31m" + "x" * 9000, stack=["y\n" * 500] * 900))
    assert "\x1b" not in str(error)
    assert len(str(error)) < 6000


def test_a_rank_without_work_enters_the_exchange_and_waits_there(gang):
    """Shares move: then one has nothing to do, and is early."""
    for _ in range(20):
        gang.enter("exchange", 0)
        gang.enter("data", 1, 2)
        assert gang.passes(9) == []
        gang.enter("exchange", 1, 2)
        assert gang.passes(1) == []
        gang.step += 1
        gang.enter("data")
    gang.enter("exchange", 0)
    gang.enter("data", 1, 2)
    gang.passes(5)
    gang.enter("exchange", 1)
    assert names(gang.passes(30)) == ["hanging"]
    assert gang.shows().details["rank"] == 2


def local_round(gang, *, inner, exchange_s):
    """Hosts do steps of their own, then exchange for long; who is early beats meanwhile."""
    last = gang.step + inner - 1
    for _ in range(inner):
        gang.enter("compute")
        gang.passes(1, every=1)
        gang.step += 1
    gang.step = last
    gang.enter("exchange")
    gang.passes(exchange_s, beating=gang.ranks)
    gang.step = last + 1


def test_a_round_of_local_sgd_has_one_long_exchange_after_many_short_steps():
    gang = Gang()
    for _ in range(3):
        local_round(gang, inner=30, exchange_s=120)
    assert gang.events == []
    gang.enter("exchange", 0, 1, step=gang.step + 29)
    gang.enter("data", 2)
    assert gang.passes(356, beating=(0, 1)) == []
    ((_, details),) = gang.passes(12, beating=(0, 1))
    assert (details["host"], details["rank"]) == ("pc3", 2)


def test_an_exchange_that_moves_is_no_hang():
    gang = Gang()
    gang.steps(3, 2.0)
    gang.enter("exchange")
    assert gang.passes(900, beating=(0,)) == []


def test_a_new_supervisor_knows_nothing_of_steps_yet_but_since_when_ranks_stand(gang):
    gang.stands(2)
    gang.passes(10)
    gang.watched_by_a_new_supervisor()
    assert gang.passes(FIRST_S - 1, every=1) == []
    ((_, details),) = gang.passes(4)
    assert "since 5 min 1" in details["what"]


def test_a_step_of_which_only_the_end_was_seen_teaches_nothing():
    gang = Gang()
    gang.steps(3, 60.0)
    gang.passes(58)
    gang.watched_by_a_new_supervisor()
    gang.passes(2)
    gang.steps(1, 2.0)
    gang.stands(1)
    assert gang.passes(60) == []


def test_one_rank_alone_is_named():
    gang = Gang({"pc1": (0,)})
    gang.steps(3, 1.0)
    gang.enter("data")
    ((_, details),) = gang.passes(STEP_S + 2)
    assert (details["host"], details["rank"]) == ("pc1", 0)


def test_ranks_that_have_ended_and_hosts_that_have_are_not_waited_for(gang):
    gang.enter("ended", 2)
    gang.ended.add("pc3")
    gang.enter("save", 0, 1)
    assert gang.passes(100) == []
    gang.ended |= set(HOSTS)
    assert gang.passes(1000, every=5) == []


def test_nothing_is_told_before_all_have_joined_nor_of_the_users_own_program(gang):
    own = Gang(program="command")
    own.steps(3, 1.0)
    own.stands(2)
    assert own.passes(1000, every=5) == []
    assert list(gang.hang.note([gang.status(host) for host in HOSTS], joined=False)) == []


def test_time_without_a_processor_does_not_count_and_the_rest_does(gang):
    gang.steps(5, 4.0)
    gang.stands(2, "compute")
    gang.shares = {2: 0.9}  # of each second it wants a processor, and gets it for a tenth
    assert gang.passes(STEP_S * 8) == []
    assert names(gang.passes(STEP_S * 3)) == ["hanging"]
    assert gang.events[-1][1]["rank"] == 2


def test_who_is_starved_and_then_goes_on_was_never_accused(gang):
    gang.steps(5, 4.0)
    gang.stands(2, "compute")
    gang.shares = {2: 0.95}
    assert gang.passes(120) == []
    gang.enter("exchange", 2)
    gang.shares = {}
    assert gang.passes(5) == []
    gang.enter("update")
    gang.step += 1
    gang.steps(2, 4.0)
    assert gang.events == []


def test_a_rank_that_hangs_is_found_as_soon_as_ever_though_another_one_is_starved(gang):
    gang.steps(5, 4.0)
    gang.stands(2)
    gang.shares = {0: 0.9, 1: 0.9}
    assert names(gang.passes(STEP_S + 1)) == ["hanging"]
    assert gang.events[-1][1]["rank"] == 2


def test_what_was_starved_in_an_earlier_step_excuses_nothing(gang):
    gang.shares = {2: 0.9}
    gang.steps(5, 8.0)
    gang.shares = {}
    gang.stands(2)
    assert names(gang.passes(STEP_S + 1)) == ["hanging"]


def test_of_a_host_that_starves_for_ever_no_more_than_half_an_hour_counts(gang):
    gang.steps(5, 4.0)
    gang.stands(2, "compute")
    gang.shares = {2: 1.0}
    assert gang.passes(STARVED_S, every=5) == []
    assert names(gang.passes(STEP_S + 10)) == ["hanging"]
