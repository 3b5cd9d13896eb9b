"""What a rank does in test_parts: the small parts of the worker, one by one."""

from __future__ import annotations

import errno
import io
import json
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp_metadata
from transformers import get_scheduler

from gangline.errors import GanglineError
from gangline.runs.job import CheckpointJob, OptimizerJob, ReportJob, ScheduleJob
from gangline.runs.layout import RunLayout
from gangline.runs.step_schedule import learning_rate
from gangline.worker.agree import RankTimes, StepReport
from gangline.worker.batch import pick
from gangline.worker.loss import CausalLoss
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import clip, gradient_norm, make_optimizer
from gangline.worker.pace import step_flops, utilisation
from gangline.worker.precision import agree_precision
from gangline.worker.record import Evaluation, Lines, Recorder
from gangline.worker.restore import _MetadataUnpickler
from tests.train.cases_exact import _step_gradient
from tests.train.small import MemorySet, make_job, make_session, make_world


def rates(*, kind: str, warmup: int, total: int, final_ratio: float = 0.0):
    """The learning rate of every step, peak 1."""
    schedule = ScheduleJob(kind=kind, warmup_steps=warmup, final_ratio=final_ratio)
    return [learning_rate(step, total, peak=1.0, schedule=schedule) for step in range(total)]


def rates_of_transformers(*, name: str, warmup: int, total: int, words: dict, schedule: dict):
    """The same rates as a schedule of transformers gives them, counted as it counts, and as ours counts."""
    weight, peak = torch.nn.Parameter(torch.zeros(1)), 2e-3
    optimizer = torch.optim.SGD([weight], lr=peak)
    theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=words)
    found = {"theirs": [], "ours": [], "shifted": []}
    job = ScheduleJob(warmup_steps=warmup, **schedule)
    for step in range(total):
        found["theirs"].append(theirs.get_last_lr()[0])
        for key, from_zero in (("ours", True), ("shifted", False)):
            counted = replace(job, warmup_from_zero=from_zero)
            found[key].append(learning_rate(step, total, peak=peak, schedule=counted))
        optimizer.step()
        theirs.step()
    return found


def clipped(*, maximum: float | None):
    """Norms before and after clipping gradients of norm 13 (3, 4 and 12)."""
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])
    before = gradient_norm(parameters)
    clip(parameters, before, maximum=maximum)
    return [float(before), float(gradient_norm(parameters))]


def decayed():
    """Weight decay of matrices and of vectors, and whether the state is there before the first step."""
    model = load_model(make_job(precision="fp32"))
    optimizer = make_optimizer(model, OptimizerJob(weight_decay=0.1))
    groups = {group["weight_decay"]: {p.ndim for p in group["params"]} for group in optimizer.param_groups}
    ready = all("exp_avg" in optimizer.state[parameter] for parameter in trainable(model).values())
    return {"matrices": sorted(groups[0.1]), "vectors": sorted(groups[0.0]), "ready": ready}


def recomputed(shares, *, method: str):
    """Relative difference of one step's gradient with and without activation checkpointing, dropout on."""
    plain = make_job(method=method)
    thrifty = replace(plain, activation_checkpointing=True)
    world = make_world(shares, rank=dist.get_rank())
    session = make_session(thrifty, world)
    core = session.model.get_base_model() if method == "lora" else session.model
    without = _step_gradient(plain, make_world(shares, rank=dist.get_rank()))
    with_it = _step_gradient(thrifty, make_world(shares, rank=dist.get_rank()))
    return {"on": core.is_gradient_checkpointing, "error": float((without - with_it).norm() / without.norm())}


def flops_of(*, full: bool):
    """FLOPs of two samples of 3 and 5 tokens, the number of weights without embedding, layers and hidden size."""
    model = load_model(make_job(precision="fp32"))
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    return {
        "flops": step_flops(model, np.array([3, 5]), full=full),
        "weights": weights,
        "shape": [model.config.num_hidden_layers, model.config.hidden_size],
        "use": utilisation(50e12, 2.0, [100e12, 150e12]),
        "unknown": utilisation(50e12, 2.0, [100e12, None]),
        "strange": step_flops(torch.nn.Linear(2, 2), np.array([3]), full=full),
    }


