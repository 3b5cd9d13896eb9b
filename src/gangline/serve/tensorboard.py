"""TensorBoard of a run: it runs on the host of the event files, on loopback only, and ssh forwards its port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePath

from gangline.errors import GanglineError, RunFailed
from gangline.runs.cluster import Host
from gangline.transport.terminal import LOOPBACK, forward, interactive
from gangline.transport.transport import AGENT, CommandResult, Transport

PATH_VARIABLE = "GANGLINE_TENSORBOARD_PATH"
SHOW = (
    "import os, sys, tempfile; sys.path[:] = filter(None, sys.path); "
    "tempfile.tempdir = sys.argv[sys.argv.index('--logdir') + 1]; "
    f"sys.argv += ['--path_prefix', os.environ.pop('{PATH_VARIABLE}')]; "
    "from tensorboard.main import run_main; run_main()"
)
"""TensorBoard below a path from the environment: words of a command can be read by everybody on the host.

It writes that path into a folder of the temporary folder which it makes for everybody: there others could read it, or
have made that folder first. The run's own folder is for its owner alone.
"""
PORTS = (16006, 16999)
START_S = 60.0
"""Importing TensorBoard takes seconds."""
SHOWN_S = 7 * 86400.0
POLL_S = 0.3


def show_tensorboard(
    host: Host, transport: Transport, folder: Path, *, on_ready: Callable[[str], None], wait: Callable[[], None]
) -> None:
    """Show the event files in `folder` of a host until `wait` returns; `on_ready` gets the address to open, with a
    warning: TensorBoard knows no password, so only an address that nobody can guess protects it.

    Raises RunFailed where it does not start. It ends with this command, however that ends.
    """
    port, path = _free_port(host, transport), f"/{secrets.token_urlsafe(16)}"
    argv = host.argv("-c", SHOW, "--logdir", str(folder), "--host", LOOPBACK, "--port", str(port))
    if host.transport == "local":
        on_ready(_said(port, path, host))
        os.environ[PATH_VARIABLE] = path
        interactive(host, argv)
        return
    program = _Program(transport, argv, {**host.code_env, PATH_VARIABLE: path})
    program.start()
    with forward(host, port) as near:
        _await(near, program, host)
        on_ready(_said(near, path, host))
        wait()


def _said(port: int, path: str, host: Host) -> str:
    warning = f"no password: keep this address from others who can log in to {host.name}"
    return f"http://{LOOPBACK}:{port}{path}/  ({warning})"


class _Program(threading.Thread):
    """A command on a host that stays until its transport is closed."""

    def __init__(self, transport: Transport, argv: tuple[str, ...], env: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.result: CommandResult | GanglineError | None = None
        self._command = (transport, argv, env)

    def run(self) -> None:
        """Run the command to its end, and keep its result."""
        transport, argv, env = self._command
        try:
            self.result = transport.run(argv, env=env, timeout_s=SHOWN_S)
        except GanglineError as error:
            self.result = error


def _await(port: int, program: _Program, host: Host) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if program.result is not None:
            raise _failed(host, program.result)
        if _answers(port):
            return
        time.sleep(POLL_S)
    raise _failed(host, None)


def _answers(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=5)) as page:
        try:
            page.request("GET", "/")
            page.getresponse()
        except (OSError, http.client.HTTPException):
            return False
    return True


def _failed(host: Host, result: CommandResult | GanglineError | None) -> GanglineError:
    if isinstance(result, GanglineError):
        return result
    said = f"no answer within {START_S:.0f} s" if result is None else "\n".join(result.stderr.splitlines()[-8:])
    return RunFailed(
        f"{host.name}: TensorBoard did not start",
        seen=said,
        fix="its environment must have tensorboard; gangline's own lock does",
    )


def _free_port(host: Host, transport: Transport) -> int:
    asked = {"address": LOOPBACK, "range": list(PORTS), "claims": str(PurePath(host.workdir, "ports")), "hold_s": 60.0}
    result = transport.run((AGENT, "free-port"), stdin=json.dumps(asked).encode())
    port = json.loads(result.stdout)["port"] if result.returncode == 0 else None
    if port is None:
        raise RunFailed(f"{host.name}: no port for TensorBoard", seen=result.stderr[-400:] or "all are taken", fix="")
    return int(port)
