"""The network of a cluster as it was measured, and where that is kept: `<home>/clusters/<name>/network.json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.inventory.pairs import Skipped
from gangline.runs.cluster import Cluster
from gangline.runs.decode import build
from gangline.runs.files import read_json, write_json

SCHEMA_VERSION = 1


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
class Network:
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

    def to_json(self) -> dict[str, Any]:
        """Plain data for network.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Network:
        """What `to_json` wrote; raises TypeError or ValueError for anything else."""
        return build(Network, data)


def network_path(home: Path, name: str) -> Path:
    """Where the measured network of a cluster is kept; `name` is the cluster's."""
    return home / "clusters" / name / "network.json"


def save_network(home: Path, network: Network) -> Path:
    """Keep it, in the place of an earlier one."""
    path = network_path(home, network.cluster)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, network.to_json())
    return path


def load_network(home: Path, cluster: Cluster) -> Network | None:
    """The network of a cluster as last measured; None where it never was, or with other hosts or addresses."""
    try:
        data = read_json(network_path(home, cluster.name))
        network = Network.from_json(data) if data.get("schema_version") == SCHEMA_VERSION else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
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
