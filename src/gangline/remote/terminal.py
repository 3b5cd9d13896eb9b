"""A command that talks with the user directly: this terminal is its stdin, stdout and stderr."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from gangline.errors import UsageError
from gangline.runs.cluster import Host


def interactive(host: Host, argv: Sequence[str]) -> int:
    """Run a command on a host with the terminal handed over to it; its exit code. Ctrl-C is for the command alone."""
    if host.transport != "local":
        raise UsageError(f"{host.name}: no terminal over {host.transport}", seen="expected a local host", fix="")
    process = subprocess.Popen(list(argv))
    # only now: a command started with SIGINT ignored would never see Ctrl-C
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
