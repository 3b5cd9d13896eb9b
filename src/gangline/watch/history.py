"""What the metrics of a run say so far."""

from __future__ import annotations

from typing import Any


class History:
    """Steps and evaluations of a run; where a resumed run repeats a step, the last line of the step counts."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Take in one line of metrics.jsonl; other kinds of records are passed over."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        if record.get("kind") == "step":
            # a repeated step moves to the end: the order is that of writing
            self.steps.pop(step, None)
            self.steps[step] = record
        elif record.get("kind") == "evaluation":
            self.evaluations[step] = record

    @property
    def last_step(self) -> dict[str, Any] | None:
        """The step that was written last, which after a resume need not be the highest."""
        return next(reversed(self.steps.values()), None) if self.steps else None

    def losses(self) -> list[tuple[float, float]]:
        """(step, training loss) by step."""
        return _points(self.steps)

    def evaluation_losses(self) -> list[tuple[float, float]]:
        """(step, evaluation loss) by step."""
        return _points(self.evaluations)

    def remaining_s(self, *, window: int = 20) -> float | None:
        """Time left at the mean speed of the last steps; None before the first."""
        last = self.last_step
        if last is None or not isinstance(last.get("steps"), int):
            return None
        recent = [record["step_s"] for record in list(self.steps.values())[-window:] if record.get("step_s")]
        return (last["steps"] - last["step"]) * sum(recent) / len(recent) if recent else None


def _points(records: dict[int, dict[str, Any]]) -> list[tuple[float, float]]:
    return [
        (float(step), float(records[step]["loss"]))
        for step in sorted(records)
        if isinstance(records[step].get("loss"), (int, float))
    ]
