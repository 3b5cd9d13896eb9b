"""What the ranks do in test_tensor_parallel."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gangline.errors import GanglineError
from gangline.planner.config import read_architecture
from gangline.planner.traffic import traffic
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.job import ModelJob
from gangline.strategies.tensor_parallel.train import TensorParallel, TensorParallelGroup
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.model import load_model, trainable
from gangline.worker.optimizer import norm_of
from gangline.worker.pace import step_flops
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.record import evaluate
from gangline.worker.run_io import RunIO
from gangline.worker.weights import meta_model
from tests.train.cases_fsdp import _saved_model
from tests.train.small import VOCABULARY, make_job, make_session, make_world, mixture_folder, model_folder

LENGTHS = np.array([3, 5])


def contract(
    shares, *, method: str, packed: bool = False, checkpointing: bool = False, dropout: float = 0.1, hosts=None, **model
):
    """Two steps' gradients and an evaluation of a model in slices, against those of one process."""
    job = make_job(method=method, dropout=dropout, draws="micro_batch")  # as this strategy has it
    folder = model.pop("folder", None) or model_folder(**model)
    job = replace(job, model=replace(job.model, path=folder), micro_batch=2, activation_checkpointing=checkpointing)
    world = make_world(shares, rank=dist.get_rank(), strategy="tp", hosts=hosts)
    session = make_session(job, world, packed=packed)
    alone = make_session(job, make_world([5], rank=0), packed=packed)
    steps = [_compare(session, alone, step) for step in (0, 3)]
    evaluation = evaluate(session, shares=world.shares)
    weights = dict(session.model.named_parameters())
    return {
        "steps": steps,
        "strategy": type(session.strategy) is TensorParallel,
        "fused": session.loss.fused,
        "cut": {name: list(each.shape) for name, each in weights.items() if name in session.strategy.sliced.cuts},
        "whole": {name: list(each.shape) for name, each in alone.model.named_parameters()},
        "flops": [
            step_flops(session.model, LENGTHS, full=True, elsewhere=session.strategy.sliced.elsewhere(session.model)),
            step_flops(alone.model, LENGTHS, full=True),
        ],
        "others": [name for name, each in weights.items() if name not in session.strategy.sliced.cuts],
        "evaluation": [evaluation.loss, evaluate(alone, shares=[5]).loss],
        "tokens": evaluation.label_tokens,
    }


def other_family(folder: str, shares, *, family: str, method: str, **more):
    """The same contract for models whose plans say other words."""
    from transformers import AutoConfig

    if dist.get_rank() == 0:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        words = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0}
        AutoConfig.for_model(family, **words, max_position_embeddings=64, **more).save_pretrained(folder)
    dist.barrier()
    _norms_in_own_dtype(family)
    return contract(shares, method=method, folder=folder)


