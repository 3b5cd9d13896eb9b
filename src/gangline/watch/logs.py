"""Which log files a run has, and the last figures in its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
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
) -> list[LogFile]:
    """The logs of an attempt, by rank; `console`: torchrun's output instead, by host."""
    found = []
    for host in cluster.hosts:
        transport = transports[host.name]
        folder = RunLayout(Path(host.workdir), run_id).attempt(attempt)
        if console:
            found.append(_console(host.name, transport, folder))
        else:
            found += _of_ranks(host.name, transport, folder)
    return [file for file in found if file.path.name in file.transport.names(file.path.parent)]


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


def _console(host: str, transport: Transport, folder: Path) -> LogFile:
    return LogFile(name=f"{host} console", rank=None, transport=transport, path=folder / host / "console.log")


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
