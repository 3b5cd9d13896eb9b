"""Parts on the disk, with real tensors: saved whole or not at all, loaded only as they were committed."""

import contextlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import PART_FILE, commit_record, describe_part, digest_of
from gangline.worker.checkpoint import Saver
from gangline.worker.restore import load_part

pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[2]
DESCRIPTION = {"attempt": 1, "hosts": ["pc1"], "num_ranks": 2, "fingerprints": {"model": "f00d"}}
LIMIT_S = 60


def saver_in(folder, *, description=DESCRIPTION, **job):
    return Saver(folder, host="pc1", job=CheckpointJob(**job), description=description)


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    return {
        "model.fp64": values,
        "model.fp32": values.float(),
        "model.bf16": values.bfloat16(),
        "model.fp16": values.half(),
        "model.transposed": values.float().t(),
        "model.slice": values.float()[1:4, ::2],
        "model.empty": torch.zeros(0, 4),
        "model.special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        "optimizer.step": torch.tensor(17.0),
        "optimizer.count": torch.tensor(2**53 + 1),
        "rng.bytes": torch.arange(256, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }


def like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )


def saved(folder, step=100, tensors=None, state=None, **job):
    """A saved part: its folder and the digest of its description."""
    saver = saver_in(folder, **job)
    saver.save(
        step, some_tensors() if tensors is None else tensors, {"step": step} if state is None else state, wait=True
    )
    assert saver.failure is None, saver.failure
    return part_and_digest(folder, step)


def part_and_digest(folder, step=100):
    part = disk.part_folder(folder, step, "pc1")
    return part, digest_of((part / PART_FILE).read_bytes())


def commit(folder, step):
    part, _ = part_and_digest(folder, step)
    disk.place_commit(folder, commit_record({"pc1": (part / PART_FILE).read_bytes()}))


def forge(part):
    """What somebody does who can write the folder: every hash is made right again."""
    (part / PART_FILE).unlink()
    describe_part(part, step=100, host="pc1", description=DESCRIPTION)
    return digest_of((part / PART_FILE).read_bytes())


# --- round trip -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_dtype_and_shape_comes_back_bit_for_bit_with_its_state(tmp_path, asynchronous):
    tensors = some_tensors()
    state = {"step": 100, "rate": 0.1 + 0.2, "samples": [1, 2], "evaluation_loss": 1.5, "nested": {"a": None}}
    saver = saver_in(tmp_path, asynchronous=asynchronous)
    saver.save(100, tensors, state)
    saver.wait()
    assert saver.failure is None
    part, digest = part_and_digest(tmp_path)
    template = like(tensors)
    assert load_part(part, template, digest=digest) == state
    assert [name for name in tensors if not same_bits(tensors[name], template[name])] == []
    assert sorted(path.name for path in part.parent.iterdir()) == ["part-pc1"]


def test_parameters_that_need_gradients_are_filled_in_place(tmp_path):
    model = torch.nn.Linear(3, 2)
    part, digest = saved(tmp_path, tensors=dict(model.named_parameters()))
    other = torch.nn.Linear(3, 2)
    load_part(part, dict(other.named_parameters()), digest=digest)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad


