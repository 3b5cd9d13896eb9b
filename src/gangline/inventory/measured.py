"""The network of a cluster as it was measured, and where that is kept: `<home>/clusters/<name>/network.json`."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Pairs, Skipped
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout

if TYPE_CHECKING:
    from gangline.planner.calibration import Profile, ProfileKey
from gangline.runs.record_versions import Record
from gangline.runs.registry import run_ids
from gangline.runs.state import RunState

SCHEMA_VERSION = 1
_Kept = TypeVar("_Kept", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one host to another, measured while nothing else was."""

    source: str
    target: str
    latency_s: float | None = None
    """Of a round trip: the least of 20."""
    latency_median_s: float | None = None
    throughput_mbps: float | None = None
    """Of one TCP connection."""
    retransmits: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operation over all ranks, at one size."""

    operation: str
    num_bytes: int
    seconds: float
    """Median over the iterations; of each, the slowest rank counts."""
    iterations: int
    world_size: int
    backend: str

    @property
    def algorithm_gbps(self) -> float:
        """Gbit/s of the data that each rank puts in."""
        return self.num_bytes * 8 / self.seconds / 1e9

    @property
    def bus_gbps(self) -> float:
        """Gbit/s that a ring moves over each link for an all-reduce: 2(n-1)/n of the data."""
        return self.algorithm_gbps * 2 * (self.world_size - 1) / self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Record):
    """What `gangline bench network` found."""

    cluster: str
    measured: str
    """When, in ISO format."""
    method: str
    addresses: dict[str, str]
    """Host -> the address that was used."""
    slots: dict[str, int]
    """Host -> ranks of the collectives."""
    versions: dict[str, str]
    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    """What was not measured, and why."""
    notes: tuple[str, ...] = ()
    """What makes figures worse than they are."""
    schema_version: int = SCHEMA_VERSION

    def fits(self, cluster: Cluster) -> bool:
        """Whether these are the figures of these hosts, at these addresses."""
        return self.addresses == {host.name: host.address for host in cluster.hosts}


def network_path(home: Path, name: str) -> Path:
    """Where the measured network of a cluster is kept; `name` is the cluster's."""
    return home / "clusters" / name / "network.json"


def save_network(home: Path, network: Network) -> Path:
    """Keep it, in the place of an earlier one."""
    return keep(network_path(home, network.cluster), network.to_json())


def keep(path: Path, value: Any) -> Path:
    """Write what is kept between commands, in a folder that nobody else reads."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, value)
    return path


def load_network(home: Path, cluster: Cluster) -> Network | None:
    """The network of a cluster as last measured; None where it never was, or with other hosts or addresses."""
    network = _load(network_path(home, cluster.name), Network, version=SCHEMA_VERSION)
    return network if network is not None and network.fits(cluster) else None


def network_line(network: Network) -> str:
    """What was measured, in one line: the slowest way, and the largest all-reduce."""
    said = []
    ways = [link for link in network.links if link.throughput_mbps is not None]
    if ways:
        slow = min(ways, key=lambda link: link.throughput_mbps or 0.0)
        said.append(f"slowest pair {slow.throughput_mbps:.0f} Mbit/s ({slow.source} to {slow.target})")
    reduced = [each for each in network.collectives if each.operation == "all_reduce"]
    if reduced:
        large = max(reduced, key=lambda each: each.num_bytes)
        said.append(f"all-reduce {large.algorithm_gbps:.2f} Gbit/s at {large.num_bytes / 2**20:.0f} MiB")
    return f"network measured {network.measured[:10]}: {', '.join(said) or 'nothing that can be compared'}"


# How fast devices were at which work, as it was measured: `<home>/profiles/<key>-<host>.json`.


def profile_path(home: Path, profile: Profile) -> Path:
    """Where it is kept."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", profile.host)
    return home / "profiles" / f"{profile.key.name}-{host}.json"


def save_profile(home: Path, profile: Profile) -> Path:
    """Keep it, in the place of an earlier one of the same host and work."""
    return keep(profile_path(home, profile), profile.to_json())


def load_profiles(home: Path) -> list[Profile]:
    """All that are kept, newest first; what is not ours, or of another version, counts as none."""
    from gangline.planner.calibration import PROFILE_SCHEMA_VERSION, Profile  # here, as most commands plan nothing

    paths = sorted((home / "profiles").glob("*.json"))
    found = [_load(path, Profile, version=PROFILE_SCHEMA_VERSION) for path in paths]
    return sorted((each for each in found if each is not None), key=lambda each: each.measured, reverse=True)


def find_profile(profiles: Sequence[Profile], wanted: ProfileKey, *, host: str | None = None) -> Profile | None:
    """The newest one that holds for what is asked; that of the host itself comes first.

    Words of `wanted` that are empty ask for nothing. A processor's speed holds for its own host only: "cpu" may be any.
    """
    known = [each for each in profiles if each.key.meets(wanted)]
    own = [each for each in known if each.host == host]
    others = [] if wanted.gpu in {"", "cpu"} else known
    return next(iter(own or others), None)


def _load(path: Path, kind: type[_Kept], *, version: int) -> _Kept | None:
    try:
        data = read_json(path)
        return kind.from_json(data) if data.get("schema_version") == version else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


# What was tried between the hosts a moment ago, for a start that follows: `<home>/clusters/<name>/pairs.json`.


RECENT_S = 600.0


def keep_pairs(home: Path, cluster: Cluster, inventory: Inventory) -> None:
    """Keep what was just tried, and found to be good."""
    pairs = inventory.pairs.to_json() if inventory.pairs else None
    keep(_path(home, cluster), {"mark": _mark(cluster, inventory), "pairs": pairs})


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
    # every job of Slurm has an allocation of its own, on nodes that are as they were
    hosts = tuple(dataclasses.replace(host, allocation=None) for host in cluster.hosts)
    asked = dataclasses.replace(cluster, hosts=hosts).to_json()
    return hashlib.sha256(json.dumps([asked, known], sort_keys=True).encode()).hexdigest()


def _has_failed_since(home: Path, when: float) -> bool:
    for layout in (RunLayout(home, run_id) for run_id in run_ids(home)):
        try:
            if layout.state.stat().st_mtime > when and RunState.load(layout).phase == "failed":
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False
