"""The answer to logs of any program: the known failures in them, the cause first, or the errors that nobody knows."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gangline.diagnose.log_search import LogSearch, RaisedLine, Sighting
from gangline.diagnose.signatures import Level, Signature
from gangline.errors import UsageError
from gangline.report.text_table import clean

STDIN = "-"
"""The name of what comes on standard input."""
MOST_FILES = 1_000
"""Of a folder."""
MOST_ALSO = 8
"""Lines about what else stands in the logs."""

MOST_OTHERS = 3
"""Other errors that no row knows, beside the first one."""

_PIECE = 4 << 20
_SNIFFED = 4 << 10
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_LABELS: Mapping[Level, str] = {
    "cause": "cause",
    "symptom": "perhaps",
    "error": "error",
    "echo": "echo",
    "noise": "ignore",
}
_ALSO: Mapping[Level, str] = {"cause": "also", "symptom": "also", "error": "also", "echo": "echo", "noise": "ignore"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """What was found in one log."""

    name: str
    lines: int
    found: tuple[Sighting, ...]
    """Causes first."""
    raised: tuple[RaisedLine, ...]
    """The last exceptions in it that are no known failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFailure:
    """A known failure with all its places in one or several logs."""

    first: Sighting
    places: tuple[tuple[str, int], ...]
    """The first line in each log that has it: the log's name and the number of the line."""
    times: int


def read_logs(names: Sequence[str], *, stdin: BinaryIO) -> list[LogReport]:
    """Search logs, all files of folders, and standard input (`-`); UsageError for what cannot be read."""
    reports = []
    for name in names:
        if name == STDIN:
            reports.append(_searched("standard input", stdin))
        else:
            reports += [read_log(path) for path in _files(Path(name))]
    return reports


def read_log(path: Path) -> LogReport:
    """Find known failures in a log; raises UsageError for one that cannot be read."""
    try:
        with path.open("rb") as stream:
            return _searched(str(path), stream)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", seen=str(error.strerror), fix="name a log file, or a run") from error


def together(reports: Iterable[LogReport]) -> list[SeenFailure]:
    """The known failures of several logs, the likeliest cause first."""
    by_id: dict[str, list[tuple[str, Sighting]]] = {}
    for report in reports:
        for sighting in report.found:
            by_id.setdefault(sighting.id, []).append((report.name, sighting))
    seen = [
        SeenFailure(
            first=min((each for _, each in places), key=lambda each: (each.is_warned, each.time)),
            places=tuple((name, each.number) for name, each in places),
            times=sum(each.times for _, each in places),
        )
        for places in by_id.values()
    ]
    ranked = sorted(seen, key=_rank)
    alike = (list(group) for _, group in itertools.groupby(ranked, key=_rank))
    return [each for group in alike for each in _by_time(group)]


def _rank(seen: SeenFailure) -> tuple[int, bool]:
    return seen.first.order[:2]


def _by_time(seen: list[SeenFailure]) -> list[SeenFailure]:
    """The first in time first, where the logs give every one a time; else in the order of the logs."""
    return sorted(seen, key=lambda each: each.first.time) if all(each.first.time for each in seen) else seen


def answer_lines(reports: Sequence[LogReport]) -> list[str]:
    """The answer for people: the cause with its fix, then what else was seen, a line each."""
    count = sum(report.lines for report in reports)
    rows = [f"{reports[0].name if len(reports) == 1 else f'{len(reports)} logs'}: {count:,} line{'s' * (count != 1)}"]
    seen = together(reports)
    if not seen or seen[0].first.level == "noise":
        rows += _unknown_rows(reports)
    elif seen[0].first.level == "echo":
        rows.append("only echoes: this is what a rank says when another has gone; look into the logs of the others")
    rest = seen
    if seen and seen[0].first.level != "noise":
        rows += _first_rows(seen[0])
        rest = seen[1:]
        rows += _other_errors(reports, seen[0].first) if seen[0].first.level == "error" else []
    rows += [_also_row(each) for each in rest[:MOST_ALSO]]
    rows += [f"{'':9}and {len(rest) - MOST_ALSO} more; all of them: --json"] if len(rest) > MOST_ALSO else []
    return [clean(row) for row in rows]


def answer_json(reports: Sequence[LogReport]) -> dict[str, Any]:
    """The answer for programs."""
    seen = together(reports)
    causes = sum(each.first.level == "cause" for each in seen)
    rows = [
        {
            "id": each.first.id,
            "level": each.first.level,
            "confidence": _confidence(each.first, causes),
            "means": each.first.means,
            "fix": each.first.fix,
            "confirm": each.first.confirm,
            "text": each.first.line,
            "places": [{"file": name, "line": number} for name, number in each.places],
            "times": each.times,
        }
        for each in seen
    ]
    raised = [
        {"file": report.name, "line": each.number, "text": each.text} for report in reports for each in report.raised
    ]
    files = [{"file": report.name, "lines": report.lines} for report in reports]
    return {"files": files, "found": rows, "unknown_errors": raised}


