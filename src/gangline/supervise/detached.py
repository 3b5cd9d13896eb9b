"""The supervisor as a process of its own: start one, see whether a run is alive, order a run to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gangline.errors import RunFailed
from gangline.launch.backend import Request
from gangline.launch.local import outlives_guard
from gangline.launch.registry import backend
from gangline.remote.connect import connect_all
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState, write_order
from gangline.supervise.lock import has_supervisor

STARTED = b"started"


def spawn(run_folder: Path, attempt: int) -> None:
    """Start a detached supervisor, and return once its pid stands in state.json and the gang has been started.

    If the attempt runs already but its supervisor is gone, the new one takes it over. Raises RunFailed when it does
    not come up: the run has a supervisor, or a guard could not be started.
    """
    log = RunLayout.of(run_folder).attempt(attempt) / "supervisor.log"
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "gangline.supervise", str(run_folder), str(attempt), "--ready-fd", str(writer)]
    with log.open("ab") as stream, os.fdopen(reader, "rb") as said:
        try:
            # It forks and leaves at once, so that the supervisor is nobody's child here.
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=(writer,),
                start_new_session=True,  # Ctrl-C at our terminal ends us, not the run
                check=False,
            )
        finally:
            os.close(writer)
        words = said.read()
    if words != STARTED:
        raise RunFailed(
            f"the supervisor of {run_folder.name} did not start",
            seen=words.decode() or f"{' '.join(command[:5])} ended with {process.returncode}, see {log}",
            fix="put right what it says, then: gangline resume",
        )


def is_alive(layout: RunLayout) -> bool:
    """Whether anything of the run is going on: its supervisor, a guard on any host, or what a killed one has left."""
    if has_supervisor(layout):
        return True
    with suppress(FileNotFoundError):
        return _runs_somewhere(layout)
    return False


def stop_run(layout: RunLayout, *, now: bool) -> None:
    """Order a run to end, and return; `now`: without saving. Works without a supervisor, too.

    Then the guards get the order from here, and a new supervisor takes over to commit and to write the outcome.
    """
    write_order(layout, "kill" if now else "stop")
    state = RunState.load(layout)
    if has_supervisor(layout) or state.phase not in {"running", "stopping"}:
        return
    with _attempt_at_hand(layout, state.attempt) as (request, transports):
        backend().stop(request, transports, now=now)
    with suppress(RunFailed):  # somebody else's came first
        spawn(layout.folder, state.attempt)


def _runs_somewhere(layout: RunLayout) -> bool:
    with _attempt_at_hand(layout, RunState.load(layout).attempt) as (request, transports):
        if any(status.phase == "running" for status in backend().poll(request, transports)):
            return True
        return any(outlives_guard(part, transports[part.host]) for part in request.hosts)


@contextmanager
def _attempt_at_hand(layout: RunLayout, attempt: int) -> Iterator[tuple[Request, Mapping[str, Transport]]]:
    """What was started, and ways to the hosts on which it was; raises FileNotFoundError."""
    request = Request.from_json(read_json(layout.attempt(attempt) / "request.json"))
    transports = connect_all(Cluster.of_attempt(layout, attempt))
    try:
        yield request, transports
    finally:
        for transport in transports.values():
            transport.close()
