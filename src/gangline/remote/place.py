"""A copy of a file or folder on this computer, in place whole or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from gangline.errors import UsageError
from gangline.remote.transport import Progress
from gangline.runs.files import sync_folder

COPY_BYTES = 1 << 20


def place_copy(source: Path, target: Path, *, on_progress: Progress | None = None) -> None:
    """Copy so that `target` is whole, or as it was before; nothing happens if both are the same place.

    As `Transport.push` says: for the owner alone, links are followed inside `source` only. Raises FileNotFoundError.
    """
    if target.exists() and source.samefile(target):
        return
    root = source.resolve(strict=True)
    copier = _Copier(root, on_progress)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        copier.copy(root, fresh)
        if target.is_dir():
            target.rename(old)  # a folder cannot be renamed onto a folder that is not empty
        fresh.rename(target)
        sync_folder(target.parent)
    finally:
        for leftover in (fresh, old):
            _remove(leftover)


class _Copier:
    """The copy of one tree."""

    def __init__(self, root: Path, on_progress: Progress | None) -> None:
        self._root = root
        self._on_progress = on_progress
        self._total_bytes = sum(path.stat().st_size for path in _files(root)) if on_progress else 0
        self._done_bytes = 0

    def copy(self, source: Path, target: Path) -> None:
        """Copy one file, or a folder with what is in it."""
        real = source.resolve(strict=True)
        if not real.is_relative_to(self._root):
            raise UsageError(
                f"{source} is a link that leads out of {self._root}",
                seen=f"it leads to {real}",
                fix="it may lead to a key or a password: put a copy in its place, or copy what it leads to",
            )
        if real.is_dir():
            target.mkdir(mode=0o700)
            for child in sorted(real.iterdir()):
                self.copy(child, target / child.name)
            sync_folder(target)
        elif real.is_file():
            self._copy_file(real, target)
        else:
            raise UsageError(f"{source} is neither a file nor a folder", fix="it cannot be copied: take it away")

    def _copy_file(self, source: Path, target: Path) -> None:
        with source.open("rb") as reader, target.open("xb") as writer:
            while piece := reader.read(COPY_BYTES):
                writer.write(piece)
                self._done_bytes += len(piece)
                if self._on_progress:
                    self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
            writer.flush()
            os.fsync(writer.fileno())
        target.chmod(0o700 if source.stat().st_mode & stat.S_IXUSR else 0o600)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else [root]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