def test_equal_state_gives_equal_files_wherever_and_whenever_it_is_written(tmp_path):
    files = [{path.name: path.read_bytes() for path in saved(tmp_path / name)[0].iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert str(tmp_path).encode() not in files[0][".metadata"]


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_staged_and_come_back(tmp_path):
    tensors = {name: tensor.cuda() for name, tensor in some_tensors().items()}
    expected = some_tensors()
    saver = saver_in(tmp_path)
    saver.save(100, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    saver.wait()
    assert saver.failure is None
    part, digest = part_and_digest(tmp_path)
    load_part(part, tensors, digest=digest)
    assert [name for name in expected if not same_bits(expected[name], tensors[name].cpu())] == []


# --- in the background ------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Holds writers at one point until it is opened."""

    class Gate:
        reached = threading.Event()
        opened = threading.Event()

        def __call__(self, point):
            if point == "save: folder made":
                self.reached.set()
                assert self.opened.wait(LIMIT_S)

    gate = Gate()
    gate.reached, gate.opened = threading.Event(), threading.Event()
    monkeypatch.setattr(disk, "at_point", gate)
    yield gate
    gate.opened.set()


def test_training_may_change_the_tensors_as_soon_as_save_returns(tmp_path, gate):
    tensors = some_tensors()
    state = {"step": 100, "losses": [1.0]}
    saver = saver_in(tmp_path)
    saver.save(100, tensors, state)
    assert gate.reached.wait(LIMIT_S)
    assert saver.busy
    for tensor in tensors.values():
        tensor.zero_()
    state["losses"].append(2.0)
    gate.opened.set()
    saver.wait()
    assert saver.saved.step == 100
    part, digest = part_and_digest(tmp_path)
    template = like(tensors)
    assert load_part(part, template, digest=digest)["losses"] == [1.0]
    assert torch.equal(template["model.fp32"], some_tensors()["model.fp32"])


def test_a_second_save_waits_for_the_first_and_counts_the_wait(tmp_path, gate):
    saver = saver_in(tmp_path)
    saver.save(100, some_tensors(1), {})
    short_s = saver.stall_s
    assert gate.reached.wait(LIMIT_S)
    second = threading.Thread(target=saver.save, args=(200, some_tensors(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(LIMIT_S)
    saver.wait()
    assert saver.stall_s >= 0.2 > short_s >= 0
    assert disk.saved_steps(tmp_path) == [100, 200]
    part, digest = part_and_digest(tmp_path, 100)
    template = like(some_tensors())
    load_part(part, template, digest=digest)
    assert torch.equal(template["model.fp32"], some_tensors(1)["model.fp32"])


def test_there_is_no_thread_before_the_first_save(tmp_path):
    before = threading.active_count()
    saver = saver_in(tmp_path)
    saver.wait()
    assert threading.active_count() == before
    assert not saver.busy


def test_only_tensors_and_json_are_saved(tmp_path):
    saver = saver_in(tmp_path)
    with pytest.raises(TypeError, match="tensors only; not one: schedule"):
        saver.save(100, {"schedule": {"last": 1}}, {})
    with pytest.raises(TypeError):
        saver.save(100, some_tensors(), {"rate": object()})
    assert disk.saved_steps(tmp_path) == []


def test_retention_runs_before_a_save(tmp_path):
    saver = saver_in(tmp_path, keep_last=2, keep_best=True)
    for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0), (400, 4.0)):
        saver.save(step, some_tensors(), {"evaluation_loss": loss}, wait=True)
        commit(tmp_path, step)
    saver.save(500, some_tensors(), {}, wait=True)
    assert disk.saved_steps(tmp_path) == [200, 300, 400, 500]


def test_a_step_that_is_saved_again_loses_its_old_record_first(tmp_path):
    saved(tmp_path, tensors=some_tensors(1))
    commit(tmp_path, 100)
    saver = saver_in(tmp_path, description={**DESCRIPTION, "attempt": 2})
    saver.save(100, some_tensors(2), {}, wait=True)
    assert disk.choose({"pc1": disk.survey(tmp_path)}).step is None
    commit(tmp_path, 100)
    assert disk.choose({"pc1": disk.survey(tmp_path)}).step == 100


# --- not as it was committed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", PART_FILE])
def test_a_flipped_byte_anywhere_is_named_and_nothing_is_loaded(tmp_path, name):
    part, digest = saved(tmp_path)
    data = (part / name).read_bytes()
    for place in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1}):
        for mask in (0x01, 0x80):
            (part / name).write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            template = like(some_tensors())
            with pytest.raises(CheckpointError) as caught:
                load_part(part, template, digest=digest)
            assert name in caught.value.seen
            assert caught.value.fix
            assert not any(tensor.any() for tensor in template.values())


def test_truncated_missing_and_added_files_are_named(tmp_path):
    part, digest = saved(tmp_path)
    for name in ("__0_0.distcp", ".metadata", "state.json", PART_FILE):
        data = (part / name).read_bytes()
        for damage in (lambda path, data=data: path.write_bytes(data[:-1]), Path.unlink):
            damage(part / name)
            with pytest.raises(CheckpointError) as caught:
                load_part(part, like(some_tensors()), digest=digest)
            assert name in caught.value.seen
            (part / name).write_bytes(data)
    (part / "__1_0.distcp").write_bytes(b"more")
    with pytest.raises(CheckpointError, match="not what was committed") as caught:
        load_part(part, like(some_tensors()), digest=digest)
    assert "__1_0.distcp is not listed" in caught.value.seen


def test_a_whole_part_of_another_save_is_refused(tmp_path):
    part, _ = saved(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_part(part, like(some_tensors()), digest="0" * 64)
    assert "part.json is not the one of the commit record" in caught.value.seen


def test_the_state_of_another_model_is_refused_with_every_difference(tmp_path):
    part, digest = saved(tmp_path, tensors={"a": torch.ones(2, 3), "b": torch.ones(4), "gone": torch.ones(1)})
    template = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="another model, method or precision") as caught:
        load_part(part, template, digest=digest)
    for words in (
        "missing in the checkpoint: new",
        "unknown to this job: gone",
        "a is float32 [2, 3] in the checkpoint and float32 [3, 2] in this job",
        "b is float32 [4] in the checkpoint and bfloat16 [4] in this job",
    ):
        assert words in caught.value.seen
    assert not template["b"].any()


# --- somebody who wants to run code -----------------------------------------------------------------------------


class Canary:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def call(module, name, argument):
    """A pickle (protocol 4) that calls module.name(argument); dotted names reach through modules."""

    def text(value):
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "executed"


def test_a_metadata_that_was_replaced_is_refused_by_its_digest(tmp_path, canary):
    part, digest = saved(tmp_path / "c")
    (part / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(CheckpointError, match="not what was committed"):
        load_part(part, like(some_tensors()), digest=digest)
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["reduce", "os.system", "dotted", "builtins.eval", "inside", "importlib"])
def test_a_forged_metadata_with_right_digests_is_never_executed(tmp_path, canary, kind):
    part, _ = saved(tmp_path / "c")
    with dcp_metadata_of(part) as metadata:
        metadata.planner_data = Canary(canary)
        inside = pickle.dumps(metadata)
    forged = {
        "reduce": pickle.dumps(Canary(canary)),
        "os.system": call("os", "system", f"touch {canary}"),
        "dotted": call("torch.distributed.checkpoint.metadata", "os.mkdir", str(canary)),
        "builtins.eval": call("builtins", "eval", f"__import__('os').mkdir({str(canary)!r})"),
        "inside": inside,
        "importlib": call("importlib", "import_module", "antigravity"),
    }[kind]
    if kind == "dotted":
        # The trap is real: a plain unpickler follows the dots.
        pickle.loads(forged)
        canary.rmdir()
    (part / ".metadata").write_bytes(forged)
    template = like(some_tensors())
    with pytest.raises(CheckpointError, match="nothing of it was executed"):
        load_part(part, template, digest=forge(part))
    assert not canary.exists()
    assert not any(tensor.any() for tensor in template.values())


class dcp_metadata_of:  # noqa: N801
    """The metadata of a part, read by DCP itself."""

    def __init__(self, part):
        self.part = part

    def __enter__(self):
        return dcp.FileSystemReader(self.part).read_metadata()

    def __exit__(self, *_):
        return False


def test_a_forged_tensor_file_with_right_digests_is_never_executed(tmp_path, canary):
    part, _ = saved(tmp_path / "c", tensors={"a": torch.ones(3)})
    torch.save(Canary(canary), part / "__0_0.distcp")
    with dcp_metadata_of(part) as metadata:
        for info in metadata.storage_data.values():
            info.length = (part / "__0_0.distcp").stat().st_size
        (part / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="nothing of it was executed"):
        load_part(part, {"a": torch.zeros(3)}, digest=forge(part))
    assert not canary.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_items_that_dcp_would_unpickle_are_refused(tmp_path, canary):
    part, _ = saved(tmp_path / "c", tensors={"a": torch.ones(3)})
    dcp.save({"a": Canary(canary)}, storage_writer=dcp.FileSystemWriter(tmp_path / "bytes"), no_dist=True)
    for name in ("__0_0.distcp", ".metadata"):
        shutil.copy(tmp_path / "bytes" / name, part / name)
    with pytest.raises(CheckpointError, match="nothing of it was executed") as caught:
        load_part(part, {"a": torch.zeros(3)}, digest=forge(part))
    # storage_meta holds a pathlib path there, and the refusal of it would come first.
    assert "pathlib" in caught.value.seen or "not tensors" in caught.value.seen
    with dcp_metadata_of(part) as metadata:
        metadata.storage_meta = None
        (part / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        load_part(part, {"a": torch.zeros(3)}, digest=forge(part))
    assert "items that are not tensors (DCP would unpickle them): a" in caught.value.seen
    assert not canary.exists()


def test_a_metadata_that_points_out_of_its_folder_is_refused(tmp_path):
    part, _ = saved(tmp_path, tensors={"a": torch.ones(3)})
    shutil.copy(part / "__0_0.distcp", tmp_path / "elsewhere")
    with dcp_metadata_of(part) as metadata:
        for info in metadata.storage_data.values():
            info.relative_path = "../../elsewhere"
        (part / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        load_part(part, {"a": torch.zeros(3)}, digest=forge(part))
    assert "files that are not of the part: ../../elsewhere" in caught.value.seen


# --- no room ----------------------------------------------------------------------------------------------------


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
    assert [path.name for path in disk.step_folder(folder, 200).iterdir()] == []
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


# --- kill -9 ----------------------------------------------------------------------------------------------------


def test_kill_9_at_every_point_loses_nothing_and_the_next_save_works(tmp_path):
    out = tmp_path / "cases.jsonl"
    argv = [sys.executable, str(ROOT / "benchmarks" / "kill_saves.py"), "--times", "3", "--out", str(out)]
    done = subprocess.run([*argv, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=100)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["point"] for line in lines} == set(disk.POINTS)
    assert len(disk.POINTS) >= 12
    assert len(lines) == 3 * len(disk.POINTS)
    assert all(line["killed"] and line["wrong"] == [] for line in lines)
