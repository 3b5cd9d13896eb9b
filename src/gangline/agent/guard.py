"""The guard: owns what was started on one host for one attempt, and leaves nothing behind.

    guard          < {"request": HostRequest, "epoch": n, "secrets": {name: value}}: start; returns once it stands
    guard reap     < {"request": HostRequest}: end what a guard that is gone has left

It is detached (own session, no terminal), so that closing a laptop changes nothing. It ends ranks only on an order with
a valid epoch (gangline.agent.orders), once the command it started has ended, or if they have not joined in time; then
every descendant is ended, found by parentage (the guard is their subreaper) and by the tag in their environment, never
by name. Secrets go into the environment of the command and are written nowhere.

If it does not stand, it says why in JSON on stdout: {"what", "seen", "fix"}.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from gangline.agent import processes
from gangline.agent.detach import detach
from gangline.agent.leases import TAG, Leases, Taken, forget
from gangline.agent.orders import Orders
from gangline.agent.ranks import Ranks, reported_exits, tail
from gangline.agent.signs import Signs
from gangline.agent.silence import Silence
from gangline.agent.status import Status

TICK_S = 0.1
LEAVE_S = 10.0
"""How long torchrun may take to leave after SIGTERM, before everything is killed."""
DISK_S = 60.0
"""How long a last word waits for room on the disk."""
RESERVE = "reserve"
"""A file that keeps room for the guard's last words; it goes when they are written."""
RESERVE_BYTES = 64 << 10
SHIM = "rank_start.py"
"""What stands in front of the ranks of a program that is not ours; the request's command names it in our folder."""
OWN_PATH = "GANGLINE_OWN_PATH"
"""Set where Python's path was set for gangline's own sake: the command shall not see it."""


class StartFailed(Exception):
    """The guard does not stand; the text is what went wrong."""

    def __init__(self, what: str, *, seen: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.words = {"what": what, "seen": seen, "fix": fix}


class Guard:
    """One host's part of one attempt."""

    def __init__(self, request: Dict[str, Any], *, epoch: int, leases: Leases) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.console = self.folder / "console.log"
        self.ranks = Ranks(Path(request["rank_files"]), set(request.get("ranks", ())))
        self.order: Optional[str] = None
        self.exits: Dict[int, int] = {}
        """Exit codes of our own children: the command, and orphans that came back to us."""
        self._leases = leases
        self._orders = Orders(self.folder, epoch=epoch, complain=_log)
        self._signs = Signs(request, self.ranks)
        self._silence = Silence(request, self.ranks)
        self._failures: List[Dict[str, Any]] = []
        self._started = time.monotonic()
        self._deadline = float("inf")
        self._progress: Any = None
        """What was last seen of the ranks' progress while they are to leave."""
        self._asked_command = False
        self._is_late = False

    def start(self, secrets: Dict[str, str]) -> None:
        """Start the command, write guard.json and the first status; raises StartFailed."""
        processes.become_subreaper()
        child = self._start_command(secrets)
        command, me = processes.find(child.pid), processes.find(os.getpid())
        assert command is not None
        assert me is not None
        child.returncode = 0  # waitpid(-1) takes its exit code; Popen shall not wait for it
        self.command = command
        identity = {"pid": me.pid, "start_ticks": me.start_ticks}
        child_record = {"torchrun_pid": child.pid, "torchrun_start_ticks": command.start_ticks}
        self._status = Status(self.folder, identity)
        self._status.write(self._facts())
        self._write("guard.json", dict(identity, started=time.time(), host=self.request["host"], **child_record))
        with contextlib.suppress(OSError):  # what is full already has nothing to keep
            (self.folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))

    def _start_command(self, secrets: Dict[str, str]) -> subprocess.Popen[bytes]:
        env = {**_own_env(), **secrets, **self.request["env"], TAG: self.request["folder"]}
        if self.request.get("program") == "command":
            (self.folder / SHIM).write_bytes(pkgutil.get_data("gangline.agent", SHIM) or b"")
        try:
            with self.console.open("ab") as console:
                return subprocess.Popen(
                    list(self.request["argv"]),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=self.request.get("cwd") or self.folder,
                    start_new_session=True,
                    pass_fds=self._leases.descriptors,
                )
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else self.request["argv"][0]
            raise StartFailed("the guard did not start", seen=f"cannot start {name}: {error.strerror}") from error

    def watch(self) -> None:
        """Follow until the command has ended and nothing of it is left; write exit.json."""
        wake = _wake_on(signal.SIGCHLD)
        while self.command.pid not in self.exits and self.order != "kill":
            select.select([wake], [], [], TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            self.exits.update(processes.reap())
            if self.ranks.scan(ordered=self.order is not None):
                self._failures = self.ranks.failures({})
            self._obey()
            if self._status.is_due():
                self._signs.look(self.command)
                self._silence.look()
                self._expire()
            self._status.tell(self._facts())
        self._finish()

    def _facts(self) -> Dict[str, Any]:
        facts = {"epoch": self._orders.epoch, "order": self.order, "failures": self._failures}
        return dict(facts, start=self._signs.seen, silence=self._silence.seen, leases=self._leases.slots)

    def _obey(self) -> None:
        """Take a step towards what was ordered: ranks first, then torchrun, then everything."""
        order = self._orders.read()
        if order == "kill" or (order == "stop" and self.order is None):
            self.take(order)
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
        processes.send(self.command, signal.SIGTERM)
        self._asked_command = True
        self._deadline = time.monotonic() + LEAVE_S

    def _extend(self) -> None:
        """The grace begins anew with every sign of progress: a long step or a large save is no hang."""
        signs = self.ranks.signs(logs=self.request.get("program") == "command")
        if signs != self._progress:
            self._progress = signs
            self._deadline = time.monotonic() + self._grace_s()

    def _grace_s(self) -> float:
        return float(self.request.get("grace_s", 120.0))

    def _expire(self) -> None:
        """Nobody may be there to see it: ranks that do not join are ended by their guard, too."""
        limit_s = self.request.get("join_timeout_s")
        if limit_s is None or self._signs.joined or self.order is not None:
            return
        if time.monotonic() > self._started + float(limit_s):
            self._is_late = True
            self.take("kill")

    def take(self, order: str) -> None:
        """Begin to carry out an order."""
        self.order = order
        if order == "stop":
            self._deadline = time.monotonic() + self._grace_s()

    def _finish(self) -> None:
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
            "epoch": self._orders.epoch,
            "ended": time.time(),
        }
        if not left:
            self._leases.end()
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
        """finished: by itself, well or badly. stopped: by order, in order. killed: by order. signalled: by others.
        late: its ranks had not joined in time.
        """
        if self._is_late:
            return "late"
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
    asked = json.loads(sys.stdin.buffer.read())
    request = asked["request"]
    if argv == ["reap"]:
        return _reap(request)
    said = detach(Path(request["folder"]), lambda tell: _stand(asked, tell))
    return _refuse(said) if said else 0


