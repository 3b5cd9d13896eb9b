"""What a rank does in test_compiled: a few steps with compiled layers, and the same without."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from gangline.errors import UsageError
from gangline.worker import compat
from gangline.worker.compiled import compile_layers
from gangline.worker.progress import TrainingProgress
from tests.train.small import make_job, make_session, make_world, mixture_folder, run_loop

EAGER = "aot_eager"
"""Graphs as they are compiled, without a compiler behind them, which takes a minute for each test."""


def losses(shares, *, strategy: str, packed: bool, backend: str = EAGER, device: str = "cpu", **job):
    """(Step, loss, norm) of six steps and the evaluations, plain and compiled, and what was compiled."""
    torch.compiler.reset()
    plain = _session(shares, strategy=strategy, packed=packed, device=device, **job)
    compiled = _session(shares, strategy=strategy, packed=packed, device=device, **job)
    found = compile_layers(compiled, backend=backend)
    graphs = _graphs()
    told = [_trained(each) for each in (plain, compiled)]
    return {
        "plain": told[0],
        "compiled": told[1],
        "graphs": found["graphs"],
        "later": _graphs() - graphs,
        "kernels": list(compiled.kernels.taken),
    }


def resumed(shares, *, folder: str, **job):
    """Six steps at once; then, as in a new process that finds what was compiled, three of them and three."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    words = {"strategy": "single", "packed": False, "compile": True, **job}
    plain, whole, first = (_session(shares, **{**words, "compile": it}) for it in (False, True, True))
    told, (_, at_once) = run_loop(plain)[1], run_loop(whole)
    _, before = run_loop(first, stop_after=3)
    torch.compiler.reset()
    second = _session(shares, **words)
    with torch.no_grad():
        kept = first.state_tensors()
        for name, tensor in second.state_tensors().items():
            tensor.copy_(kept[name])
    _, after = run_loop(second, progress=TrainingProgress(step=3))
    cold, warm = ([each for each in one.events if each["event"] == "compiled"] for one in (at_once, after))
    return {
        "plain": told.steps,
        "whole": at_once.steps,
        "parts": before.steps + after.steps,
        "cold": cold[0],
        "warm": warm[0],
    }


def no_compiler(_graph, _inputs):
    """A backend that cannot compile."""
    raise RuntimeError("no working C++ compiler")


def refused(shares, *, works: bool = True, **job):
    """What is said of a model that drops, or where nothing can be compiled."""
    torch.compiler.reset()
    session = _session(shares, strategy="single", packed=False, **job)
    try:
        compile_layers(session, backend=EAGER if works else no_compiler)
    except UsageError as error:
        return {**error.to_json(), "untouched": not any("forward" in vars(each) for each in session.model.modules())}
    return None


def _session(shares, *, strategy: str, packed: bool, device: str = "cpu", mixture: bool = False, **job):
    job = {"method": "lora", "dropout": 0.0, **job, "kernels": tuple(job.get("kernels", ("torch",)))}
    made = make_job(**job, steps=6)
    if mixture:
        made = replace(made, model=replace(made.model, path=mixture_folder()))
    if packed:
        made = replace(made, data=replace(made.data, packing=True))
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = make_world(shares, rank=rank, strategy=strategy, device=device)
    return make_session(made, world, packed=packed)


def _graphs() -> int:
    return compat.COMPILE_COUNTERS.get()["stats"]["unique_graphs"]


def _trained(session):
    _, told = run_loop(session)
    return {"steps": told.steps, "evaluations": told.evaluations}
