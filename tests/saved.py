"""Commit records placed by hand, the named points of a save, and the events of a run: for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.runs import checkpoints as disk
from gangline.runs.files import write_atomic
from gangline.runs.manifest import COMMIT_FILE, Commit

POINTS = (
    "save: begin",
    "save: folder made",
    "save: within tensors",
    "save: tensors written",
    "save: state written",
    "save: files on disk",
    "save: part described",
    "save: old part gone",
    "save: part renamed",
    "save: end",
    "commit: begin",
    "commit: end",
    "retention: begin",
    "retention: record removed",
    "retention: step renamed",
    "retention: within removal",
    "retention: end",
)
"""Where the crash tests and benchmarks/kill_saves.py end the process: `disk.at_point` is called at each of them."""


def place_commit(checkpoints: Path, record: bytes) -> None:
    """Write a commit record on this host: the same bytes that a supervisor writes through its transport."""
    folder = disk.step_folder(checkpoints, Commit.from_bytes(record).step)
    disk.at_point("commit: begin")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / COMMIT_FILE, record)
    disk.at_point("commit: end")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines of events.jsonl; [] where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, _, _ = data.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
