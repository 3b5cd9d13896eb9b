"""Work that goes on when who asked for it has gone: in a session of its own, without a terminal, as nobody's child."""

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

from gangline.agent import layout_names

Words = Dict[str, str]
"""Why it does not stand, for the user: what, seen, fix."""
Notify = Callable[[Optional[Words]], None]
"""Says that it stands (None), or why not."""


def detach(folder: Path, work: Callable[[Notify], None]) -> Optional[Words]:
    """Do `work` in a process of its own; None once it has told that it stands, else why it does not.

    At most once per folder: agent.lock there is held as long as it lasts, and agent.json says that it was done.
    """
    if own(folder) is None:
        return {"what": "this attempt was already started here", "seen": str(folder), "fix": ""}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _fork_again(folder, work, writer)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    if not said:
        return {"what": "the gangline agent ended early", "seen": f"its log is {folder}/agent.log", "fix": ""}
    words: Optional[Words] = json.loads(said)
    return words


def own(folder: Path) -> Optional[int]:
    """The lock of this host and attempt, held until the host agent ends; None if it was started before. Raises
    OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_new = not (folder / layout_names.AGENT_RECORD).exists()
    except BlockingIOError:
        is_new = False
    if is_new:
        return descriptor
    os.close(descriptor)
    return None


def log_to(folder: Path) -> None:
    """From now on what this process says goes to agent.log there; raises OSError."""
    log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    if log > 2:
        os.close(log)


def _fork_again(folder: Path, work: Callable[[Notify], None], writer: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            _go_on(folder, work, writer)
        code = 0
    finally:
        os._exit(code)


def _go_on(folder: Path, work: Callable[[Notify], None], writer: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    log_to(folder)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(words: Optional[Words]) -> None:
        os.write(writer, json.dumps(words).encode())
        os.close(writer)

    try:
        work(tell)
    except BaseException:  # noqa: BLE001  (its end is ours, and the log keeps it)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


# The supervisor of a run, started again by the host agent of the host on which it lived.


GOES_ON = ("running", "stopping", "restarting")
"""Phases of a run that somebody has to look after."""
MISSED_S = 3.0
"""So long nobody has held the lock: one that hands over to another is not missed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST = 5.0, 60.0, 8
STEADY_S = 120.0
"""One that lived for so long came up well."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
MOST_DESCRIPTORS = 4096


class Revive:
    """Sees to it that a run has a supervisor. words: `supervisor` of the request: argv, env, folder (of the run).

    secrets: what ranks got on top of their environment, for attempts that this supervisor starts; kept in memory only.
    """

    def __init__(
        self,
        words: Optional[Mapping[str, Any]],
        *,
        secrets: Mapping[str, str],
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = words
        self._secrets = dict(secrets)
        self._complain = complain
        self._clock = clock
        self._missed_since: Optional[float] = None
        self._started_at = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._count = 0

    def look(self) -> None:
        """Look once, and start one where none is; costs a lock and a small read."""
        if self._words is None or self._count >= MOST:
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
        self._complain("the supervisor is gone: starting another one")
        try:
            self._start(self._words)
        except OSError as error:
            self._complain("no supervisor can be started: {}".format(error))

    def _start(self, words: Mapping[str, Any]) -> None:
        """As nobody's child: this host agent ends all that it started before it leaves."""
        reader, writer = os.pipe()
        with _not_ours():
            child = os.fork()
            if child == 0:
                _become(words, reader)
            os.close(reader)
            os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb") as stream:
            stream.write(json.dumps({"secrets": self._secrets}).encode())

    def _has_supervisor(self) -> bool:
        assert self._words is not None
        try:
            descriptor = os.open(
                Path(self._words["folder"]) / layout_names.SUPERVISOR_LOCK, os.O_RDWR | os.O_CREAT, 0o600
            )
        except OSError:
            return True  # nobody can say; one more would only add to the confusion
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _goes_on(self) -> bool:
        assert self._words is not None
        try:
            state: Dict[str, Any] = json.loads((Path(self._words["folder"]) / layout_names.STATE).read_bytes())
            return state["phase"] in GOES_ON
        except (OSError, ValueError, LookupError, TypeError):
            return False


def _become(words: Mapping[str, Any], stdin: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for target, source in ((0, stdin), (1, null), (2, null)):
                os.dup2(source, target)
            os.closerange(3, MOST_DESCRIPTORS)  # slots, above all: their locks would outlive the run
            os.chdir("/")
            os.execve(words["argv"][0], list(words["argv"]), {**os.environ, **words["env"]})  # noqa: S606
        code = 0
    finally:
        os._exit(code)


@contextlib.contextmanager
def _not_ours() -> Iterator[None]:
    """What is detached meanwhile does not come back to us when its parent ends."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
