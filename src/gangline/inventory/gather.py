"""Ask every host for its facts, all at the same time."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from gangline.errors import HostUnreachable
from gangline.inventory.facts import HostFacts, HostFailure, Inventory
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host

TIMEOUT_S = 30.0
"""How long one host may take."""


def gather(cluster: Cluster, transports: Mapping[str, Transport]) -> Inventory:
    """Read the facts of all hosts in parallel. A host that fails is recorded with the reason, never raised."""
    with ThreadPoolExecutor(max_workers=min(32, len(cluster.hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host, transports[host.name]), cluster.hosts))
    return Inventory(
        gathered=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        hosts=tuple(answer for answer in answers if isinstance(answer, HostFacts)),
        failures=tuple(answer for answer in answers if isinstance(answer, HostFailure)),
    )


def facts_argv(host: Host) -> tuple[str, ...]:
    """The command that prints a host's facts."""
    return (host.python, "-m", "gangline.agent.facts", host.workdir)


def _ask(host: Host, transport: Transport) -> HostFacts | HostFailure:
    try:
        result = transport.run(facts_argv(host), timeout_s=TIMEOUT_S)
    except HostUnreachable as error:
        return HostFailure(host=host.name, why=str(error), unreachable=True)
    except TimeoutError:
        return HostFailure(host=host.name, why=f"no facts within {TIMEOUT_S:.0f} s", unreachable=False)
    except OSError as error:
        return HostFailure(host=host.name, why=f"{host.python}: {error.strerror or error}", unreachable=False)
    if result.returncode != 0:
        why = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return HostFailure(host=host.name, why=f"exit code {result.returncode}: {why}", unreachable=False)
    try:
        return HostFacts.from_json({**json.loads(result.stdout), "host": host.name})
    except (ValueError, TypeError) as error:
        return HostFailure(host=host.name, why=f"its facts cannot be read: {error}", unreachable=False)
