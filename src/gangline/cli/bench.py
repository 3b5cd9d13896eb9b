"""`gangline bench network [CLUSTER]`: how fast the hosts exchange data."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, print_data, print_json
from gangline.inventory.network import Link, Network, network_path
from gangline.steps.measure import bench_network
from gangline.units import format_bytes
from gangline.watch.table import table


class What(str, enum.Enum):
    """What is measured."""

    network = "network"


def command(
    what: Annotated[
        What, typer.Argument(metavar="network", help="latency, throughput, all-reduce", show_default=False)
    ],
    cluster: Annotated[
        Path | None, typer.Argument(metavar="CLUSTER", help="by default ./cluster.yaml", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=4, max=600, help="how long it may take, after the start")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measure every pair of hosts, then all-reduce over all ranks; best while nothing else runs. The result is kept."""
    del what
    talk, home = Terminal(), app.default_home()
    network = bench_network(app.cluster_file(cluster), home=home, seconds=seconds, talk=talk)
    talk.clear()
    if as_json:
        print_json(network.to_json())
        return
    print_data(_screen(network))
    talk.say(f"kept in {network_path(home, network.cluster)}")


def _screen(network: Network) -> list[str]:
    speeds = _matrix(network, "Mbit/s", lambda link: _text(link.throughput_mbps, "{:.0f}"))
    latencies = _matrix(network, "ms", lambda link: _text(link.latency_s and link.latency_s * 1000, "{:.2f}"))
    rows = [
        (
            f"{one.operation} {format_bytes(one.num_bytes)}",
            f"{one.seconds * 1000:.2f} ms",
            f"{one.bus_gbps:.3g} Gbit/s bus",
            f"{one.world_size} ranks, {one.backend}",
        )
        for one in network.collectives
    ]
    return [
        *([*speeds, "", *latencies, ""] if network.links else []),
        *(table(("collective", "median", "speed", "of"), rows) if rows else []),
        *(f"note     {note}" for note in network.notes),
        *(f"skipped  {row.what}: {row.why}" for row in network.skipped),
    ]


def _matrix(network: Network, unit: str, words: Callable[[Link], str]) -> list[str]:
    names = [name for name in network.addresses if any(name in {link.source, link.target} for link in network.links)]
    cells = {(link.source, link.target): words(link) for link in network.links}
    rows = [(source, *(cells.get((source, target), "-") for target in names)) for source in names]
    return table((f"{unit}, from", *(f"to {name}" for name in names)), rows)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
