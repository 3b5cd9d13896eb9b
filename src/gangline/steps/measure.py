"""What `bench` does: hosts on which ranks can start, then the measurement."""

from __future__ import annotations

from pathlib import Path

from gangline.bench.network import Hosts, measure_network
from gangline.checks.judge import require
from gangline.inventory.network import Network
from gangline.steps.equip import claim, equip
from gangline.steps.look import Wish, look
from gangline.steps.reach import load_cluster, reached
from gangline.steps.seams import REAL, Seams, Talk

ACCESS = Wish(only=("access",), own_worker=False)


def bench_network(cluster_path: Path | None, *, home: Path, seconds: float, talk: Talk, seams: Seams = REAL) -> Network:
    """Measure the network of a cluster and keep it; raises HostUnreachable where a host does not answer."""
    cluster = load_cluster(cluster_path, home)
    with reached(cluster, home=home, talk=talk, seams=seams) as (cluster, means):
        sight = look(cluster, ACCESS, means)
        require(sight.findings)
        claim(cluster, means)
        ready = equip(sight, means)
        hosts = Hosts(
            cluster=ready.cluster, inventory=sight.inventory, transports=means.transports, networks=ready.networks
        )
        return measure_network(hosts, home=home, seconds=seconds, tell=talk.tick)
