"""`digests`: what files and folders hold, by hash. One JSON request on stdin, JSON lines on stdout.

Request:  {"folders": [PATH, ...]}, and perhaps "exact": true, "skip": [NAME, ...], "names": [FILE, ...], "cache": PATH
Lines:    {"kind": "progress", "done_bytes", "total_bytes"} at most twice a second,
          {"kind": "files", "folder": PATH, "files": NAME -> [bytes, mark]}, a thousand names in a line, and last
          {"kind": "result", "folders": {PATH: {"is", "tree", "num_files", "num_bytes", "odd", "free_bytes"}}}

is: "file", "folder" or null (nothing there); a file itself has the name "". mark: blake2b-256 of the content in
hexadecimal. tree: one hash over all names and marks. odd: what has no content that can be said, and why. free_bytes: on
the disk where it is, or would be; null if nobody can say. A symbolic link counts as what it leads to.
exact: a link counts as itself ("link:TARGET"), and a mark ends in ":x" for a program. skip: files and folders of these
names are passed over. names: of each folder only these files count. cache: hashes are remembered there, by path, size,
times and inode.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence, Tuple

from gangline.agent.host_facts.paths import nearest
from gangline.agent.host_files import read_record, write_whole
from gangline.agent.verbs import VerbFailed, write_line

PIECE_BYTES = 1 << 20
INTERVAL_S = 0.5
NUM_THREADS = 4
"""blake2b hashes about 1 GB/s on one core; disks of today read faster."""
NAMES_IN_LINE = 1000
"""A line has to stay below a mebibyte."""
SETTLED_NS = 2_000_000_000
"""A file that changed this recently may change again without a new time of change."""

Marks = Dict[str, Tuple[int, str]]
"""Name -> (bytes, mark)."""
FoundFiles = Tuple[List[Tuple[str, Path, int]], Dict[str, str]]
"""(name, path, bytes) of every file, and what is odd by name."""


class DigestMeter:
    """Says how many bytes are done, at most twice a second; several threads may count."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._done_bytes = 0
        self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done_bytes += num_bytes
            now = time.monotonic()
            if now - self._said_s >= INTERVAL_S:
                self._said_s = now
                write_line({"kind": "progress", "done_bytes": self._done_bytes, "total_bytes": self.total_bytes})


class Cache:
    """Remembered hashes in a JSON file; None: nothing is remembered."""

    def __init__(self, path: Optional[str]) -> None:
        self._path = Path(path) if path else None
        self._entries = read_record(self._path) if self._path else {}
        self._fresh: Dict[str, List[Any]] = {}

    def get(self, path: Path, status: os.stat_result) -> Optional[str]:
        """The remembered hash of a file that has not changed."""
        known = self._entries.get(str(path))
        return str(known[-1]) if known and known[:-1] == _stamp(status) else None

    def put(self, path: Path, status: os.stat_result, digest: str) -> None:
        """Remember a hash."""
        if self._path and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS:
            self._fresh[str(path)] = [*_stamp(status), digest]

    def save(self) -> None:
        """Write what was learned; entries of files that are gone go with it."""
        if not self._path or not self._fresh:
            return
        entries = {**read_record(self._path), **self._fresh}
        kept = {path: entry for path, entry in entries.items() if Path(path).exists()}
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(kept).encode())


def digests(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    try:
        return {"kind": "result", "folders": _digests(request)}
    except OSError as error:
        raise VerbFailed("{} cannot be read: {}".format(error.filename, error.strerror)) from error


def _digests(request: Dict[str, Any]) -> Dict[str, Any]:
    exact, skip = bool(request.get("exact")), frozenset(request.get("skip", ()))
    cache, meter = Cache(request.get("cache")), DigestMeter()
    names = request.get("names")
    found = {path: look(Path(path), exact=exact, skip=skip, names=names) for path in request["folders"]}
    meter.total_bytes = sum(size for files, _ in found.values() for _, _, size in files)
    answer = {}
    for path, (files, odd) in found.items():
        marks = hash_all(files, exact=exact, cache=cache, meter=meter)
        say_files(path, marks)
        answer[path] = _described(Path(path), marks, odd)
    cache.save()
    return answer


def _described(path: Path, marks: Marks, odd: Dict[str, str]) -> Dict[str, Any]:
    kind = "file" if path.is_file() else "folder" if path.is_dir() else None
    return {
        "is": kind,
        "tree": tree_hash(marks) if kind else None,
        "num_files": len(marks),
        "num_bytes": sum(size for size, _ in marks.values()),
        "odd": dict(sorted(odd.items())[:100]),
        "free_bytes": free_bytes(path),
    }


def free_bytes(path: Path) -> Optional[int]:
    """Room on the disk where a path is, or would be."""
    try:
        return shutil.disk_usage(nearest(str(path))).free
    except OSError:
        return None


def say_files(folder: str, marks: Marks) -> None:
    """All names and marks, in lines of a bearable length."""
    names = sorted(marks)
    for begin in range(0, len(names), NAMES_IN_LINE):
        piece = {name: marks[name] for name in names[begin : begin + NAMES_IN_LINE]}
        write_line({"kind": "files", "folder": folder, "files": piece})


def tree_hash(marks: Marks) -> str:
    """One hash (blake2b-256, hexadecimal) over names and marks: [[name, mark], ...], sorted, as JSON."""
    rows = sorted([name, mark] for name, (_, mark) in marks.items())
    return hashlib.blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=32).hexdigest()


