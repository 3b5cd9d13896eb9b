"""The start board as people see it: how far the start has come on each host, and who is behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gangline.runs.layout import RunLayout
from gangline.runs.versions import load_record
from gangline.watch.table import table
from gangline.watch.text import clean

Board = Mapping[str, Any]


def read_board(layout: RunLayout, attempt: int) -> Board | None:
    """The board of an attempt; None where there is none yet."""
    try:
        return load_record(layout.board(attempt), checked_board)
    except (FileNotFoundError, ValueError):
        return None


def checked_board(data: Any) -> Board:
    """What somebody else says is a board, if it can be shown; raises LookupError, TypeError or ValueError."""
    sentence = data["sentence"]
    if not isinstance(data["done"], bool) or not isinstance(sentence, str | None):
        raise TypeError("a board that is none")
    joined_line(data)
    board_tick(data)
    board_lines(data)
    return {**data}


def board_tick(board: Board) -> str:
    """One line: "starting, 8 s: pc1 joined · pc2 torch imported · pc3 connected"."""
    hosts = " · ".join(f"{row['host']} {_stage(row, board['order'])}" for row in board["hosts"])
    return clean(f"starting, {board['seconds']:.0f} s: {hosts}")


def board_lines(board: Board) -> list[str]:
    """The board as a table: seconds after which each host had reached each stage."""
    stages = board["order"]
    rows = [
        [row["host"], *(_seconds(row["stages"].get(stage)) for stage in stages), f"{row['joined']} of {row['ranks']}"]
        for row in board["hosts"]
    ]
    return table(["host", *stages, "ranks"], rows)


def joined_line(board: Board) -> str:
    """One line once everybody is there, such as: all 5 ranks have joined after 12.3 s."""
    ranks = "the rank has" if board["ranks"] == 1 else f"all {board['ranks']} ranks have"
    return f"{ranks} joined after {board['seconds']:.1f} s"


def gist(board: Board) -> str:
    """What the sentence says, but for the time that has passed: news only when this changes."""
    return re.sub(r"after \d+ s", "", board["sentence"] or "")


_REACHED = {
    "ssh": "answers",
    "agent": "guard up",
    "launcher": "torchrun up",
    "port": "connected",
    "python": "ranks started",
    "torch": "torch imported",
    "joined": "joined",
}
"""What a host has done that has reached a stage."""


def _stage(row: Mapping[str, Any], order: Sequence[str]) -> str:
    """The last stage that a host has reached."""
    reached = [stage for stage in order if row["stages"].get(stage) is not None]
    return _REACHED.get(reached[-1], reached[-1]) if reached else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
