"""Bad input through the real command: an exit code, an error of three parts, and nothing lost or left."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.story import (
    Said,
    User,
    copy_world,
    make_user,
    write_cluster,
    write_corpus,
    write_job,
)

pytestmark = pytest.mark.timeout(400)

FEW_STEPS = {"data": {"train": "corpus.jsonl", "sequence_length": 32}, "checkpoint": {"every_steps": 2}}


@contextlib.contextmanager
def somebody(folder: Path, world: Path, python: Path) -> Iterator[User]:
    """A user with copies of these, who leaves nothing behind."""
    user = make_user(folder, python=python)
    copy_world(world, user)
    left = []
    try:
        yield user
    finally:
        left = user.end_runs()
    assert left == []
    assert user.wait_until_quiet() == []


@pytest.fixture
def user(world, quick_python, tmp_path):
    with somebody(tmp_path / "user", world, quick_python) as user:
        yield user


class Canary:
    """A pickle that makes a file when it is loaded as pickles are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def test_the_canary_sings(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def refused(user: User, *words: str, code: int = 2) -> Said:
    """`gangline train job.yaml ...`, which must say what is wrong in three parts, start nothing and leave no run."""
    said = user.gangline("train", "job.yaml", *words, code=code)
    assert said.out.strip() == ""
    assert user.recorded() == []
    assert_three_parts(said)
    return said


def assert_three_parts(said: Said) -> None:
    """What and where; expected and seen; what to do."""
    text = "\n".join(said.parts)
    assert "Traceback" not in said.err
    assert "seen" in text, said.err
    assert "fix" in text, said.err


# --- words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batchs": 3}, ["job.yaml:1:", "batchs", "batch"]),
        ({"batch": "many"}, ["job.yaml:1:", "batch", "many"]),
        ({"batch": 12, "micro_batch": 5}, ["job.yaml:1:", "12", "5"]),
        ({"optimizer": {"lr": 1}}, ["job.yaml:1:", "optimizer.learning_rate"]),
    ],
    ids=["unknown key", "wrong type", "a batch that is not a whole number of micro-batches", "foreign key"],
)
def test_words_that_are_off(user, changes, words):
    write_job(user, **changes)
    said = refused(user)
    assert all(word in said.err for word in words), said.err


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_job_file_that_is_missing(user, command):
    said = user.gangline(command, "job.yaml", code=2)
    assert_three_parts(said)
    assert "job.yaml" in said.err
    assert user.recorded() == []


def test_a_cluster_file_that_is_missing(user):
    write_job(user)
    assert "none.yaml" in refused(user, "--cluster", "none.yaml").err


# --- files


def test_a_data_file_that_is_missing(user):
    write_job(user, data={"train": "none.jsonl"})
    assert "none.jsonl" in refused(user).err


def test_rows_without_the_field(user):
    rows = [{"text": "the rope"}, {"txt": "the sled"}, {"text": "the dog"}, {"prompt": "the ice"}]
    (user.folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_job(user)
    said = refused(user)
    assert "corpus.jsonl:2" in said.err
    assert "'text'" in said.err
    assert "2 " in said.parts[0] + said.parts[1]  # how many there are


def test_a_model_folder_that_is_missing(user):
    write_job(user, model="./none")
    assert "none" in refused(user).err


def test_a_model_folder_without_weights(user):
    (user.folder / "model" / "model.safetensors").unlink()
    write_job(user)
    said = refused(user)
    assert "has no weights" in said.err
    assert "random" in said.err


def test_a_sequence_longer_than_the_model_reads(user):
    write_job(user, data={"train": "corpus.jsonl", "sequence_length": 65})
    said = refused(user)
    assert "65" in said.err
    assert "64" in said.err


# --- what would be executed


def test_a_model_that_asks_for_remote_code(user):
    canary = user.folder / "canary"
    model = user.folder / "model"
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
    write_job(user)
    said = refused(user)
    assert "auto_map" in said.err
    assert "trust_remote_code" in said.err
    assert not canary.exists()


def test_old_weights_that_are_more_than_tensors(user):
    canary = user.folder / "canary"
    (user.folder / "model" / "model.safetensors").unlink()
    (user.folder / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary), protocol=2))
    write_job(user)
    write_cluster(user, "one", pc1={})
    said = user.gangline("train", "job.yaml", "--cluster", "one.yaml", code=2)
    assert_three_parts(said)
    assert "nothing in it was executed" in said.err
    assert user.runs()[0]["phase"] == "failed"
    assert not canary.exists()


