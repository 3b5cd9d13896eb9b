"""Which checkpoints stay."""

import pytest

from gangline.runs import checkpoints as disk
from gangline.runs.checkpoints import main, prune, set_aside
from gangline.runs.manifest import COMMIT_FILE, Commit, describe_part
from tests.saved import POINTS, place_commit


def save(checkpoints, step, *, attempt=1, commit=True, part=True, loss=None):
    folder = disk.part_folder(checkpoints, step, "pc1")
    folder.parent.mkdir(parents=True)
    if part:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"x" * 100)
        description = {"attempt": attempt, "hosts": ["pc1"], "num_ranks": 1, "fingerprints": {}}
        describe_part(folder, step=step, host="pc1", description=description, evaluation_loss=loss)
    if commit:
        record = Commit(step=step, attempt=attempt, parts={"pc1": "0" * 64}, evaluation_loss=loss)
        place_commit(checkpoints, record.to_bytes())


@pytest.mark.parametrize(("keep_last", "left"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40]), (0, [40])])
def test_the_newest_committed_ones_stay_and_always_one(tmp_path, keep_last, left):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    prune(tmp_path, keep_last=keep_last, keep_best=False)
    assert disk.saved_steps(tmp_path) == left


def test_the_best_stays_however_old_it_is(tmp_path):
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, None), (60, float("nan"))):
        save(tmp_path, step, loss=loss)
    assert prune(tmp_path, keep_last=2, keep_best=True) == [10, 30, 40]
    assert disk.saved_steps(tmp_path) == [20, 50, 60]


