"""Endpoints that are looked after: `gangline serve --detach`, and what `ps`, `logs` and `stop` do with them.

`python -m gangline.control.served_endpoints FOLDER` serves what request.json in that folder names, writes into
state.json where it stands, and ends on SIGTERM. The worker holds the other end of its pipe, so it ends with this
process however that ends.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from gangline.control.slurm_job import LogConsole
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import require_job
from gangline.errors import GanglineError, RecordError, RunFailed, UsageError
from gangline.provision.console import Console
from gangline.runs.cluster import Host
from gangline.runs.files import write_atomic
from gangline.runs.layout import EndpointLayout
from gangline.runs.record_versions import Record, load_if_there
from gangline.runs.state import ProcessId, iso, now_iso
from gangline.serve.run_model import bring_saved, complete, find_saved, is_model_folder, placed_model
from gangline.serve.served_model import END_S, Endpoint, serve_folder, serve_saved, serve_stages
from gangline.transport.local import our_python

POLL_S = 0.2
EVERY_HOST = "all"
PREFIX = "serve-"
"""Before the name of a model: the run that it is of has that name already."""
NAME_BYTES = 200
EndpointPhase = Literal["loading", "serving", "stopped", "failed", "damaged"]
"""damaged: not written, but shown where the record cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest(Record):
    """What is to be served."""

    target: str
    """A run, or the absolute path of a folder."""
    name: str | None
    """Of the model; None: that of the run or folder."""
    options: tuple[str, ...]
    """Words for the worker."""
    has_adapters: bool = False
    hosts: tuple[str, ...] = ()
    """Of the run, on which it is served; (): where its checkpoint lies. More than one: in stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointState(Record):
    """state.json of an endpoint: where it stands, without its key."""

    target: str
    process: ProcessId
    phase: EndpointPhase = "loading"
    url: str | None = None
    models: tuple[str, ...] = ()
    error: dict[str, Any] | None = None
    created: str = field(default_factory=now_iso)

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs."""
        return self.phase in {"stopped", "failed", "damaged"} or not self.process.is_alive

    @property
    def shown(self) -> str:
        """The phase; `lost` where its process was killed."""
        return "lost" if self.ended and self.phase in {"loading", "serving"} else self.phase

    @property
    def cause(self) -> GanglineError | None:
        """The error with which it ended."""
        if self.shown == "lost":
            return RunFailed(
                f"the endpoint of {self.target} has ended",
                seen=f"its process {self.process.pid} was killed, or this computer was off",
                fix="start it again: gangline serve --detach",
            )
        return GanglineError.from_json(self.error) if self.error else None


def serve_model(asked: ServeRequest, *, home: Path, console: Console, on_ready: Callable[[Endpoint], None]) -> NoReturn:
    """Serve a run's newest checkpoint or a folder, until interrupted. Raises GanglineError where it ends by itself."""
    if is_model_folder(Path(asked.target)):
        folder = Path(asked.target).resolve()
        console.progress("loading the model")
        serve_folder(folder, [*asked.options, f"--name={asked.name or folder.name}"], home=home, on_ready=on_ready)
    with open_run(asked.target, home=home) as opened:
        require_job(opened.layout)
        hosts, run_id = _hosts(asked, opened), opened.layout.run_id
        console.progress("verifying the checkpoint")
        saved = find_saved(run_id, opened.cluster, opened.transports)
        if len(hosts) == 1:
            saved = bring_saved(saved, run_id, hosts[0].name, console=console)
        if asked.has_adapters and saved.place.host.transport != "local":
            raise UsageError(
                "--adapter is for a model on this computer",
                seen=f"the checkpoint lies on {saved.place.host.name}",
                fix="gangline export writes it here; serve that folder",
            )
        options = [*asked.options, f"--name={asked.name or run_id}"]
        if len(hosts) > 1:
            if asked.has_adapters:
                raise UsageError(
                    "--adapter is for a model on one host", seen=f"--on names {len(hosts)}", fix="leave one of both out"
                )
            shared = opened.cluster.shared
            with placed_model(saved, opened.layout, hosts, home=home, shared=shared, console=console) as places:
                console.progress("loading the model")
                serve_stages(places, options, ports=opened.cluster.ports, on_ready=on_ready)
        complete(saved, run_id, console=console)
        console.progress("loading the model")
        serve_saved(saved, options, on_ready=on_ready)


