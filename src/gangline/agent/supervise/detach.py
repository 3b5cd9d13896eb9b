"""Work that goes on without the process that asked for it: in a session of its own, without terminal and parent."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional

from gangline.agent.host_files import AGENT_RECORD, STATE, SUPERVISOR_LOCK, read_record
from gangline.agent.verbs import VerbFailed

Ready = Callable[[], None]
"""Is called once the work has begun well."""


def detach(folder: Path, work: Callable[[Ready], None]) -> None:
    """Do `work` in a process of its own, and return once it has begun well; raises VerbFailed where it does not.

    At most once per folder: the process holds agent.lock there until it ends, and agent.json says that it was started.
    """
    if own(folder) is None:
        raise already_started(folder)
    reader, writer = os.pipe()
    _orphan(lambda: _go_on(folder, work, reader, writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    if not data:
        raise VerbFailed("the gangline agent ended early", f"its log is {folder}/agent.log")
    if failure := json.loads(data):
        raise VerbFailed(failure["what"], failure["seen"], failure["fix"])


def already_started(folder: Path) -> VerbFailed:
    """The error for a second start of one attempt on one host."""
    return VerbFailed("this attempt was already started here", str(folder))


def own(folder: Path) -> Optional[int]:
    """The lock of this host and attempt, held until the host agent ends; None if it was started before. Raises
    OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_new = not (folder / AGENT_RECORD).exists()
    except BlockingIOError:
        is_new = False
    if is_new:
        return descriptor
    os.close(descriptor)
    return None


def log_to(folder: Path) -> None:
    """Send stdout and stderr of this process to agent.log in a folder; raises OSError."""
    log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    if log > 2:
        os.close(log)


def _orphan(work: Callable[[], None]) -> None:
    """Do `work` in a session of its own, in a process whose parent has ended; raises OSError."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            work()
        code = 0
    finally:
        os._exit(code)


def _go_on(folder: Path, work: Callable[[Ready], None], reader: int, writer: int) -> None:
    os.close(reader)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    log_to(folder)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(failure: Dict[str, str]) -> None:
        os.write(writer, json.dumps(failure).encode())
        os.close(writer)

    try:
        work(lambda: report({}))
    except VerbFailed as failed:
        report(failed.record)
    except BaseException:  # noqa: BLE001  (this process ends here, and its log keeps the cause)
        traceback.print_exc()
        sys.stderr.flush()


# The supervisor of a run, started again by the host agent of the host on which it lived.


GOES_ON = ("running", "stopping", "restarting")
"""Phases of a run that needs a supervisor."""
MISSED_S = 3.0
"""How long the lock has to be free: a supervisor may be handing over to another one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST = 5.0, 60.0, 8
STEADY_S = 120.0
"""A supervisor that lived for so long had started well."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
MOST_DESCRIPTORS = 4096


class Revive:
    """Starts the supervisor of a run again where it is gone. supervisor: see `HostRequest`.

    secrets: more environment of ranks, for the attempts that this supervisor starts; kept in memory only.
    """

    def __init__(
        self,
        supervisor: Optional[Mapping[str, Any]],
        *,
        secrets: Mapping[str, str],
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._secrets = dict(secrets)
        self._complain = complain
        self._clock = clock
        self._missed_since: Optional[float] = None
        self._started_at = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._count = 0

    def look(self) -> None:
        """Look once, and start a supervisor if there is none; costs a lock and a small read."""
        if self._supervisor is None or self._count >= MOST:
            return
        now = self._clock()
        if self._has_supervisor() or not self._goes_on():
            self._missed_since = None
            if now > self._started_at + STEADY_S:
                self._pause_s, self._count = FIRST_PAUSE_S, 0
            return
        self._missed_since = now if self._missed_since is None else self._missed_since
        if now < self._missed_since + MISSED_S or now < self._started_at + self._pause_s:
            return
        self._count += 1
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
        self._started_at = now
        self._complain("the supervisor is gone; starting it again")
        try:
            start_detached(self._supervisor, json.dumps({"secrets": self._secrets}).encode())
        except OSError as error:
            self._complain("the supervisor cannot be started: {}".format(error))

    def _has_supervisor(self) -> bool:
        assert self._supervisor is not None
        try:
            descriptor = os.open(Path(self._supervisor["folder"]) / SUPERVISOR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return True  # unknown: a second supervisor would do harm
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _goes_on(self) -> bool:
        assert self._supervisor is not None
        return read_record(Path(self._supervisor["folder"]) / STATE).get("phase") in GOES_ON


def start_detached(words: Mapping[str, Any], stdin: bytes) -> None:
    """Start a command that is no descendant of this host agent, which ends all its descendants before it leaves.

    words: its "argv", and "env" on top of our own.
    """
    reader, writer = os.pipe()
    with _no_subreaper():
        _orphan(lambda: _become(words, reader))
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as stream:
        stream.write(stdin)


def _become(words: Mapping[str, Any], stdin: int) -> None:
    """Never returns."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, stdin), (1, null), (2, null)):
        os.dup2(source, target)
    os.closerange(3, MOST_DESCRIPTORS)  # slots, above all: their locks would outlive the run
    os.chdir("/")
    os.execve(words["argv"][0], list(words["argv"]), {**os.environ, **words["env"]})  # noqa: S606


@contextlib.contextmanager
def _no_subreaper() -> Iterator[None]:
    """A process that is orphaned meanwhile does not become a child of this one."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
