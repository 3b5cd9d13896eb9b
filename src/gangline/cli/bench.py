"""`gangline bench network [CLUSTER]`, `bench compute JOB`, `bench scaling JOB`: how fast hosts exchange and compute."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline import app
from gangline.bench.measure import bench_compute, bench_network, bench_scaling
from gangline.bench.text import network_lines, scaling_lines, speeds_lines
from gangline.cli.output import Terminal, print_data, print_json
from gangline.errors import UsageError
from gangline.inventory.measured import network_path


class What(str, enum.Enum):
    """What is measured."""

    network = "network"
    compute = "compute"
    scaling = "scaling"


DEFAULT_S = {What.network: 20.0, What.compute: 60.0, What.scaling: 180.0}


def command(
    what: Annotated[
        What,
        typer.Argument(
            metavar="network|compute|scaling",
            help="latency, throughput, all-reduce; a job's model on every rank; each host alone against all together",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="network: the cluster, by default ./cluster.yaml; else the job", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="laid over the job", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="with a job: the cluster, by default ./cluster.yaml", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=4, max=3600, help="how long it may take, after the start: 20, 60 or 180", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measure every pair of hosts, how fast every rank computes, or how near all hosts come to the sum of each alone.

    compute times a copy of the job's model with two layers. scaling trains the whole model, with random weights and
    samples. What network and compute find is kept for gangline plan. Best while nothing else runs.
    """
    limit_s, home, talk = seconds or DEFAULT_S[what], app.default_home(), Terminal()
    if what is What.network:
        if overrides:
            raise UsageError("bench network takes one file", seen=overrides[0], fix="gangline bench network FILE")
        network = bench_network(app.cluster_file(file or cluster), home=home, seconds=limit_s, talk=talk)
        kept = f"kept in {network_path(home, network.cluster)}"
        _show(talk, network.to_json(), network_lines(network), as_json=as_json, kept=kept)
        return
    if file is None:
        raise UsageError(f"bench {what.value} needs a job", seen="no file", fix=f"gangline bench {what.value} job.yaml")
    start = app.StartOptions(home=home, job=file, overrides=tuple(overrides or ()), cluster=app.cluster_file(cluster))
    if what is What.compute:
        speeds = bench_compute(start, seconds=limit_s, talk=talk)
        kept = f"kept in {home / 'profiles'}" if speeds.ranks else ""
        _show(talk, speeds.to_json(), speeds_lines(speeds), as_json=as_json, kept=kept)
        return
    scaling = bench_scaling(start, seconds=limit_s, talk=talk)
    _show(talk, scaling.to_json(), scaling_lines(scaling), as_json=as_json)


def _show(talk: Terminal, data: dict[str, Any], lines: list[str], *, as_json: bool, kept: str = "") -> None:
    talk.clear()
    if as_json:
        print_json(data)
        return
    print_data(lines)
    if kept:
        talk.say(kept)
