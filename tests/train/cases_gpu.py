"""What processes do in test_gpu: a step that is watched for waiting, and what only a card can answer."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from gangline.errors import UsageError
from gangline.runs.job import MethodJob
from gangline.worker import batch as batch_module
from gangline.worker import compat, documents, process_group
from gangline.worker.borders import remember_borders
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.model import base_of
from gangline.worker.precision import agree_precision
from gangline.worker.process_group import open_files
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.trace.order import TraceOrder
from gangline.worker.trace.steps import ByteTracker, build_model, build_session, kernels_of
from tests.train.small import Captured, make_job, make_session, make_world

plain = process_group.ProcessGroup.require_sums
WARM_STEPS = 3
STEPS = 3
OURS = ("gangline", "transformers", "peft", "torch/optim", "torch/nn", "torch/amp", "deepspeed", "bitsandbytes")


def where() -> str:
    """The place that asks a tensor for its numbers: the innermost line of ours or of a library."""
    lines = [each for each in traceback.extract_stack() if not each.filename.endswith(Path(__file__).name)]
    found = [each for each in lines if any(f"/{name}/" in each.filename for name in OURS)]
    chosen = (found or lines)[-1]
    return f"{chosen.filename.rpartition('site-packages/')[2].rpartition('src/')[2]}:{chosen.lineno} {chosen.name}"


def stepper_of(session) -> Synchronous:
    """What moves this session on, with a recorder, as a rank has it."""
    outlets = RunIO(recorder=Captured([], [], [], []), saver=None, stop=StopFlag())
    return Synchronous(TrainingRun(session, outlets, TrainingProgress()))


def waits_on_a_gpu(words: dict, *, packed: bool, strategy: str = "single", shares=(10,)) -> list[list[str]]:
    """Where each of some steps waits for the card: torch itself tells of everything that does."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    job = make_job(**words)
    world = make_world(list(shares), rank=rank, strategy=strategy, device="cuda")
    session = make_session(job, world, packed=packed, num_evaluation=0)
    stepper, found = stepper_of(session), []
    stepper.begin()
    for _ in range(WARM_STEPS):
        stepper.advance()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with patch.object(warnings, "showwarning", lambda message, *_: found[-1].append(f"{where()}: {message}")):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(STEPS):
                    found.append([])
                    stepper.advance()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return [[each.partition(": ")[0] for each in step if "called a synchronizing" in each] for step in found]


def waits_on_processors(words: dict, *, strategy: str, shares) -> list[list[str]]:
    """Where each of some packed steps would wait for a card, seen on a processor: the ranks of a strategy compute for
    real, and what is computed from a batch or a weight counts as a card's.
    """
    world = make_world(list(shares), rank=dist.get_rank(), strategy=strategy)
    session = make_session(make_job(**words), world, packed=True, num_evaluation=0)
    assert documents.keep_apart(base_of(session.model), length=session.job.data.sequence_length)
    stepper, watch, found = stepper_of(session), _Watch(), []
    stepper.begin()
    with watch.batches(), watch:
        for _ in range(STEPS):
            watch.forget()
            watch.bring(session.model.parameters())
            stepper.advance()
            found.append(list(watch.asked))
    return found


ASKED = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__),
    *(torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero, torch.equal, torch.allclose),
    *(torch.Tensor.equal, torch.masked_select, torch.Tensor.masked_select, torch.unique, torch.Tensor.unique),
}
"""Functions that a tensor on a GPU answers only when all before it is computed."""


class _Watch(TorchFunctionMode):
    """Notes where a tensor that would be on the device is asked for its numbers.

    A batch is on the device once `Batch.to` has given it out, and so is whatever is computed from it or from a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._on_device: dict[int, torch.Tensor] = {}

    def bring(self, tensors) -> None:
        """These are on the device from now on."""
        self._on_device.update((_place(each), each) for each in tensors)

    def batches(self):
        """What `Batch.to` gives is on the device."""

        def to(batch, _device):
            moved = batch_module.Batch(*(tensor.clone() for tensor in batch.tensors))
            remember_borders(moved.position_ids, batch.position_ids)
            self.bring(moved.tensors)
            return moved

        return patch.object(batch_module.Batch, "to", to)

    def forget(self) -> None:
        """What is on the device, and what it was asked."""
        self.asked.clear()
        self._on_device.clear()

    def read_list(self, count: int) -> list[float]:
        """In place of a fake tensor's own `tolist`, which reads number by number."""
        self.asked.append(where())
        return [0.0] * count

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        is_there = any(_place(each) in self._on_device for each in _tensors((*args, *kwargs.values())))
        fake = isinstance(first, compat.FAKE_TENSOR.get())
        if func in ASKED and (is_there or fake):
            self.asked.append(where())
        result = func(*args, **kwargs)
        if is_there and func not in ASKED:
            self.bring(_tensors([result]))
        return result


