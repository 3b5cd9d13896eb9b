"""A run whose ranks all print no more is told of once, with who fell silent first; a rank that prints is enough."""

import pytest

from gangline.launch.backend import HostStatus, RankSilence
from gangline.launch.program import StallWatch
from gangline.supervise.gang_view import FRESH_S, STACKS_S, TRIES, Stall
from tests.unit.supervise.test_board import Clock

LIMIT_S = 600.0


class Run:
    """Two ranks on each of two hosts. A test says when they print; host agents tell of it every second."""

    def __init__(self, *, action="report", after_s=LIMIT_S, is_told=False, can_resume=False):
        self.clock = Clock()
        watch = StallWatch(after_s=after_s, action=action, can_resume=can_resume)
        self.stall = Stall(watch, run_id="calm-otter-7", is_told=is_told, clock=self.clock)
        self.hosts = {"pc1": (0, 1), "pc2": (2, 3)}
        self.printed = {}
        self.gone, self.frozen, self.ended = set(), set(), set()
        self.beats = dict.fromkeys(self.hosts, 0)
        self.lines = {}
        self.joined = True

    def print(self, *ranks, at):
        self.until(at)
        self.printed |= dict.fromkeys(ranks, at)

    def until(self, at, every=10.0):
        """Let time go by; the events."""
        events = []
        while self.clock.now < at:
            self.clock.now = min(at, self.clock.now + every)
            events += self.look()
        return events

    def look(self):
        return list(self.stall.note([self.status(host) for host in self.hosts], joined=self.joined))

    def status(self, host):
        if host in self.ended:
            return HostStatus(host=host, phase="ended", returncode=0)
        if host in self.gone:
            return HostStatus(host=host, phase="unreachable", why="no answer")
        if host not in self.frozen:
            self.beats[host] += 1
            self.told = {**getattr(self, "told", {}), host: tuple(map(self.silence, self.hosts[host]))}
        return HostStatus(host=host, phase="running", beat=self.beats[host], silence=self.told[host])

    def silence(self, rank):
        now = self.clock.now
        silent_s, line = int(now - self.printed.get(rank, 0.0)), self.lines.get(rank, "")
        return RankSilence(rank=rank, silent_s=silent_s, age_s=int(now), has_printed=rank in self.printed, line=line)


@pytest.fixture
def run():
    return Run()


def names(events):
    return [name for name, _ in events]


def test_silence_of_all_is_told_once_and_so_is_the_next_output(run):
    run.print(0, 1, 2, 3, at=100)
    assert run.until(699) == []
    ((name, details),) = run.until(710)
    assert name == "quiet"
    assert details["what"].startswith("no rank has printed anything for 10 min 0")
    assert run.until(5000) == []
    run.print(0, at=5000)
    assert names(run.until(5030)) == ["printing"]
    assert names(run.until(5620)) == ["quiet"]


def test_one_rank_that_prints_is_enough(run):
    for at in range(0, 7200, 300):
        run.print(0, at=at)
        assert run.until(at + 300) == []


def test_who_fell_silent_first_while_the_others_printed_on_is_named(run):
    run.lines[3] = "step 41"
    for at in range(0, 400, 20):
        run.print(0, 1, 2, *([3] if at < 300 else []), at=at)
    ((_, details),) = run.until(1100)
    assert "rank 3 on pc2 fell silent first, 1 min 40 s before rank 2 on pc2, the last" in details["what"]
    assert details["first"] == [{"host": "pc2", "rank": 3}]
    assert details["line"] == "step 41"


def test_a_rank_that_only_said_something_at_its_start_is_not_the_first_to_fall_silent(run):
    run.print(0, 1, 2, 3, at=5)
    for at in range(20, 400, 20):
        run.print(0, at=at)
    ((_, details),) = run.until(1100)
    assert details["what"].endswith("the last was rank 0 on pc1, which alone prints")
    assert (details["first"], details["last"]) == ([], [{"host": "pc1", "rank": 0}])


