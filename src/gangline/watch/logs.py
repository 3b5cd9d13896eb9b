"""Which log files a run has, and the last figures in its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.layout import AGENT_NAMES, RunLayout
from gangline.watch.tail import Tail

LIMIT_BYTES = 1 << 30
"""Figures of more steps than anybody takes: a file without end has an end here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log file on a host."""

    name: str
    """For people: "pc1 rank 0" or "pc1 console"."""
    rank: int | None
    transport: Transport
    path: Path


def log_files(
    run_id: str, cluster: Cluster, transports: Mapping[str, Transport], *, attempt: int, console: bool
) -> tuple[list[LogFile], dict[str, HostUnreachable]]:
    """The logs of an attempt, by rank, of the hosts that answer, and why the others do not; `console`: torchrun's
    output instead, by host. Raises HostKeyRefused.
    """
    found: list[LogFile] = []
    silent: dict[str, HostUnreachable] = {}
    for host in cluster.hosts:
        folder = RunLayout(Path(host.workdir), run_id).attempt(attempt)
        try:
            found += (_console if console else _of_ranks)(host.name, transports[host.name], folder)
        except HostKeyRefused:
            raise
        except HostUnreachable as error:
            silent[host.name] = error
    return found, silent


def last_step(transport: Transport, metrics: Path) -> dict[str, Any] | None:
    """The step that was written last; None before the first, and where what was written is no record of a step."""
    last = ""
    for line in Tail(transport, metrics).stream(limit_bytes=LIMIT_BYTES):
        if '"step_s"' in line:
            last = line
    try:
        record = json.loads(last or "null")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _console(host: str, transport: Transport, folder: Path) -> list[LogFile]:
    path = folder / host / AGENT_NAMES["CONSOLE_LOG"]
    is_there = path.name in transport.names(path.parent)
    return [LogFile(name=f"{host} console", rank=None, transport=transport, path=path)] if is_there else []


def _of_ranks(host: str, transport: Transport, folder: Path) -> list[LogFile]:
    ranks = [
        int(name[5:-4])
        for name in transport.names(folder)
        if name.startswith("rank-") and name.endswith(".log") and name[5:-4].isdigit()
    ]
    return [
        LogFile(name=f"{host} rank {rank}", rank=rank, transport=transport, path=folder / f"rank-{rank}.log")
        for rank in sorted(ranks)
    ]
