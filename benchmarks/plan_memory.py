"""Predicted against published peaks of GPU memory.

    python -m benchmarks.plan_memory            # summary per half, per source, and every row that is off by 3 % or more
    python -m benchmarks.plan_memory --all      # every row
    python -m benchmarks.plan_memory --json

Rows, their sources and the rule that holds half of the public ones out of fitting are in tests/fixtures/planning and
tests/unit/planner/rows.py; what the software of a row means for bytes is in tests/unit/planner/foreign.py. Only
allocated memory is compared (torch's max_memory_allocated): what a process holds beyond it is a pool that it gives back
when memory gets short, so that a figure taken with room to spare says nothing about the need. For that there are
verdicts: runs near the end of their card, which went through or died.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean, median

from tests.unit.planner.foreign import predicted
from tests.unit.planner.rows import (
    ALLOCATED,
    HELD_OUT,
    Choice,
    Row,
    anchor_rows,
    public_rows,
    split_of,
    verdicts,
)

GIB = 2**30
ANCHOR, INDICATIVE = "anchor", "incomplete"
OFF = 0.03
KINDS = ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table."""

    row: str
    source: str
    half: str
    predicted_bytes: int
    measured_bytes: int
    instant: str

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_bytes / self.measured_bytes - 1


def lines() -> list[Line]:
    """Every allocated figure whose settings say how many tokens there were."""
    found = [_line(row, ANCHOR) for row in anchor_rows() if row.measured == ALLOCATED]
    public = [row for row in public_rows() if row.measured == ALLOCATED and row.seq_len and row.strategy in KINDS]
    return found + [_line(row, split_of(row.run) if row.complete else INDICATIVE) for row in public]


def _line(row: Row, half: str) -> Line:
    memory = predicted(row)
    return Line(
        row=row.run,
        source=row.source,
        half=half,
        predicted_bytes=memory.allocated_bytes,
        measured_bytes=row.value_bytes,
        instant=memory.peak.name,
    )


def summary(found: Iterable[Line]) -> dict[str, float]:
    """Absolute errors: mean, median, worst."""
    errors = [abs(line.error) for line in found]
    return {"rows": len(errors), "mean": fmean(errors), "median": median(errors), "worst": max(errors)}


def groups(found: list[Line]) -> dict[str, dict[str, float]]:
    """Summaries per half, and per half and source."""
    keys = {line.half for line in found} | {f"{line.half}: {line.source}" for line in found}
    return {
        key: summary(line for line in found if key in (line.half, f"{line.half}: {line.source}"))
        for key in sorted(keys)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A verdict of the model beside what happened."""

    run: str
    half: str
    outcome: str
    chance: float
    part: float
    """Of the card that the process is expected to take."""

    @property
    def wrong(self) -> bool:
        """Whether the more probable answer is not what happened."""
        return (self.chance >= 0.5) != (self.outcome == "completed")


def calls() -> list[Call]:
    """One per run near the end of its card."""
    return [_call(each) for each in verdicts() if each.complete and each.seq_len and each.strategy in KINDS]


def _call(choice: Choice) -> Call:
    memory = predicted(choice)
    return Call(
        run=choice.run,
        half=split_of(choice.run),
        outcome=choice.outcome,
        chance=memory.fits(choice.card_bytes),
        part=memory.process.likely / choice.card_bytes,
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="predicted against published peaks of GPU memory")
    parser.add_argument("--all", action="store_true", help="every row, not only those that are off by 3 percent")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    options = parser.parse_args()
    found = lines()
    if options.json:
        rows = [asdict(line) | {"error": line.error} for line in found]
        print(json.dumps({"rows": rows, "summary": groups(found), "verdicts": [asdict(call) for call in calls()]}))
        return 0
    _print_rows(found, everything=options.all)
    _print_summary(groups(found))
    _print_calls(calls())
    return 0


def _print_rows(found: list[Line], *, everything: bool) -> None:
    print(f"{'predicted':>10} {'measured':>9} GiB  error  half")
    for line in found:
        if everything or abs(line.error) >= OFF:
            sizes = f"{line.predicted_bytes / GIB:10.2f} {line.measured_bytes / GIB:9.2f}"
            print(f"{sizes}     {line.error:+6.1%}  {line.half:10} {line.row} ({line.instant})")


def _print_summary(found: dict[str, dict[str, float]]) -> None:
    print(f"\n{'rows':>5} {'mean':>7} {'median':>7} {'worst':>7}")
    for name, each in found.items():
        print(f"{each['rows']:5.0f} {each['mean']:7.2%} {each['median']:7.2%} {each['worst']:7.2%}  {name}")


def _print_calls(found: list[Call]) -> None:
    wrong = [call for call in found if call.wrong]
    held = sum(call.half == HELD_OUT for call in found)
    print(f"\n{len(found)} verdicts ({held} held out), {len(wrong)} wrong")
    for call in wrong:
        print(f"  {call.part:6.1%} of the card, chance {call.chance:.2f}, {call.outcome}: {call.run} ({call.half})")


if __name__ == "__main__":
    sys.exit(main())
