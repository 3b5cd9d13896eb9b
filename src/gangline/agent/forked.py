"""A verb of the agent as a child of the channel: what that has loaded already need not be loaded again.

That saves the start of a Python for every short question, on each of many hosts (benchmarks/RESULTS.md, fan-out).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Callable, NoReturn

PAUSE_S = 0.005


class Forked:
    """A child that leads a session of its own and runs `work`; serves its caller as a `subprocess.Popen` does.

    env: added to ours. keep: descriptors that the child needs; it has no others of ours.
    """

    def __init__(self, work: Callable[[], int], *, env: dict[bytes, bytes], keep: tuple[int, ...]) -> None:
        theirs_in, stdin = os.pipe()
        stdout, theirs_out = os.pipe()
        stderr, theirs_err = os.pipe()
        self.args = "gangline-agent"
        self.returncode: int | None = None
        try:
            self.pid = os.fork()
        except OSError:  # too many processes
            for descriptor in (theirs_in, stdin, stdout, theirs_out, stderr, theirs_err):
                os.close(descriptor)
            raise
        if self.pid == 0:
            _become(work, (theirs_in, theirs_out, theirs_err), env=env, keep=keep)
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self.stderr = os.fdopen(stderr, "rb", buffering=0)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(PAUSE_S)
        return code


def _become(
    work: Callable[[], int],
    streams: tuple[int, int, int],
    *,
    env: dict[bytes, bytes],
    keep: tuple[int, ...],
) -> NoReturn:
    """The child: only this thread is left of the channel, and nothing of its state is used."""
    code = 1
    try:
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names, not paths)
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):  # the one that the folder was listed with
                    os.close(int(name))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environb.update(env)
        _fresh_streams()
        code = _run(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
    except BaseException:  # noqa: BLE001  (what Python does with it at the end of a program)
        traceback.print_exc()
    return 1


def _fresh_streams() -> None:
    """Another thread may have been in the middle of using the old ones."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        mode = "w" if number else "r"
        setattr(sys, name, os.fdopen(number, mode, encoding=old.encoding, errors=old.errors, closefd=False))