def entry_lines(name: str, signature: Signature) -> list[str]:
    """A known failure by its id: all that is known of it."""
    rows = [f"{name}  ({_LABELS[signature.level]}{f'; to blame: {signature.blames}' if signature.blames else ''})"]
    rows += _row("means", _general(signature.means))
    rows += _row("fix", _general(signature.fix))
    rows += _row("sure", _general(signature.confirm))
    rows += [line for each in signature.avoid for line in _row("never", each)]
    rows += _row("since", signature.since) + _row("until", signature.until)
    return rows + [line for each in signature.sources for line in _row("seen at", each)]


def entry_json(name: str, signature: Signature) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "id": name,
        "level": signature.level,
        "blames": signature.blames,
        "means": _general(signature.means),
        "fix": _general(signature.fix),
        "confirm": _general(signature.confirm),
        "avoid": list(signature.avoid),
        "since": signature.since,
        "until": signature.until,
        "sources": list(signature.sources),
    }


def _general(words: str) -> str:
    """A text of a signature without a match: its groups are dots."""
    return words.format(*["..."] * 9, host="the host")


def _searched(name: str, stream: BinaryIO) -> LogReport:
    search = LogSearch()
    for piece in _pieces(stream):
        search.feed(piece)
    found = tuple(search.finish())
    return LogReport(name=name, lines=search.lines, found=found, raised=tuple(search.raised))


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """The log in pieces; as UTF-8, where it is UTF-16, as a shell of Windows writes it."""
    piece = stream.read(_PIECE)
    encoding = _MARKS.get(piece[:2])
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    while piece:
        yield decoder.decode(piece).encode("utf-8", "replace") if decoder else piece
        piece = stream.read(_PIECE)


def _files(path: Path) -> list[Path]:
    """A file, or all files of a folder that hold text."""
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.rglob("*")) if each.is_file() and _is_text(each)]
    if not found or len(found) > MOST_FILES:
        raise UsageError(
            f"{path} has {len(found) or 'no'} logs",
            seen=f"expected 1 to {MOST_FILES:,} files of text in the folder",
            fix="name the logs themselves",
        )
    return found


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            begin = stream.read(_SNIFFED)
    except OSError:
        return True  # reading it says what is wrong
    return begin[:2] in _MARKS or b"\0" not in begin


def _first_rows(seen: SeenFailure) -> list[str]:
    first = seen.first
    return [
        *_row(_LABELS[first.level], first.means),
        *_row("seen", _places(seen) if first.line in first.means else f"{_places(seen)}: {first.line}"),
        *_row("fix", first.fix),
        *_row("sure", first.confirm),
        *_row("more", f"gangline explain {first.id}"),
    ]


def _also_row(seen: SeenFailure) -> str:
    (row,) = _row(_ALSO[seen.first.level], f"{seen.first.means}  ({_places(seen)}; {seen.first.id})")
    return row


def _other_errors(reports: Sequence[LogReport], first: Sighting) -> list[str]:
    """The last exceptions that no row knows, beside the one that is told first."""
    others = [(report.name, each) for report in reports for each in report.raised if each.text != first.line]
    last = {each.text: f"{name}:{each.number}: {each.text}" for name, each in others}
    return [line for words in list(last.values())[-MOST_OTHERS:] for line in _row("error", words)]


def _unknown_rows(reports: Sequence[LogReport]) -> list[str]:
    raised = [(report.name, each) for report in reports for each in report.raised]
    if not raised:
        return ["nothing in it is known to gangline, and it has no exception; the logs of other ranks may have one"]
    rows = ["nothing in it is known to gangline; the last errors in it:"]
    return rows + [
        line for name, each in raised[-MOST_ALSO:] for line in _row("error", f"{name}:{each.number}: {each.text}")
    ]


def _places(seen: SeenFailure) -> str:
    name, number = seen.places[0]
    others = len(seen.places) - 1
    more = f" and {others} other log{'s' * (others > 1)}" if others else ""
    times = f", {seen.times:,} times" if seen.times > 1 else ""
    return f"{name}:{number}{more}{times}"


def _confidence(sighting: Sighting, causes: int) -> str:
    """How sure it is that it is the cause."""
    if sighting.level != "cause":
        return "low"
    return "high" if causes == 1 and not sighting.is_warned else "medium"


def _row(label: str, text: str) -> list[str]:
    """A line behind its label, if there is something to say."""
    return [f"{label:<9}{text}"] if text else []