def _norms_in_own_dtype(family: str) -> None:
    """As `small.norms_in_own_dtype`."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norms = [kind for name, kind in vars(module).items() if name.endswith("RMSNorm")]
    for kind in norms:
        plus = 1.0 if "Gemma" in kind.__name__ else 0.0

        def forward(self, hidden, plus=plus):
            epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
            return (plus + self.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)

        kind.forward = forward


def refused(shares, *, hosts=None, changes=None, mixture=False, other=None, empty="", **model):
    """Why such a session cannot be built."""
    from transformers import AutoConfig

    changes = dict(changes or {})
    targets = changes.pop("targets", None)
    job = make_job(**{"precision": "fp32", **changes})
    if targets:
        job = replace(job, method=replace(job.method, targets=tuple(targets)))
    if "optimizer" not in changes:
        job = replace(job, model=replace(job.model, path=mixture_folder() if mixture else model_folder(**model)))
    if other:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        if dist.get_rank() == 0:
            AutoConfig.for_model(other, **sizes).save_pretrained(empty)
        dist.barrier()
        job = replace(job, model=replace(job.model, path=empty))
    try:
        make_session(job, make_world(shares, rank=dist.get_rank(), strategy="tp", hosts=hosts))
    except GanglineError as error:
        return str(error)
    return "it was built"


def read_by_slices(folder: str, shares, *, method: str, tied: bool):
    """Whether every rank has read its columns and rows of a model that none has held."""
    path = _saved_model(Path(folder), tie_word_embeddings=tied)
    job = replace(make_job(method=method, precision="fp32", dropout=0.0), model=ModelJob(path=path))
    session = make_session(job, make_world(shares, rank=dist.get_rank(), strategy="tp"), num_evaluation=0)
    whole = dict(load_model(job).named_parameters())
    names = [f"model.{name}" for name in whole]
    ours = session.strategy.full_state(
        {f"model.{name}": each.detach() for name, each in session.model.named_parameters()}, wanted=True
    )
    return {
        "names": sorted(ours) == sorted(names),
        "differing": [name for name in whole if not torch.equal(ours[f"model.{name}"], whole[name])],
        "held": sum(each.numel() for each in session.model.parameters()),
        "whole": sum(each.numel() for each in whole.values()),
        "fused": session.loss.fused,
        "by parts": meta_model(job, compute=torch.float32) is not None,
    }


def _compare(session, alone, step: int) -> dict:
    loss, _ = _accumulate(session, step)
    expected_loss, _ = _accumulate(alone, step)
    strategy, trained = session.strategy, trainable(session.model)
    ours = strategy.full_state({f"model.{name}": each.grad for name, each in trained.items()}, wanted=True)
    wanted = {f"model.{name}": each.grad for name, each in trainable(alone.model).items()}
    norm = norm_of(strategy.gradients(list(trained.values())), parts=strategy.shard_group)
    expected = torch.cat([each.flatten() for each in wanted.values()])
    assert ours.keys() == wanted.keys()
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "error": max(float((ours[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12)) for name in ours),
        "least": min(float(each.norm()) for each in wanted.values()),
        "norm_error": abs(float(norm / expected.norm()) - 1),
        "loss_error": abs(float(total) / expected_loss - 1),
    }


def _accumulate(session, step: int):
    for name, parameter in trainable(session.model).items():  # LoRA's B is 0 at the start
        parameter.grad = None
        if step == 0:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            placed = session.strategy.as_shards({f"model.{name}": parameter.detach()})[f"model.{name}"]
            noise = torch.randn(placed.shape, generator=generator, dtype=parameter.dtype) * 0.02
            if isinstance(placed, DTensor):
                noise = session.strategy.sliced.tp_group.part_of(noise, placed.placements[0].dim)
            parameter.data.add_(noise)
    outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
    stepper = Synchronous(TrainingRun(session, outlets, progress))
    tally = stepper.accumulate(step)
    return float(tally.loss_sum), tally.micro_batches


def sent(*, method: str, checkpointing: bool, layers: int = 2) -> dict:
    """What a step of two micro-batches sends: counted, and according to the plan."""
    job = replace(make_job(method=method, batch=2, dropout=0.0), activation_checkpointing=checkpointing)
    job = replace(job, model=replace(job.model, path=model_folder(layers=layers)))
    session = make_session(job, make_world([2], rank=dist.get_rank(), strategy="tp"), num_evaluation=0)
    sums, own = [], TensorParallelGroup.sum_up

    def sum_up(side, terms):
        sums.append(terms.numel())
        return own(side, terms)

    TensorParallelGroup.sum_up = sum_up
    try:
        _accumulate(session, 1)
    finally:
        TensorParallelGroup.sum_up = own
    trained = trainable(session.model)
    cut = sum(each.numel() for name, each in trained.items() if name in session.strategy.sliced.cuts)
    config = json.loads((Path(job.model.path) / "config.json").read_text())
    training = Training(
        method=method,
        micro_batch=1,
        sequence_length=1,
        rank=4,
        compute="fp64",
        parameters="fp64",
        checkpointing=checkpointing,
    )
    two = PlannedStrategy(kind="tp", world_size=4, shard_size=2)
    plan = traffic(read_architecture(config), training, two, micro_batches=2)
    bytes_of = {each.what: each.num_bytes for each in plan.exchanges}
    tokens = sum(int(session.train_set.lengths[row]) for row in session.order.samples(1))
    planned = [each for each in plan.exchanges if each.hides == "in-layer"]
    return {
        "sums": [len(sums), sum(each.times for each in planned)],
        "numbers": [sum(sums), sum(each.times * each.num_bytes // 8 for each in planned) * tokens / 2],
        "cut": [cut, bytes_of["gradients"] // 8],
        "whole": [sum(each.numel() for each in trained.values()) - cut, bytes_of["their sums"] // 8],
    }
