"""What the ranks do in test_pipeline."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.runs.job import ModelJob
from gangline.strategies.pipeline.train import AbsentLayer, Pipeline
from gangline.worker.batch import split_work
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.model import trainable
from gangline.worker.optimizer import norm_of
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.record import evaluate
from gangline.worker.run_io import RunIO
from gangline.worker.weights import meta_model
from tests.train.cases_fsdp import _saved_model
from tests.train.small import make_job, make_session, make_world, mixture_folder, model_folder


def contract(
    stages,
    *,
    method: str,
    mixture: bool = False,
    packed: bool = False,
    checkpointing: bool = False,
    targets=("all-linear",),
    rows=(10,),
    hosts=None,
    eager: bool = False,
    tied: bool = False,
    exchange: str = "fp32",
):
    """Two steps' gradients and an evaluation of pipelines, against those of one process."""
    job = replace(make_job(method=method, dropout=0.0), exchange=exchange)
    depth = sum(stages) // len(rows)
    job = replace(
        job, model=replace(job.model, path=model_folder(layers=depth, tie_word_embeddings=tied)), micro_batch=2
    )
    job = replace(job, activation_checkpointing=checkpointing, method=replace(job.method, targets=tuple(targets)))
    if mixture:  # torch multiplies groups of rows in fp32 at the most
        job = replace(job, model=replace(job.model, path=mixture_folder()), precision="fp32")
    world = make_world(stages, rank=dist.get_rank(), strategy="pipeline", rows=rows, hosts=hosts)
    world = replace(world, gang=replace(world.gang, eager=eager))
    beats = []
    session = make_session(job, world, packed=packed, beat=lambda: beats.append(1))
    alone = make_session(job, make_world([5], rank=0), packed=packed)
    on_their_way = _counting(session.strategy)
    found = {}
    for step in (0, 3):
        ours, wanted = _gradients(session, step), _gradients(alone, step)
        gradients = session.strategy.gradients(list(trainable(session.model).values()))
        expected = torch.cat([parameter.grad.flatten() for parameter in trainable(alone.model).values()])
        norm = norm_of(gradients, parts=session.strategy.shard_group)
        found[step] = {
            "error": max(
                float((ours[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12)) for name in ours
            ),
            "norm_error": abs(float(norm / expected.norm()) - 1),
        }
    evaluation = evaluate(session, shares=session.world.shares)
    return {
        "steps": list(found.values()),
        "names": sorted(ours),
        "all": sorted(wanted),
        "beats": len(beats),
        "on their way": on_their_way.most,
        "wrapper": type(session.strategy) is Pipeline,
        "elsewhere": sum(isinstance(part, AbsentLayer) for part in session.model.modules()),
        "held": sum(parameter.numel() for parameter in session.model.parameters()),
        "whole": sum(parameter.numel() for parameter in alone.model.parameters()),
        "digests": {name: str(torch.hash_tensor(gradient).item()) for name, gradient in ours.items()},
        "last": session.strategy.counts_loss,
        "done": len(split_work(5, session.world.shares, world.gang.replica_groups)[world.rank]),
        "evaluation": [evaluation.loss, evaluate(alone, shares=[5]).loss],
    }


class _Counter:
    """Of micro-batches that went forward and are not back yet."""

    now = most = 0


def _counting(strategy: Pipeline) -> _Counter:
    counter, forward, backward = _Counter(), strategy._forward, strategy._backward

    def forth(*words):
        counter.now += 1
        counter.most = max(counter.most, counter.now)
        return forward(*words)

    def back(*words):
        counter.now -= 1
        return backward(*words)

    strategy._forward, strategy._backward = forth, back
    return counter


def _gradients(session, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    for name, parameter in trainable(session.model).items():  # LoRA's B is 0 at the start
        parameter.grad = None
        if step == 0:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.02)
    outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
    stepper = Synchronous(TrainingRun(session, outlets, progress))
    stepper.accumulate(step)
    return {name: parameter.grad.clone() for name, parameter in trainable(session.model).items()}


def read_by_stages(folder: str, stages, *, method: str, tied: bool = False):
    """Whether every rank has read its layers, and nothing else, of a model that none has held."""
    from pathlib import Path

    path = _saved_model(Path(folder), layers=sum(stages), tie_word_embeddings=tied)
    job = replace(make_job(method=method, precision="fp32", dropout=0.0), model=ModelJob(path=path))
    session = make_session(job, make_world(stages, rank=dist.get_rank(), strategy="pipeline"), num_evaluation=0)
    alone = make_session(job, make_world([10], rank=0), num_evaluation=0)
    ours, expected = dict(session.model.named_parameters()), dict(alone.model.named_parameters())
    return {
        "strangers": sorted(set(ours) - set(expected)),
        "differing": [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])],
        "names": sorted(ours),
        "all": sorted(expected),
        "fused": session.loss.fused,
        "by parts": meta_model(job, compute=torch.float32) is not None,
    }


def masks(stages):
    """What a layer's dropout leaves of ones, in each stage."""
    job = make_job(method="lora", precision="fp32", dropout=0.5)
    session = make_session(job, make_world(stages, rank=dist.get_rank(), strategy="pipeline"), num_evaluation=0)
    seen = []
    for part in session.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.register_forward_hook(
                lambda _module, _inputs, output: seen.append((output == 0).flatten()[:64].tolist())
            )
    _gradients(session, 0)
    return seen[0]


def refused(stages, **how):
    """Why such a session cannot be built."""
    changes = {"method": how.pop("method", "full"), "precision": how.pop("precision", "fp32")}
    job = make_job(**changes)
    folder = how.pop("folder", None) or model_folder(layers=2, **how)
    job = replace(job, model=replace(job.model, path=folder))
    try:
        make_session(job, make_world(stages, rank=dist.get_rank(), strategy="pipeline"))
    except GanglineError as error:
        return str(error)
    return "it was built"


def other_family(folder: str, stages, *, family: str):
    """Why a decoder is not cut that adds positions to what it is given (gpt2), or wants more of a layer (falcon)."""
    from transformers import FalconConfig, GPT2Config

    if dist.get_rank() == 0:
        sizes = {"vocab_size": 96, "tie_word_embeddings": False}
        if family == "gpt2":
            config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **sizes)
        else:
            config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **sizes)
        config.save_pretrained(folder)
    dist.barrier()
    return refused(stages, folder=folder)
