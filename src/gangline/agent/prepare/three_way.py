"""Take one change of a text back while changes that others made since stay: a merge of lines."""

from __future__ import annotations

import difflib
from typing import List, NamedTuple, Optional


class _Region(NamedTuple):
    """Lines `start` to `end` of the base that one side has replaced."""

    start: int
    end: int
    lines: List[bytes]


def merge(base: bytes, ours: bytes, theirs: bytes) -> Optional[bytes]:
    """`base` with the changes that lead to `ours` and those that lead to `theirs`; None where both touch one line.

    What others insert directly before or behind our lines is no conflict.
    """
    lines = base.splitlines(keepends=True)
    mine = _regions(lines, ours.splitlines(keepends=True))
    others = [each for each in _regions(lines, theirs.splitlines(keepends=True)) if each not in mine]
    if any(_overlap(one, other) for one in mine for other in others):
        return None
    for region in sorted([*mine, *others], key=lambda each: (each.start, each.end), reverse=True):
        lines[region.start : region.end] = region.lines
    return b"".join(_with_newline(line) for line in lines[:-1]) + b"".join(lines[-1:])


def _regions(base: List[bytes], changed: List[bytes]) -> List[_Region]:
    matcher = difflib.SequenceMatcher(None, base, changed, autojunk=False)
    return [
        _Region(start, end, changed[first:last])
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


def _with_newline(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"


def _overlap(one: _Region, other: _Region) -> bool:
    return one.start < other.end and other.start < one.end