# --- a run that goes on twice: once there is data, and from the checkpoint before one that is forged


@dataclass(frozen=True, kw_only=True)
class Mended:
    """A start without data, another one with some, stopped, and resumed with a pickle in its newest checkpoint."""

    empty: Said
    """Of the first start."""
    listed: list[dict]
    """The runs after it."""
    phase: str
    """At the end."""
    newest: int
    before: int
    """The last two steps that were saved."""
    forged: Said
    """Of the last `resume`."""
    canary: Path


@pytest.fixture(scope="module")
def mended(world, quick_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mended")
    with somebody(folder / "user", world, quick_python) as user:
        write_job(user, **FEW_STEPS, steps=30)
        write_cluster(user, "one", pc1={"env": {"GANGLINE_SIMULATED_SLOWDOWN": 10}})
        write_cluster(user, "fast", pc1={})
        (user.folder / "corpus.jsonl").write_text("")
        empty = refused(user, "--cluster", "one.yaml")
        listed = user.runs()
        write_corpus(user.folder)
        run = user.gangline("train", "job.yaml", "--cluster", "one.yaml", "--detach").out.strip()
        user.wait_for_step(run, 4)
        user.gangline("stop", run)
        newest, before = sorted(user.at_host("pc1", run).glob("checkpoints/step-*"), reverse=True)[:2]
        canary = folder / "canary"
        (newest / "part-pc1" / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
        forged = user.gangline("resume", run, "--cluster", "fast.yaml")
        yield Mended(
            empty=empty,
            listed=listed,
            phase=user.runs()[0]["phase"],
            newest=int(newest.name[5:]),
            before=int(before.name[5:]),
            forged=forged,
            canary=canary,
        )


def test_an_empty_data_set(mended):
    assert "corpus.jsonl" in mended.empty.err
    assert mended.listed == []  # a start that fails before its ranks run leaves no run


def test_a_start_can_be_repeated_once_its_cause_is_gone(mended):
    assert mended.newest >= 4


def test_a_checkpoint_with_a_pickle_in_it(mended):
    assert any(
        all(word in line for word in ("pc1", f"step {mended.newest}", ".metadata"))
        for line in mended.forged.err.splitlines()
        if line.startswith("skipped checkpoint")
    ), mended.forged.err
    assert f"from step {mended.before}" in mended.forged.err
    assert mended.phase == "finished"
    assert not mended.canary.exists()


# --- while it runs


def test_a_loss_that_is_not_a_number(user):
    optimizer = {"learning_rate": 1e30, "clip_norm": "none"}
    write_job(user, **FEW_STEPS, optimizer=optimizer, max_skipped_steps=1, failures="stop")
    write_cluster(user, "one", pc1={})
    said = user.gangline("train", "job.yaml", "--cluster", "one.yaml", code=5)
    assert_three_parts(said)
    assert "not finite, or far off, in 2 steps in a row" in said.err
    assert "samples of the last step: [" in said.err
    (row,) = user.runs()
    assert row["phase"] == "failed"


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, which a test makes as small as it likes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system of a given size")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4g,mode=700", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def set_size(disk: Path, num_bytes: int) -> None:
    """Change the size of a mounted tmpfs."""
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", disk], check=True)


def test_a_disk_that_is_full_when_a_checkpoint_is_saved(user, disk):
    write_job(user, **FEW_STEPS, steps=30, failures="stop")
    write_cluster(user, "one", pc1={"workdir": str(disk), "env": {"GANGLINE_SIMULATED_SLOWDOWN": 10}})
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "one.yaml")
    run = watching.stdout.readline().strip()
    assert run, watching.communicate()[1]  # it has ended before a run began
    records = disk / "runs" / run / "checkpoints"
    user.wait_until(lambda: list(records.glob("*/COMMITTED")))
    usage = shutil.disk_usage(disk)
    set_size(disk, usage.used)
    _out, err = watching.communicate()
    assert watching.returncode == 5, err
    assert_three_parts(Said(code=5, out="", err=err))
    assert "No space left on device" in err
    assert user.runs()[0]["phase"] == "failed"
    saved = max(int(path.parent.name[5:]) for path in records.glob("*/COMMITTED"))
    set_size(disk, usage.total)
    write_cluster(user, "fast", pc1={"workdir": str(disk)})
    assert f"from step {saved}" in user.gangline("resume", run, "--cluster", "fast.yaml").err
    assert user.runs()[0]["phase"] == "finished"
