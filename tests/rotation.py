"""Matrices that are too long for every run: of tests marked `rotating`, a part is run each day."""

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from zlib import crc32

import pytest

PARTS = 3
TURN = "GANGLINE_TURN"
"""In the environment: the number of the part, from 0; else the day decides. Processes that share a run have the same."""


def take_turn() -> int:
    """Today's part, for this process and those that it starts."""
    today = datetime.now(tz=timezone.utc).date().toordinal()
    return int(os.environ.setdefault(TURN, str(today % PARTS))) % PARTS


def part_of(name: str) -> int:
    """The part that a test of that name is in; other tests do not change it."""
    return crc32(name.encode()) % PARTS


def divide(items: Iterable[pytest.Item], turn: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those to be run, and those whose turn it is not."""
    run: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        waits = item.get_closest_marker("rotating") is not None and part_of(item.nodeid) != turn
        (rest if waits else run).append(item)
    return run, rest
