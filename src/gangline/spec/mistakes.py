"""Mistakes in what the user wrote: where, what was seen, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gangline.errors import SpecError

KeyPath = tuple[str | int, ...]
"""Where a value stands in a file: ("hosts", 0, "name")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a file, or an override on the command line."""

    source: str
    """The file as the user named it, or "command line: key=value"."""
    line: int = 0
    """From 1; 0: the whole file, or the command line."""
    column: int = 0
    override: int = -1
    """Which override of the command line this is; -1: not the command line."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts a file from top to bottom, then the command line from left to right."""
        return (self.override, self.line, self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is off."""

    position: Position
    key: str
    """Dotted key, or "" where the file as a whole is meant."""
    seen: str
    expected: str
    fix: str

    @property
    def what(self) -> str:
        """Where it stands: "job.yaml:3:8  optimizer.learning_rate"."""
        if not self.key or self.position.source.startswith(f"command line: {self.key}="):
            return str(self.position)
        return f"{self.position}  {self.key}"

    @property
    def contrast(self) -> str:
        """What was seen and what was expected, in one row."""
        return f"{self.seen}; expected {self.expected}" if self.expected else self.seen


@dataclass(slots=True)
class Mistakes:
    """Everything that is off in one file and the overrides on it."""

    source: str
    found: list[Mistake] = field(default_factory=list)

    def raise_if_any(self) -> None:
        """Raise one SpecError with all mistakes, in the order in which they stand in the file."""
        if not self.found:
            return
        ordered = sorted(dict.fromkeys(self.found), key=lambda mistake: mistake.position.order)
        if len(ordered) == 1:
            only = ordered[0]
            raise SpecError(only.what, seen=only.contrast, fix=only.fix)
        report = [f"{len(ordered)} mistakes in {self.source}"]
        report += [str(SpecError(mistake.what, seen=mistake.contrast, fix=mistake.fix)) for mistake in ordered]
        raise SpecError("\n\n".join(report))


def dotted(path: KeyPath) -> str:
    """A key as the user reads it: ("hosts", 0, "name") -> "hosts.0.name"."""
    return ".".join(printable(str(part)) for part in path)


def printable(text: str, *, limit: int = 80) -> str:
    """Foreign text made safe for a terminal: no control characters, no more than `limit` characters."""
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def quote(text: str) -> str:
    """Foreign text in double quotes, safe for a terminal."""
    return f'"{printable(text)}"'


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def listed(names: Sequence[str], *, limit: int = 8) -> str:
    """Names in a row, the first few of many."""
    shown = ", ".join(printable(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