def look(path: Path, *, exact: bool, skip: FrozenSet[str], names: Optional[Sequence[str]] = None) -> FoundFiles:
    """All files of a folder, or those of `names` that are there; the file itself has the name ""."""
    if not path.is_dir():
        return ([("", path, path.stat().st_size)], {}) if path.is_file() else ([], {})
    files: List[Tuple[str, Path, int]] = []
    odd: Dict[str, str] = {}
    if names is None:
        entries = _walk(path, exact=exact, skip=skip, above=frozenset(), odd=odd)
    else:
        entries = (path / name for name in names if (path / name).exists() or (path / name).is_symlink())
    for entry in entries:
        _sort_in(entry, entry.relative_to(path).as_posix(), exact, files, odd)
    return files, odd


def _sort_in(entry: Path, name: str, exact: bool, files: List[Tuple[str, Path, int]], odd: Dict[str, str]) -> None:
    try:
        status = entry.lstat() if exact else entry.stat()
    except OSError as error:
        odd[name] = error.strerror or str(error)
        return
    if stat.S_ISREG(status.st_mode):
        files.append((name, entry, status.st_size))
    elif stat.S_ISLNK(status.st_mode):
        files.append((name, entry, 0))
    else:
        odd[name] = "neither a file, a folder nor a link"


def _walk(
    folder: Path, *, exact: bool, skip: FrozenSet[str], above: FrozenSet[Tuple[int, int]], odd: Dict[str, str]
) -> Iterator[Path]:
    """All that is no folder. A link that leads back up is odd."""
    try:
        status = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        odd[str(folder)] = error.strerror or str(error)
        return
    here = (status.st_dev, status.st_ino)
    if here in above:
        odd[str(folder)] = "a link that leads to a folder above it"
        return
    for entry in entries:
        if entry.name in skip:
            continue
        if entry.is_dir() and not (exact and entry.is_symlink()):
            yield from _walk(entry, exact=exact, skip=skip, above=above | {here}, odd=odd)
        else:
            yield entry


def hash_all(files: Iterable[Tuple[str, Path, int]], *, exact: bool, cache: Cache, meter: DigestMeter) -> Marks:
    """The mark of every file; raises OSError."""

    def mark(found: Tuple[str, Path, int]) -> Tuple[str, Tuple[int, str]]:
        name, path, _ = found
        return name, mark_of(path, exact=exact, cache=cache, meter=meter)

    with ThreadPoolExecutor(max_workers=min(NUM_THREADS, os.cpu_count() or 1)) as pool:
        return dict(pool.map(mark, files))


def mark_of(path: Path, *, exact: bool, cache: Cache, meter: DigestMeter) -> Tuple[int, str]:
    """Bytes and mark of one file."""
    if exact and path.is_symlink():
        return 0, "link:" + os.readlink(str(path))  # noqa: PTH115  (Path.readlink came with 3.9)
    status = path.stat()
    digest = cache.get(path, status)
    if digest is None:
        digest = file_digest(path, meter)
        cache.put(path, status, digest)
    else:
        meter.add(status.st_size)
    return status.st_size, digest + (":x" if exact and status.st_mode & 0o100 else "")


def file_digest(path: Path, meter: DigestMeter) -> str:
    """blake2b-256 of a file's content in hexadecimal, read in pieces."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while True:
            piece = stream.read(PIECE_BYTES)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)
            meter.add(len(piece))


def _stamp(status: os.stat_result) -> List[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
