"""Which checkpoints stay."""

import pytest

from gangline.runs import checkpoints as disk
from gangline.runs.manifest import COMMIT_FILE, Commit, describe_part
from gangline.runs.retention import prune


def save(checkpoints, step, *, commit=True, part=True, loss=None):
    folder = disk.part_folder(checkpoints, step, "pc1")
    folder.parent.mkdir(parents=True)
    if part:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"x" * 100)
        description = {"attempt": 1, "hosts": ["pc1"], "num_ranks": 1, "fingerprints": {}}
        describe_part(folder, step=step, host="pc1", description=description, evaluation_loss=loss)
    if commit:
        record = Commit(step=step, attempt=1, parts={"pc1": "0" * 64}, evaluation_loss=loss)
        disk.place_commit(checkpoints, record.to_bytes())


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
    assert {point for point, *_ in seen} == {point for point in disk.POINTS if point.startswith("retention")}


def test_no_folder_is_nothing_to_do(tmp_path):
    assert prune(tmp_path / "none", keep_last=1, keep_best=True) == []
