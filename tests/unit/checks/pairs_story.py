"""Pairs of hosts for tests: all is well, until a test says what is not."""

import dataclasses

from gangline.inventory.facts import HostFacts, Inventory, Nic
from gangline.inventory.pairs import Clock, ListenerFacts, Pair, Pairs, PortTry
from gangline.runs.cluster import Cluster, Host

MEETING, DATA = 29500, (40001, 40002)


def address(name):
    return f"10.0.0.{name.removeprefix('pc')}"


def mac(name):
    return f"02:00:00:00:00:0{name.removeprefix('pc')}"


def cluster(*names, **options):
    hosts = tuple(Host(name=name, workdir="/w", python="p", transport="ssh", address=address(name)) for name in names)
    return Cluster(name="home", hosts=hosts, **options)


def tries(target, meeting="ok", data=("ok", "ok"), **more):
    doors = [
        ("rendezvous", MEETING, meeting),
        *(("ephemeral", port, what) for port, what in zip(DATA, data, strict=True)),
    ]
    return tuple(
        PortTry(
            kind=kind,
            address=address(target),
            port=port,
            outcome=what,
            seconds=2.5,
            tries=1 if what == "ok" else 2,
            **more,
        )
        for kind, port, what in doors
    )


def open_pair(source, target):
    return Pair(
        source=source,
        target=target,
        tries=tries(target),
        source_address=address(source),
        interface="eno1",
        neighbour=mac(target),
        latency_min_s=0.0002,
        latency_median_s=0.0003,
        ahead_s=0.0001,
        full_segment=True,
        own_mtu=1500,
        largest_packet=1500,
        packets_sent=200,
        packets_answered=200,
        burst_mbps=900.0,
        throughput_mbps=940.0,
        retransmits=0,
    )


def healthy(*names):
    return Pairs(
        measured="2026-01-01T00:00:00+00:00",
        tier="full",
        listeners=tuple(
            ListenerFacts(host=n, address=address(n), has_address=True, rendezvous_port=MEETING, macs=(mac(n),))
            for n in names
        ),
        pairs=tuple(open_pair(source, target) for source in names for target in names if source != target),
        clocks=tuple(Clock(host=name, ahead_s=0.01, uncertainty_s=0.0002) for name in names[1:]),
    )


def facts(name, *, time_s=1000.0, speed_mbps=1000):
    nic = Nic(
        name="eno1", kind="ethernet", driver="igb", speed_mbps=speed_mbps, mtu=1500, addresses=(f"{address(name)}/24",)
    )
    system = dataclasses.replace(HostFacts.__dataclass_fields__["system"].default_factory(), time_s=time_s)
    return HostFacts(
        host=name,
        hostname=name,
        num_cpus=8,
        memory_total_bytes=16 << 30,
        memory_available_bytes=8 << 30,
        workdir="/w",
        disk_free_bytes=1 << 40,
        python="3.12.1",
        packages={},
        nics=(nic,),
        system=system,
        asked_s=999.9,
        answered_s=1000.1,
    )


def inventory(pairs, *hosts):
    return Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=hosts, pairs=pairs)


def changed(pairs, which, **what):
    """The pairs with something else about those that `which(source, target)` names; values may be functions of the pair."""
    return dataclasses.replace(
        pairs,
        pairs=tuple(
            dataclasses.replace(pair, **{key: value(pair) if callable(value) else value for key, value in what.items()})
            if which(pair.source, pair.target)
            else pair
            for pair in pairs.pairs
        ),
    )


def closed(pairs, which, how="timed out"):
    """The pairs with no port open for those that `which` names."""
    return changed(pairs, which, tries=lambda pair: tries(pair.target, how, (how, how)), full_segment=None)
