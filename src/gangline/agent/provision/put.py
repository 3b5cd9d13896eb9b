"""`place`: what was brought to this host, put where it belongs, if it is what it should be. JSON on stdin and stdout.

Request: {"target": PATH, "tree": HASH, "exact": false, "archive": PATH} or {..., "folder": PATH}
Answer:  {"kind": "result", "placed": true or false}; where false, before it what was found, as `digests` says it

archive: a tar file, unpacked beside the target and then removed. folder: a folder (or a file) on the target's disk that
becomes the target. Either is hashed as `digests` does, and takes the target's place only if its hash is `tree`.

An archive is taken for hostile: nothing of it is written outside the new folder, which nobody else knows yet. Members
may be files, folders and links that stay inside; links are made last, so that no member is written through one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterable, List, Tuple

from gangline.agent.host_files import read_record, sync, write_whole
from gangline.agent.provision.digests import (
    Cache,
    DigestMeter,
    Marks,
    hash_all,
    look,
    mark_of,
    say_files,
    tree_hash,
)
from gangline.agent.provision.tree_stream import remove
from gangline.agent.verbs import VerbFailed

PIECE_BYTES = 1 << 20
MEMBERS_LIMIT = 200_000
TRIES = 20


class Refused(Exception):
    """An archive or a project that is not taken; the text says why."""


def place(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    target = Path(request["target"])
    try:
        marks = (_place_archive if "archive" in request else _place_folder)(request, target)
    except (Refused, tarfile.TarError, OSError) as error:
        raise VerbFailed("{}: {}".format(target, error)) from error
    placed = tree_hash(marks) == request["tree"]
    if not placed:
        say_files(str(target), marks)
    return {"kind": "result", "placed": placed}


def _place_archive(request: Dict[str, Any], target: Path) -> Marks:
    archive = Path(request["archive"])
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = _beside(target, "new")
    fresh.mkdir(mode=0o700)
    try:
        unpack(archive, fresh)
        marks = _marks(fresh, request)
        if tree_hash(marks) == request["tree"]:
            _take_place(fresh, target)
        return marks
    finally:
        remove(os.fsencode(fresh))
        with contextlib.suppress(FileNotFoundError):
            archive.unlink()


def _place_folder(request: Dict[str, Any], target: Path) -> Marks:
    folder = Path(request["folder"])
    marks = _marks(folder, request)
    if tree_hash(marks) == request["tree"]:
        _take_place(folder, target)
    else:
        remove(os.fsencode(folder))  # a second try must not go on from what is wrong
    return marks


def _marks(path: Path, request: Dict[str, Any]) -> Marks:
    files, _ = look(path, exact=bool(request.get("exact")), skip=frozenset())
    meter = DigestMeter()
    meter.total_bytes = sum(size for _, _, size in files)
    return hash_all(files, exact=bool(request.get("exact")), cache=Cache(None), meter=meter)


def _take_place(fresh: Path, target: Path) -> None:
    """Rename; what was there before goes. A folder cannot be renamed onto one that is not empty."""
    old = _beside(target, "old")
    for _ in range(TRIES):
        try:
            fresh.rename(target)
            break
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}:
                raise
        with contextlib.suppress(FileNotFoundError):  # somebody else puts the same there, at the same time
            target.rename(old)
            remove(os.fsencode(old))
    else:
        raise OSError(errno.EBUSY, "others keep putting something in its place", str(target))
    sync(target.parent)


def unpack(archive: Path, folder: Path) -> None:
    """Write the members of a tar file into a folder that is new and empty; raises Refused, TarError or OSError."""
    links: List[Tuple[PurePosixPath, str]] = []
    seen = 0
    with archive.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        for member in tar:
            seen += 1
            if seen > MEMBERS_LIMIT:
                raise Refused("more than {} members".format(MEMBERS_LIMIT))
            name = _inside(member.name)
            if member.isdir():
                _make_folders(folder, name)
            elif member.isreg():
                _make_folders(folder, name.parent)
                _write_file(tar, member, folder / str(name))
            elif member.issym():
                links.append((name, member.linkname))
            else:
                raise Refused("{!r} is neither a file, a folder nor a link".format(member.name))
    for name, leads_to in links:
        _make_link(folder, name, leads_to)
    for name, _ in links:
        _refuse_outside(folder.resolve(), folder / str(name))


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise Refused("the name {!r} leads out of the folder".format(name))
    return path


def _make_folders(folder: Path, name: PurePosixPath) -> None:
    """All folders on the way, each made by us: no link is ever followed."""
    here = folder
    for part in name.parts:
        here = here / part
        with contextlib.suppress(FileExistsError):
            here.mkdir(mode=0o700)
        if not stat.S_ISDIR(here.lstat().st_mode):
            raise Refused("{!r} is below something that is no folder".format(str(name)))


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(str(path), flags, 0o700 if member.mode & 0o100 else 0o600)
    with source, os.fdopen(descriptor, "wb") as writer:
        shutil.copyfileobj(source, writer, PIECE_BYTES)


def _make_link(folder: Path, name: PurePosixPath, leads_to: str) -> None:
    if PurePosixPath(leads_to).is_absolute():
        raise Refused("the link {!r} leads out of the folder".format(str(name)))
    _make_folders(folder, name.parent)
    (folder / str(name)).symlink_to(leads_to)


def _refuse_outside(folder: Path, link: Path) -> None:
    """Only once all links are there: one may lead out by way of another."""
    try:
        end = link.resolve()
    except (OSError, RuntimeError):  # it leads in a circle
        end = Path("/")
    if folder != end and folder not in end.parents:
        raise Refused("the link {!r} leads out of the folder".format(link.name))


def _beside(target: Path, word: str) -> Path:
    return target.with_name(".{}.{}.{}".format(target.name, os.getpid(), word))


# `lay`: the working folder of one run, filled from a project that was brought to this host. JSON on stdin and
# stdout.


def lay_project(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    source, target = Path(request["source"]), Path(request["target"])
    marks: Dict[str, str] = request["marks"]
    try:
        for name in marks:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise Refused("the name {!r} leads out of the folder".format(name))
        return {"kind": "result", **lay(source, target, marks)}
    except (Refused, OSError) as error:
        raise VerbFailed("{}: {}".format(target, error)) from error


def lay(source: Path, target: Path, marks: Dict[str, str]) -> Dict[str, object]:
    """Fill the target; the answer."""
    note = target.with_name(target.name + ".json")
    fresh = not target.exists()
    laid = sorted(marks)
    removed: List[str] = []
    kept: List[str] = []
    if fresh:
        _copy_whole(source, target, marks)
    else:
        before = read_record(note)
        laid = sorted(name for name, mark in marks.items() if before.get(name) != mark)
        for name in laid:
            _copy(source, target, name, marks[name])
        removed, kept = _take_away(target, {name: mark for name, mark in before.items() if name not in marks})
    write_whole(note, json.dumps(marks).encode())  # last: who is interrupted does all of it again
    return {"fresh": fresh, "laid": laid, "removed": removed, "kept": kept}


def _copy_whole(source: Path, target: Path, marks: Dict[str, str]) -> None:
    fresh = _beside(target, "new")
    fresh.mkdir(mode=0o700, parents=True)
    try:
        for name, mark in marks.items():
            _copy(source, fresh, name, mark)
        fresh.rename(target)
    finally:
        shutil.rmtree(str(fresh), ignore_errors=True)


def _copy(source: Path, target: Path, name: str, mark: str) -> None:
    """One file or link, whole or not at all."""
    path = target / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = _beside(path, "new")
    try:
        if (source / name).is_symlink():
            fresh.symlink_to(os.readlink(str(source / name)))  # noqa: PTH115  (Path.readlink came with 3.9)
        else:
            shutil.copyfile(str(source / name), str(fresh))
            fresh.chmod(0o700 if (source / name).stat().st_mode & 0o100 else 0o600)
        if _mark(fresh) != mark:
            raise Refused("{} is not what was brought".format(source / name))
        fresh.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()


def _take_away(target: Path, gone: Dict[str, str]) -> Tuple[List[str], List[str]]:
    """Remove what is as it was laid; names that were removed, and those that were not."""
    there: Iterable[str] = [name for name in sorted(gone) if os.path.lexists(str(target / name))]
    removed = [name for name in there if _mark(target / name) == gone[name]]
    for name in removed:
        (target / name).unlink()
    return removed, [name for name in there if name not in removed]


def _mark(path: Path) -> str:
    """See `gangline.agent.provision.digests`; "" for what is neither file nor link."""
    if path.is_dir() and not path.is_symlink():
        return ""
    return mark_of(path, exact=True, cache=Cache(None), meter=DigestMeter())[1]
