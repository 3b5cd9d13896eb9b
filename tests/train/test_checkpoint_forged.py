"""Checkpoints of somebody who wants to run code: named, refused, never executed."""

import errno
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gangline.errors import CheckpointError
from gangline.worker import restore
from tests.train.parts import forge, like, load_part, saved, some_tensors

pytestmark = pytest.mark.train


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


@pytest.mark.parametrize("kind", ["reduce", "os.system", "dotted", "builtins.eval", "inside"])
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


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), CheckpointError, "cannot be read"),
        (FileNotFoundError(errno.ENOENT, "No such file"), CheckpointError, "asks for what no checkpoint"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
)
def test_a_disk_that_fails_is_no_forger(tmp_path, monkeypatch, error, kind, said):
    part, digest = saved(tmp_path)

    def fails(*_):
        raise error

    monkeypatch.setattr(restore, "_read_tensors", fails)
    with pytest.raises(kind, match=said):
        load_part(part, like(some_tensors()), digest=digest)
