"""The order to record a few steps of a running job, and the files that it leaves in the folder of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CLOCK = "gangline: clock"
STEPS = "gangline: steps"
DATA = "gangline: data"
"""Names of spans in a trace: at a known time; around all steps that are recorded; around reading a batch."""
MOST_STEPS = 50
"""A step on a card is some thousand events, of 200 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """Record so many steps. Each id is obeyed once."""

    id: str
    steps: int

    def to_json(self) -> dict[str, Any]:
        """For profile.json."""
        return {"id": self.id, "steps": self.steps}

    @staticmethod
    def of(record: Mapping[str, Any]) -> ProfileOrder:
        """From profile.json. Raises ValueError, KeyError or TypeError for what is no order."""
        order = ProfileOrder(id=str(record["id"]), steps=int(record["steps"]))
        if not (1 <= order.steps <= MOST_STEPS and order.id.isalnum()):
            raise ValueError(f"no order: {record}")
        return order


def rank_files(order: str, rank: int) -> tuple[str, str]:
    """The names of a rank's trace, and of the record that is written after it."""
    return f"profile-{order}-{rank}.trace.json.gz", f"profile-{order}-{rank}.json"
