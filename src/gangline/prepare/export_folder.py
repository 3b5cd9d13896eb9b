"""A new folder with what `prepare` would do, as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gangline.errors import UsageError
from gangline.runs.files import write_atomic

STDOUT = Path("-")
"""Stands for stdout where a folder is expected."""


def require_new_folder(folder: Path) -> None:
    """Raise UsageError for a folder that has something in it: hosts may have changed since it was written."""
    if folder == STDOUT:
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there already",
            seen="expected a name that is free, or an empty folder: nothing in it is replaced",
            fix="name another folder, or remove that one",
        )


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> None:
    """Write the files below the folder, for the user alone: they say much of the hosts."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
