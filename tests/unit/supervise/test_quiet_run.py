"""What the supervisor does about the user's own program once it prints no more."""

import pytest

from gangline.control.start import next_state
from gangline.launch.backend import RankSigns, RankSilence, StartSigns
from gangline.launch.program import Program, StallWatch
from gangline.runs.files import write_json
from gangline.runs.state import AttemptOutcome, RunState, write_order
from tests.saved import read_events
from tests.unit.supervise.test_loop import HOSTS, Lab
from tests.waiting import wait_until

TELL = StallWatch(after_s=600.0)
STOP = StallWatch(after_s=600.0, action="stop", can_resume=True)


class QuietLab(Lab):
    """The user's own program on two hosts: rank 0 on pc1, rank 1 on pc2."""

    def __init__(self, folder, stall, **how):
        super().__init__(folder, **how)
        program = Program(kind="command", argv=("train.py",), stall=stall)
        self.request = self.backend.render(self.cluster, self.gang, port=1, program=program)
        write_json(self.layout.attempt(1) / "request.json", self.request.to_json())
        self.beat = 0

    def silent(self, *seconds):
        """What the host agents say from now on."""
        self.beat += 1
        for rank, (host, silent_s) in enumerate(zip(HOSTS, seconds, strict=True)):
            row = RankSilence(rank=rank, silent_s=silent_s, age_s=9000, has_printed=True, line=f"the last of {rank}")
            self.backend.change(host, beat=self.beat, silence=(row,))

    def is_looked_at(self):
        """Wait until the supervisor has looked twice at what is so now."""
        looks, poll = [], self.backend.poll
        self.backend.poll = lambda *words: looks.append(1) or poll(*words)
        wait_until(lambda: len(looks) > 2, "the supervisor looks")
        self.backend.poll = poll

    def sees(self, event):
        wait_until(lambda: event in self.events(), f"{event} is told")

    def state(self):
        return RunState.load(self.layout)


@pytest.fixture
def make(tmp_path):
    return lambda stall, **how: QuietLab(tmp_path, stall, **how)


def test_a_run_that_prints_no_more_is_told_of_and_goes_on(make):
    lab = make(TELL)

    def script():
        lab.silent(700, 700)
        lab.sees("quiet")
        assert lab.state().quiet_since is not None
        assert (lab.phase(), lab.backend.orders) == ("running", [])
        lab.silent(0, 702)
        lab.sees("printing")
        assert lab.state().quiet_since is None
        lab.end(pc1=0, pc2=0)

    assert lab.run(script).result == "finished"
    assert lab.events() == ["started", "quiet", "printing", "finished"]
    event = read_events(lab.layout.events)[1]
    assert event["what"].endswith("rank 0 on pc1 and rank 1 on pc2 fell silent at about the same time")
    assert event["line"] == "the last of 0"


def test_where_the_user_wants_it_the_run_is_ended_as_failed(make):
    lab = make(STOP)
    outcome = lab.run(lambda: lab.silent(700, 640), grace_s=60)
    assert outcome.result == "failed"
    assert lab.orders() == ["stop"]
    assert lab.events() == ["started", "quiet", "failing", "failed"]
    error = AttemptOutcome.load(lab.layout.attempt(1) / "outcome.json").error
    assert error["what"] == "no rank has printed anything for 10 min 00 s"
    assert error["seen"].startswith("rank 0 on pc1 fell silent first, 1 min 00 s before rank 1 on pc2")
    assert "the last line of rank 0 on pc1: the last of 0" in error["seen"]
    assert "gangline resume calm-otter-7" in error["fix"]
    assert lab.state().error == error


def test_ranks_that_do_not_leave_a_run_that_stands_still_are_killed(make):
    lab = make(STOP, stubborn=frozenset(HOSTS))
    outcome = lab.run(lambda: lab.silent(700, 700))
    assert lab.orders() == ["stop", "kill"]
    assert (outcome.result, outcome.error["what"]) == ("failed", "no rank has printed anything for 10 min 00 s")


def test_a_rank_that_failed_is_the_cause_and_not_the_silence(make):
    lab = make(STOP)

    def script():
        lab.backend.silent = set(HOSTS)
        lab.silent(700, 700)
        lab.backend.end("pc1", returncode=1, reason="finished")
        lab.backend.silent = set()

    assert lab.run(script, grace_s=60).error["what"].startswith("torchrun on pc1 ended with exit code 1")


def test_after_an_order_ranks_may_be_silent(make):
    lab = make(STOP, stubborn=frozenset(HOSTS))

    def script():
        write_order(lab.layout, "stop", attempt=1)
        wait_until(lambda: lab.phase() == "stopping", "the order is seen")
        lab.silent(700, 700)
        lab.is_looked_at()
        for host in HOSTS:
            lab.backend.end(host, returncode=0, reason="stopped")

    assert lab.run(script).result == "stopped"
    assert "quiet" not in lab.events()


def test_before_the_ranks_have_joined_nothing_is_said_of_their_silence(make):
    lab = make(STOP)
    rows = {host: RankSigns(rank=rank, phase=None, has_torch=True, has_met=False) for rank, host in enumerate(HOSTS)}
    lab.backend.signs = {host: StartSigns(launcher=True, met=True, ranks=(row,)) for host, row in rows.items()}

    def script():
        lab.silent(700, 700)
        lab.is_looked_at()
        lab.end(pc1=0, pc2=0)

    assert lab.run(script).result == "finished"
    assert "quiet" not in lab.events()


def test_who_takes_over_keeps_the_choice_and_does_not_tell_it_twice(make):
    lab = make(STOP, stubborn=frozenset(HOSTS))
    first = lab.supervisor()
    first.begin()
    first.records.set_quiet("2026-01-01T00:00:00.000Z")  # and then it was killed
    outcome = lab.run(lambda: lab.silent(700, 700))
    assert (outcome.result, lab.orders()) == ("failed", ["stop", "kill"])
    assert "quiet" not in lab.events()


def test_the_next_attempt_begins_without_it(make):
    lab = make(TELL)
    lab.supervisor().records.set_quiet("2026-01-01T00:00:00.000Z")
    assert next_state(lab.state()).quiet_since is None


def test_without_a_choice_nobody_looks(make):
    lab = make(None)

    def script():
        lab.silent(7000, 7000)
        lab.is_looked_at()
        lab.end(pc1=0, pc2=0)

    assert lab.run(script).result == "finished"
    assert lab.events() == ["started", "finished"]
