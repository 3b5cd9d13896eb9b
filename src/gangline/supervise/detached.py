"""The supervisor as a process of its own: start one, see whether a run is alive, order a run to end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from gangline.errors import RunFailed
from gangline.launch.backend import Request
from gangline.launch.registry import backend
from gangline.remote.connect import connect_all
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState, write_order
from gangline.supervise.loop import supervisor_lock

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
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, pass_fds=(writer,), check=False
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


def has_supervisor(layout: RunLayout) -> bool:
    """Whether a supervisor looks after the run now."""
    try:
        with supervisor_lock(layout):
            return False
    except RunFailed:
        return True


def is_alive(layout: RunLayout) -> bool:
    """Whether anything of the run is going on: its supervisor, or a guard on any host."""
    if has_supervisor(layout):
        return True
    with suppress(FileNotFoundError):
        return bool(_running_hosts(layout, Cluster.from_json(read_json(layout.cluster))))
    return False


def stop_run(layout: RunLayout, cluster: Cluster, *, now: bool) -> None:
    """Order a run to end, and return; `now`: without saving. Works without a supervisor, too.

    Then the guards get the order from here, and a new supervisor takes over to commit and to write the outcome.
    """
    write_order(layout, "kill" if now else "stop")
    if has_supervisor(layout) or RunState.load(layout).phase not in {"running", "stopping"}:
        return
    transports = connect_all(cluster)
    backend().stop(_request(layout), transports, now=now)
    for transport in transports.values():
        transport.close()
    with suppress(RunFailed):  # somebody else's came first
        spawn(layout.folder, RunState.load(layout).attempt)


def _request(layout: RunLayout) -> Request:
    attempt = RunState.load(layout).attempt
    return Request.from_json(read_json(layout.attempt(attempt) / "request.json"))


def _running_hosts(layout: RunLayout, cluster: Cluster) -> list[str]:
    """Hosts of the current attempt whose guard runs."""
    transports = connect_all(cluster)
    statuses = backend().poll(_request(layout), transports)
    for transport in transports.values():
        transport.close()
    return [status.host for status in statuses if status.phase == "running"]
