"""`gangline bench network [CLUSTER]`, `gangline bench compute JOB`: how fast the hosts exchange data, and compute."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, print_data, print_json
from gangline.errors import UsageError
from gangline.inventory.network import network_path
from gangline.steps.measure import bench_compute, bench_network
from gangline.steps.measured import network_lines, speeds_lines


class What(str, enum.Enum):
    """What is measured."""

    network = "network"
    compute = "compute"


DEFAULT_S = {What.network: 20.0, What.compute: 60.0}


def command(
    what: Annotated[
        What,
        typer.Argument(
            metavar="network|compute", help="latency, throughput, all-reduce; or a job's model", show_default=False
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="network: the cluster, by default ./cluster.yaml; compute: the job", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="compute: the cluster, by default ./cluster.yaml", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=4, max=600, help="how long it may take, after the start: 20, or 60", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measure every pair of hosts and all-reduce, or how fast every rank computes. Best while nothing else runs.

    compute times a copy of the job's model with two layers, on all ranks at once. Both are kept for gangline plan.
    """
    limit_s = seconds or DEFAULT_S[what]
    if what is What.network:
        _network(file or cluster, limit_s, as_json=as_json)
    elif file is None:
        raise UsageError("bench compute needs a job", seen="no file", fix="gangline bench compute job.yaml")
    else:
        _compute(app.Start(home=app.default_home(), job=file, cluster=app.cluster_file(cluster)), limit_s, as_json)


def _network(cluster: Path | None, seconds: float, *, as_json: bool) -> None:
    talk, home = Terminal(), app.default_home()
    network = bench_network(app.cluster_file(cluster), home=home, seconds=seconds, talk=talk)
    talk.clear()
    if as_json:
        print_json(network.to_json())
        return
    print_data(network_lines(network))
    talk.say(f"kept in {network_path(home, network.cluster)}")


def _compute(start: app.Start, seconds: float, as_json: bool) -> None:
    talk = Terminal()
    speeds = bench_compute(start, seconds=seconds, talk=talk)
    talk.clear()
    if as_json:
        print_json(speeds.to_json())
        return
    print_data(speeds_lines(speeds))
    if speeds.ranks:
        talk.say(f"kept in {start.home / 'profiles'}")
