"""The attempts of a run, one line each: when, where, from which step to which, and how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gangline.checks.finding import fold_names
from gangline.units import format_duration
from gangline.watch.story import Attempt, Story
from gangline.watch.table import age, table

COLUMNS = ("attempt", "began", "took", "hosts", "from", "to", "end")


def attempt_table(story: Story, *, now: datetime) -> list[str]:
    """For people, oldest first:

    attempt  began    took         hosts    from   to     end
    1        2 h ago  52 min 10 s  pc[1-3]  0      1,241  pc3 does not answer
    2        1 h ago  -            pc[1-2]  1,240  2,900  running
    """
    rows = [_row(each) for each in attempt_rows(story)]
    return table(COLUMNS, [[*row[:1], age(row[1], now=now) or "-", *row[2:]] for row in rows])


def attempt_rows(story: Story) -> list[dict[str, Any]]:
    """For programs, oldest first.

    result: finished, stopped or failed; that of the run where the attempt has not ended; None: not known.
    what: the first line of its cause, or why another attempt took its place. next: whether one did by itself.
    """
    following = [*story.attempts, None][1:]
    return [_attempt(each, after, story) for each, after in zip(story.attempts, following, strict=True)]


def _attempt(attempt: Attempt, after: Attempt | None, story: Story) -> dict[str, Any]:
    by_itself = after.begun_by if after else None
    error = attempt.error or {}
    said = by_itself.get("what") if by_itself else error.get("what")
    return {
        "attempt": attempt.number,
        "began": _time(attempt, "started"),
        "ended": attempt.outcome.ended if attempt.outcome else "",
        "hosts": list(attempt.hosts),
        "from_step": attempt.from_step,
        "to_step": attempt.to_step,
        "result": attempt.result or (story.run.phase if after is None else None),
        "what": next(iter(str(said or "").splitlines()), ""),
        "next": by_itself is not None,
    }


def _time(attempt: Attempt, event: str) -> str:
    found = attempt.of(event)
    return str(found.get("time", "")) if found else ""


def _row(row: dict[str, Any]) -> list[str]:
    return [
        str(row["attempt"]),
        row["began"],
        _took(row["began"], row["ended"]),
        fold_names(row["hosts"]) or "-",
        _step(row["from_step"]),
        _step(row["to_step"]),
        _end(row),
    ]


def _end(row: dict[str, Any]) -> str:
    if row["next"]:
        return row["what"] or "another took its place"
    result = row["result"] or "nobody wrote down how"
    return f"{result}: {row['what']}" if row["what"] else str(result)


def _step(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def _took(began: str, ended: str) -> str:
    """Both times are those of the supervisor's clock."""
    try:
        first, last = (datetime.fromisoformat(time.replace("Z", "+00:00")) for time in (began, ended))
    except ValueError:
        return "-"
    return format_duration(max(0.0, (last - first).total_seconds()))
