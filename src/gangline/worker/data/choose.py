"""Which rows of its sources a set has, and how often.

Of each source, in this order: the rows that its slice means, without rows that came before (`deduplicate`), then at
most `max_samples` of them, each of them `weight` times. Of all sources together `data.max_samples` at the most, counted
with their weights. What is chosen at random follows from the job's seed and from how many rows there are: it is the
same on every host and in every attempt.

A weight of 2.5 gives every row twice, and a third time half of the rows (rounded), chosen at random. A source of `n`
rows then has round(2.5 n) in an epoch.

Rows are counted in a first pass where that is needed; of a slice such as [100:200], or the first `max_samples`, nothing
is read beyond the last. In memory stay 2 bytes for each row, with `deduplicate` about 80.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gangline.formats import RowError
from gangline.row_files import BadRow, SourceRow
from gangline.runs.job import DataJob, SliceJob, SourceJob
from gangline.worker.data.row_formats import Format

Row = SourceRow | BadRow
Int64s = npt.NDArray[np.int64]
Times = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source of a set."""

    source: SourceJob
    format: Format
    read: Callable[[], Iterator[Row]]
    """Reads all rows anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRow:
    """A row that belongs to the set."""

    row: Row
    format: Format
    again: bool
    """It was there already: its source has a weight above 1."""


def needs_seed(source: SourceJob, data: DataJob, max_samples: int | None) -> bool:
    """Whether the rows that are chosen depend on the seed. max_samples: of the whole set."""
    cut = max_samples is not None or any(part.max_samples is not None for part in source.parts)
    return (data.shuffle and cut) or any(part.weight % 1 for part in source.parts)


def num_passes(source: SourceJob, data: DataJob, max_samples: int | None) -> int:
    """How often the sources are read, on average and at the most."""
    weight = max(part.weight for part in source.parts)
    return int(np.ceil(weight)) + _is_counted(source, data, max_samples)


def chosen_rows(parts: Sequence[Part], data: DataJob, *, seed: int, max_samples: int | None) -> Iterator[ChosenRow]:
    """The rows of a set in order, as often as they occur in it. max_samples: of the whole set, as `DataJob` has it."""
    source = SourceJob(mix=tuple(part.source for part in parts))
    if not _is_counted(source, data, max_samples):
        for part in parts:
            for turn in range(int(part.source.weight)):
                for row in _first_rows(part, max_samples):
                    yield ChosenRow(row=row, format=part.format, again=turn > 0)
        return
    for part, times in zip(parts, _count(parts, data, seed=seed, max_samples=max_samples), strict=True):
        for turn in range(int(times.max(initial=0))):
            wanted = times > turn
            wanted = wanted[: np.flatnonzero(wanted)[-1] + 1]
            for index, row in _numbered(part.read()):
                if index == len(wanted):
                    break  # nothing is read beyond the last
                if wanted[index]:
                    yield ChosenRow(row=row, format=part.format, again=turn > 0)


def _is_counted(source: SourceJob, data: DataJob, max_samples: int | None) -> bool:
    """Whether a first pass has to count rows."""
    if data.deduplicate or needs_seed(source, data, max_samples):
        return True
    if max_samples is not None and (len(source.parts) > 1 or source.parts[0].weight != 1):
        return True
    return any(part.rows is not None and part.rows.counts for part in source.parts)


def _numbered(rows: Iterator[Row]) -> Iterator[tuple[int, Row]]:
    """Every row with its number from 0; pieces of a long text, and lines of it that cannot be read, have one."""
    index = -1
    for row in rows:
        goes_on = row.within if isinstance(row, BadRow) else row.follows
        index += not goes_on
        yield max(0, index), row


def _first_rows(part: Part, max_samples: int | None) -> Iterator[Row]:
    start, stop = _edges(part.source.rows)
    limits = [limit for limit in (part.source.max_samples, max_samples) if limit is not None]
    stops = [edge for edge in (stop, *(start + limit for limit in limits)) if edge is not None]
    for index, row in _numbered(part.read()):
        if stops and index >= min(stops):
            return
        if index >= start:
            yield row


def _edges(rows: SliceJob | None) -> tuple[int, int | None]:
    if rows is None:
        return 0, None
    return int(rows.start or 0), None if rows.stop is None else int(rows.stop)


# The first pass.


@dataclass(slots=True)
class _Seen:
    """The values of rows, to know them again."""

    digests: set[bytes] = field(default_factory=set)

    def is_new(self, part: Part, rows: Sequence[Row]) -> bool:
        """Whether no row with these values was there; a row that cannot be used is always new. rows: its pieces."""
        digest = hashlib.blake2b(part.format.name.encode(), digest_size=16)
        for row in rows:
            if isinstance(row, BadRow):
                return True
            try:
                values = part.format.values(row)
            except RowError:
                return True
            digest.update(json.dumps(values, sort_keys=True, default=str).encode())
        before = len(self.digests)
        self.digests.add(digest.digest())
        return len(self.digests) > before


def _count(parts: Sequence[Part], data: DataJob, *, seed: int, max_samples: int | None) -> list[Times]:
    """How often each row of every part occurs."""
    seen = _Seen() if data.deduplicate else None
    found: list[Times] = []
    for number, part in enumerate(parts):
        draw = _Draw(seed, number)
        num_rows, rows = _kept(part, seen)
        rows = draw.cut(rows, part.source.max_samples, at_random=data.shuffle)
        times = np.zeros(num_rows, dtype=np.uint16)
        times[rows] += np.uint16(int(part.source.weight))
        more = round((part.source.weight % 1) * len(rows))
        times[draw.cut(rows, more, at_random=True)] += np.uint16(1)
        found.append(times)
    return _limited(found, max_samples, _Draw(seed, len(parts)), at_random=data.shuffle)


def _kept(part: Part, seen: _Seen | None) -> tuple[int, Int64s]:
    """How many rows a part has, and the numbers of those in its slice that are not left out."""
    rows = part.source.rows
    start, stop = (0, None) if rows is not None and rows.counts else _edges(rows)
    kept: list[int] = []
    num_rows = 0
    if seen is not None and rows is not None and rows.counts:
        # what is a repetition depends on the slice, and the slice on the number of rows
        num_rows = sum(1 for _ in itertools.groupby(_numbered(part.read()), key=_number))
        start, stop = rows.bounds(num_rows)
    for index, group in itertools.groupby(_numbered(part.read()), key=_number):
        if stop is not None and index >= stop:
            break
        num_rows = max(num_rows, index + 1)
        if index >= start and (seen is None or seen.is_new(part, [row for _, row in group])):
            kept.append(index)
    found: Int64s = np.array(kept, dtype=np.int64)
    if seen is None and rows is not None and rows.counts:
        found = found[slice(*rows.bounds(num_rows))]
    return num_rows, found


def _number(each: tuple[int, Row]) -> int:
    return each[0]


class _Draw:
    """Random choices that follow from a seed, a number and how many things there are, for ever (NEP 19)."""

    def __init__(self, seed: int, number: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence([seed, number]))

    def cut(self, rows: Int64s, limit: int | None, *, at_random: bool) -> Int64s:
        """`limit` of the rows in their order: the first ones, or random ones."""
        if limit is None or limit >= len(rows):
            return rows
        if not at_random:
            return rows[:limit]
        order = np.argsort(self._generator.random_raw(len(rows)), kind="stable")
        return rows[np.sort(order[:limit])]


def _limited(times: list[Times], limit: int | None, draw: _Draw, *, at_random: bool) -> list[Times]:
    """At most `limit` of all occurrences: the first ones, or random ones. They lie as they are read: source by source,
    and of a source all first occurrences before the second ones.
    """
    if limit is None:
        return times
    occurrences = [
        (part, np.flatnonzero(each > turn))
        for part, each in enumerate(times)
        for turn in range(int(each.max(initial=0)))
    ]
    kept = draw.cut(np.arange(sum(len(rows) for _, rows in occurrences)), limit, at_random=at_random)
    found = [np.zeros_like(each) for each in times]
    start = 0
    for part, rows in occurrences:
        low, high = np.searchsorted(kept, [start, start + len(rows)])
        found[part][rows[kept[low:high] - start]] += np.uint16(1)
        start += len(rows)
    return found
