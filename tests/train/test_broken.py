"""Promise: when a part of the gang fails, those who are left lose a step at the most, and none of them waits for long."""

import re
import signal
import time
from pathlib import Path

import pytest

from gangline.worker.rank_files import PHASES
from tests.train import cases_broken
from tests.train.attempts import START_S, Run
from tests.train.tolerances import FP64
from tests.waiting import wait_until

pytestmark = pytest.mark.rotating

STEPS = 14
HOSTS = ("pc1", "pc2", "pc3")
TOLD = "told that the gang has failed elsewhere"
ECHO = re.compile(rf"{TOLD}|Connection (closed|reset) by peer|Broken pipe")


def is_echo(error):
    """Whether it only tells of another rank."""
    return ECHO.search(f"{error['what']} {error['seen']}") is not None


@pytest.fixture(scope="module")
def device():
    """Of the ranks; a test may have another one."""
    return "cpu"


@pytest.fixture
def run(zygote, tmp_path, device):
    return Run(zygote, tmp_path / "run", steps=STEPS, device=device)


@pytest.fixture(scope="module")
def undisturbed(_session_zygote, tmp_path_factory, device):
    """The losses of the same run when nothing happens to it."""
    run = Run(_session_zygote, tmp_path_factory.mktemp("undisturbed") / "run", steps=STEPS, device=device)
    ranks = run.start(1, HOSTS, [4, 3, 3])
    assert [rank.wait(timeout_s=START_S) for rank in ranks] == [0, 0, 0]
    _session_zygote.close_others()
    return run.steps()


def go_on(run, undisturbed, *, last):
    """Two hosts go on from the newest step that anybody saved, and come to the same end. last: step before."""
    step = run.adopt()
    assert last <= step <= last + 1, "a step at the most is done again, and none is lost that was told of"
    ranks = run.start(2, HOSTS[:2], [6, 4], resume_step=step)
    assert [rank.wait(timeout_s=START_S) for rank in ranks] == [0, 0], run.log(2, 0)
    assert min(run.steps(2)) == step + 1
    assert run.steps() == pytest.approx(undisturbed, rel=FP64)
    assert list(run.steps(2))[-1] == STEPS


on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")


@on_both
def test_after_a_rank_was_killed_the_others_save_the_last_step_and_nothing_is_lost(run, undisturbed):
    ranks = run.start(1, HOSTS, [4, 3, 3], slowdown=4.0)
    run.wait_for_step(3)
    ranks[2].kill()
    assert [rank.wait(timeout_s=20) for rank in ranks] == [5, 5, -signal.SIGKILL]
    last = max(run.steps())
    assert "saved step" in run.log(1, 0)
    assert "saved step" in run.log(1, 1)
    assert [is_echo(run.error(1, number)) for number in (0, 1)] == [True, True]
    go_on(run, undisturbed, last=last)


@on_both
def test_ranks_that_wait_for_one_that_is_stopped_leave_when_told_and_nothing_is_lost(run, undisturbed):
    ranks = run.start(1, HOSTS, [4, 3, 3], slowdown=4.0)
    run.wait_for_step(3)
    ranks[2].signal(signal.SIGSTOP)
    for rank in ranks[:2]:
        rank.signal(signal.SIGUSR2)
    assert [rank.wait(timeout_s=20) for rank in ranks[:2]] == [5, 5]
    ranks[2].close()
    # of two that are told, the second may have lost the first by then
    told = [is_echo(run.error(1, number)) for number in (0, 1)]
    assert told == [True, True]
    assert TOLD in run.error(1, 0)["what"] + run.error(1, 1)["what"]
    go_on(run, undisturbed, last=max(run.steps()))


@on_both
def test_a_rank_with_an_error_of_its_own_says_so_and_saves_as_well(run, undisturbed):
    # 3 samples a step, and what the start reads to measure
    ranks = run.start(1, HOSTS, [4, 3, 3], train={2: {"fails_after": 20}})
    assert [rank.wait(timeout_s=START_S) for rank in ranks] == [5, 5, 5]
    assert "ValueError: the flour is damp" in run.error(1, 2)["what"]
    assert "saved step" in run.log(1, 2)
    assert "flour" not in run.error(1, 0)["what"]
    go_on(run, undisturbed, last=max(run.steps()))


def test_weights_that_are_known_to_be_bad_are_not_saved(run):
    (rank,) = run.start(1, ["pc1"], [10], train={0: {"spoilt_after": 3}})
    assert rank.wait(timeout_s=START_S) == 5
    assert list(run.steps()) == [1, 2, 3]
    assert run.saved_steps() == []


def test_within_rounds_of_local_sgd_they_leave_when_told_and_what_was_saved_before_counts(zygote, tmp_path):
    run = Run(zygote, tmp_path / "run", steps=40, every_steps=2)
    ranks = run.start(1, HOSTS, [4, 3, 3], slowdown=4.0, strategy="local-sgd")
    run.wait_for_step(6)
    ranks[2].signal(signal.SIGSTOP)
    for rank in ranks[:2]:
        rank.signal(signal.SIGUSR2)
    assert [rank.wait(timeout_s=10) for rank in ranks[:2]] == [5, 5]
    assert [is_echo(run.error(1, number)) for number in (0, 1)] == [True, True]
    ranks[2].close()
    last = max(run.steps())
    assert all(step % 2 == 0 for step in run.saved_steps())
    assert last - 2 <= run.adopt() <= last, "the last round, or the one before if that was not saved yet"


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_for_others_to_come_leaves_at_once_when_told(run, waiting):
    """Rank 0 keeps the store and waits in it; rank 1 looks for a store that is not there."""
    (rank,) = run.start(1, HOSTS[:2], [5, 5], only=[waiting])
    phase = run.layout.attempt(1) / f"rank-{waiting}.phase"
    joining = PHASES.index("joining").to_bytes(8, "little")
    wait_until(lambda: phase.exists() and phase.read_bytes()[8:16] == joining, "it waits", timeout_s=START_S)
    rank.signal(signal.SIGUSR2)
    assert rank.wait(timeout_s=5) == 5
    assert TOLD in run.error(1, waiting)["what"]
    assert run.saved_steps() == []


def test_a_wait_for_a_stopped_rank_ends_within_two_seconds(zygote, tmp_path):
    gang = zygote.gang(2, cases_broken.wait_for_ever, {"folder": str(tmp_path)})
    for rank in (0, 1):
        wait_until(Path(tmp_path, f"ready-{rank}").exists, "both are ready")
    gang.children[1].signal(signal.SIGSTOP)
    # an order to stop is not lost on the way, and does not end the wait
    gang.children[0].signal(signal.SIGTERM)
    told_s = time.monotonic()
    gang.children[0].signal(signal.SIGUSR2)
    seen = gang.children[0].result(timeout_s=20)
    assert seen["raised_s"] - told_s < 2.0
    assert (seen["explained"], seen["own_error_explained"], seen["stop"]) == (True, False, True)


def test_of_a_rank_that_leaves_the_connections_of_groups_are_cut_and_no_others(zygote):
    for rank in zygote.gang(2, cases_broken.severed).results():
        assert rank == {"opened": 0, "error": True, "other": "still here"}