def precision_error(**changes):
    """The error of a combination that cannot train."""
    try:
        agree_precision(replace(make_job(), **changes), torch.device("cpu"), world_size=1)
    except GanglineError as error:
        return error.to_json()
    return None


def torn_line():
    """The lines of a file whose last line was cut by a full disk, after one more was written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b'{"a": 1}\n{"b": ')
        lines = Lines(path)
        lines.write("step", loss=float("nan"))
        lines.close()
        return path.read_text().splitlines()


class _ByGetattr:
    """Pickled as getattr(owner, name), as some Pythons write members of enums."""

    def __init__(self, owner, name):
        self.reduced = (getattr, (owner, name))

    def __reduce__(self):
        return self.reduced


def enum_members():
    """What the restricted unpickler makes of getattr: a member of the one enum, or a refusal."""
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    found = []
    for owner, name in ((encoding, "TORCH_CONTIGUOUS_FORMAT"), (encoding, "__class__"), (torch.Size, "__new__")):
        data = pickle.dumps(_ByGetattr(owner, name))
        try:
            found.append(_MetadataUnpickler(io.BytesIO(data)).load() is encoding.TORCH_CONTIGUOUS_FORMAT)
        except pickle.UnpicklingError:
            found.append("refused")
    return found


class _FullDisk:
    """A stream, and an exporter, on a disk without room."""

    def write(self, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    def step(self, step, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    evaluation = step

    def close(self):
        """Nothing to flush."""


def figures_without_room(*, on_failure: str, exporter: bool = False):
    """What becomes of a run whose figures cannot be written, by metrics.jsonl or by an exporter."""
    job = make_job(checkpoint=CheckpointJob(on_failure=on_failure), report=ReportJob(exporters={}))
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(job, RunLayout(Path(folder), "calm-otter-7"), make_world([1], rank=0))
        stream = recorder._metrics._stream
        if exporter:
            recorder._exporters._open["tensorboard"] = _FullDisk()
        else:
            recorder._metrics._stream = _FullDisk()
        times = (RankTimes(data_s=0.0, compute_s=1.0, wait_s=0.0, memory_bytes=1),)
        figures = {"loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0}
        try:
            recorder.step(StepReport(loss_sum=1.0, times=times), step=1, shares=[1], **figures)
            recorder.evaluation(Evaluation(loss=1.0, label_tokens=1, duration_s=0.1), step=1)
        except GanglineError as error:
            return {"error": error.to_json()}
        recorder._metrics._stream = stream
        recorder.close()
        metrics = (Path(folder) / "runs" / "calm-otter-7" / "metrics.jsonl").read_text()
        return {"kinds": [json.loads(line)["kind"] for line in metrics.splitlines()]}


def drawn_alike():
    """Whether random weights are the same whatever dtype they are drawn for."""
    wide = load_model(make_job(), compute=torch.float32)
    narrow = load_model(make_job(parameters="compute"), compute=torch.bfloat16)
    pairs = zip(wide.parameters(), narrow.parameters(), strict=True)
    return all(torch.equal(one.to(torch.bfloat16), other) for one, other in pairs)


def plain_and_fused_gradients():
    """Difference of all gradients between the chunked head and the model's own logits."""
    found = []
    for fused in (True, False):
        loss = CausalLoss(load_model(make_job(), compute=torch.float64), compute=torch.float64)
        loss.fused = fused and loss.fused
        loss(*pick(range(6), MemorySet(6)).tensors).backward()
        found.append(torch.cat([p.grad.flatten() for p in loss.parameters()]))
    return float((found[0] - found[1]).norm() / found[1].norm())
