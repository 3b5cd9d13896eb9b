"""Paths that the user wrote: where they lead, and what was probably meant where they lead nowhere."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from gangline.spec.mistakes import listed, nearest, printable, quote

_GLOB = frozenset("*?[")


def absolute(text: str, folder: Path) -> Path:
    """`~` and relative paths written out, links kept (the python of a virtual environment is one)."""
    return Path(os.path.abspath(folder / Path(text).expanduser()))  # noqa: PTH100  Path.resolve follows links


def find_files(text: str, folder: Path) -> list[Path]:
    """The files that a path or a glob (`**` for any depth) stands for, sorted; [] where there are none."""
    path = absolute(text, folder)
    if path.is_file() or not _GLOB & set(text):
        return [path] if path.is_file() else []
    matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  Path.glob knows no absolute patterns
    return sorted(match for match in map(Path, matches) if match.is_file())


def what_is_there(text: str, folder: Path) -> str:
    """What stands in the way of reading `text`: "a folder", "no file of this name in data"."""
    path = absolute(text, folder)
    if path.is_dir():
        return f"{quote(text)} is a folder"
    kind = "no file matches" if _GLOB & set(text) else "there is no file"
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
