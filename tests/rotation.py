"""Matrices that are long: of tests marked `rotating`, a developer's `make test` runs a part each day, CI all."""

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from zlib import crc32

import pytest

PARTS = 3
TURN = "GANGLINE_TURN"
"""In the environment: the number of the part, from 0, or `all`. Processes that share a run have the same."""
ALL = "all"


def take_turn() -> int | None:
    """The part for this process and those that it starts: today's, and None for all of them where CI is set."""
    today = datetime.now(tz=timezone.utc).date().toordinal()
    turn = os.environ.setdefault(TURN, ALL if os.environ.get("CI") else str(today % PARTS))
    return None if turn == ALL else int(turn) % PARTS


def part_of(name: str) -> int:
    """The part that a test of that name is in; other tests do not change it."""
    return crc32(name.encode()) % PARTS


def divide(items: Iterable[pytest.Item], turn: int | None) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those to be run, and those whose turn it is not."""
    run: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        rotates = turn is not None and item.get_closest_marker("rotating") is not None
        waits = rotates and part_of(item.nodeid) != turn
        (rest if waits else run).append(item)
    return run, rest