def _refuse(words: Dict[str, str]) -> int:
    sys.stdout.write(json.dumps(words) + "\n")
    return 1


def _stand(asked: Dict[str, Any], tell: Callable[[Optional[Dict[str, str]]], None]) -> None:
    """Be the guard."""
    request = asked["request"]
    try:
        guard = Guard(request, epoch=int(asked.get("epoch", 0)), leases=_claimed(request))
        # The machine shuts down: save and leave, as if ordered.
        signal.signal(signal.SIGTERM, lambda *_: guard.take("stop") if guard.order is None else None)
        guard.start(asked.pop("secrets", {}))
        tell(None)
        guard.watch()
    except StartFailed as error:
        tell(error.words)
    except BaseException:
        # Whatever it is, nothing may stay behind; the log keeps it.
        processes.end_all(lambda: _belongings(request["folder"]))
        raise


def _claimed(request: Dict[str, Any]) -> Leases:
    """The leases of all slots that the request needs; raises StartFailed that says who holds them."""
    leases = Leases()
    try:
        leases.claim(request)
    except Taken as taken:
        raise StartFailed(**taken.words()) from None
    except OSError as error:
        raise StartFailed(f"slots cannot be claimed: {error}") from error
    return leases


def _own_env() -> Dict[str, str]:
    """Our environment without what is there for our own sake."""
    env = dict(os.environ)
    own = env.pop(OWN_PATH, None)
    if own is not None and env.get("PYTHONPATH") == own:
        del env["PYTHONPATH"]
    return env


def _log(words: str) -> None:
    sys.stderr.write(time.strftime("%Y-%m-%d %H:%M:%S ") + words + "\n")
    sys.stderr.flush()


def _wake_on(number: int) -> int:
    """A descriptor that becomes readable when the signal arrives."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)
    return reader


def _belongings(folder: str) -> List[processes.Process]:
    """What was started here and still runs, other than ourselves."""
    found = {process.pid: process for process in processes.tagged(f"{TAG}={folder}")}
    found.update({process.pid: process for process in processes.descendants(os.getpid())})
    return list(found.values())


def _reap(request: Dict[str, Any]) -> int:
    """End what carries the folder's tag; exit code 1 if something is left."""
    folder = request["folder"]
    left = processes.end_all(lambda: processes.tagged(f"{TAG}={folder}"))
    if left:
        return _refuse({"what": f"{left} processes cannot be ended", "seen": folder, "fix": ""})
    with contextlib.suppress(OSError):  # a lease that stays written down is looked through by the next who wants it
        forget(request)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
