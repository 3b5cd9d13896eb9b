"""What was tried between the hosts a moment ago, for a start that follows: `<home>/clusters/<name>/pairs.json`."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Pairs
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.registry import run_ids
from gangline.runs.state import RunState

RECENT_S = 600.0


def keep_pairs(home: Path, cluster: Cluster, inventory: Inventory) -> None:
    """Keep what was just tried, and found to be good."""
    path = _path(home, cluster)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pairs = inventory.pairs.to_json() if inventory.pairs else None
    write_json(path, {"mark": _mark(cluster, inventory), "pairs": pairs})


def forget_pairs(home: Path, cluster: Cluster) -> None:
    """The next start has to try anew."""
    _path(home, cluster).unlink(missing_ok=True)


def recent_pairs(home: Path, cluster: Cluster, inventory: Inventory) -> Pairs | None:
    """What was tried in the last ten minutes; None where it has to be tried anew.

    It counts for the very same cluster file, machines since their last boot, interfaces and addresses, and as long as
    no run has failed since.
    """
    try:
        kept = read_json(_path(home, cluster))
        pairs = Pairs.from_json(kept["pairs"]) if kept["mark"] == _mark(cluster, inventory) else None
        if pairs is None or not 0 <= age_s(pairs) <= RECENT_S:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return None if _has_failed_since(home, time.time() - age_s(pairs)) else pairs


def age_s(pairs: Pairs) -> float:
    """How long ago it was tried."""
    return (dt.datetime.now(dt.timezone.utc) - dt.datetime.fromisoformat(pairs.measured)).total_seconds()


def _path(home: Path, cluster: Cluster) -> Path:
    return home / "clusters" / cluster.name / "pairs.json"


def _mark(cluster: Cluster, inventory: Inventory) -> str:
    """Changes with anything that the way between two hosts could depend on, as far as hosts know it."""
    known: dict[str, Any] = {
        facts.host: [
            [facts.system.machine.boot, facts.system.machine.network],
            [[nic.name, nic.up, nic.carrier, nic.mtu, nic.addresses] for nic in facts.nics],
        ]
        for facts in inventory.hosts
    }
    return hashlib.sha256(json.dumps([cluster.to_json(), known], sort_keys=True).encode()).hexdigest()


def _has_failed_since(home: Path, when: float) -> bool:
    for layout in (RunLayout(home, run_id) for run_id in run_ids(home)):
        try:
            if layout.state.stat().st_mtime > when and RunState.load(layout).phase == "failed":
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False