def _tensors(values):
    """The tensors among these, and in the lists among these."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _place(tensor: torch.Tensor) -> int:
    """What tensors over the same memory have in common; they are kept, so that nothing else gets that memory."""
    if isinstance(tensor, compat.FAKE_TENSOR.get()):
        return id(tensor)
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return id(tensor)


def waits_without_a_gpu(*, method: str, dropout: float, packed: bool) -> list[list[str]]:
    """The same of steps on tensors without numbers, as the trace of a plan has them, on a processor."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    way = MethodJob(kind=method, rank=4, dropout=dropout)
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, **shape)
    order = TraceOrder(
        config=config.to_dict(), method=way, micro_batch=2, micro_batches=2, sequence_length=32, packing=packed
    )
    model, job, precision = build_model(config, order)
    watch, found = _Watch(), []

    fake = compat.FAKE_TENSOR_MODE.get()(allow_non_fake_inputs=True)
    with kernels_of("flash"), fake, ByteTracker():
        session = build_session(model, replace(job, steps=STEPS), precision, order=order)
        stepper = stepper_of(session)
        # as `session.build_session` has it on a GPU, whether rows are packed or not
        assert documents.keep_apart(base_of(session.model), length=order.sequence_length)
        fake_list = patch.object(compat.FAKE_TENSOR.get(), "tolist", lambda tensor: watch.read_list(tensor.numel()))
        with watch.batches(), fake_list, watch:
            for _ in range(STEPS):
                watch.forget()
                stepper.advance()
                found.append(list(watch.asked))
    return found


def with_a_rank_on_a_processor() -> dict:
    """What is said to a gang of which one rank has a card and the other none."""
    device = "cuda" if dist.get_rank() == 0 else "cpu"
    try:
        agree_precision(make_job(precision="fp32"), torch.device(device), world_size=2)
    except UsageError as error:
        return error.to_json()
    return {}


def joined(env: dict) -> dict:
    """What torch's watchdog is told when ranks with cards join, and by which backends they do."""
    os.environ.update(env, RANK="0", WORLD_SIZE="2")
    gang, seen = make_world([1, 1], rank=0).gang, {}

    def begin(backend, **_words):
        seen.update(mode=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], backend=backend)

    with (
        patch.object(process_group, "_own_device", lambda _index: torch.device("cuda", 0)),
        patch.object(process_group, "meeting_place", lambda *_place, **_words: None),
        patch.object(dist, "init_process_group", begin),
    ):
        process_group.join(gang)
    return seen


def card() -> dict:
    """What torch says of the first card, while it computes."""
    torch.cuda.init()
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {"name": found.name, "capability": f"{found.major}.{found.minor}", "total": total, "free": free}


def keep_busy(seconds: float) -> int:
    """Multiply on the card for some seconds; how often."""
    left, right = torch.ones(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        torch.mm(left, right)
        torch.cuda.synchronize()
        count += 1
    return count


def driver_is_open() -> bool:
    """Whether this process has opened the GPUs' driver."""
    return torch.cuda.is_initialized() or "/dev/nvidia-uvm" in open_files().values()


class GaveUp:
    """Stands for the backend of a group whose NCCL has lost a rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_error(self):
        """As torch answers, which has the name of the error."""
        return self


def step_without_sums(error: str) -> dict:
    """A step of two ranks on processors that are told what NCCL met: whether weights moved, and what is said."""
    job, rank = make_job(steps=4), dist.get_rank()
    session = make_session(job, make_world([5, 5], rank=rank), num_evaluation=0)
    stepper = stepper_of(session)
    stepper.begin()
    stepper.advance()
    before = [each.detach().clone() for each in session.model.parameters()]
    on_a_card = replace(session.world, device=torch.device("cuda"))
    groups = patch.object(process_group, "_nccl_backends", lambda: [("world", GaveUp(error))])
    with groups, patch.object(process_group.ProcessGroup, "require_sums", lambda _world: plain(on_a_card)):
        try:
            stepper.advance()
        except dist.DistBackendError as failure:
            said = str(failure)
        else:
            said = ""
    moved = any(not torch.equal(one, two) for one, two in zip(before, session.model.parameters(), strict=True))
    return {"said": said, "moved": moved}