def test_ranks_that_fell_silent_together_are_said_to_have(run):
    run.print(0, 1, at=100)
    run.print(2, 3, at=102)
    ((_, details),) = run.until(800)
    assert details["what"].endswith("ranks 0, 1 on pc1 and ranks 2, 3 on pc2 fell silent at about the same time")


def test_where_all_fell_silent_together_the_one_that_stands_elsewhere_shows_by_its_last_line():
    run = Run(action="stop")
    run.lines = {0: "step 7", 1: "step 7", 2: "loads a batch", 3: "step 7"}
    run.print(0, 1, 2, 3, at=100)
    ((_, details),) = run.until(800)
    assert details["line"] == "loads a batch"
    assert run.stall.failure().seen.splitlines()[-2:] == [
        "the last line of rank 2 on pc2: loads a batch",
        "the last line of ranks 0, 1 on pc1 and rank 3 on pc2: step 7",
    ]


def test_a_run_that_never_printed_is_told_of_too(run):
    ((_, details),) = run.until(700)
    assert details["what"].endswith("the ranks have printed nothing since their start")
    assert (details["first"], details["last"], details["line"]) == ([], [], "")


def test_the_time_before_the_ranks_have_joined_does_not_count(run):
    run.joined = False
    assert run.until(2000) == []
    run.joined = True
    assert run.until(2590) == []
    assert names(run.until(2620)) == ["quiet"]


def test_ranks_that_wait_for_more_connections_later_are_still_looked_at(run):
    run.print(0, at=50)
    run.joined = False
    assert names(run.until(700)) == ["quiet"]


def test_nothing_is_said_while_the_host_that_printed_last_does_not_answer(run):
    for at in range(0, 100, 10):
        run.print(0, at=at)
    run.gone = {"pc1"}
    assert run.until(2000) == []
    run.gone = set()
    run.printed[0] = 1990
    assert run.until(2500) == []
    assert names(run.until(2600)) == ["quiet"]


def test_a_host_that_fell_silent_before_the_others_and_does_not_answer_hides_nothing(run):
    for at in range(0, 100, 10):
        run.print(0, 2, at=at)
    run.gone = {"pc2"}
    for at in range(100, 200, 10):
        run.print(0, at=at)
    ((name, details),) = run.until(900)
    assert name == "quiet"
    assert "rank 2 on pc2 fell silent first" in details["what"]


def test_a_host_agent_that_stands_still_says_nothing_of_its_ranks(run):
    for at in range(0, 100, 10):
        run.print(0, 2, at=at)
    run.frozen = {"pc1"}
    for at in range(100, 200, 10):
        run.print(2, at=at)
    assert run.until(700) == []
    ((_, details),) = run.until(900)
    assert details["first"] == [{"host": "pc1", "rank": 0}]


def test_a_short_limit_is_not_reached_by_a_host_that_only_stopped_answering():
    run = Run(after_s=10.0)
    for at in range(0, 100, 2):
        run.print(0, at=at)
        run.until(at + 2, every=1.0)
    run.gone = {"pc1"}
    assert run.until(100 + 5 * FRESH_S, every=0.3) == []


def test_a_host_that_nobody_has_heard_of_yet_may_print(run):
    run.gone = {"pc2"}
    assert run.until(3000) == []


def test_a_host_that_has_ended_in_order_prints_no_more_and_the_others_count(run):
    run.print(0, 2, at=100)
    run.ended = {"pc2"}
    run.print(0, at=200)
    assert run.until(790) == []
    assert names(run.until(820)) == ["quiet"]


def test_whole_seconds_are_no_output(run):
    """What host agents say is up to a second old and rounded: around the limit that is no return."""
    run = Run(after_s=10.0)
    run.print(0, at=0)
    assert names(run.until(100, every=0.3)) == ["quiet"]


