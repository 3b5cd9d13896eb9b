"""The rows of one source of a job, read where they lie; also by a bare Python of a host (`rows_there`).

JSON lines, JSON arrays, csv and text are read by the standard library. Tables of columns (parquet, arrow) take
packages: a short process of a Python of the same computer that has them looks at those. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gangline
from gangline.errors import DataError, GanglineError
from gangline.formats import FORMATS, RowError, expected_columns, fields_of
from gangline.provision.ask import AskLook
from gangline.row_check import Chosen, RowCheck, SampleRow
from gangline.row_files import BadRow, ReadPosition, SourceRow, file_kind, on_host, read_rows
from gangline.runs.cluster import Host
from gangline.runs.job import DataJob, Job, SourceJob, row_edges
from gangline.units import format_bytes

WHOLE_BYTES = 128 << 20
"""So much of a file is read in full, which takes a second or two; of the rest of JSON lines a sample is read."""
REST_ROWS = 200
"""Lines behind the first `WHOLE_BYTES` that are read, evenly spread."""
TABLES = frozenset({"parquet", "arrow"})

TRAIN = "data.train"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLook:
    """What was seen of `data.train` or `data.eval`."""

    key: str
    data: DataJob
    """The words of the job, with format, fields and roles of this source."""
    is_cut: bool = False
    """Only some of the rows that were looked at are chosen: those that cannot be used may be others."""
    taken: tuple[int, int] | None = None
    """The job takes a part of the rows, and these were looked at: the one before the first, and the last, from 1."""
    num_rows: int = 0
    """Rows that were looked at, good and bad."""
    num_bad: int = 0
    examples: tuple[str, ...] = ()
    """The first rows that cannot be used: place and reason."""
    fits: str = ""
    """Where none can be used: what the job should say instead; see `formats.fitting_format`."""
    broken: tuple[DataError, ...] = ()
    """Files that cannot be read to their end."""
    unread: tuple[str, ...] = ()
    """What was not looked at, and why."""
    sample: tuple[SampleRow, ...] = ()
    """Some of the rows that can be used."""

    def to_json(self) -> dict[str, Any]:
        """What the computer that asked needs of it."""
        names = ("is_cut", "taken", "num_rows", "num_bad", "examples", "fits", "unread")
        record = {name: getattr(self, name) for name in names}
        broken = [error.to_json() for error in self.broken]
        return {**record, "broken": broken, "sample": [row.to_json() for row in self.sample]}

    @staticmethod
    def from_json(key: str, data: DataJob, record: Mapping[str, Any]) -> SourceLook:
        """What another computer saw, as `to_json` wrote it."""
        return SourceLook(
            key=key,
            data=data,
            is_cut=bool(record["is_cut"]),
            taken=None if record["taken"] is None else (int(record["taken"][0]), int(record["taken"][1])),
            num_rows=int(record["num_rows"]),
            num_bad=int(record["num_bad"]),
            examples=tuple(map(str, record["examples"])),
            fits=str(record["fits"]),
            broken=tuple(DataError(each["what"], seen=each["seen"], fix=each["fix"]) for each in record["broken"]),
            unread=tuple(map(str, record["unread"])),
            sample=tuple(map(SampleRow.from_json, record["sample"])),
        )

    @property
    def num_good(self) -> int:
        """Rows that can be used."""
        return self.num_rows - self.num_bad

    def lines(self) -> Iterator[str]:
        """For the plan."""
        if self.num_rows:
            bad = f"{self.num_bad} of them cannot be used" if self.num_bad else "all can be used"
            cut = "; the job takes a part of these rows only (see its slice and max_samples)" if self.is_cut else ""
            which = f" ({self.taken[0] + 1} to {self.taken[1]}, which the job takes)" if self.taken else ""
            yield f"rows       {self.key}: {self.num_rows} looked at{which}, {bad}{cut}"
        for line in self.unread:
            yield f"rows       {self.key}: not looked at: {line}"

    def errors(self) -> Iterator[DataError]:
        """What stops a start."""
        yield from self.broken
        if self.num_bad and not (self.num_good and (self.data.skip_bad_rows or self.is_cut)):
            yield self._bad_rows()
        elif not (self.num_rows or self.unread or self.broken):
            source = self.data.train if self.key == TRAIN else self.data.evaluation
            files = source.all_files if source is not None else ()
            shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
            if self.taken is not None and self.taken[1]:
                seen = f"it has {self.taken[1]} rows; its slice begins behind them or takes none"
                yield DataError(f"{self.key}: no rows in the part of {shown}", seen=seen, fix="write another slice")
                return
            yield DataError(
                f"{self.key}: no rows in {shown}", seen="expected rows; all of it is empty", fix="name files with rows"
            )

    def _bad_rows(self) -> DataError:
        names = expected_columns(self.data.format, fields_of(self.data.format, self.data.fields))
        fix = f"the rows fit {self.fits}" if self.fits else "mend the rows, data.format or data.fields"
        return DataError(
            f"{self.key}: {self.num_bad} of {self.num_rows} rows cannot be used:\n  " + "\n  ".join(self.examples),
            seen=f"expected {self.data.format} rows with {names}",
            fix=f"{fix}, or set data.skip_bad_rows: true to leave them out" if self.num_good else fix,
        )


def sources_of(job: Job) -> list[tuple[str, SourceJob]]:
    """The sources of training and evaluation, with their keys."""
    return [*_parts(TRAIN, job.data.train), *_parts("data.eval", job.data.evaluation)]


def host_of(source: SourceJob) -> str:
    """The host on which the files of a source lie; "": this computer, a store, or the hub."""
    return on_host(source.files[0])[0] if source.files else ""


def _parts(key: str, source: SourceJob | None) -> Iterator[tuple[str, SourceJob]]:
    """The sources of a set, with their keys."""
    parts = source.parts if source is not None else ()
    for number, part in enumerate(parts):
        yield f"{key}[{number}]" if len(parts) > 1 else key, part


@dataclass(frozen=True, slots=True)
class Looker:
    """A process that has the packages for training, if there is one."""

    host: Host | None
    why_not: str
    ask: AskLook


class SourceReader:
    """Reads one source, and remembers what it saw."""

    def __init__(self, key: str, source: SourceJob, job: Job, looker: Looker) -> None:
        self._key, self._source, self._data = key, source, job.data.of(source)
        self._limit, self._is_cut = _limit(source, job.data, job.data.max_samples if key.startswith(TRAIN) else None)
        self._chosen = Chosen()
        self._looker = looker
        self._fields = fields_of(self._data.format, self._data.fields)
        self._check = RowCheck(self._data.format, self._fields, self._data.roles, self._data.learn.roles)
        self._unread: list[str] = []
        self._is_told = False
        """The numbers of the rows that the job takes are known, and only those are looked at."""

    def read(self) -> SourceLook:
        """Read all files; what was seen."""
        there = [file for file in self._source.files if Path(file).is_file()]
        tables = [file for file in there if _is_table(file)]
        is_part = self._source.rows is not None or self._limit is not None
        if self._source.hub is not None:
            self._unread.append(f"{self._source.hub} of the hub; its rows are read when the data is prepared")
        elif is_part and len(there) == len(self._source.files) and self._choose(there, tables):
            is_part = False
        self._is_cut |= is_part
        for file in self._source.files:
            if file not in there:
                self._unread.append(f"{file} is not on this computer")
            elif file in tables:
                continue
            elif file_kind(file) == "text" and not FORMATS[self._data.format].whole:
                self._check.broken.append(_plain_text(file, self._data.format))
            else:
                self._read(file)
        self._check.end()
        self._read_tables(tables)
        return SourceLook(
            key=self._key,
            data=self._data,
            is_cut=self._is_cut,
            num_rows=self._check.num_rows,
            num_bad=self._check.bad.count,
            examples=tuple(self._check.bad.examples),
            fits=self._check.fits,
            taken=self._taken,
            broken=tuple(self._check.broken),
            unread=tuple(self._unread),
            sample=tuple(self._check.sample),
        )

    def _choose(self, files: Sequence[str], tables: Sequence[str]) -> bool:
        """Find out which rows the job takes; False where their numbers do not tell."""
        rows = self._source.rows
        if tables:
            self._is_told = len(tables) == len(files)  # what reads them counts them
            return self._is_told
        if any(file_kind(file) == "text" for file in files):
            return False
        if rows is not None and rows.counts and sum(Path(file).stat().st_size for file in files) > WHOLE_BYTES:
            return False
        try:
            edges = row_edges(rows, self._limit, lambda: sum(1 for file in files for _ in read_rows(file)))
        except DataError:
            return False  # it is told when the rows are read
        self._chosen, self._is_told = Chosen(*edges), True
        return True

    @property
    def _taken(self) -> tuple[int, int] | None:
        return (self._chosen.start, self._chosen.at) if self._is_told else None

    def _read(self, file: str) -> None:
        position = ReadPosition()
        self._check.take_all(self._chosen.take(_beginning(file, position)))
        size = Path(file).stat().st_size
        if self._chosen.is_over or position.done_bytes <= WHOLE_BYTES or position.done_bytes >= size:
            return
        if self._is_told:
            # behind it no row's number is known
            self._is_told, self._is_cut, self._chosen = False, True, Chosen()
        rest = f"the rest of {Path(file).name}, behind {format_bytes(position.done_bytes)}"
        if file.lower().endswith((".jsonl", ".ndjson")):
            self._read_rest(file, position.done_bytes, size)
            rest += f", but for {REST_ROWS} lines of it"
        self._unread.append(rest)

    def _read_rest(self, file: str, done_bytes: int, size: int) -> None:
        """A sample of the lines behind the part that was read in full."""
        with Path(file).open("rb") as stream:
            for number in range(REST_ROWS):
                stream.seek(done_bytes + (size - done_bytes) * number // REST_ROWS)
                stream.readline()
                at = stream.tell()
                if line := stream.readline().strip():
                    self._check.num_rows += 1
                    if reason := self._fault(line):
                        self._check.bad.add(BadRow(file=file, number=_line_at(file, at), reason=reason))

    def _fault(self, line: bytes) -> str:
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                return f"a JSON {type(values).__name__}, not an object with fields"
            self._check.size(values)
        except RowError as error:
            return str(error)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        return ""

    def _read_tables(self, files: Sequence[str]) -> None:
        if not files:
            return
        data = self._data
        learned = list(data.learn.roles)
        asked: dict[str, Any] = {
            "format": data.format,
            "fields": self._fields,
            "speakers": data.roles,
            "learned": learned,
        }
        asked |= {"files": list(files), "rows": None, "limit": None}
        if self._is_told:
            rows = self._source.rows
            asked |= {"rows": None if rows is None else dataclasses.asdict(rows), "limit": self._limit}
        why = self._looker.why_not
        if self._looker.host is not None:
            try:
                answer = self._looker.ask(self._looker.host, "look-tables", asked)
            except GanglineError as error:
                why = in_a_line(error)
            else:
                self._check.add(answer)
                self._chosen = Chosen(start=int(answer["start"]), at=int(answer["at"]))
                return
        self._unread += [f"{Path(file).name}: {why}" for file in files]


def _beginning(file: str, position: ReadPosition) -> Iterator[SourceRow | BadRow]:
    """The rows of a file, as far as it is read in full."""
    for row in read_rows(file, position=position):
        yield row
        if position.done_bytes > WHOLE_BYTES:
            return


def _limit(source: SourceJob, data: DataJob, max_samples: int | None) -> tuple[int | None, bool]:
    """(the first so many rows of its slice are taken, whether some of them are left out for another reason).

    max_samples: of the whole set.
    """
    given = [limit for limit in (source.max_samples, max_samples) if limit is not None]
    is_first = not (data.shuffle or data.deduplicate)
    if max_samples is not None and len(data.train.parts) > 1:
        is_first = False
    return min(given, default=None) if is_first else None, source.weight < 1 or bool(given and not is_first)


def _is_table(file: str) -> bool:
    return file_kind(file) in TABLES or (file.lower().endswith(".zst") and not _reads_zstd())


def _reads_zstd() -> bool:
    """Whether this Python reads zstd by itself; see `row_files`."""
    return sys.version_info >= (3, 14) or importlib.util.find_spec("pyarrow") is not None


def _plain_text(file: str, format_: str) -> DataError:
    return DataError(
        f"{file} is plain text, data.format is {format_}",
        seen="expected rows with fields, in a file that is called .jsonl, .json, .csv, .tsv, .parquet or .arrow",
        fix="set data.format: text, or write the rows as JSON lines",
    )


def _line_at(file: str, at: int) -> int:
    """The number of the line that begins at a byte."""
    number, left = 1, at
    with Path(file).open("rb") as stream:
        while left > 0 and (piece := stream.read(min(left, 1 << 22))):
            number += piece.count(b"\n")
            left -= len(piece)
    return number


SETUP_BUILDS = " (gangline setup builds one)"


def python_with_packages(hosts: Sequence[Host]) -> tuple[Host | None, str]:
    """A Python of this computer with the packages for training, as a host; otherwise why there is none."""
    code = str(Path(gangline.__file__).parent.parent)
    if all(importlib.util.find_spec(name) is not None for name in ("transformers", "pyarrow", "numpy")):
        return Host(name="this computer", workdir="", python=sys.executable, code=code), ""
    for host in hosts:
        # not where the names lead to: two virtual environments are links to one program
        if host.transport == "local" and host.python not in {"", sys.executable}:
            return dataclasses.replace(host, code=code), ""
    return None, f"no Python of this computer has the packages for training{SETUP_BUILDS}"


def in_a_line(error: GanglineError) -> str:
    """What went wrong, short."""
    return "; ".join(filter(None, [error.what, error.seen.strip().splitlines()[-1] if error.seen else ""]))
