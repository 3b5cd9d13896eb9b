"""Sides of the trainer benchmark on tiny models, for a process of their own."""

import dataclasses
from pathlib import Path

from benchmarks.trainer_cases import CASES
from benchmarks.trainer_inputs import open_rows, prepare
from benchmarks.trainer_measure import measure


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
