"""Mistakes in what the user wrote: where, what was seen, what was expected, what to do."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    """"" where `seen` says it already."""
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

    def add(self, position: Position, *, seen: str, fix: str, expected: str = "", key: str = "") -> None:
        """Record one; see `Mistake`."""
        self.found.append(Mistake(position=position, key=key, seen=seen, expected=expected, fix=fix))

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


# Paths that the user wrote: where they lead, and what was probably meant where they lead nowhere.


GLOB = frozenset("*?[")
"""What makes a path a pattern."""


def absolute(text: str, folder: Path) -> Path:
    """`~` and relative paths written out, links kept (the python of a virtual environment is one)."""
    return Path(os.path.abspath(folder / Path(text).expanduser()))  # noqa: PTH100  Path.resolve follows links


def find_files(text: str, folder: Path) -> list[Path]:
    """The files that a path or a glob (`**` for any depth) stands for, sorted; [] where there are none."""
    path = absolute(text, folder)
    if path.is_file() or not GLOB & set(text):
        return [path] if path.is_file() else []
    matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  Path.glob knows no absolute patterns
    return sorted(match for match in map(Path, matches) if match.is_file())


def what_is_there(text: str, folder: Path) -> str:
    """What stands in the way of reading `text`: "a folder", "no file of this name in data"."""
    path = absolute(text, folder)
    if path.is_dir():
        return f"{quote(text)} is a folder"
    kind = "no file matches" if GLOB & set(text) else "there is no file"
    return f"{kind} {quote(text)}"


def what_was_meant(text: str, folder: Path, *, folders: bool = False) -> str:
    """A suggestion: the nearest name beside a path that does not exist, or what is there at all.

    folders: a folder is looked for, not a file.
    """
    path = absolute(text, folder)
    if path.is_dir() and not folders:
        return f"name the files in it, such as {quote(text.rstrip('/') + '/*.jsonl')}; it holds {folder_content(path)}"
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    names = _names(missing.parent, folders=folders or missing != path)
    meant = nearest(missing.name, names)
    if meant:
        repaired = missing.with_name(meant) / path.relative_to(missing)
        return (
            f"did you mean {quote(_like(text, repaired if repaired.exists() else missing.with_name(meant), folder))}?"
        )
    return _holding(text, missing.parent, folder)


def _holding(text: str, holder: Path, folder: Path) -> str:
    """What a folder has to offer, and where a relative path would begin."""
    begin = "the current folder" if folder == Path.cwd() else "the folder of the file that names it"
    if holder == folder:
        return f"{begin} holds {folder_content(holder)}"
    told = "" if Path(text).expanduser().is_absolute() else f"; relative paths begin at {begin}"
    return f"the folder {printable(_like(text, holder, folder))} holds {folder_content(holder)}{told}"


def _like(text: str, path: Path, folder: Path) -> str:
    """A path in the user's manner: absolute where theirs was, else relative to the same folder."""
    if Path(text).expanduser().is_absolute():
        return str(path)
    shown = os.path.relpath(path, folder)
    return f"./{shown}" if text.startswith("./") and not shown.startswith(".") else shown


def _names(folder: Path, *, folders: bool) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() == folders)
    except OSError:
        return []


def folder_content(folder: Path) -> str:
    """The first names in a folder, for a message."""
    try:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if entry.name[0] != ".")
    except OSError:
        return "nothing that can be listed"
    return listed(names) if names else "nothing"
