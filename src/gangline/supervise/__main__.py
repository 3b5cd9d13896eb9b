"""`python -m gangline.supervise RUN_FOLDER ATTEMPT`: the supervisor of one attempt.

With `--ready-fd N` it detaches first, and says on descriptor N that the gang was started, or why it was not.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from gangline.errors import GanglineError
from gangline.launch.registry import backend
from gangline.remote.connect import connect_all
from gangline.runs.layout import RunLayout
from gangline.supervise.detached import STARTED
from gangline.supervise.lock import supervisor_lock
from gangline.supervise.loop import Pace, Supervisor


def main() -> int:
    """Entry point; the exit code is 0 unless the attempt failed."""
    parser = argparse.ArgumentParser(prog="python -m gangline.supervise", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--ready-fd", type=int)
    words = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(format="%(asctime)s %(message)s")
    if words.ready_fd is not None:
        _detach()
    return _supervise(RunLayout.of(words.run_folder), words.attempt, ready=words.ready_fd)


def _detach() -> None:
    """Go on in a session of our own, as nobody's child."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _supervise(layout: RunLayout, attempt: int, *, ready: int | None) -> int:
    try:
        with supervisor_lock(layout, timeout_s=Pace().lock_s):
            supervisor = Supervisor(layout, attempt, backend=backend(), connect=connect_all)
            supervisor.begin()
            _say(ready, STARTED)
            ready = None
            outcome = supervisor.watch()
    except GanglineError as error:
        _say(ready, str(error).encode())
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 1 if outcome.result == "failed" else 0


def _say(descriptor: int | None, words: bytes) -> None:
    if descriptor is None:
        return
    with suppress(BrokenPipeError):  # who asked was interrupted; the gang has been started, and needs us
        os.write(descriptor, words)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
