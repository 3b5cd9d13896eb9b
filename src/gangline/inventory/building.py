"""Ask the hosts whose environment is built by gangline what there is to build it with. Changes nothing there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any

from gangline.errors import GanglineError
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.plain import plain
from gangline.inventory.pythons import BuildFacts
from gangline.inventory.read import checked
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Host

TIMEOUT_S = 15.0
"""Every Python there is run once, eight at a time."""
NUM_AT_ONCE = 64
WHY_LENGTH = 300


def probe_building(
    inventory: Inventory, wanted: Mapping[str, tuple[Host, BuildFacts]], transports: Mapping[str, Transport]
) -> Inventory:
    """The inventory with `building` of the hosts that are asked, all at the same time.

    wanted: host name -> host, and what its lock says. A host that cannot say it has the reason as `BuildFacts.error`.
    """
    asked = {name: pair for name, pair in wanted.items() if inventory.of(name) is not None}
    if not asked:
        return inventory
    with ThreadPoolExecutor(max_workers=min(NUM_AT_ONCE, len(asked))) as pool:
        answers = pool.map(lambda name: _ask(*asked[name], transports[name]), asked)
        found = dict(zip(asked, answers, strict=True))
    return dataclasses.replace(inventory, hosts=tuple(_on(facts, found.get(facts.host)) for facts in inventory.hosts))


def environments_folder(host: Host) -> PurePath:
    """Where the environments lie that gangline builds there."""
    return PurePath(host.workdir) / "environments"


def read_building(said: Any, known: BuildFacts) -> BuildFacts:
    """What a host answers to `environment`, `do: look`, beside what is `known` of its lock; raises Unreadable."""
    fields = ("pythons", "built", "free_bytes")
    data = {name: said.get(name) for name in fields} if isinstance(said, dict) else said
    found = checked(BuildFacts, data, "environment")
    return dataclasses.replace(known, **{name: getattr(found, name) for name in fields})


def _on(facts: HostFacts, building: BuildFacts | None) -> HostFacts:
    return facts if building is None else dataclasses.replace(facts, building=building)


def _ask(host: Host, known: BuildFacts, transport: Transport) -> BuildFacts:
    request = json.dumps({"do": "look", "root": str(environments_folder(host))}).encode()
    try:
        result = transport.run((AGENT, "environment"), stdin=request, timeout_s=TIMEOUT_S)
        if result.returncode != 0:
            last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
            return _unknown(known, f"exit code {result.returncode}: {last}")
        return read_building(json.loads(result.stdout.splitlines()[-1]), known)
    except GanglineError as error:
        return _unknown(known, error.what)
    except TimeoutError:
        return _unknown(known, f"no answer within {TIMEOUT_S:g} s")
    except (OSError, ValueError, LookupError, RecursionError) as error:  # Unreadable is a ValueError
        return _unknown(known, f"its answer cannot be read: {error}")


def _unknown(known: BuildFacts, why: str) -> BuildFacts:
    return dataclasses.replace(known, error=plain(why[:WHY_LENGTH]))
