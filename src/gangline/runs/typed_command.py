"""The command that started a run, as it was typed, with the text of its job file; for whoever repeats it."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedCommand(Record):
    """typed.json of a run that `gangline train` started from a file."""

    words: tuple[str, ...]
    folder: str
    """In which it was typed."""
    job_file: str
    job_text: str
    """Of the file at that time."""
    gangline: str
    """The version."""

    @staticmethod
    def of(layout: RunLayout) -> TypedCommand | None:
        """The command of a run; None where it is not recorded, as of a run by an older version or of a sweep."""
        return load_if_there(layout.typed, TypedCommand)