def test_who_takes_over_does_not_tell_it_again(run):
    run = Run(is_told=True)
    run.clock.now = 1000.0
    assert run.until(5000) == []
    run.print(0, at=5000)
    assert names(run.until(5020)) == ["printing"]


def test_who_takes_over_counts_from_the_last_output_and_not_from_now(run):
    run.clock.now = 650.0
    assert names(run.look()) == ["quiet"]


def test_without_a_limit_nothing_is_looked_for():
    stall = Stall(None, run_id="calm-otter-7")
    row = RankSilence(rank=0, silent_s=10**6, age_s=10**6, has_printed=True, line="")
    status = HostStatus(host="pc1", phase="running", beat=1, silence=(row,))
    assert list(stall.note([status], joined=True)) == []
    assert stall.failure() is None


def test_a_run_that_is_only_told_of_does_not_fail(run):
    run.until(5000)
    assert run.stall.failure() is None


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ({3: "[rank3]: KeyError: 'text'"}, ("pc2", 3)),
        ({3: "[rank3]: KeyError: 'text'", 0: "[rank0]: ValueError: another"}, ("pc2", 3)),
        ({3: "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:4711"}, (None, None)),
        ({3: "step 41 of 100"}, (None, None)),
        ({3: "step 41 MeanSquaredError: 0.31"}, (None, None)),
        ({3: "MeanSquaredError: 0.31"}, (None, None)),
        ({3: "WARNING: tried again after KeyError: 'text'"}, (None, None)),
    ],
)
def test_a_rank_whose_last_line_is_an_error_of_its_own_is_named_and_none_that_lost_it(lines, named):
    run = Run(action="stop")
    run.lines |= lines
    for at in range(0, 400, 20):
        run.print(0, 1, 2, *([3] if at < 300 else []), at=at)
    run.until(1100)
    error = run.stall.failure()
    assert (error.details["host"], error.details["rank"]) == named
    said = "the last line of rank 3 on pc2 is an error: KeyError: 'text', and no rank has printed anything"
    assert error.what.startswith(said if named[0] else "no rank has printed anything for 10 min")


def test_the_error_says_what_was_seen_on_every_host_and_what_to_do():
    run = Run(action="stop", can_resume=True)
    run.lines[3] = "all-reduce of step 41"
    for at in range(0, 400, 20):
        run.print(0, 2, *([3] if at < 300 else []), at=at)
    assert run.stall.failure() is None
    run.until(1100)
    error = run.stall.failure()
    assert error.what == "no rank has printed anything for 10 min 00 s"
    order, pc1, pc2, last = error.seen.splitlines()
    assert order.startswith("rank 3 on pc2 fell silent first")
    assert pc1.startswith("ranks 0, 1 on pc1: last output 20")
    assert pc2.startswith("ranks 2, 3 on pc2: last output 20")
    assert " to 20" in pc2
    assert last == "the last line of rank 3 on pc2: all-reduce of step 41"
    assert "gangline logs calm-otter-7" in error.fix
    assert "gangline resume calm-otter-7" in error.fix


def test_resume_is_not_offered_where_nobody_said_how_the_script_goes_on():
    run = Run(action="stop")
    run.until(700)
    assert "resume" not in run.stall.failure().fix
    assert "ranks 0, 1 on pc1: nothing printed since the start" in run.stall.failure().seen


def test_output_that_comes_back_takes_the_failure_away():
    run = Run(action="stop")
    run.until(700)
    run.print(1, at=700)
    run.until(720)
    assert run.stall.failure() is None


def test_of_many_ranks_and_hosts_a_few_are_named():
    run = Run(action="stop")
    run.hosts = {f"pc{number}": tuple(range(16 * number, 16 * number + 16)) for number in range(20)}
    run.beats = dict.fromkeys(run.hosts, 0)
    run.print(*range(320), at=100)
    ((_, details),) = run.until(800)
    assert "16 ranks on pc0" in details["what"]
    assert "and 12 more fell silent" in details["what"]
    assert len(run.stall.failure().seen.splitlines()) == 10


