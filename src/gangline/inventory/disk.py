"""Can files really be written on every host?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gangline.errors import HostUnreachable
from gangline.inventory.plain import plain
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Cluster, Host

TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTry:
    """A file of 1 MiB that was written, synced, renamed and removed; or why not."""

    host: str
    folder: str
    seconds: float | None = None
    error: str | None = None


def probe_disks(cluster: Cluster, transports: Mapping[str, Transport]) -> tuple[WriteTry, ...]:
    """Try the work folders of all hosts at the same time; a host that does not answer is left out."""
    with ThreadPoolExecutor(max_workers=min(64, len(cluster.hosts))) as pool:
        tries = list(pool.map(lambda host: _try(host, transports[host.name]), cluster.hosts))
    return tuple(row for row in tries if row is not None)


def _try(host: Host, transport: Transport) -> WriteTry | None:
    request = json.dumps({"folders": [host.workdir]}).encode()
    try:
        result = transport.run((AGENT, "disk"), stdin=request, timeout_s=TIMEOUT_S)
        answer: Any = json.loads(result.stdout)["folders"][host.workdir]
        error, seconds = answer.get("error"), answer.get("seconds")
    except HostUnreachable:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return WriteTry(host=host.name, folder=host.workdir, error=plain(str(problem).partition("\n")[0]))
    return WriteTry(
        host=host.name,
        folder=host.workdir,
        seconds=float(seconds) if isinstance(seconds, (int, float)) else None,
        error=plain(str(error)) if error is not None else None,
    )
