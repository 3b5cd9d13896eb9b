"""Let one host try the ports of others: `reach` of the agent, and its answer as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gangline.errors import GanglineError
from gangline.inventory.pairs import Pair, PortTry
from gangline.remote.transport import AGENT, Transport

CONNECT_S = 2.5
"""A SYN that was lost is sent again after 1 s, so this is two tries already."""
TRIES = 2
BASE_S = 25.0
PER_TARGET_S = 2.0


class CannotAsk(Exception):
    """The host could not say what it reaches; the text says why."""


def ask(
    transport: Transport, token: str, targets: Sequence[dict[str, Any]], *, measure: Sequence[str], seconds: float = 1.0
) -> list[Pair]:
    """What the host of `transport` found out about each target; raises CannotAsk."""
    request = {
        "token": token,
        "targets": list(targets),
        "tries": TRIES,
        "timeout_s": CONNECT_S,
        "measure": list(measure),
        "seconds": seconds,
    }
    timeout_s = BASE_S + len(targets) * (PER_TARGET_S + seconds)
    try:
        result = transport.run((AGENT, "reach"), stdin=json.dumps(request).encode(), timeout_s=timeout_s)
    except GanglineError as error:
        raise CannotAsk(error.what) from error
    except OSError as error:  # TimeoutError is one
        raise CannotAsk(str(error)) from error
    if result.returncode != 0:
        words = result.stderr.strip().splitlines()
        raise CannotAsk(words[-1] if words else f"the probe ended with code {result.returncode}")
    try:
        return [pair(transport.host, json.loads(line)) for line in result.stdout.splitlines() if line.startswith("{")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotAsk(f"its answer cannot be read: {error}") from error


def pair(source: str, said: dict[str, Any]) -> Pair:
    """One line of `reach` as data; raises KeyError, TypeError or ValueError for anything else."""
    tries = tuple(_try(door) for door in said["doors"])
    packets, loss = said.get("packets") or {}, said.get("loss") or {}
    throughput = said.get("throughput") or {}
    return Pair(
        source=source,
        target=str(said["host"]),
        tries=tries,
        source_address=said.get("source"),
        interface=said.get("interface"),
        neighbour=next((mac for mac in said.get("neighbours", {}).values() if mac), None),
        latency_min_s=_number(said.get("latency_min_s")),
        latency_median_s=_number(said.get("latency_median_s")),
        ahead_s=_number(said.get("ahead_s")),
        full_segment=said.get("full_segment"),
        own_mtu=packets.get("own_mtu"),
        largest_packet=packets.get("largest"),
        told_mtu=packets.get("told"),
        packets_sent=int(loss.get("sent", 0)),
        packets_answered=int(loss.get("answered", 0)),
        burst_mbps=_number((said.get("burst") or {}).get("mbps")),
        throughput_mbps=_number(throughput.get("mbps")),
        retransmits=throughput.get("retransmits"),
        waited=_number(throughput.get("waited")),
    )


def _try(door: dict[str, Any]) -> PortTry:
    return PortTry(
        kind=door["kind"],
        address=str(door["address"]),
        port=int(door["port"]),
        outcome=door["outcome"],
        seconds=float(door.get("seconds", 0.0)),
        tries=int(door.get("tries", 1)),
        answered_by=door.get("answered_by"),
        detail=door.get("detail"),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
