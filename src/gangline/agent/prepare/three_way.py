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

    What others insert directly before or behind our lines is no conflict, nor is a line that both delete.
    """
    lines = base.splitlines(keepends=True)
    mine = _regions(lines, ours.splitlines(keepends=True))
    others = [each for each in _regions(lines, theirs.splitlines(keepends=True)) if each not in mine]
    if any(_conflict(one, other) for one in mine for other in others):
        return None
    regions = {(each.start, each.end, tuple(each.lines)) for region in (*mine, *others) for each in _by_line(region)}
    for start, end, new in sorted(regions, key=lambda each: each[:2], reverse=True):
        lines[start:end] = new
    return b"".join(_with_newline(line) for line in lines[:-1]) + b"".join(lines[-1:])


def _regions(base: List[bytes], changed: List[bytes]) -> List[_Region]:
    matcher = difflib.SequenceMatcher(None, base, changed, autojunk=False)
    return [
        _Region(start, end, changed[first:last])
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


def _conflict(one: _Region, other: _Region) -> bool:
    return one.start < other.end and other.start < one.end and bool(one.lines or other.lines)


def _by_line(region: _Region) -> List[_Region]:
    """A deletion in its lines: both sides may have deleted some of them."""
    if region.lines:
        return [region]
    return [_Region(line, line + 1, []) for line in range(region.start, region.end)]


def _with_newline(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"
