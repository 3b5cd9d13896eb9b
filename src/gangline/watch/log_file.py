"""What a log file tells: known words in it, causes first, then what only witnesses say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.diagnose.signatures import LINE_CHARS, Sighting, recognise
from gangline.diagnose.torchrun import LEFT_OUT, VERDICT
from gangline.errors import UsageError
from gangline.watch.text import clean

LIMIT_BYTES = 32 << 20
"""Of a larger file the end is read."""

_RAISED = re.compile(
    r"^(?:\[?\w{1,20}\]?:? {0,4})?((?:\w{1,60}\.){0,8}\w{0,60}(?:Error|Exception|Interrupt)\b[^\n]{0,400})",
    re.MULTILINE,
)
"""The last line of a traceback, with what torchrun puts before it. Bounded: a log may be one line of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """What stands in a log."""

    name: str
    lines: int
    skipped_lines: int
    """At its beginning, which were not read."""
    found: tuple[Sighting, ...]
    """Causes in the order in which they stand there, then witnesses."""
    has_verdict: bool
    """torchrun names a "root cause" in it."""
    raised: str | None
    """The last error in it, where no known words are."""


def read_log(path: Path) -> LogReport:
    """Look for known words in a log file; raises UsageError for one that cannot be read."""
    try:
        data, skipped_lines = _end_of(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", seen=str(error.strerror), fix="name a log file, or a run") from error
    text = "\n".join(_shown(line) for line in data.decode("utf-8", "replace").split("\n"))
    found = sorted(recognise(text), key=lambda sighting: sighting.is_echo)
    raised = _RAISED.findall(text)
    return LogReport(
        name=str(path),
        lines=skipped_lines + text.count("\n") + (not text.endswith("\n") and bool(text)),
        skipped_lines=skipped_lines,
        found=tuple(found),
        has_verdict=VERDICT in text,
        raised=raised[-1][:LINE_CHARS] if raised and not found else None,
    )


def log_lines(report: LogReport) -> list[str]:
    """The report for people."""
    unread = f", of which the first {report.skipped_lines:,} were not read" if report.skipped_lines else ""
    rows = [f"{report.name}: {report.lines:,} lines{unread}"]
    if not report.found:
        rows.append("nothing in it is known to gangline")
        rows += [f"the last error in it: {report.raised}"] if report.raised else []
    elif all(sighting.is_echo for sighting in report.found):
        rows.append("only echoes: this is what a rank says when another has gone; look into the logs of the others")
    for sighting in report.found:
        rows += ["", *_sighting_lines(sighting, report.skipped_lines)]
    return [clean(row) for row in [*rows, *(["", f"note: {LEFT_OUT}"] if report.has_verdict else [])]]


def log_json(report: LogReport) -> dict[str, Any]:
    """The report for programs."""
    rows = [
        {
            "id": sighting.id,
            "line": sighting.number + report.skipped_lines,
            "text": sighting.line,
            "times": sighting.times,
            "means": sighting.means,
            "fix": sighting.fix,
            "is_echo": sighting.is_echo,
        }
        for sighting in report.found
    ]
    return {"file": report.name, "lines": report.lines, "found": rows, "last_error": report.raised}


def _sighting_lines(sighting: Sighting, skipped_lines: int) -> list[str]:
    times = f", {sighting.times} times" if sighting.times > 1 else ""
    kind = "echo" if sighting.is_echo else "cause"
    return [
        f"{kind}  line {sighting.number + skipped_lines:,}{times}: {sighting.line}",
        f"  means  {sighting.means}",
        f"  fix    {sighting.fix}",
    ]


def _shown(line: str) -> str:
    """What a terminal would show of a line: of a progress bar its end. An escape sequence ends with its line."""
    return clean(line.rstrip("\r").rpartition("\r")[2])


def _end_of(path: Path) -> tuple[bytes, int]:
    """The end of a file from the beginning of a line, and how many lines are before it."""
    skipped_lines = 0
    with path.open("rb") as stream:
        ahead = max(0, path.stat().st_size - LIMIT_BYTES)
        while ahead > 0 and (piece := stream.read(min(ahead, 1 << 20))):
            skipped_lines += piece.count(b"\n")
            ahead -= len(piece)
            if ahead == 0 and not piece.endswith(b"\n"):
                stream.readline(LIMIT_BYTES)
                skipped_lines += 1
        return stream.read(LIMIT_BYTES), skipped_lines
