"""The journal of changes on this host: an intent on the disk before each change, a record after it.

A line of journal.jsonl is one of

    {"kind": "begin", "txn", "step", "who", "by", "when", "revert_s"}
    {"kind": "intent", "txn", "seq", "change", "before", "after", "folders"}
    {"kind": "done", "txn", "seq", "after"}
    {"kind": "complete", "txn"}                                       every change of it was made
    {"kind": "void", "txn", "seq"}                                    it was not made, or was taken back at once
    {"kind": "undoing", "txn"}                                        every change of it is going to be taken back
    {"kind": "undone", "txn", "seq", "when"}
    {"kind": "confirmed" or "expired", "txn", "when"}                 of a transaction with a timer

Each line is on the disk before the work goes on. A line that a crash cut off stands for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from gangline.agent.host_files import sync
from gangline.agent.verbs import VerbFailed

Record = Dict[str, Any]
ROOT_FOLDER = "/var/lib/gangline/prepare"
USER_FOLDER = ".local/state/gangline/prepare"
"""Below the home folder: for changes that need no root."""
LOCK_S = 90.0
PAUSE_S = 0.05


class Transaction:
    """The changes of one step that were made together."""

    def __init__(self, begin: Record) -> None:
        self.txn: str = begin["txn"]
        self.step: str = begin["step"]
        self.begin = begin
        self.entries: Dict[int, Record] = {}
        """By number: `change`, `before`, `after`, `folders` that it makes; `state`: intent, done, void or undone."""
        self.is_complete = False
        self.is_undoing = False
        self.timer = "confirmed" if begin["revert_s"] is None else "waiting"
        """waiting, confirmed, or expired."""

    @property
    def is_open(self) -> bool:
        """Whether a change of it stands, or may stand."""
        return any(entry["state"] in {"intent", "done"} for entry in self.entries.values())

    def made(self) -> List[Record]:
        """Entries whose change stands, the last one first."""
        return [entry for _, entry in sorted(self.entries.items(), reverse=True) if entry["state"] == "done"]

    def take(self, line: Record) -> None:
        """Read the next line about it."""
        kind = line["kind"]
        if kind == "intent":
            self.entries[line["seq"]] = {**line, "state": "intent"}
        elif kind == "done":
            self.entries[line["seq"]].update(state="done", after=line["after"])
        elif kind in {"void", "undone"}:
            self.entries[line["seq"]]["state"] = kind
        elif kind in {"confirmed", "expired"}:
            self.timer = kind
        else:
            self.is_complete = self.is_complete or kind == "complete"
            self.is_undoing = self.is_undoing or kind == "undoing"


class Journal:
    """The journal in a folder. Every use but `transactions` of a test needs `locked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.jsonl"

    @contextlib.contextmanager
    def locked(self, *, wait_s: float = LOCK_S) -> Iterator[None]:
        """Nobody else changes this host by gangline meanwhile; raises VerbFailed, and OSError for a full disk."""
        self._make_folder()
        descriptor = os.open(str(self.folder / "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, wait_s)
            self._cut_torn_line()
            yield
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(str(self.folder))
        if found.st_uid != os.geteuid() or self.folder.is_symlink() or found.st_mode & 0o022:
            raise VerbFailed(
                "{} cannot be trusted with the journal".format(self.folder),
                "expected a folder that only its owner, user {}, may write to".format(os.geteuid()),
                "look at who made it: ls -ld",
            )

    def _cut_torn_line(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open("r+b") as stream:
            data = stream.read()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                stream.truncate(whole)
                os.fsync(stream.fileno())

    def append(self, line: Record) -> None:
        """Write a line down; it is on the disk when this returns. Raises OSError."""
        is_new = not self.path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(str(self.path), flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            data = json.dumps(line).encode() + b"\n"
            try:
                if os.write(descriptor, data) != len(data):
                    raise OSError(28, "No space left on device")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if is_new:
            sync(self.folder)

    def transactions(self) -> List[Transaction]:
        """Everything that was done, in order. Raises VerbFailed for a journal that somebody damaged."""
        found: Dict[str, Transaction] = {}
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                record = json.loads(line)
                if record["kind"] == "begin":
                    found[record["txn"]] = Transaction(record)
                else:
                    found[record["txn"]].take(record)
            except (ValueError, LookupError, TypeError):
                raise VerbFailed(
                    "the journal of changes is damaged",
                    "line {} of {} cannot be read".format(number, self.path),
                    "nothing was changed; move it away only if you know that nothing has to be undone",
                ) from None
        return list(found.values())


def _lock(descriptor: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise VerbFailed(
                "another gangline prepare works on this host",
                "its lock was held for {:.0f} s".format(wait_s),
                "wait for it, then try again",
            )
        time.sleep(PAUSE_S)


def try_lock(descriptor: int) -> bool:
    """Take a lock if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def now() -> str:
    """The time of a record."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def journal_folder(scope: str, *, root: Path, home: Optional[Path] = None) -> Path:
    """Where the journal of a scope lies: root's changes, or those of the user's own files."""
    if scope == "root":
        return root / ROOT_FOLDER.lstrip("/")
    return (home or Path.home()) / USER_FOLDER
