"""Full disks and sudden ends: the cause is named, and nothing that was committed is lost."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from tests.saved import POINTS
from tests.train.parts import commit, saver_in, some_tensors

pytestmark = [pytest.mark.train, pytest.mark.rotating]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_files():
    """No file of this process grows beyond 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_room(saver, folder):
    """A save that does not fit fails with a cause, and harms nothing."""
    small = {"a": torch.ones(1000)}
    saver.save(100, small, {"step": 100}, wait=True)
    assert saver.failure is None
    commit(folder, 100)
    saver.save(200, {"a": torch.ones(1 << 20)}, {"step": 200})
    saver.wait()
    failure = saver.failure
    assert isinstance(failure, CheckpointError)
    assert "no room to save step-00000200" in failure.what
    assert "needs 4 MiB" in failure.seen
    assert "are free" in failure.seen
    assert "keep_last" in failure.fix
    assert saver.saved.step == 100
    assert disk.saved_steps(folder) == [100], "of a failed save not even the folder stays"
    assert disk.choose({"pc1": disk.survey(folder)}).step == 100
    saver.save(300, small, {"step": 300})
    saver.wait()
    assert (saver.failure, saver.saved.step) == (None, 300)


def fill(path):
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


def test_a_full_disk_is_named_and_the_checkpoints_before_stay(small_disk):
    no_room(saver_in(small_disk), small_disk)


def test_a_file_too_large_is_named_and_the_checkpoints_before_stay(tmp_path, small_files):
    no_room(saver_in(tmp_path), tmp_path)


def test_a_disk_that_is_full_already_is_named(small_disk):
    fill(small_disk / "other")
    saver = saver_in(small_disk / "checkpoints")
    saver.save(100, some_tensors(), {}, wait=True)
    assert "no room to save step-00000100" in saver.failure.what
    assert disk.choose({"pc1": disk.survey(small_disk / "checkpoints")}).step is None


def test_any_other_failure_is_told_with_its_cause(tmp_path):
    (tmp_path / "file").write_text("in the way")
    saver = saver_in(tmp_path / "file")
    saver.save(100, some_tensors(), {})
    saver.wait()
    assert "step-00000100 cannot be saved" in saver.failure.what
    assert "NotADirectoryError" in saver.failure.seen or "FileExistsError" in saver.failure.seen
    assert saver.failure.fix


@pytest.mark.timeout(300)
def test_kill_9_at_every_point_loses_nothing_and_the_next_save_works(tmp_path):
    out = tmp_path / "cases.jsonl"
    argv = [sys.executable, "-m", "benchmarks.kill_saves", "--times", "1", "--out", str(out), "--folder", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["point"] for line in lines if line["story"] == "train"] == list(POINTS)
    assert [line["point"] for line in lines if line["story"] == "in parts"] == list(POINTS)
    assert {line["story"] for line in lines} == {"train", "in parts", "last step", "resume"}
    assert len(lines) >= 35 + len(POINTS)
    assert all(line["killed"] and line["wrong"] == [] for line in lines)


@pytest.mark.parametrize(("ending", "steps"), [("", [100]), ("os._exit(0)", [])])
def test_an_interpreter_that_ends_finishes_its_save_and_one_that_is_cut_off_leaves_none(tmp_path, ending, steps):
    script = f"""
import os, sys, threading
from pathlib import Path
from gangline.runs import checkpoints as disk
from tests.train.parts import saver_in, some_tensors
reached, ended = threading.Event(), threading.Event()
def hold(point):
    if point == "save: part described":
        reached.set()
        ended.wait(2)
disk.at_point = hold
saver_in(Path(sys.argv[1])).save(100, some_tensors(), {{}})
assert reached.wait(60)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [step for step in disk.saved_steps(tmp_path) if disk.part_folders(disk.step_folder(tmp_path, step))] == steps
    saver = saver_in(tmp_path)
    saver.save(200, some_tensors(), {}, wait=True)
    assert saver.failure is None
