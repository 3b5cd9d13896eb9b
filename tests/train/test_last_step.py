"""What is saved of an attempt that breaks, by whom, and what never is."""

import pytest

from tests.train import cases_last_step

pytestmark = pytest.mark.rotating


@pytest.fixture
def kept(pool, tmp_path):
    def _kept(**words):
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        (told,) = pool(1).run(cases_last_step.kept, folder=str(folder), **words)
        return told

    return _kept


@pytest.mark.parametrize("state", ["", "updated"])
def test_the_last_complete_step_is_saved_once(kept, state):
    assert kept(state=state) == {"first": True, "again": False, "part": True}


def test_a_step_that_an_attempt_went_on_from_is_there_already(kept):
    assert kept(resume_step=7) == {"first": False, "again": False, "part": False}


def test_weights_that_are_half_way_are_not_saved(kept):
    assert kept(state="updating") == {"first": False, "again": False, "part": False}


def test_a_checkpoint_that_is_being_written_is_not_cut_off(pool, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    assert pool(1).run(cases_last_step.kept_while_it_writes, folder=str(folder)) == [{"saved": False, "there": True}]


def test_within_a_round_of_local_sgd_there_is_nothing_to_save(kept):
    assert kept(strategy="local-sgd") == {"first": False, "again": False, "part": False}


def test_a_save_that_fails_ends_nothing(kept):
    assert kept(state="no disk") == {"first": False, "again": False, "part": False}


@pytest.mark.parametrize(("first", "saves"), [("alive", False), ("gone", True), ("saved", False)])
def test_one_rank_of_a_host_saves_the_first_that_lives(pool, tmp_path, first, saves):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    told = pool(2).run(cases_last_step.second_of_its_host, folder=str(folder), first=first)
    assert told == [None, saves]
