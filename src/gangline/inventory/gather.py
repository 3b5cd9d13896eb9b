"""Ask every host for its facts, all at the same time."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gangline.errors import HostUnreachable
from gangline.inventory.facts import HostFacts, HostFailure, Inventory
from gangline.inventory.plain import plain
from gangline.inventory.read import Unreadable, read_facts
from gangline.remote.transport import AGENT, Result, Transport
from gangline.runs.cluster import Cluster, Host

TIMEOUT_S = 15.0
"""How long one host may take; the agent itself takes 11 s at most."""
NUM_AT_ONCE = 64
ANSWER_LENGTH = 1 << 21
WHY_LENGTH = 2000


def gather(cluster: Cluster, transports: Mapping[str, Transport]) -> Inventory:
    """Read the facts of all hosts in parallel. A host that fails is recorded with the reason, never raised."""
    with ThreadPoolExecutor(max_workers=min(NUM_AT_ONCE, len(cluster.hosts))) as pool:
        requests = [facts_request(host, cluster) for host in cluster.hosts]
        asked = zip(cluster.hosts, requests, strict=True)
        answers = list(pool.map(lambda pair: _ask(pair[0], pair[1], transports[pair[0].name]), asked))
    return Inventory(
        gathered=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        hosts=tuple(answer for answer in answers if isinstance(answer, HostFacts)),
        failures=tuple(answer for answer in answers if isinstance(answer, HostFailure)),
    )


def facts_request(host: Host, cluster: Cluster) -> dict[str, Any]:
    """What a host is asked."""
    files = [path for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE") if (path := host.env.get(name))]
    return {
        "workdir": host.workdir,
        "python_argv": list(host.argv()) if host.python else None,
        "python_env": {**host.code_env, **host.env},
        "names": asked_names(cluster),
        "shared": list(cluster.shared),
        "files": files,
    }


def asked_names(cluster: Cluster) -> list[str]:
    """Every name and address by which the hosts may call each other."""
    names = [name for host in cluster.hosts for name in (host.name, host.address, _destination(host))]
    return list(dict.fromkeys(name for name in names if name))


def _destination(host: Host) -> str:
    """The name behind an @; what stands in a user's ssh_config means nothing on other hosts, and does no harm."""
    return (host.ssh or "").rpartition("@")[2]


def is_address(text: str) -> bool:
    """Whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _ask(host: Host, request: dict[str, Any], transport: Transport) -> HostFacts | HostFailure:
    asked_s = time.time()
    try:
        result = transport.run((AGENT, "facts"), stdin=json.dumps(request).encode(), timeout_s=TIMEOUT_S)
    except HostUnreachable as error:
        why = "; ".join(filter(None, (error.what, error.seen)))
        return HostFailure(
            host=host.name,
            why=plain(why[:WHY_LENGTH]),
            unreachable=error.reason != "no-python",
            kind=error.reason or "unreachable",
            fix=error.fix,
        )
    except TimeoutError:
        return _no_facts(host, f"no facts within {TIMEOUT_S:.0f} s")
    except OSError as error:
        return _no_facts(host, error.strerror or str(error))
    return _read(host, result, asked_s=asked_s)


def _read(host: Host, result: Result, *, asked_s: float) -> HostFacts | HostFailure:
    if result.returncode != 0:
        why = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return _no_facts(host, f"exit code {result.returncode}: {why}")
    if len(result.stdout) > ANSWER_LENGTH:
        return _no_facts(host, f"its facts are longer than {ANSWER_LENGTH >> 20} MiB")
    try:
        return read_facts(host.name, json.loads(result.stdout), asked_s=asked_s, answered_s=time.time())
    except (Unreadable, ValueError, RecursionError) as error:
        return _no_facts(host, f"its facts cannot be read: {error}")


def _no_facts(host: Host, why: str) -> HostFailure:
    return HostFailure(host=host.name, why=plain(why[:WHY_LENGTH]), unreachable=False, kind="no-facts")