def stack(where, waits=False, state="S"):
    row = {
        "pid": 1,
        "state": state,
        "wchan": "",
        "where": where,
        "waits": waits,
        "stack": [where, "<module> (train.py:9)"],
    }
    return {**row, "unheard": []}


def answers(r1, others):
    return {"pc1": {"ranks": {"0": others, "1": r1}}, "pc2": {"ranks": {"2": others, "3": others}}}


LOCK, SUM = "load_rows (train.py:7)", "train (train.py:14)"


def test_the_rank_that_the_others_wait_for_is_told_once_with_the_call_where_it_stands():
    run = Run(action="stop")
    assert run.stall.suspicion is None
    run.until(LIMIT_S)
    assert run.stall.suspicion == 1
    assert list(run.stall.take({"pc1": answers(stack(LOCK), None)["pc1"]})) == [], "pc2 has not answered"
    found = answers(stack(LOCK), stack(SUM, waits=True))
    ((name, details),) = run.stall.take(found)
    assert (name, details["host"], details["rank"]) == ("standing", "pc1", 1)
    assert details["what"] == (
        f"rank 1 on pc1 stands at {LOCK}; the others wait: rank 0 on pc1 and ranks 2, 3 on pc2 at {SUM}"
    )
    assert list(run.stall.take(found)) == []
    error = run.stall.failure()
    assert error.what == f"no rank has printed anything for 10 min 00 s: {details['what']}"
    assert details["what"] in error.seen.splitlines()
    assert f"stack of rank 1 on pc1, innermost first:\n  {LOCK}" in error.seen
    assert (error.details["host"], error.details["rank"], len(error.details["stacks"])) == ("pc1", 1, 4)


def test_the_error_waits_a_few_seconds_for_stacks_and_does_without_those_that_do_not_come():
    run = Run(action="stop", after_s=60)
    run.until(60)
    assert run.stall.suspicion == 1
    assert run.stall.failure() is None
    run.until(60 + STACKS_S)
    assert list(run.stall.take({})) == []
    assert run.stall.failure().details["stacks"] == []


def test_a_host_that_was_too_busy_to_say_where_its_ranks_stand_is_asked_again(run):
    run.until(700)
    whole = answers(stack(LOCK), stack(SUM, waits=True))
    assert list(run.stall.take({"pc2": whole["pc2"]})) == []
    run.until(760)
    assert list(run.stall.take({"pc2": whole["pc2"], "pc1": {}})) == []
    assert run.stall.suspicion == 2
    assert list(run.stall.take({})) == []
    ((name, details),) = run.stall.take(whole)
    assert (name, details["rank"]) == ("standing", 1)
    assert run.stall.suspicion == 2


def test_a_host_that_never_says_where_its_ranks_stand_is_asked_a_few_times(run):
    run.until(700)
    whole = answers(stack(LOCK), stack(SUM))
    for _ in range(TRIES - 1):
        assert list(run.stall.take({"pc2": whole["pc2"], "pc1": {}})) == []
    ((_, details),) = run.stall.take({"pc2": whole["pc2"], "pc1": {}})
    assert details == {"what": f"the ranks stand: ranks 2, 3 on pc2 at {SUM}"}
    assert run.stall.suspicion == TRIES
    assert list(run.stall.take(whole)) == []


def test_a_rank_that_was_stopped_is_accused_and_places_are_told_where_nobody_is(run):
    run.until(700)
    ((_, details),) = run.stall.take(answers(stack("", state="T"), stack(SUM)))
    assert details["what"].startswith("rank 1 on pc1 is stopped (SIGSTOP); the others wait: ")
    run.print(1, at=710)
    run.until(1500)
    assert run.stall.suspicion == 2
    ((_, details),) = run.stall.take(answers(stack(SUM), stack(SUM)))
    assert details == {"what": f"the ranks stand: ranks 0, 1 on pc1 and ranks 2, 3 on pc2 at {SUM}"}
