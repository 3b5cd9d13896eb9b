"""What the supervisor does about what it sees."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import Leftover, RankSigns, StartSigns
from gangline.planner.outcome import Comparison, TimeReport
from gangline.runs.files import read_json, write_json
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState, write_order
from gangline.supervise.attempt_records import Superseded
from gangline.supervise.clean import finish_all, unfinished
from gangline.supervise.gang_control import PollIntervals, SupervisedRun
from gangline.supervise.lead import Deposed, Deputies
from gangline.supervise.lock import has_supervisor, is_frozen, supervisor_lock
from gangline.supervise.startup import StartLimits
from gangline.supervise.supervisor import Supervisor
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.saved import read_events
from tests.unit.planner.outcomes import line, plan
from tests.unit.supervise.runs import cluster_of, create_run, save_part
from tests.waiting import wait_until

HOSTS = ("pc1", "pc2")
ERROR = {"kind": "DataError", "what": "row 7 is empty", "seen": "", "fix": "", "exit_code": 2}
FAILURE = {"rank": 1, "pid": 1, "time": 0.0, "ordered": False, "error": ERROR, "exit": 2, "log": "l", "log_tail": []}


class Lab:
    """A run on two hosts that are not there, and a supervisor in a thread."""

    def __init__(self, folder, **how):
        self.folder = folder
        self.backend = FakeBackend(**how)
        self.cluster = cluster_of(folder, *HOSTS)
        self.gang = Gang(run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=host, share=1) for host in HOSTS))
        self.layout = create_run(folder, self.cluster, self.backend.render(self.cluster, self.gang, port=1))
        self.transports = {host: FakeTransport(host) for host in HOSTS}
        self.outcome = None

    def supervisor(self, grace_s=0.0, **pace):
        pace = PollIntervals(**{"poll_s": 0.005, "failure_grace_s": grace_s, "notice_s": 0.0, "verify_s": 0.3, **pace})
        return Supervisor(self.supervised(pace=pace), 1)

    def supervised(self, **how):
        return SupervisedRun(
            layout=self.layout, backend=lambda _name: self.backend, connect=lambda _: self.transports, **how
        )

    def follow(self, supervisor):
        self.outcome = supervisor.watch()

    def run(self, script, **pace):
        """Supervise from the start, do `script` meanwhile, and see it end."""
        supervisor = self.supervisor(**pace)
        supervisor.begin()
        thread = threading.Thread(target=self.follow, args=(supervisor,), daemon=True)
        thread.start()
        script()
        thread.join(20)
        assert not thread.is_alive()
        return self.outcome

    def say(self, result):
        """What rank 0 leaves behind."""
        part = self.backend.render(self.cluster, self.gang, port=1).hosts[0]
        self.transports["pc1"].write(Path(part.rank_files, "result.json"), json.dumps({"result": result}).encode())

    def finish(self):
        self.say("finished")
        self.end(pc1=0, pc2=0)

    def end(self, **returncodes):
        for host, returncode in returncodes.items():
            self.backend.end(host, returncode=returncode, reason="finished")

    def events(self):
        return [event["event"] for event in read_events(self.layout.events)]

    def orders(self):
        """What was ordered, one after the other; every host is told by itself."""
        return list(dict.fromkeys(self.backend.orders))

    def phase(self):
        return RunState.load(self.layout).phase


@pytest.fixture
def make(tmp_path):
    return lambda **how: Lab(tmp_path, **how)


def test_a_gang_that_ends_well_has_finished(make):
    lab = make()
    outcome = lab.run(lab.finish)
    assert (outcome.result, outcome.error) == ("finished", None)
    assert lab.events() == ["started", "finished"]
    state = RunState.load(lab.layout)
    assert (state.phase, state.attempt, state.error) == ("finished", 1, None)
    assert state.supervisor == ProcessId.current()
    assert AttemptOutcome.load(lab.layout.attempt(1) / "outcome.json") == outcome
    assert {host: status.returncode for host, status in outcome.hosts.items()} == {"pc1": 0, "pc2": 0}


def figures_of(lab, *, steps=20):
    write_json(lab.layout.plan, plan().to_json())
    path = RunLayout(lab.folder / "pc1", lab.layout.run_id).metrics
    lab.transports["pc1"].write(path, b"".join(json.dumps(line(n)).encode() + b"\n" for n in range(1, steps + 1)))
    return path


def test_at_the_end_the_plan_stands_beside_what_came_of_it(make):
    lab = make()
    figures_of(lab)
    lab.run(lab.finish)
    comparison = load_record(lab.layout.comparison, Comparison)
    assert (comparison.run, comparison.attempt, comparison.step_s.measured) == ("calm-otter-7", 1, 0.8)


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_of_a_run_that_did_not_finish_too(make, end):
    lab = make()
    figures_of(lab)
    lab.run((lambda: write_order(lab.layout, "stop", attempt=1)) if end == "stopped" else (lambda: lab.end(pc2=1)))
    assert lab.phase() == end
    assert load_record(lab.layout.comparison, Comparison).num_steps == 18
    assert load_record(lab.layout.times(1), TimeReport).num_steps == 18


def test_after_too_few_steps_what_an_earlier_attempt_showed_stays(make):
    lab = make()
    figures_of(lab, steps=4)
    lab.layout.comparison.write_text("{}", encoding="utf-8")
    lab.run(lab.finish)
    assert lab.layout.comparison.read_text(encoding="utf-8") == "{}"


def break_plan(lab, _path):
    lab.layout.plan.write_text("[]", encoding="utf-8")


def break_disk(lab, _path):
    lab.layout.comparison.mkdir()


def break_head(lab, path):
    lab.transports["pc1"].files[path] = None


@pytest.mark.parametrize("harm", [break_plan, break_disk, break_head])
def test_a_comparison_that_cannot_be_made_is_noted_and_the_run_ends_all_the_same(make, caplog, harm):
    lab = make()
    harm(lab, figures_of(lab))
    assert lab.run(lab.finish).result == "finished"
    assert "compar" in caplog.text
    assert lab.phase() == "finished"


def test_figures_that_are_read_slowly_do_not_keep_a_run_from_ending(make, caplog):
    lab = make()
    path, read, let_go = figures_of(lab), lab.transports["pc1"].read, threading.Event()

    def slow(asked, **how):
        if asked == path:
            assert let_go.wait(20)
        return read(asked, **how)

    lab.transports["pc1"].read = slow
    assert lab.run(lab.finish, patience_s=0.05).result == "finished"
    let_go.set()
    assert "its figures on pc1 are read too slowly" in caplog.text
    assert not lab.layout.comparison.exists()


def test_when_one_host_fails_the_other_is_ended(make):
    lab = make()
    outcome = lab.run(lambda: lab.backend.end("pc2", returncode=1, error=ERROR, failures=(FAILURE,)), grace_s=60)
    assert outcome.result == "failed"
    assert outcome.error["what"] == "rank 1 on pc2: row 7 is empty"
    assert outcome.failures[0]["host"] == "pc2"
    assert lab.orders() == ["stop"]
    assert RunState.load(lab.layout).error["exit_code"] == 2


def test_what_does_not_leave_a_failed_gang_is_killed(make):
    lab = make(stubborn=frozenset({"pc1"}))
    outcome = lab.run(lambda: lab.end(pc2=1))
    assert lab.orders() == ["stop", "kill"]
    assert (outcome.result, outcome.error["host"]) == ("failed", "pc2")


def test_an_error_ends_the_gang_before_its_host_has_ended(make):
    lab = make()
    lab.run(lambda: lab.backend.change("pc2", failures=(FAILURE,)), grace_s=60)
    assert lab.orders() == ["stop"]
    assert lab.phase() == "failed"


def test_a_lost_host_ends_the_gang_and_what_it_left_is_ended(make):
    lab = make()
    outcome = lab.run(lambda: lab.backend.change("pc2", phase="lost"))
    assert outcome.result == "failed"
    assert outcome.error["what"] == "the gangline agent on pc2 died; its ranks were stopped"
    assert lab.backend.orders[-1] == "kill"


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_an_order_of_the_user_is_passed_on(make, order):
    lab = make()
    outcome = lab.run(lambda: write_order(lab.layout, order, attempt=1))
    assert lab.orders() == [order]
    assert (outcome.result, outcome.error) == ("stopped", None)
    assert lab.events() == ["started", "stopping", "stopped"]


def test_ranks_that_left_before_the_last_step_without_an_order_have_stopped(make):
    lab = make()

    def script():
        lab.say("stopped")
        lab.end(pc1=0, pc2=0)

    assert lab.run(script).result == "stopped"
    assert lab.phase() == "stopped"
    assert lab.backend.orders == []


@pytest.mark.parametrize("reason", ["stopped", "finished"])
def test_ranks_that_left_without_a_word_are_not_taken_to_have_finished(make, reason):
    lab = make()

    def script():
        lab.backend.end("pc2", returncode=0, reason="finished")
        lab.backend.end("pc1", returncode=0, reason=reason)

    assert lab.run(script).result == "stopped"


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_an_order_that_came_after_the_last_step_changes_nothing(make, order):
    lab = make(stubborn=frozenset(HOSTS))
    supervisor = lab.supervisor()
    supervisor.begin()
    write_order(lab.layout, order, attempt=1)
    lab.finish()
    assert supervisor.watch().result == "finished"


def test_a_stop_may_become_a_kill(make):
    lab = make(stubborn=frozenset(HOSTS))

    def script():
        write_order(lab.layout, "stop", attempt=1)
        wait_until(lambda: lab.phase() == "stopping", "the order is seen")
        write_order(lab.layout, "kill", attempt=1)

    assert lab.run(script).result == "stopped"
    assert lab.orders() == ["stop", "kill"]


@pytest.mark.parametrize("is_first_told", [True, False])
def test_a_host_that_left_as_ordered_takes_no_time_from_one_that_saves(make, is_first_told):
    """A script without a handler of SIGTERM dies at once, and its torchrun ends with 1."""
    lab = make(stubborn=frozenset(HOSTS))
    exit_code = -signal.SIGTERM if is_first_told else None

    def script():
        write_order(lab.layout, "stop", attempt=1)
        wait_until(lambda: lab.phase() == "stopping", "the order is seen")
        left = {**FAILURE, "error": None, "exit": exit_code, "ordered": is_first_told}
        lab.backend.end("pc2", returncode=1, reason="stopped", failures=(left,))
        looks = lab.backend.num_polls
        wait_until(lambda: lab.backend.num_polls > looks + 5, "the end is seen")
        lab.backend.end("pc1", returncode=0, reason="stopped")

    outcome = lab.run(script)
    assert (outcome.result, outcome.error) == ("stopped", None)
    assert lab.orders() == ["stop"]


def test_who_is_killed_after_others_left_as_ordered_is_not_blamed(make, monkeypatch):
    """As `scancel` does it: a host has ended by SIGTERM before the order is here, and then the others are killed."""
    monkeypatch.setattr("gangline.supervise.supervisor.JOB_NOTICE_S", 20.0)
    lab = make(stubborn=frozenset(HOSTS))
    nodes = tuple(replace(host, transport="srun", allocation="41") for host in lab.cluster.hosts)
    write_json(lab.layout.cluster, replace(lab.cluster, hosts=nodes).to_json())

    def script():
        left = {**FAILURE, "error": None, "exit": None}
        lab.backend.end("pc2", returncode=1, reason="stopped", failures=(left,))
        wait_until(lambda: "kill" in lab.backend.orders, "the other one is killed")
        write_order(lab.layout, "stop", attempt=1)

    outcome = lab.run(script)
    assert (outcome.result, outcome.error) == ("stopped", None)


def test_a_save_that_fails_while_stopping_is_a_failure(make):
    lab = make(stubborn=frozenset(HOSTS))

    def script():
        write_order(lab.layout, "stop", attempt=1)
        wait_until(lambda: lab.phase() == "stopping", "the order is seen")
        lab.end(pc1=0)
        lab.backend.end("pc2", returncode=1, error=ERROR, failures=({**FAILURE, "ordered": True},))

    assert lab.run(script).result == "failed"


def test_an_order_for_the_attempt_before_is_none_for_this_one(make):
    lab = make()
    write_order(lab.layout, "kill", attempt=0)
    assert lab.run(lab.finish).result == "finished"
    assert lab.backend.orders == []


def test_what_was_told_to_stop_before_it_began_is_not_started(make):
    lab = make()
    first = RunState.load(lab.layout)
    replace(first, phase="running", epoch=1).save(lab.layout)  # its supervisor died before a host agent stood
    write_order(lab.layout, "stop", attempt=1)
    with pytest.raises(RunFailed, match="calm-otter-7 was stopped before it began"):
        lab.supervisor().begin()
    assert lab.backend.statuses == {}
    assert lab.backend.orders == ["kill"]  # for a host agent that comes up late
    assert (lab.phase(), lab.events()) == ("stopped", ["stopped"])
    assert AttemptOutcome.load(lab.layout.attempt(1) / "outcome.json").result == "stopped"


def test_a_start_that_fails_is_the_outcome(make):
    lab = make(broken=frozenset({"pc2"}))
    with pytest.raises(RunFailed, match="pc2: the gangline agent did not start"):
        lab.supervisor().begin()
    assert (
        AttemptOutcome.load(lab.layout.attempt(1) / "outcome.json").error["what"]
        == "pc2: the gangline agent did not start"
    )
    assert lab.phase() == "failed"
    assert lab.events() == ["failed"]


def test_checkpoints_are_committed_on_the_way_and_at_the_end(make):
    lab = make()

    def save(step):
        for host, transport in lab.transports.items():
            save_part(transport, lab.folder / host, step, hosts=HOSTS)

    def script():
        save(100)
        wait_until(lambda: "committed" in lab.events(), "the step is committed")
        save(200)
        lab.finish()

    lab.run(script)
    commits = [event for event in read_events(lab.layout.events) if event["event"] == "committed"]
    assert [event["step"] for event in commits] == [100, 200]
    assert all("COMMITTED" in {path.name for path in transport.files} for transport in lab.transports.values())


def test_a_gang_that_runs_already_is_taken_over(make):
    lab = make()
    lab.supervisor().begin()
    write_order(lab.layout, "stop", attempt=1)
    outcome = lab.run(lambda: None)
    assert outcome.result == "stopped"
    assert lab.events() == ["started", "stopping", "stopped"]


def test_a_run_has_one_supervisor(make):
    lab = make()
    with supervisor_lock(lab.layout), pytest.raises(RunFailed, match="calm-otter-7 is running already"):  # noqa: SIM117
        with supervisor_lock(lab.layout, timeout_s=0.2):
            pass
    with supervisor_lock(lab.layout):
        pass


def test_a_full_disk_does_not_keep_it_from_ending_the_gang(make):
    lab = make()

    def fill():
        lab.layout.events.unlink()
        lab.layout.events.mkdir()  # no event can be written any more
        lab.end(pc2=1)

    assert lab.run(fill).result == "failed"
    assert lab.backend.orders[0] == "stop"


def test_a_commit_that_cannot_be_placed_is_tried_again(make):
    lab = make()
    place, full = lab.transports["pc2"].write, [True]

    def write(path, data):
        if full[0] and path.name == "COMMITTED":
            raise OSError(28, "No space left on device")
        place(path, data)

    lab.transports["pc2"].write = write

    def script():
        for host, transport in lab.transports.items():
            save_part(transport, lab.folder / host, 100, hosts=HOSTS)
        wait_until(lambda: "COMMITTED" in {path.name for path in lab.transports["pc1"].files}, "the first is placed")
        full[0] = False
        wait_until(lambda: "committed" in lab.events(), "the step is committed")
        lab.finish()

    assert lab.run(script).result == "finished"


def test_a_look_is_not_taken_for_a_supervisor(make):
    layout = make().layout
    assert not has_supervisor(layout)
    with supervisor_lock(layout):
        assert has_supervisor(layout)
    assert not has_supervisor(layout)


def signs(*phases):
    ranks = [RankSigns(rank=number, phase=phase, has_torch=True, has_met=True) for number, phase in enumerate(phases)]
    return StartSigns(launcher=True, met=True, ranks=tuple(ranks))


def test_a_host_that_is_silent_for_a_while_is_told_of_and_the_run_goes_on(make):
    lab = make()

    def script():
        lab.backend.silent = {"pc2"}
        wait_until(lambda: "unreachable" in lab.events(), "the silence is told of")
        lab.backend.silent = set()
        wait_until(lambda: "reachable" in lab.events(), "the return is told of")
        lab.finish()

    assert lab.run(script).result == "finished"
    assert lab.events() == ["started", "unreachable", "reachable", "finished"]
    assert lab.backend.orders == []


def test_a_host_that_dies_while_a_checkpoint_is_committed_is_told_of_soon(make):
    lab = make()
    gate, names = threading.Event(), lab.transports["pc2"].names
    gate.set()

    def hang(folder):
        gate.wait(20)
        return names(folder)

    lab.transports["pc2"].names = hang

    def script():
        gate.clear()  # it hangs till ssh gives the host up
        lab.backend.silent = {"pc2"}
        wait_until(lambda: "unreachable" in lab.events(), "the silence is told of")
        gate.set()
        lab.backend.silent = set()
        wait_until(lambda: "reachable" in lab.events(), "the return is told of")
        for host in HOSTS:
            save_part(lab.transports[host], lab.folder / host, 100, hosts=HOSTS)
        lab.finish()

    assert lab.run(script, patience_s=0.05).result == "finished"
    assert lab.events() == ["started", "unreachable", "reachable", "committed", "finished"]


def test_all_hosts_may_be_silent_for_long_and_nothing_is_given_up(make):
    lab = make()

    def script():
        lab.backend.silent = set(HOSTS)
        wait_until(lambda: lab.events().count("unreachable") == 2, "the silence is told of")
        lab.backend.silent = set()
        wait_until(lambda: lab.events().count("reachable") == 2, "they are back")
        lab.finish()

    assert lab.run(script, silence_s=0.0, abandon_s=0.0).result == "finished"


def test_where_the_others_fail_a_silent_host_is_the_cause_and_is_named_as_not_verified(make):
    lab = make()
    echo = {**ERROR, "what": "Connection closed by peer", "kind": "RunFailed"}

    def script():
        lab.backend.silent = {"pc2"}
        failure = {**FAILURE, "rank": 0, "error": echo}
        lab.backend.end("pc1", returncode=1, error=echo, failures=(failure,), reason="finished")

    outcome = lab.run(script, silence_s=0.05)
    assert outcome.result == "failed"
    assert outcome.error["what"].startswith("pc2 does not answer since ")
    assert (outcome.unverified, outcome.left) == (("pc2",), ())
    assert outcome.hosts["pc2"].phase == "unreachable"
    assert unfinished(lab.layout) == ("pc2",)
    assert read_events(lab.layout.events)[-1]["unverified"] == ["pc2"]


def test_a_host_that_a_job_waits_for_all_day_does_not_keep_an_order_waiting(make):
    lab = make()

    def script():
        lab.backend.silent = {"pc2"}
        lab.backend.end("pc1", returncode=1, failures=({**FAILURE, "rank": 0},), reason="finished")
        wait_until(lambda: lab.phase() == "stopping", "it has failed")
        write_order(lab.layout, "stop", attempt=1)

    outcome = lab.run(script, silence_s=1e5, ordered_silence_s=0.05)
    assert outcome.unverified == ("pc2",)


def test_an_order_is_repeated_until_a_silent_host_takes_it(make):
    lab = make(stubborn=frozenset({"pc1"}))

    def script():
        lab.backend.silent = {"pc2"}
        wait_until(lambda: "unreachable" in lab.events(), "the silence is seen")
        write_order(lab.layout, "stop", attempt=1)
        wait_until(lambda: lab.phase() == "stopping", "the order is seen")
        lab.end(pc1=0)
        assert lab.backend.statuses["pc2"].phase == "running"
        lab.backend.silent = set()
        wait_until(lambda: lab.backend.statuses["pc2"].phase == "ended", "the order is taken")

    outcome = lab.run(script, silence_s=60.0)
    assert (outcome.result, outcome.unverified) == ("stopped", ())


def test_after_an_order_hosts_that_stay_silent_are_left_and_ended_later(make):
    lab = make()

    def script():
        lab.backend.silent = set(HOSTS)
        write_order(lab.layout, "kill", attempt=1)

    outcome = lab.run(script, abandon_s=0.05)
    assert (outcome.result, outcome.unverified) == ("stopped", HOSTS)
    assert finish_all(lab.supervised()) == HOSTS
    lab.backend.silent = set()
    assert finish_all(lab.supervised()) == ()
    assert {status.phase for status in lab.backend.statuses.values()} == {"ended"}
    assert AttemptOutcome.load(lab.layout.attempt(1) / "outcome.json").unverified == ()


def test_what_is_left_at_the_end_is_written_down(make):
    lab = make()
    lab.backend.left = [Leftover(host="pc1", kind="process", what="process 4711 (tag): python")]
    assert lab.run(lab.finish).left == ("pc1: process 4711 (tag): python",)
    assert unfinished(lab.layout) == ("pc1",)


def test_a_host_that_does_not_answer_keeps_a_gang_from_being_started(make):
    lab = make()
    lab.backend.silent = {"pc2"}
    with pytest.raises(HostUnreachable, match="pc2 does not answer"):
        lab.supervisor().begin()
    assert lab.backend.statuses == {}
    assert lab.phase() == "failed"


def test_who_takes_over_has_a_higher_epoch_and_who_was_there_before_leaves_without_a_word(make):
    lab = make(stubborn=frozenset(HOSTS))
    first = lab.supervisor()
    first.begin()
    second = lab.supervisor()
    second.begin()
    assert (first.epoch, second.epoch) == (1, 2)
    assert {status.epoch for status in lab.backend.statuses.values()} == {2}
    before = lab.layout.state.read_bytes()
    with pytest.raises(Superseded, match="another supervisor is in charge of calm-otter-7"):
        first.watch()
    assert lab.layout.state.read_bytes() == before
    assert not (lab.layout.attempt(1) / "outcome.json").exists()


def test_a_supervisor_that_slept_is_told_by_the_host_agents_too(make):
    lab = make()
    first = lab.supervisor()
    first.begin()
    lab.backend.announce(first.request, lab.transports, epoch=7)  # by one that keeps its records elsewhere
    with pytest.raises(Superseded):
        first.watch()
    assert lab.backend.orders == []


class LeadAfterSleep:
    """The lead of a supervisor that slept. holds: whether most hosts have heard it since."""

    own = "pc1"
    least_epoch = 0

    def __init__(self, lab):
        self.deputies = Deputies(cluster=lab.cluster, candidates=("pc2",), attempt=1)
        self.holds = False
        self.num_checks = 0

    def check(self):
        self.num_checks += 1

    def failure(self):
        return None

    def give_way(self, epoch):
        return Deposed(f"another host leads with epoch {epoch}")


def test_a_leader_without_a_majority_commits_nothing_and_asks_no_host_to_leave(make):
    lab = make()
    lead = LeadAfterSleep(lab)
    run = lab.supervised(lead=lead, pace=PollIntervals(poll_s=0.005, notice_s=0.0))
    supervisor = Supervisor(run, 1, reason_to_yield=lambda: "pc2 leaves, as ordered")
    supervisor.begin()
    supervisor.followed.take_for_joined()
    for host, transport in lab.transports.items():
        save_part(transport, lab.folder / host, 100, hosts=HOSTS)
    thread = threading.Thread(target=lab.follow, args=(supervisor,), daemon=True)
    thread.start()
    wait_until(lambda: lead.num_checks > 5, "it has looked")
    assert (lab.backend.orders, lab.events()) == ([], ["started"])
    lead.holds = True
    wait_until(lambda: {"committed", "leaving"} <= set(lab.events()), "it commands again")
    thread.join(20)
    assert lab.outcome.result == "stopped"


def test_a_leader_that_hears_of_a_higher_epoch_gives_way(make):
    """It has to end what is left on its host, and to say who leads: `Superseded` would do neither."""
    lab = make()
    supervisor = Supervisor(lab.supervised(lead=LeadAfterSleep(lab)), 1)
    supervisor.begin()
    lab.backend.announce(supervisor.request, lab.transports, epoch=2_000_001)
    with pytest.raises(Deposed, match="another host leads with epoch 2000001"):
        supervisor.watch()


def test_one_that_was_replaced_on_its_own_host_asks_nobody_for_votes(make):
    """Its own host would give it one, and it would end the ranks of the other supervisor."""
    lab = make()
    lead = LeadAfterSleep(lab)
    supervisor = Supervisor(lab.supervised(lead=lead), 1)
    supervisor.begin()
    replace(RunState.load(lab.layout), epoch=2_000_001).save(lab.layout)
    with pytest.raises(Superseded):
        supervisor.watch()
    assert lead.num_checks == 0


def test_one_host_that_lies_about_another_supervisor_is_named_and_not_obeyed(make):
    lab = make()

    def script():
        lab.backend.change("pc2", epoch=999_999_999)
        wait_until(lambda: "doubted" in lab.events(), "it is named")
        lab.finish()

    assert lab.run(script, doubt_s=0.0).result == "finished"
    (event,) = [event for event in read_events(lab.layout.events) if event["event"] == "doubted"]
    assert (event["host"], event["epoch"]) == ("pc2", 999_999_999)


def test_a_host_that_takes_no_order_keeps_neither_the_others_nor_the_supervisor_waiting(make):
    lab = make()
    asked, let_go = threading.Event(), threading.Event()
    real = lab.backend.stop

    def stop(request, transports, **how):
        if request.names == ("pc1",) and not let_go.is_set():
            asked.set()
            assert let_go.wait(20)
            return ["pc1"]
        return real(request, transports, **how)

    lab.backend.stop = stop

    def script():
        write_order(lab.layout, "stop", attempt=1)
        assert asked.wait(20)
        wait_until(lambda: lab.backend.statuses["pc2"].phase == "ended", "pc2 has heard")
        write_order(lab.layout, "kill", attempt=1)
        events = lab.layout.events
        wait_until(lambda: [each.get("order") for each in read_events(events)].count("kill") == 1, "it looks on")
        let_go.set()

    outcome = lab.run(script, patience_s=0.01)
    assert (outcome.result, outcome.hosts["pc1"].returncode) == ("stopped", -9)


def test_a_takeover_while_a_host_is_silent_waits_for_it(make):
    lab = make()
    lab.supervisor().begin()
    lab.backend.silent = set(HOSTS)

    def script():
        wait_until(lambda: "unreachable" in lab.events(), "the silence is told of")
        lab.backend.silent = set()
        wait_until(lambda: {each.epoch for each in lab.backend.statuses.values()} == {2}, "all know who is in charge")
        lab.finish()

    assert lab.run(script).result == "finished"
    assert lab.events().count("started") == 1


def test_secrets_go_to_who_starts_the_gang_and_into_no_file(make, tmp_path):
    lab = make()
    lab.supervisor().begin({"HF_TOKEN": "hf_canary"})
    assert lab.backend.secrets == {"HF_TOKEN": "hf_canary"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_canary" in path.read_bytes()]


def test_the_start_is_followed_on_the_board(make):
    lab = make()
    lab.backend.signs = {"pc1": signs("joining"), "pc2": signs("importing")}
    board = lab.layout.attempt(1) / "board.json"

    def script():
        wait_until(lambda: board.exists() and read_json(board)["hosts"][0]["stages"]["python"] is not None, "it starts")
        lab.backend.change("pc1", signs=signs("joined"))
        lab.backend.change("pc2", signs=signs("data"))
        wait_until(lambda: read_json(board)["done"], "all have joined")
        lab.finish()

    lab.run(script, start=StartLimits(sentence_s=60.0))
    assert lab.events() == ["started", "joined", "beginning", "finished"]
    assert read_events(lab.layout.events)[2]["what"] == "rank 0 on pc1 loads the model"
    assert read_json(board)["joined"] == 2


def test_a_start_that_gets_nowhere_is_given_up_with_its_cause(make):
    lab = make(stubborn=frozenset(HOSTS))
    lab.backend.signs = {"pc1": signs("joined"), "pc2": signs("joining")}
    outcome = lab.run(lambda: None, start=StartLimits(sentence_s=0.0, stage_s=0.05))
    assert outcome.result == "failed"
    assert "rank 1 on pc2 has not joined" in outcome.error["what"]
    assert lab.orders() == ["kill"]
    assert lab.events() == ["started", "waiting", "failing", "failed"]


def test_launchers_that_wait_for_one_that_failed_are_ended_at_once(make):
    lab = make(stubborn=frozenset({"pc1"}))
    waiting = StartSigns(launcher=True, met=False)
    lab.backend.signs = {"pc1": waiting, "pc2": waiting}
    outcome = lab.run(lambda: lab.backend.end("pc2", returncode=1), grace_s=60)
    assert outcome.result == "failed"
    assert lab.orders() == ["kill"]


@pytest.mark.parametrize(("order", "result"), [(None, "finished"), ("stop", "stopped")])
def test_a_program_of_the_user_has_finished_if_nobody_told_it_to_leave(make, order, result):
    lab = make()
    request = read_json(lab.layout.attempt(1) / "request.json")
    for part in request["hosts"]:
        part["program"] = "command"
    write_json(lab.layout.attempt(1) / "request.json", request)

    def script():
        if order:
            write_order(lab.layout, order, attempt=1)
        else:
            lab.end(pc1=0, pc2=0)

    assert lab.run(script).result == result


def test_it_shows_that_it_gets_on(make):
    lab = make()
    beats = []
    with supervisor_lock(lab.layout) as beat:
        lock = lab.layout.folder / "supervisor.lock"
        os.utime(lock, (0, 0))
        assert is_frozen(lab.layout)
        beat()
        assert not is_frozen(lab.layout)
        supervisor = Supervisor(lab.supervised(beat=lambda: beats.append(1)), 1)
        supervisor.begin()
        lab.finish()
        supervisor.watch()
    assert beats
    assert not is_frozen(lab.layout)


@pytest.mark.parametrize("error", [GanglineError("the agent cannot read"), KeyError("returncode"), OSError(5, "I/O")])
def test_a_look_that_fails_is_borne_and_told_once(make, error, caplog):
    lab = make()
    poll, left = lab.backend.poll, [3]

    def failing(*words):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return poll(*words)

    def script():
        lab.backend.poll = failing
        wait_until(lambda: left[0] < 0, "it looks again")
        lab.backend.poll = poll
        lab.finish()

    assert lab.run(script).result == "finished"
    told = [record.getMessage() for record in caplog.records if "polling the hosts failed" in record.getMessage()]
    assert len(told) == 1


def test_where_looks_fail_for_long_it_gives_up_and_says_why(make):
    lab = make()
    supervisor = lab.supervisor(trouble_s=0.05)
    supervisor.begin()

    deadline = time.monotonic() + 10

    def failing(*_words):
        if time.monotonic() > deadline:
            pytest.fail("it does not give up")
        raise KeyError("returncode")

    lab.backend.poll = failing
    with pytest.raises(KeyError):
        supervisor.watch()
    event = read_events(lab.layout.events)[-1]
    assert event["event"] == "unsupervised"
    assert "returncode" in event["what"]
    assert lab.backend.orders == []  # the ranks run on
    assert lab.phase() == "running"


def test_who_has_been_superseded_does_not_bear_it(make):
    lab = make()
    supervisor = lab.supervisor()
    supervisor.begin()

    looks = []

    def superseded(*_words):
        looks.append(1)
        if len(looks) > 1:
            pytest.fail("it looks again")
        raise Superseded("another one")

    lab.backend.poll = superseded
    with pytest.raises(Superseded):
        supervisor.watch()


def test_a_result_that_cannot_be_read_ends_no_supervisor(make):
    lab = make()
    read = lab.transports["pc1"].read

    def failing(path, **how):
        if path.name == "result.json":
            raise OSError(5, "Input/output error")
        return read(path, **how)

    lab.transports["pc1"].read = failing
    assert lab.run(lab.finish).result == "stopped"


def test_a_host_agent_that_stands_still_is_told_of_and_is_evidence_where_the_gang_fails(make):
    lab = make()

    def script():
        lab.backend.change("pc2", beat=7)
        wait_until(lambda: "stalled" in lab.events(), "it is told of")
        failure = {**FAILURE, "rank": 0}
        lab.backend.end("pc1", returncode=1, error=ERROR, failures=(failure,))

    outcome = lab.run(script, stall_s=0.05)
    assert outcome.error["what"] == "rank 0 on pc1: row 7 is empty"
    assert "the gangline agent on pc2 has not responded since " in outcome.error["seen"]


def test_a_host_agent_that_stands_still_keeps_an_ordered_gang_from_ending_for_a_while_only(make):
    lab = make(stubborn=frozenset({"pc2"}))
    lab.backend.left = [Leftover(host="pc2", kind="process", what="process 4711 (tag): python")]

    def script():
        lab.backend.stop = lambda *_words, **_how: []  # nobody hears it
        lab.backend.change("pc2", beat=7)
        wait_until(lambda: "stalled" in lab.events(), "it is told of")
        write_order(lab.layout, "stop", attempt=1)
        lab.end(pc1=0)

    outcome = lab.run(script, stall_s=0.05, abandon_s=0.05)
    assert (outcome.result, outcome.left) == ("stopped", ("pc2: process 4711 (tag): python",))
