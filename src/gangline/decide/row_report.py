"""The rows that a job trains on, looked at before anything is built or copied.

Their shape is read where they lie (`row_reader`, `rows_there`). The tokens of a sample take packages: a short process
of a Python of this computer that has them looks at those. The plan says what nobody looked at. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.context import Dependencies
from gangline.decide.forecast import cached_config, find_shape
from gangline.decide.row_reader import (
    TRAIN,
    Looker,
    SourceLook,
    SourceReader,
    host_of,
    in_a_line,
    python_with_packages,
    sources_of,
)
from gangline.errors import DataError, GanglineError, ModelError
from gangline.formats import FORMATS
from gangline.runs.cluster import Host
from gangline.runs.job import DEFAULT_LENGTH, Job, SourceJob

LONGEST_DEFAULT = 4096
"""A sample is no longer than that unless the job says so: memory grows with it, and few rows are."""
ROUNDED_TO = 64
"""Lengths are multiples of it, which kernels like."""
COVERED = 0.99
"""Of the rows fit into a sample whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of rows of `data.train`."""

    spread: tuple[int, ...]
    """Of rows that are evenly spread over it; sorted."""
    is_whole: bool
    """They are all rows."""
    prompts: tuple[tuple[int, int], ...]
    """(tokens, tokens before the first learned one) of these rows, and of the longest ones besides."""
    places: tuple[tuple[str, int], ...] = ()
    """(place, tokens) of the longest rows."""

    @property
    def covering(self) -> int:
        """The length that `COVERED` of the rows do not exceed."""
        return self.spread[max(0, math.ceil(COVERED * len(self.spread)) - 1)]

    @property
    def longest(self) -> int:
        """Of all rows that were tokenised."""
        return max(length for length, _ in self.prompts)

    @property
    def of(self) -> str:
        """Which rows these are, in words."""
        return f"{len(self.spread)} rows" if self.is_whole else f"a sample of {len(self.spread)} rows"

    def errors(self, job: Job) -> Iterator[DataError]:
        """What stops a start, once the length of a sample is known."""
        data = job.data
        longer = [f"{place} has {tokens} tokens" for place, tokens in self.places if tokens > data.sequence_length]
        if _is_text(job):
            return
        if longer and data.overlong == "fail" and not data.skip_bad_rows:
            yield DataError(
                "data.train: rows are longer than a sample:\n  " + "\n  ".join(longer),
                seen=f"data.overlong: fail, and samples of {data.sequence_length} tokens",
                fix="raise data.sequence_length, or write data.overlong: truncate",
            )
        elif all(prompt >= data.sequence_length for _, prompt in self.prompts):
            yield DataError(
                "data.train: no token to learn in any row that was looked at",
                seen=f"the prompts alone have more than data.sequence_length: {data.sequence_length} tokens",
                fix="raise data.sequence_length",
            )

    def overlong(self, job: Job) -> Iterator[str]:
        """Rows that do not fit into a sample, and what becomes of them, for the plan."""
        limit = job.data.sequence_length
        longer = sum(length > limit for length in self.spread)
        if _is_text(job) or self.longest <= limit:
            return
        rule = {"fail": "cannot be used", "drop": "are dropped"}.get(job.data.overlong, "are truncated")
        of = f"{longer} of {self.of}"
        if not longer:  # they are so few that the sample has none
            of = f"at least {sum(length > limit for length, _ in self.prompts)} of all rows"
        yield f"longer     {of} have more than {limit} tokens and {rule}; the longest has {self.longest}"
        dropped = sum(prompt >= limit for length, prompt in self.prompts if length > limit)
        if dropped and job.data.overlong not in {"fail", "drop"}:
            least = "" if self.is_whole else "at least "
            yield f"dropped    {least}{dropped} of these: the prompt alone fills the sample, nothing is left to learn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsReport:
    """What was seen of all rows of a job."""

    sources: tuple[SourceLook, ...] = ()
    lengths: Lengths | None = None
    why_not: str = ""
    """Why there are no lengths."""
    length_reason: str = ""
    """Why `data.sequence_length` is what it is, where the job leaves it open."""

    def lines(self, job: Job) -> list[str]:
        """For the plan."""
        found = [line for source in self.sources for line in source.lines()]
        if self.lengths is None and self.why_not:
            found.append(f"tokens     not looked at: {self.why_not}")
        if self.length_reason:
            found.append(f"length     sequence_length {job.data.sequence_length}: {self.length_reason}")
        return found if self.lengths is None else [*found, *self.lengths.overlong(job)]

    def errors(self, job: Job) -> list[DataError]:
        """What stops a start."""
        errors = [error for source in self.sources for error in source.errors()]
        return errors if self.lengths is None else [*errors, *self.lengths.errors(job)]

    def require(self, job: Job) -> None:
        """Raise one DataError that names every file that cannot be read, and the first rows that cannot be used."""
        errors = self.errors(job)
        if not errors:
            return
        what = "\n".join(dict.fromkeys(error.what for error in errors))
        seen = "\n        ".join(dict.fromkeys(error.seen for error in errors))
        raise DataError(what, seen=seen, fix="\n        ".join(dict.fromkeys(error.fix for error in errors)))


# Reading the rows.


LookThere = Callable[[str, SourceJob, str], Mapping[str, Any]]
"""(key, source, host) -> `SourceLook.to_json` of a source whose files lie on that host."""


def look_at_rows(job: Job, hosts: Sequence[Host], deps: Dependencies, *, there: LookThere | None = None) -> RowsReport:
    """Every row that is cheap to read and a sample of the rest, by their shape.

    hosts: whose Pythons may look. there: looks at files that lie on a host; None: nobody does.
    """
    looker = Looker(*python_with_packages(hosts), deps.ask_look)
    looks = []
    for key, part in sources_of(job):
        host = host_of(part)
        if not host:
            looks.append(SourceReader(key, part, job, looker).read())
        elif there is not None:
            looks.append(SourceLook.from_json(key, job.data.of(part), there(key, part, host)))
        else:
            unread = tuple(f"{file} lies on a host, which is not asked here" for file in part.files)
            looks.append(SourceLook(key=key, data=job.data.of(part), unread=unread))
    return RowsReport(sources=tuple(looks))


# Tokens, by a process that has the packages.


def with_lengths(report: RowsReport, job: Job, hosts: Sequence[Host], deps: Dependencies) -> RowsReport:
    """The report with the tokens of the training rows; raises DataError for rows that the chat template refuses, and
    for a tokenizer that is not the model's.
    """
    train = [source for source in report.sources if source.key.startswith(TRAIN)]
    if _is_text(job):
        return report  # texts are split where a sample ends
    looker, why_not = python_with_packages(hosts)
    if not Path(job.model.path).is_absolute() and cached_config(job, deps.variables) is None:
        looker, why_not = None, f"{job.model.path} is not in the hub's cache on this computer"
    rows = [{**row.to_json(), "part": number} for number, source in enumerate(train) for row in source.sample]
    if looker is None or not rows:
        return dataclasses.replace(report, why_not=why_not or "no row of data.train was looked at")
    asked = {"job": job.to_json(), "rows": rows}
    try:
        answer = deps.ask_look(looker, "look-lengths", asked)
    except GanglineError as error:
        if isinstance(error, DataError) or (isinstance(error, ModelError) and Path(job.model.path).is_dir()):
            raise
        return dataclasses.replace(report, why_not=in_a_line(error))
    found = [(int(length), int(prompt)) for length, prompt, _ in answer["lengths"]]
    spread = tuple(sorted(int(length) for length, _, is_spread in answer["lengths"] if is_spread))
    if num_refused := int(answer["num_refused"]):
        report = _with_refused(report, num_refused, [str(text) for text in answer["refused"]])
    if not spread:
        return dataclasses.replace(report, why_not="no row can be used")
    is_whole = len(spread) == sum(source.num_good for source in train)
    lengths = Lengths(
        spread=spread,
        is_whole=is_whole,
        prompts=tuple(found),
        places=tuple((str(place), int(tokens)) for place, tokens in answer["longest"]),
    )
    return dataclasses.replace(report, lengths=lengths)


def _with_refused(report: RowsReport, num_refused: int, examples: Sequence[str]) -> RowsReport:
    """The rows that the chat template refuses belong to the first training source: their places name the file."""
    first = next(number for number, source in enumerate(report.sources) if source.key.startswith(TRAIN))
    source = report.sources[first]
    shown = (*source.examples, *examples)
    changed = dataclasses.replace(source, num_bad=source.num_bad + num_refused, examples=shown)
    sources = (*report.sources[:first], changed, *report.sources[first + 1 :])
    return dataclasses.replace(report, sources=sources)


# How long a sample is, where the job leaves that open.


def settled_length(
    job: Job, report: RowsReport, variables: Mapping[str, str], home: Path | None = None
) -> tuple[Job, RowsReport]:
    """The job with its `data.sequence_length`, and the report with the reason."""
    if "sequence_length" not in job.open:
        return job, report
    rest = tuple(key for key in job.open if key != "sequence_length")
    length, reason = default_length(job, report, max_positions(job, variables, home))
    data = dataclasses.replace(job.data, sequence_length=length)
    return dataclasses.replace(job, data=data, open=rest), dataclasses.replace(report, length_reason=reason)


def default_length(job: Job, report: RowsReport, positions: int | None) -> tuple[int, str]:
    """The length of a sample, and why: `COVERED` of the rows fit in, unless that is too much.

    positions: the tokens that the model reads at the most, where that is known.
    """
    lengths = report.lengths
    most = min(positions or LONGEST_DEFAULT, LONGEST_DEFAULT)
    cap = "the model reads no more" if most == positions else "the plan takes no more by itself"
    if lengths is None:
        known = "texts are split and packed" if _is_text(job) else "nothing is known of the lengths of the rows"
        if most < DEFAULT_LENGTH:
            return most, f"{cap}; {known}"
        return DEFAULT_LENGTH, f"the default; {known}"
    wanted = lengths.longest if job.data.overlong == "fail" else lengths.covering
    covering = -(-wanted // ROUNDED_TO) * ROUNDED_TO
    said = f"99 % of {lengths.of} have {lengths.covering} tokens or fewer, the longest has {lengths.longest}"
    return (covering, said) if covering <= most else (most, f"{said}; {cap}")


def _is_text(job: Job) -> bool:
    """Whether all rows are texts, of which samples are filled to the end."""
    return job.data.packing and all(FORMATS[name].whole for name in job.data.formats)


POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""Keys of a config.json for the tokens that the model reads at the most."""


def max_positions(job: Job, variables: Mapping[str, str], home: Path | None = None) -> int | None:
    """The tokens that the model of a job reads at the most; None where its config.json is not here or does not say."""
    try:
        config = find_shape(job, variables, home).config or {}
    except ModelError:  # the forecast says so
        return None
    nested = config.get("text_config")
    for words in (config, nested if isinstance(nested, dict) else {}):
        for key in POSITION_KEYS:
            if isinstance(words.get(key), int):
                return int(words[key])
    return None
