"""`python -m gangline.supervise RUN_FOLDER ATTEMPT`: the supervisor of a run, from this attempt on.

With `--detach` it reads {"secrets": {name: value}} from stdin, continues in the background, and prints one line of
JSON: {"started": true} once the gang was started, or {"error": ...}. With `--step`, and nothing else, it reads
"run_folder" and "attempt" as well, does the same and stays: a batch system ends it with its job, and gives notice by
SIGTERM, on which the run saves and stops. It ends at once where nothing comes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from gangline.errors import GanglineError, RunFailed
from gangline.runs.cluster import Cluster
from gangline.runs.files import full_disk
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState, write_order
from gangline.supervise.attempts import Attempts
from gangline.supervise.gang_control import PollIntervals, SupervisedRun
from gangline.supervise.lead import Lead, leading
from gangline.supervise.lock import supervisor_lock
from gangline.supervise.messages import Courier
from gangline.supervise.own_session import fork_again, write_to

STARTED = {"started": True}


def main() -> int:
    """Entry point; the exit code is 0 unless the attempt failed, or did not start."""
    parser = argparse.ArgumentParser(prog="python -m gangline.supervise", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--detach", action="store_true")
    os.umask(0o077)
    logging.basicConfig(format="%(asctime)s %(message)s")
    if sys.argv[1:] == ["--step"]:
        return _as_step()
    words = parser.parse_args()
    layout = RunLayout.of(words.run_folder)
    if words.detach:
        return _detach(layout, words.attempt)
    return supervise(layout, words.attempt, secrets={})


def _detach(layout: RunLayout, attempt: int) -> int:
    """Supervise in a process of its own; the exit code says whether the gang was started."""
    secrets = _read_asked().get("secrets", {})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        fork_again(lambda: _go_on(layout, attempt, secrets, writer))
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    sys.stdout.buffer.write(said + b"\n")
    sys.stdout.flush()
    return 0 if said == json.dumps(STARTED).encode() else 1


def _read_asked() -> dict[str, Any]:
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.read() or b"{}")
    return asked


def _as_step() -> int:
    """Supervise in this very process, once it is said what."""
    asked, said = _read_asked(), os.dup(1)
    if not asked:
        return 0
    layout, attempt, secrets = RunLayout.of(Path(asked["run_folder"])), int(asked["attempt"]), asked["secrets"]

    def end(*_: object) -> None:
        with suppress(OSError, GanglineError):
            write_order(layout, "stop", attempt=RunState.load(layout).attempt)

    write_to(layout.supervisor_log(attempt))
    signal.signal(signal.SIGTERM, end)
    return supervise(layout, attempt, secrets=secrets, ready=said, end=b"\n")


def _go_on(layout: RunLayout, attempt: int, secrets: Mapping[str, str], ready: int) -> NoReturn:
    """Supervise in a session of our own, without a terminal and without a parent."""
    code = 1
    try:
        write_to(layout.supervisor_log(attempt))
        code = supervise(layout, attempt, secrets=secrets, ready=ready)
    except BaseException:
        logging.getLogger(__name__).exception("the supervisor failed")
        raise
    finally:
        logging.shutdown()
        os._exit(code)


def supervise(
    layout: RunLayout,
    attempt: int,
    *,
    secrets: Mapping[str, str],
    ready: int | None = None,
    end: bytes = b"",
    won: tuple[Lead, Callable[[], None]] | None = None,
) -> int:
    """Supervise the run from this attempt on, to its end; the exit code.

    secrets: more environment of the ranks. ready: the descriptor that is told, with `end`, how the start went. won: the
    lead of a deputy, and what touches the lock that it holds; None: both have to be won.
    """
    try:
        lock = supervisor_lock(layout, timeout_s=PollIntervals().lock_s) if won is None else nullcontext(won[1])
        with lock as beat:
            courier = Courier(layout)
            with leading(layout, attempt, won[0] if won is not None else None, beat=beat) as lead:
                run = SupervisedRun(layout=layout, beat=beat, deliver=courier.deliver, lead=lead)
                attempts = Attempts(run, attempt)
                attempts.begin(secrets)
                _say(ready, STARTED, end)
                ready = None
                courier.start()
                outcome = attempts.watch()
        courier.finish()
    except GanglineError as error:
        _say(ready, {"error": error.to_json()}, end)
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except Exception as error:
        known = full_disk(error, here=_our_name(layout, attempt))
        bug = RunFailed(
            f"{type(error).__name__}: {error}", fix="this is a bug in gangline; details are in supervisor.log"
        )
        _say(ready, {"error": (known or bug).to_json()}, end)
        raise
    return 1 if outcome.result == "failed" else 0


def _our_name(layout: RunLayout, attempt: int) -> str:
    """The name of this computer for the user: the head's, unless the head is reached from here."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        head = Cluster.of_attempt(layout, attempt).head
        if head.transport == "local":
            return head.name
    return "this computer"


def _say(descriptor: int | None, words: Mapping[str, object], end: bytes) -> None:
    if descriptor is None:
        return
    with suppress(BrokenPipeError):  # the caller was interrupted; the gang runs and needs its supervisor
        os.write(descriptor, json.dumps(words).encode() + end)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
