"""Parts of checkpoints for tests: some tensors of every kind, saved by a Saver."""

import torch

from gangline.runs import checkpoints as disk
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import PART_FILE, commit_record, describe_part, digest_of
from gangline.worker.checkpoint import Saver
from gangline.worker.restore import load_parts
from tests.saved import place_commit

DESCRIPTION = {"attempt": 1, "hosts": ["pc1"], "num_ranks": 2, "fingerprints": {"model": "f00d"}}


def saver_in(folder, *, description=DESCRIPTION, beat=lambda: None, **job):
    return Saver(folder, host="pc1", job=CheckpointJob(**job), description=description, beat=beat)


def load_part(folder, tensors, *, digest):
    return load_parts([(folder, digest)], tensors)


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
    place_commit(folder, commit_record({"pc1": (part / PART_FILE).read_bytes()}))


def forge(part):
    """What somebody does who can write the folder: every hash is made right again."""
    (part / PART_FILE).unlink()
    describe_part(part, step=100, host="pc1", description=DESCRIPTION)
    return digest_of((part / PART_FILE).read_bytes())
