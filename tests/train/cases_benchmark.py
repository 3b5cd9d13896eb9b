"""Sides of the trainer benchmark on tiny models, for a process of their own."""

import contextlib
import dataclasses
import io
import os
import time
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import speed_table, trainer_measure
from benchmarks.trainer_cases import CASES
from benchmarks.trainer_inputs import model_folder, open_rows, prepare
from benchmarks.trainer_measure import measure, model_flops
from benchmarks.trainer_profile import profile
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
