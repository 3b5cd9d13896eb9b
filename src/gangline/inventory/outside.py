"""Who outside the cluster reaches the ports of its hosts: tried from this computer, if it is no member. No ssh."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gangline.inventory.pairs import Outcome, Outside, PortTry
from gangline.runs.cluster import Cluster

CONNECT_S = 2.0
ANSWER_BYTES = 4096
OUTCOMES: Mapping[int, Outcome] = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ETIMEDOUT: "timed out",
}


def is_member(cluster: Cluster) -> bool:
    """Whether this computer is a host of the cluster."""
    return any(host.transport == "local" or own_address(host.address) == host.address for host in cluster.hosts)


def own_address(towards: str) -> str | None:
    """The address with which this computer goes there; None where there is no way. Sends nothing."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as door:
            door.connect(where)
            return str(door.getsockname()[0])
    except OSError:
        return None


def probe_outsider(token: str, targets: Sequence[Mapping[str, Any]], *, timeout_s: float = CONNECT_S) -> list[Outside]:
    """Try every port of every target from this process; `targets` as `reach` is told of them."""
    jobs = [(target, door) for target in targets for door in target["doors"]]
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(jobs)))) as pool:
        tries = list(pool.map(lambda job: _knock(token, job[0], job[1], timeout_s), jobs))
    by_host: dict[str, list[PortTry]] = {str(target["host"]): [] for target in targets}
    for (target, _), attempt in zip(jobs, tries, strict=True):
        by_host[str(target["host"])].append(attempt)
    return [Outside(host=host, tries=tuple(attempts)) for host, attempts in by_host.items()]


def _knock(token: str, target: Mapping[str, Any], door: Mapping[str, Any], timeout_s: float) -> PortTry:
    begun = time.monotonic()
    words: dict[str, Any] = {}
    outcome: Outcome = "stranger"
    detail = None
    try:
        words = _who(token, str(door["address"]), int(door["port"]), timeout_s)
    except TimeoutError:
        outcome = "timed out"
    except OSError as error:
        outcome, detail = OUTCOMES.get(error.errno or 0, "error"), error.strerror or str(error)
    if words:
        outcome = "ok" if words.get("instance") == target["instance"] else "other"
    return PortTry(
        kind=door["kind"],
        address=str(door["address"]),
        port=int(door["port"]),
        outcome=outcome,
        seconds=time.monotonic() - begun,
        answered_by=str(words["host"]) if "host" in words else None,
        detail=detail,
    )


def _who(token: str, address: str, port: int, timeout_s: float) -> dict[str, Any]:
    """What the listener there says of itself; {} where it is none of ours."""
    answer = b""
    # It takes the connection and breaks it: none of ours.
    with socket.create_connection((address, port), timeout=timeout_s) as door, contextlib.suppress(ConnectionError):
        # As agent/hello.py has it: who does not begin so is not answered.
        door.sendall(f"gangline {token}\n".encode() + json.dumps({"op": "time"}).encode() + b"\n")
        while not answer.endswith(b"\n") and len(answer) < ANSWER_BYTES:
            piece = door.recv(ANSWER_BYTES)
            if not piece:
                break
            answer += piece
    with contextlib.suppress(ValueError):
        words = json.loads(answer)
        return words if isinstance(words, dict) else {}
    return {}
