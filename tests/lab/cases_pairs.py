"""What the user's computer of a lab does in tests of the network: it runs there, through `LabHost.call`."""

import contextlib
import dataclasses
import json
import sys
import time

from gangline.checks import access, clocks, links, network
from gangline.checks.rules import apply
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import Pairs
from gangline.inventory.probe import listening, probe_outsider, probe_pairs
from gangline.runs.cluster import Cluster, Host
from gangline.transport.connect import connect_all

RULES = (*network.RULES, *links.RULES, *clocks.RULES, *access.RULES)


NOW = "2026-01-01T00:00:00+00:00"


def cluster_of(hosts, ports=None):
    known = tuple(Host(workdir="/tmp/gangline", python="python3", transport="ssh", **host) for host in hosts)
    return Cluster(name="lab", hosts=known, ports=tuple(ports) if ports else None)


@contextlib.contextmanager
def connected(cluster):
    transports = connect_all(cluster)
    try:
        yield transports
    finally:
        for transport in transports.values():
            transport.close()


def look(hosts, tier="quick", ports=None):
    """Try the network between hosts over ssh, and judge it."""
    cluster = cluster_of(hosts, ports)
    before = Inventory(gathered=NOW, hosts=())
    with connected(cluster) as transports:
        begun = time.monotonic()
        pairs = probe_pairs(cluster, before, transports, tier=tier)
        seconds = time.monotonic() - begun
    inventory = dataclasses.replace(before, pairs=pairs)
    findings = [finding.to_json() for finding in apply(RULES, inventory, cluster)]
    return {"findings": findings, "pairs": pairs.to_json(), "seconds": seconds}


def watch_outside():
    """For every line on stdin but the first, which tells the hosts: what this computer reaches of the hosts' ports.

    Over connections that stay: (where ranks meet, data) by host, and who has a finding.
    """
    cluster = cluster_of(json.loads(sys.stdin.readline()))
    with connected(cluster) as transports:
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(_outside(cluster, transports)) + "\n")
            sys.stdout.flush()


def _outside(cluster, transports):
    with listening(cluster, cluster.hosts, transports, seconds=30) as listeners:
        tried = probe_outsider(listeners.token, [opened.target for opened in listeners.up.values()], timeout_s=1.0)
    pairs = Pairs(measured=NOW, tier="quick", outside=tuple(tried), outside_from="10.77.0.2")
    findings = apply(access.RULES, Inventory(gathered=NOW, hosts=(), pairs=pairs), cluster)
    return {
        "reached": {one.host: [_all_ok(one, kind) for kind in ("rendezvous", "ephemeral")] for one in tried},
        "hosts": [name for finding in findings for name in finding.hosts],
    }


def _all_ok(one, kind):
    return all(attempt.ok for attempt in one.tries if attempt.kind == kind)
