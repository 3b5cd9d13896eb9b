"""Sides of the trainer benchmark on tiny models, for a process of their own."""

import contextlib
import dataclasses
import io
import itertools
import os
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks import speed_table, trainer_measure
from benchmarks.trainer_cases import CASES
from benchmarks.trainer_inputs import model_folder, open_rows, prepare
from benchmarks.trainer_measure import measure, model_flops
from benchmarks.trainer_profile import profile
from benchmarks.trainer_sides import Clock
from gangline.worker.pace import step_flops


def both_sides(*, name: str, folder: str, device: str = "cpu") -> list[dict]:
    """A line per side, as the benchmark writes it."""
    case = dataclasses.replace(CASES[name], device=device)
    prepare(Path(folder), case)
    lines = [{"side": side, **measure(case, side, Path(folder))} for side in ("ours", "hf")]
    return [{"case": name, "round": 1, "steps": case.steps, **line} for line in lines]


def rows(*, name: str, folder: str) -> dict:
    """Lengths and numbers of documents of a case's rows."""
    prepare(Path(folder), CASES[name])
    source = open_rows(Path(folder), CASES[name])
    documents = [int((source.sample(index).position_ids == 0).sum()) for index in range(len(source))]
    return {"lengths": source.lengths.tolist(), "documents": documents}


def table(*, words: list[str]) -> dict:
    """The speed table with these words: what it printed, and its exit status."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = speed_table.main(words)
    return {"code": code, "text": text.getvalue()}


def clock_of_a_card() -> dict:
    """Steps, as a stand-in for CUDA's events times them, of a clock that ticks once for each."""
    case = dataclasses.replace(CASES["tiny-1b-lora-2048"], device="cuda", steps=6, warmup_steps=2)
    times, calls = itertools.count(step=250), []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time_ms = next(times)

        def elapsed_time(self, other: "Event") -> float:
            return other.time_ms - self.time_ms

    names = ("synchronize", "reset_peak_memory_stats")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        for name in names:
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda name=name: calls.append(name)))
        clock = Clock(case)
        for _ in range(case.steps):
            clock.tick()
    return {"step_s": clock.step_s(), "calls": calls, "positive": clock.duration_s > 0}


def way_to_start(*, folder: str, opened: bool) -> dict:
    """How children start where importing has, or has not, opened the driver; and the capability that it was told."""
    tool = Path(folder) / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\n")
    tool.chmod(0o755)
    driver = Path(folder) / "driver"
    driver.touch()
    told = []

    def importing(name: str) -> None:
        told.append(torch.cuda.get_device_capability(0))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": folder}))
        stack.enter_context(mock.patch.object(speed_table, "DRIVER", str(driver)))
        stack.enter_context(mock.patch.object(speed_table.importlib, "import_module", importing))
        if opened:
            stack.enter_context(driver.open())
        return {"way": speed_table.prepare_imports(), "told": list(set(told))}


def failing_measurement(*, folder: str) -> dict:
    """What children give back that raise, die and hang."""
    ways = {"raised": lambda *_: {}["key"], "died": lambda *_: os._exit(3), "hung": lambda *_: time.sleep(60)}
    found = {}
    for name, way in ways.items():
        seconds = 1.0 if name == "hung" else 100.0
        children = speed_table.Children(Path(folder), until=time.monotonic() + seconds)
        with mock.patch.object(trainer_measure, "measure", way):
            found[name] = children.call("measure", CASES["tiny-full"], "ours")
    return found


def flops(*, name: str, folder: str) -> dict:
    """FLOPs of three documents by the benchmark's count, and by the loop's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    prepare(Path(folder), case)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder(Path(folder), case)))
    lengths = np.array([64, 32, 17])
    return {"row": model_flops(case, lengths), "loop": step_flops(model, lengths, full=case.method == "full")}


def profiled(*, name: str, folder: str) -> str:
    """The text of a profile."""
    prepare(Path(folder), CASES[name])
    out = Path(folder) / "profile"
    profile(CASES[name], Path(folder), out)
    return out.read_text()