def _hosts(asked: ServeRequest, opened: RunHandle) -> tuple[Host, ...]:
    """The hosts that were named, in that order; `all`: the others of the run. Raises UsageError for a stranger."""
    known = {host.name: host for host in opened.cluster.hosts}
    named = dict.fromkeys(name for name in asked.hosts if name in known or name != EVERY_HOST)
    names = tuple(dict.fromkeys((*named, *known))) if EVERY_HOST in asked.hosts else tuple(named)
    if strangers := [name for name in names if name not in known]:
        raise UsageError(
            f"--on {strangers[0]}: no host of {opened.layout.run_id}",
            seen=f"its hosts: {', '.join(known) or 'none'}",
            fix=f"name one of them, or --on {EVERY_HOST}",
        )
    return tuple(known[name] for name in names)


def begin_endpoint(asked: ServeRequest, model: str, *, home: Path, console: Console) -> tuple[EndpointLayout, str]:
    """Serve in a process of its own; its files and its key once it answers. Raises the error with which it ended."""
    if "/" in model or not model.isprintable() or len(model.encode()) > NAME_BYTES:
        raise UsageError(
            f"an endpoint cannot be called {PREFIX}{model}",
            seen=f"expected a name for a folder: up to {NAME_BYTES} bytes that can be printed, without /",
            fix="give the model another name (--name), or leave --detach out",
        )
    layout = EndpointLayout(home, PREFIX + model)
    layout.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(layout.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
        _claim(layout, log.fileno())
        asked.save(layout.request)
        process = subprocess.Popen(
            our_python("gangline.control.served_endpoints", str(layout.folder)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C and the end of this terminal are not for it
        )
    try:
        return layout, _await_key(layout, process, console)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _claim(layout: EndpointLayout, log: int) -> None:
    """Lock the log: the endpoint and its worker inherit it, so the lock lasts while anything of them runs."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        old = read_endpoint(layout)
        phase = "starting" if old is None else "ending" if old.ended else old.phase
        raise UsageError(
            f"{layout.endpoint_id} is {phase} already",
            seen=f"at {(old.url if old else None) or 'no address yet'}",
            fix=f"gangline stop {layout.endpoint_id}, or serve it by another name: --name",
        ) from None
    for path in (layout.state, layout.key):
        path.unlink(missing_ok=True)
    os.ftruncate(log, 0)


def _await_key(layout: EndpointLayout, process: subprocess.Popen[bytes], console: Console) -> str:
    begun = time.monotonic()
    while True:
        code, state = process.poll(), read_endpoint(layout)
        if state is not None and state.phase == "serving":
            process.returncode = 0  # it stays: nobody waits for it
            return layout.key.read_text(encoding="ascii").strip()
        if code is not None:
            raise (state.cause if state is not None else None) or RunFailed(
                f"{layout.endpoint_id} did not start",
                seen="\n".join(layout.log.read_text("utf-8", "replace").splitlines()[-8:]) or f"exit code {code}",
                fix=f"its whole log: gangline logs {layout.endpoint_id}",
            )
        console.progress(f"loading the model, {time.monotonic() - begun:.0f} s")
        time.sleep(POLL_S)


def read_endpoint(layout: EndpointLayout) -> EndpointState | None:
    """Where an endpoint stands; None where there is none."""
    return load_if_there(layout.state, EndpointState)


def list_endpoints(home: Path) -> list[tuple[str, EndpointState]]:
    """Every endpoint with its state, the newest first."""
    folders = (home / "endpoints").glob("*/")
    found = [(folder.name, _listed(EndpointLayout(home, folder.name))) for folder in folders]
    return sorted(((name, state) for name, state in found if state), key=lambda each: each[1].created, reverse=True)


def _listed(layout: EndpointLayout) -> EndpointState | None:
    """Where an endpoint stands; one whose record is damaged is named, and hides no others."""
    try:
        return read_endpoint(layout)
    except RecordError as error:
        nobody, created = ProcessId(pid=0, start_ticks=0), iso(layout.folder.stat().st_mtime)
        return EndpointState(target="", process=nobody, phase="damaged", error=error.to_json(), created=created)


def find_endpoint(home: Path, name: str) -> EndpointLayout | None:
    """The endpoint of exactly that name."""
    layout = EndpointLayout(home, name)
    is_one = name.startswith(PREFIX) and "/" not in name and layout.log.is_file()
    return layout if is_one else None


def endpoint_log(layout: EndpointLayout, *, follow: bool) -> Iterator[str]:
    """The lines of its log; with `follow` also those that come, until it has ended."""
    with layout.log.open(encoding="utf-8", errors="replace") as stream:
        while True:
            state = read_endpoint(layout)
            yield from (line.rstrip("\n") for line in stream)
            if not follow or state is None or state.ended:
                return
            time.sleep(POLL_S)


def stop_endpoint(layout: EndpointLayout) -> str:
    """End an endpoint and wait until nothing of it runs; one that has ended is taken off the list. What was done."""
    try:
        state = read_endpoint(layout)
    except RecordError:
        if _is_locked(layout):  # it runs, and nobody knows which process it is
            raise
        state = None
    if state is None and _is_locked(layout):
        raise UsageError(
            f"{layout.endpoint_id} is starting",
            seen="its process has not begun to load the model",
            fix="the same command again, in some seconds",
        )
    if state is None or state.ended:
        shutil.rmtree(layout.folder)
        return "had ended, and is off the list"
    deadline = time.monotonic() + END_S + 30.0
    with suppress(ProcessLookupError):
        os.kill(state.process.pid, signal.SIGTERM)
    while state.process.is_alive:
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{layout.endpoint_id} does not end",
                seen=f"process {state.process.pid} goes on",
                fix=f"gangline logs {layout.endpoint_id}; kill -9 {state.process.pid} ends it, and its worker with it",
            )
        time.sleep(POLL_S)
    return "stopped"


def _is_locked(layout: EndpointLayout) -> bool:
    with layout.log.open("rb") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def main(argv: Sequence[str]) -> int:
    """Entry point of the process that looks after one endpoint; the exit code of the error that ended it."""
    parser = argparse.ArgumentParser(prog="python -m gangline.control.served_endpoints", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _interrupt)
    layout, console = EndpointLayout(folder.parent.parent, folder.name), LogConsole()
    asked = ServeRequest.load(layout.request)
    state = EndpointState(target=asked.target, process=ProcessId.current())
    state.save(layout.state)

    def ready(endpoint: Endpoint) -> None:
        nonlocal state
        write_atomic(layout.key, endpoint.token.encode())
        state = replace(state, phase="serving", url=endpoint.url, models=endpoint.models)
        state.save(layout.state)
        for line in (*endpoint.told(), f"serving {', '.join(endpoint.models)} at {endpoint.url}"):
            console.report(line)

    try:
        serve_model(asked, home=layout.home, console=console, on_ready=ready)
    except KeyboardInterrupt:
        console.report("stopped")
        replace(state, phase="stopped").save(layout.state)
        return 0
    except GanglineError as error:
        console.report(str(error))
        replace(state, phase="failed", error=error.to_json()).save(layout.state)
        return error.exit_code
    finally:
        layout.key.unlink(missing_ok=True)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the worker must not be interrupted again
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
