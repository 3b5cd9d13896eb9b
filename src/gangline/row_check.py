"""What is wrong with the rows of a source, and a sample of those that can be used. Pure.

The controller checks rows of JSON, csv and text before a start, a worker those of tables that take packages to read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import DataError
from gangline.formats import RowError, check_row, fitting_format
from gangline.row_files import BadRow, BadRows, SourceRow

SAMPLE_ROWS = 1000
"""Rows of a source in a sample at the least, evenly spread over it, and twice as many at the most."""
LONGEST_ROWS = 100
"""The longest rows belong to it besides: some of them may not fit into a sample of the model."""
TEXT_CHARS = 1 << 15
"""Of a text no more is kept: it is longer than a sample of the model anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """A row of a sample."""

    row: SourceRow
    is_spread: bool
    """It belongs to the rows that are evenly spread; otherwise it is one of the longest."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, with long texts cut."""
        cut = {name: value[:TEXT_CHARS] if isinstance(value, str) else value for name, value in self.row.values.items()}
        row = {"file": self.row.file, "number": self.row.number, "unit": self.row.unit, "values": cut}
        return {**row, "is_spread": self.is_spread}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> SampleRow:
        """As `to_json` wrote it."""
        row = SourceRow(record["file"], record["number"], record["values"], unit=record["unit"])
        return SampleRow(row=row, is_spread=record["is_spread"])


class RowSample:
    """Rows evenly spread over a source of unknown length, and its longest ones; the same for the same rows."""

    def __init__(self) -> None:
        self._spread: list[tuple[int, SourceRow]] = []
        self._longest: list[tuple[int, int, SourceRow]] = []
        self._stride, self._number = 1, 0

    def add(self, row: SourceRow, size: int) -> None:
        """Take the next row; size: its characters."""
        if self._number % self._stride == 0:
            self._spread.append((self._number, row))
            if len(self._spread) > 2 * SAMPLE_ROWS:
                self._spread, self._stride = self._spread[::2], 2 * self._stride
        if len(self._longest) < LONGEST_ROWS:
            heapq.heappush(self._longest, (size, -self._number, row))
        elif size > self._longest[0][0]:
            heapq.heapreplace(self._longest, (size, -self._number, row))
        self._number += 1

    @property
    def rows(self) -> list[SampleRow]:
        """The sample, in the order of the source."""
        found = {-number: SampleRow(row=row, is_spread=False) for _, number, row in self._longest}
        found |= {number: SampleRow(row=row, is_spread=True) for number, row in self._spread}
        return [row for _, row in sorted(found.items())]


@dataclass(slots=True)
class Chosen:
    """The rows of a source that a job takes, by their numbers: from `start` on, up to `stop`, which is left out."""

    start: int = 0
    stop: int | None = None
    at: int = 0
    """Rows that were read."""

    def take(self, rows: Iterable[SourceRow | BadRow]) -> Iterator[SourceRow | BadRow]:
        """Those of the next file's rows; nothing is read beyond the last."""
        if self.is_over:
            return
        for row in rows:
            self.at += 1
            if self.at > self.start:
                yield row
            if self.is_over:
                return

    @property
    def is_over(self) -> bool:
        """Whether no row follows."""
        return self.stop is not None and self.at >= self.stop


class RowCheck:
    """Counts the rows of a source, and keeps the first that cannot be used, and a sample of the others."""

    def __init__(
        self, format_: str, fields: Mapping[str, str], speakers: Mapping[str, str], learned: Sequence[str]
    ) -> None:
        """fields: see `formats.fields_of`. speakers, learned: `data.roles` and `data.learn.roles` of the job."""
        self.num_rows = 0
        self.bad = BadRows()
        self.broken: list[DataError] = []
        """Files that cannot be read to their end."""
        self.sample: list[SampleRow] = []
        self._rules = fields, speakers, learned
        self._format = format_
        self._rows = RowSample()
        self._fits = ""

    @property
    def fits(self) -> str:
        """Where no row can be used: the words of a job that would fit them; see `fitting_format`."""
        if self.num_rows > self.bad.count:
            return ""
        return self._fits or fitting_format(self.bad.values, preferred=self._format)

    def take(self, row: SourceRow | BadRow) -> None:
        """Take the next row."""
        if isinstance(row, BadRow):
            self.num_rows += 1
            self.bad.add(row)
            return
        self.num_rows += not row.follows
        try:
            size = self.size(row.values)
        except RowError as error:
            reason = str(error)
            self.bad.add(BadRow(file=row.file, number=row.number, reason=reason, unit=row.unit, values=row.values))
        else:
            self._rows.add(row, size)

    def size(self, values: Mapping[str, Any]) -> int:
        """The characters of a row; raises RowError for one that cannot be used."""
        fields, speakers, learned = self._rules
        return check_row(self._format, fields, values, speakers, learned)

    def take_all(self, rows: Iterable[SourceRow | BadRow]) -> None:
        """Take the rows of a file; one that cannot be read to its end is kept among the broken ones."""
        before = self.num_rows
        try:
            for row in rows:
                self.take(row)
        except DataError as error:
            count = self.num_rows - before
            seen = f"{error.seen}; {count} {'row' if count == 1 else 'rows'} before it could be read"
            self.broken.append(DataError(error.what, seen=seen, fix=error.fix))

    def end(self) -> None:
        """All rows were taken: the sample is whole."""
        self.sample += self._rows.rows

    def to_json(self) -> dict[str, Any]:
        """What another process needs of it."""
        return {
            "num_rows": self.num_rows,
            "num_bad": self.bad.count,
            "examples": self.bad.examples,
            "fits": self.fits,
            "broken": [error.to_json() for error in self.broken],
            "sample": [row.to_json() for row in self.sample],
        }

    def add(self, record: Mapping[str, Any]) -> None:
        """What another process saw of other files of this source, as `to_json` wrote it."""
        self.num_rows += int(record["num_rows"])
        self.bad.count += int(record["num_bad"])
        self.bad.told += map(str, record["examples"])
        self._fits = str(record["fits"])
        self.broken += [DataError(each["what"], seen=each["seen"], fix=each["fix"]) for each in record["broken"]]
        self.sample += map(SampleRow.from_json, record["sample"])
