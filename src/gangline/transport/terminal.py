"""What a user works with directly: a command in this terminal, and a web page of a host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport.bootstrap import BOOTSTRAP, first_words, remote_command
from gangline.transport.connection import NO_MASTER, PLACE, connect, ssh_argv, ssh_environment
from gangline.transport.slurm_commands import environment, step_argv
from gangline.transport.ssh_options import QUIET, PrivateFolder, printable, unpinned

LOOPBACK = "127.0.0.1"
FORWARD_S = 20.0
TRIES = 3
MUX = ("ssh", "-F", "none", "-o")


def interactive(host: Host, argv: Sequence[str], *, ssh_config: Path | None = None) -> int:
    """Run a command on a host with the terminal handed over to it; its exit code. Ctrl-C is for the command alone."""
    if host.transport == "local":
        return _hand_over(list(argv))
    if host.transport == "srun":
        return _hand_over([*step_argv(host), *(["--pty"] if os.isatty(0) else []), *argv], environment(os.environ))
    if host.host_key is None:
        raise unpinned(host.name)
    folder = PrivateFolder()
    try:
        flags = ["-t" if os.isatty(0) else "-T"]
        words = ssh_argv(host, folder, ssh_config=ssh_config, flags=flags, options=[NO_MASTER, QUIET])
        return _hand_over([*words, remote_command(argv)])
    finally:
        folder.close()


def _hand_over(argv: list[str], env: Mapping[str, str] | None = None) -> int:
    process = subprocess.Popen(argv, env=env or ssh_environment(), cwd="/" if env else None)
    # only now: a command started with SIGINT ignored would never see Ctrl-C
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def forward(host: Host, port: int, *, ssh_config: Path | None = None) -> Iterator[int]:
    """A port of this computer's loopback that leads to `port` of a host's loopback, as long as the context lasts."""
    if host.transport == "local":
        yield port
        return
    if host.transport == "srun":
        raise HostUnreachable(
            f"{host.name}: port {port} cannot be brought here",
            seen="it is a node of Slurm, which carries no ports",
            fix="read the files themselves, on a folder that login host and nodes share",
        )
    connection = connect(host, BOOTSTRAP, first_words(), ssh_config=ssh_config)
    try:
        yield _forwarded(host, connection.control_path, port)
    finally:
        connection.close()


def _forwarded(host: Host, control_path: Path | None, port: int) -> int:
    said = "no folder has a path short enough for a socket"
    for _ in range(TRIES if control_path else 0):
        near = _free_port()
        # no ssh_config: the forwardings in it are not ours to open
        done = subprocess.run(
            [*MUX, f"ControlPath={control_path}", "-O", "forward", "-L", f"{LOOPBACK}:{near}:{LOOPBACK}:{port}", PLACE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=FORWARD_S,
        )
        if done.returncode == 0:
            return near
        said = printable(done.stderr.decode("utf-8", "replace").strip())[-300:]
    raise HostUnreachable(f"{host.name}: port {port} cannot be brought here", seen=said, fix="try again")


def _free_port() -> int:
    """Somebody else may take it before ssh does; then another is tried."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])
