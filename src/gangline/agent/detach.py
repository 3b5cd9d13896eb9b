"""Work that goes on when who asked for it has gone: in a session of its own, without a terminal, as nobody's child."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Callable, Dict, Optional

from gangline.agent import names

Words = Dict[str, str]
"""Why it does not stand, for the user: what, seen, fix."""
Tell = Callable[[Optional[Words]], None]
"""Says that it stands (None), or why not."""


def detach(folder: Path, work: Callable[[Tell], None]) -> Optional[Words]:
    """Do `work` in a process of its own; None once it has told that it stands, else why it does not.

    At most once per folder: guard.lock there is held as long as it lasts, and guard.json says that it was done.
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
        return {"what": "the guard ended early", "seen": f"its log is {folder}/guard.log", "fix": ""}
    words: Optional[Words] = json.loads(said)
    return words


def own(folder: Path) -> Optional[int]:
    """The lock of this host and attempt, held until the guard ends; None if it was started before. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_new = not (folder / names.AGENT_RECORD).exists()
    except BlockingIOError:
        is_new = False
    if is_new:
        return descriptor
    os.close(descriptor)
    return None


def log_to(folder: Path) -> None:
    """From now on what this process says goes to guard.log there; raises OSError."""
    log = os.open(folder / "guard.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    if log > 2:
        os.close(log)


def _fork_again(folder: Path, work: Callable[[Tell], None], writer: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            _go_on(folder, work, writer)
        code = 0
    finally:
        os._exit(code)


def _go_on(folder: Path, work: Callable[[Tell], None], writer: int) -> None:
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
