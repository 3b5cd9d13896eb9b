"""Many small files in one: a tar file that is the same for the same content, and the tree that comes out of it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import GanglineError, RunFailed, UsageError
from gangline.runs.manifest import digest_of
from gangline.sync.ask import ask_agent
from gangline.sync.tell import shown
from gangline.sync.trees import Mark, Spot, Tree, differing, tree_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar file on this computer, and what it holds."""

    path: Path
    tree: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The content of one file."""

    data: bytes
    is_program: bool

    @property
    def mark(self) -> Mark:
        """As the agent says it where programs count as programs."""
        return len(self.data), digest_of(self.data) + (":x" if self.is_program else "")


def write_archive(path: Path, files: Mapping[str, Path | Plain], links: Mapping[str, str] | None = None) -> Archive:
    """Pack files (name -> where it lies here, or what it holds) and links (name -> what it says).

    Every file is read once, for the tar file and for its hash, so that both are about the same bytes. No time, owner
    or mode goes in but whether a file is a program. Raises UsageError for a file that cannot be read.
    """
    leads_to = dict(links or {})
    marks: dict[str, Mark] = {}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted([*files, *leads_to]):
            entry = tarfile.TarInfo(name)
            if name in leads_to:
                entry.type, entry.linkname = tarfile.SYMTYPE, leads_to[name]
                tar.addfile(entry)
                marks[name] = (0, f"link:{leads_to[name]}")
                continue
            file = files[name]
            plain = file if isinstance(file, Plain) else read_plain(file)
            entry.size, entry.mode = len(plain.data), 0o700 if plain.is_program else 0o600
            tar.addfile(entry, io.BytesIO(plain.data))
            marks[name] = plain.mark
    return Archive(path=path, tree=tree_of(marks))


def read_plain(path: Path) -> Plain:
    """A file that is no link, pipe or device; raises UsageError for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(22, "it is no file")
            return Plain(data=stream.read(), is_program=bool(mode & 0o100))
    except OSError as error:
        raise UsageError(
            f"{shown(str(path))} cannot be read", seen=error.strerror or str(error), fix="correct that, or take it away"
        ) from error


def place_archive(archive: Archive, targets: Sequence[Spot], *, kind: type[GanglineError] = RunFailed) -> None:
    """Have it unpacked at every target, all at the same time; raises `kind` where it does not come out whole."""
    if not targets:
        return
    with ThreadPoolExecutor(max_workers=min(16, len(targets))) as pool:
        list(pool.map(lambda target: _place(archive, target, kind), targets))


def _place(archive: Archive, target: Spot, kind: type[GanglineError]) -> None:
    incoming = PurePath(target.host.workdir) / "incoming" / f"{archive.tree.hash}-{uuid.uuid4().hex}.tar"
    target.transport.push(archive.path, incoming)
    found: dict[str, Mark] = {}

    def on_progress(record: dict[str, Any]) -> None:
        found.update(record.get("files", {}))

    request = {"target": str(target.path), "tree": archive.tree.hash, "exact": True, "archive": str(incoming)}
    if ask_agent(target.transport, "place", request, on_progress=on_progress)["placed"]:
        return
    names = ", ".join(map(shown, differing(archive.tree.files, found)[:5]))
    raise kind(
        f"{target.host.name}: {target.path} did not come out whole",
        seen=f"different by hash: {names}",
        fix="look at the disk of that host: free space, errors",
    )


def scratch_folder(home: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A private folder for something on its way, in `home` if there is one."""
    if home is not None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".on-its-way-", dir=home)
