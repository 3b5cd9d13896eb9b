"""The guard: owns what was started on one host for one attempt, and leaves nothing behind.

    python -m gangline.agent.guard         < HostRequest as JSON: start; returns once guard.json is written
    python -m gangline.agent.guard reap    < HostRequest as JSON: end what a guard that is gone has left

It is detached (own session, no terminal), so that closing a laptop changes nothing. It ends ranks only on an order
(order.json in its folder) or once the command it started has ended; then every descendant is ended, found by parentage
(the guard is their subreaper) and by the tag in their environment, never by name.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional

from gangline.agent import processes
from gangline.agent.ranks import Ranks, reported_exits, tail

TAG = "GANGLINE_PART"
"""Environment variable with the guard's folder, by which what it started is found after it is gone."""
TICK_S = 0.1
LEAVE_S = 10.0
"""How long torchrun may take to leave after SIGTERM, before everything is killed."""


DISK_S = 60.0
"""How long a last word waits for room on the disk."""
RESERVE = "reserve"
"""A file that keeps room for the guard's last words; it goes when they are written."""
RESERVE_BYTES = 64 << 10


class StartFailed(Exception):
    """The command could not be started; the text is for stderr."""


class Guard:
    """One host's part of one attempt."""

    def __init__(self, request: Dict[str, Any]) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.console = self.folder / "console.log"
        self.ranks = Ranks(Path(request["rank_files"]), set(request.get("ranks", ())))
        self.order: Optional[str] = None
        self.command: Optional[processes.Process] = None
        self.exits: Dict[int, int] = {}
        """Exit codes of our own children: the command, and orphans that came back to us."""
        self._deadline = float("inf")
        self._signs: Any = None
        """What was last seen of the ranks' progress while they are to leave."""
        self._asked_command = False

    def start(self) -> None:
        """Start the command and write guard.json; raises StartFailed."""
        processes.become_subreaper()
        env = {**os.environ, **self.request["env"], TAG: self.request["folder"]}
        try:
            with self.console.open("ab") as console:
                child = subprocess.Popen(
                    list(self.request["argv"]),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"cannot start {self.request['argv'][0]}: {error.strerror}") from error
        self.command = processes.find(child.pid)
        child.returncode = 0  # waitpid(-1) takes its exit code; Popen shall not wait for it
        me = processes.find(os.getpid())
        assert me is not None
        assert self.command is not None
        record = {"pid": me.pid, "start_ticks": me.start_ticks, "started": time.time()}
        child_record = {"torchrun_pid": child.pid, "torchrun_start_ticks": self.command.start_ticks}
        self._write("guard.json", dict(record, host=self.request["host"], **child_record))
        with contextlib.suppress(OSError):  # what is full already has nothing to keep
            (self.folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))

    def watch(self) -> None:
        """Follow until the command has ended and nothing of it is left; write exit.json."""
        wake = _wake_on(signal.SIGCHLD)
        assert self.command is not None
        while self.command.pid not in self.exits and self.order != "kill":
            select.select([wake], [], [], TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            self.exits.update(processes.reap())
            if self.ranks.scan(ordered=self.order is not None):
                with contextlib.suppress(OSError):  # a full disk: exit.json will tell
                    self._write("failures.json", self.ranks.failures({}))
            self._obey()
        self._finish()

    def _obey(self) -> None:
        """Take a step towards what was ordered: ranks first, then torchrun, then everything."""
        self._read_order()
        if self.order != "stop":
            return
        self.ranks.terminate(signal.SIGTERM)
        if not self._asked_command:
            self._extend()
        if time.monotonic() < self._deadline:
            return
        if self._asked_command:
            self.order = "kill"
            return
        assert self.command is not None
        processes.send(self.command, signal.SIGTERM)
        self._asked_command = True
        self._deadline = time.monotonic() + LEAVE_S

    def _extend(self) -> None:
        """The grace begins anew with every sign of progress: a long step or a large save is no hang."""
        signs = self.ranks.signs()
        if signs != self._signs:
            self._signs = signs
            self._deadline = time.monotonic() + self._grace_s()

    def _grace_s(self) -> float:
        return float(self.request.get("grace_s", 120.0))

    def _read_order(self) -> None:
        try:
            order = json.loads((self.folder / "order.json").read_bytes()).get("order")
        except (FileNotFoundError, ValueError, AttributeError):
            return
        if order == "kill" or (order == "stop" and self.order is None):
            self.take(order)

    def take(self, order: str) -> None:
        """Begin to carry out an order."""
        self.order = order
        if order == "stop":
            self._deadline = time.monotonic() + self._grace_s()

    def _finish(self) -> None:
        assert self.command is not None
        self.ranks.scan(ordered=self.order is not None)
        left = processes.end_all(lambda: _belongings(self.request["folder"]))
        self.exits.update(processes.reap())
        code = self.exits.get(self.command.pid, -signal.SIGKILL)
        failures = [] if code == 0 else self.ranks.failures({**self.exits, **reported_exits(self.console)})
        errors = [failure["error"] for failure in failures if failure["error"] is not None]
        record = {
            "returncode": code,
            "reason": self._reason(code),
            "left": left,
            "error": errors[0] if errors else None,
            "failures": failures,
            "console_tail": [] if code == 0 else tail(self.console),
            "ended": time.time(),
        }
        self._write_at_last("exit.json", record)

    def _write_at_last(self, name: str, value: Any) -> None:
        """Write, and try again while the disk is full: what filled it may just have been ended."""
        (self.folder / RESERVE).unlink(missing_ok=True)
        deadline = time.monotonic() + DISK_S
        while True:
            try:
                return self._write(name, value)
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _reason(self, code: int) -> str:
        """finished: by itself, well or badly. stopped: by order, in order. killed: by order. signalled: by others."""
        if self.order == "kill":
            return "killed"
        if self.order == "stop":
            return "killed" if self._asked_command else "stopped"
        return "signalled" if code < 0 else "finished"

    def _write(self, name: str, value: Any) -> None:
        path = self.folder / (name + ".tmp")
        with path.open("w", encoding="utf-8") as stream:
            json.dump(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
        path.replace(self.folder / name)


def main(argv: List[str]) -> int:
    """Entry point; the exit code tells whether the guard stands."""
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.read())
    if argv == ["reap"]:
        return _reap(request["folder"])
    Path(request["folder"]).mkdir(parents=True, exist_ok=True)
    lock = _lock(Path(request["folder"]))
    if lock is None:
        sys.stderr.write(f"{request['folder']}: this attempt was already started here\n")
        return 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _detach(request, writer)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    if said != "started":
        sys.stderr.write((said or f"the guard ended early, see {request['folder']}/guard.log") + "\n")
        return 1
    return 0


def _lock(folder: Path) -> Optional[int]:
    """The lock of this host and attempt, held until the guard ends; None if it was started before."""
    descriptor = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return None if (folder / "guard.json").exists() else descriptor


def _detach(request: Dict[str, Any], writer: int) -> None:
    """Fork again into an own session and never return; what happened goes to `writer`."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            _stand(request, writer)
        code = 0
    finally:
        os._exit(code)


def _stand(request: Dict[str, Any], writer: int) -> None:
    """Be the guard."""
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(Path(request["folder"]) / "guard.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = Guard(request)
    # The machine shuts down: save and leave, as if ordered.
    signal.signal(signal.SIGTERM, lambda *_: guard.take("stop") if guard.order is None else None)
    try:
        guard.start()
        os.write(writer, b"started")
        os.close(writer)
        guard.watch()
    except StartFailed as error:
        os.write(writer, str(error).encode())
    except BaseException:  # noqa: BLE001  (whatever it is, nothing may stay behind; the log keeps it)
        traceback.print_exc()
        sys.stderr.flush()
        processes.end_all(lambda: _belongings(request["folder"]))
    finally:
        os._exit(0)


def _wake_on(number: int) -> int:
    """A descriptor that becomes readable when the signal arrives."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)
    return reader


def _belongings(folder: str) -> List[processes.Process]:
    """Everything this guard, or an earlier one of this folder, has started and that still runs."""
    found = {process.pid: process for process in processes.tagged(f"{TAG}={folder}")}
    found.update({process.pid: process for process in processes.descendants(os.getpid())})
    return list(found.values())


def _reap(folder: str) -> int:
    """End what carries the folder's tag; exit code 1 if something is left."""
    left = processes.end_all(lambda: processes.tagged(f"{TAG}={folder}"))
    if left:
        sys.stderr.write(f"{folder}: {left} processes cannot be ended\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
