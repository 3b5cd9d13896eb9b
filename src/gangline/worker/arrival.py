"""The first thing that a rank does, before it imports torch: it says that it is there.

Importing torch takes seconds, and on a slow disk minutes; whoever watches the start shall see who does it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from gangline.runs.files import write_json
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.worker.phase import PhaseFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A rank that has said who it is."""

    gang: Gang
    layout: RunLayout
    rank: int
    phase: PhaseFile

    @property
    def files(self) -> Path:
        """Where the files of ranks lie."""
        return self.layout.attempt(self.gang.attempt)


def arrive(gang: Path, root: Path) -> Arrival:
    """Write rank-<r>.pid and rank-<r>.phase. May be called again, with the same result.

    The start time of the process is noted, too, so that a signal can never reach a later process with the same pid.
    """
    described = Gang.load(gang)
    layout = RunLayout(root, described.run_id)
    rank = int(os.environ.get("RANK", "0"))
    files = layout.attempt(described.attempt)
    write_json(files / f"rank-{rank}.pid", {**ProcessId.current().to_json(), "time": time.time()})
    phase = PhaseFile(files / f"rank-{rank}.phase")
    return Arrival(gang=described, layout=layout, rank=rank, phase=phase)


def early(argv: list[str]) -> None:
    """`arrive` for the words of `train`; what is wrong with them is told later, by who can tell it well."""
    try:
        _, gang, root = argv
        arrive(Path(gang), Path(root))
    except (OSError, ValueError, TypeError):
        return
