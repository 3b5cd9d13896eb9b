"""The exporter `csv`: one line for each figure, appended to a file in the folder of the run."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field

from gangline.exporters import ExportedRun, Exporter


@dataclass(frozen=True)
class Options:
    """What `report: {csv: {...}}` may say; the first one can stand alone: `report: {csv: figures.csv}`."""

    path: str = field(default="metrics.csv", metadata={"help": "Name of the file.", "pattern": r"^[\w.-]+$"})
    every: int = field(default=1, metadata={"help": "Write every so many steps."})


class Writer:
    """Rows of attempt, step, name and value."""

    def __init__(self, options: Options, run: ExportedRun) -> None:
        self._every, self._attempt = options.every, run.attempt
        self._stream = (run.folder / options.path).open("a", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.writer(self._stream)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        if step % self._every == 0:
            self.evaluation(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of an evaluation."""
        self._rows.writerows((self._attempt, step, name, value) for name, value in values.items())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


CSV = Exporter(open=Writer, options=Options, help="Write the figures into a CSV file in the run's folder.")