def test_an_uncommitted_step_counts_for_nothing_and_pushes_out_nothing(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    for step in (30, 40, 50):
        save(tmp_path, step, commit=False)
    prune(tmp_path, keep_last=2, keep_best=False)
    assert disk.saved_steps(tmp_path) == [10, 20, 40, 50]


def test_uncommitted_steps_older_than_the_newest_commit_go(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20, commit=False)
    save(tmp_path, 30)
    prune(tmp_path, keep_last=2, keep_best=False)
    assert disk.saved_steps(tmp_path) == [10, 30]


def test_a_step_that_is_being_written_is_left_alone(tmp_path):
    save(tmp_path, 30)
    writing = disk.part_folder(tmp_path, 20, "pc1").with_name("part-pc1.tmp")
    writing.mkdir(parents=True)
    prune(tmp_path, keep_last=1, keep_best=False, writing=frozenset({20}))
    assert writing.is_dir()
    prune(tmp_path, keep_last=1, keep_best=False)
    assert disk.saved_steps(tmp_path) == [30]


def test_a_record_without_a_part_does_not_push_out_a_checkpoint_that_is_whole(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 30, part=False)
    save(tmp_path, 40, part=False)
    prune(tmp_path, keep_last=2, keep_best=False)
    assert disk.saved_steps(tmp_path) == [10, 20, 30, 40]


def test_an_unreadable_record_is_no_commit(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    path = disk.step_folder(tmp_path, 30) / COMMIT_FILE
    path.write_bytes(path.read_bytes()[:-5])
    prune(tmp_path, keep_last=1, keep_best=False)
    assert disk.saved_steps(tmp_path) == [20, 30]


def test_what_crashes_left_behind_is_cleared(tmp_path):
    save(tmp_path, 10)
    (tmp_path / ".trash-step-00000005" / "part-pc1").mkdir(parents=True)
    (tmp_path / ".trash-step-00000005" / "part-pc1" / "__0_0.distcp").write_bytes(b"x")
    half = disk.step_folder(tmp_path, 10) / "part-pc1.tmp"
    half.mkdir()
    (disk.step_folder(tmp_path, 10) / ".COMMITTED.77.tmp").write_bytes(b"half")
    prune(tmp_path, keep_last=1, keep_best=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        COMMIT_FILE,
        "__0_0.distcp",
        "part-pc1",
        "part.json",
        "step-00000010",
    ]


def test_the_record_goes_before_anything_else_of_a_step(tmp_path, monkeypatch):
    for step in (10, 20):
        save(tmp_path, step)
    seen = []

    def look(point):
        folder = disk.step_folder(tmp_path, 10)
        seen.append((point, (folder / COMMIT_FILE).exists(), (folder / "part-pc1" / "part.json").exists()))

    monkeypatch.setattr(disk, "at_point", look)
    prune(tmp_path, keep_last=1, keep_best=False)
    assert seen[0] == ("retention: begin", True, True)
    assert ("retention: record removed", False, True) in seen
    assert seen[-1] == ("retention: end", False, False)
    assert {point for point, *_ in seen} == {point for point in POINTS if point.startswith("retention")}


def damage(checkpoints, step):
    """Flip a byte: the sizes stay, and retention, which hashes nothing, cannot see it."""
    path = disk.part_folder(checkpoints, step, "pc1") / "__0_0.distcp"
    path.write_bytes(b"y" + path.read_bytes()[1:])


def whole(checkpoints):
    return [entry["step"] for entry in disk.survey(checkpoints) if any(not part["problems"] for part in entry["parts"])]


@pytest.mark.parametrize("aside", [True, False])
def test_a_run_that_went_back_below_damaged_steps_keeps_the_step_it_went_back_to(tmp_path, aside):
    for step in (130, 140, 150):
        save(tmp_path, step)
    for step in (140, 150):
        damage(tmp_path, step)
    if aside:
        assert set_aside(tmp_path, 130) == [140, 150]
    prune(tmp_path, keep_last=2, keep_best=True, writing=frozenset({133}))
    assert whole(tmp_path) == [130]
    for step in (133, 136):
        save(tmp_path, step, attempt=2)
    prune(tmp_path, keep_last=2, keep_best=True, writing=frozenset({139}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000133", "step-00000136"]


def test_a_part_of_this_attempt_waits_for_its_commit_below_a_newer_step_of_the_attempt_before(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 150)
    damage(tmp_path, 150)
    save(tmp_path, 110, attempt=2, commit=False)
    prune(tmp_path, keep_last=2, keep_best=True, writing=frozenset({120}))
    assert {100, 110} <= set(whole(tmp_path))


def test_without_a_supervisor_a_host_keeps_what_a_slower_one_has_whole(tmp_path):
    save(tmp_path, 10, commit=False)
    save(tmp_path, 20, commit=False)
    prune(tmp_path, keep_last=1, keep_best=False, writing=frozenset({30}))
    assert disk.saved_steps(tmp_path) == [10, 20]


def test_a_later_attempt_is_newer_whatever_its_steps(tmp_path):
    for step in (10, 20, 200):
        save(tmp_path, step)
    save(tmp_path, 30, attempt=2)
    save(tmp_path, 40, attempt=2)
    prune(tmp_path, keep_last=2, keep_best=False)
    assert disk.saved_steps(tmp_path) == [30, 40]


def test_a_part_that_is_cut_off_pushes_out_nothing(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    path = disk.part_folder(tmp_path, 30, "pc1") / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    prune(tmp_path, keep_last=1, keep_best=False)
    assert disk.saved_steps(tmp_path) == [20, 30]


def test_what_is_moved_aside_loses_its_record_first_and_goes_with_the_next_commit(tmp_path, monkeypatch):
    save(tmp_path, 10)
    save(tmp_path, 20)
    seen = []
    monkeypatch.setattr(disk, "at_point", lambda point: seen.append((point, disk.saved_steps(tmp_path))))
    assert set_aside(tmp_path, 10) == [20]
    assert seen == [("retention: record removed", [10, 20])]
    prune(tmp_path, keep_last=1, keep_best=False, writing=frozenset({15}))
    assert (tmp_path / "aside-00000010-step-00000020" / "part-pc1").is_dir()
    save(tmp_path, 20)
    assert set_aside(tmp_path, 10) == [20], "twice from the same step"
    save(tmp_path, 15, attempt=2)
    prune(tmp_path, keep_last=2, keep_best=False, writing=frozenset({20}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]


def test_a_host_is_told_in_words_to_move_steps_aside(tmp_path, capsys):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert main(["aside", str(tmp_path), "10"]) == 0
    assert capsys.readouterr().out == "[20]\n"
    assert main(["aside", str(tmp_path)]) == 2
    assert main(["aside", str(tmp_path / "none"), "10"]) == 0


def test_no_folder_is_nothing_to_do(tmp_path):
    assert prune(tmp_path / "none", keep_last=1, keep_best=True) == []
