"""`gangline bench network [CLUSTER]`, `bench compute JOB`, `bench scaling JOB`: how fast hosts exchange and compute."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.bench.measure import bench_compute, bench_network, bench_scaling
from gangline.bench.text import network_lines, scaling_lines, speeds_lines
from gangline.cli.options import AsJson, Overrides, argument, option
from gangline.cli.output import Terminal, print_answer
from gangline.context import StartOptions, cluster_file, default_home
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
        argument(
            "network|compute|scaling",
            "network: latency, throughput, all-reduce. compute: a job's model on every rank. "
            "scaling: all hosts against each alone",
        ),
    ],
    file: Annotated[
        Path | None,
        argument("FILE", "network: the cluster file, by default ./cluster.yaml. compute, scaling: the job file"),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, option("compute, scaling: the cluster file, by default ./cluster.yaml")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=4,
            max=3600,
            help="time limit after the start; by default 20 (network), 60 (compute), 180 (scaling)",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the network between hosts, the speed of every rank, or how well the job scales over all hosts.

    compute times a two-layer copy of the job's model. scaling trains the whole model with random weights and samples.
    gangline plan uses the results of network and compute. Run it while the hosts are idle.
    """
    limit_s, home, console = seconds or DEFAULT_S[what], default_home(), Terminal()
    if what is What.network:
        if overrides:
            raise UsageError("bench network takes one file", seen=overrides[0], fix="gangline bench network FILE")
        network = bench_network(cluster_file(file or cluster), home=home, seconds=limit_s, console=console)
        kept = f"kept in {network_path(home, network.cluster)}"
        _show(console, network.to_json(), network_lines(network), as_json=as_json, kept=kept)
        return
    if file is None:
        raise UsageError(f"bench {what.value} needs a job", seen="no file", fix=f"gangline bench {what.value} job.yaml")
    start = StartOptions(home=home, job=file, overrides=tuple(overrides or ()), cluster=cluster_file(cluster))
    if what is What.compute:
        speeds = bench_compute(start, seconds=limit_s, console=console)
        kept = f"kept in {home / 'profiles'}" if speeds.ranks else ""
        _show(console, speeds.to_json(), speeds_lines(speeds), as_json=as_json, kept=kept)
        return
    scaling = bench_scaling(start, seconds=limit_s, console=console)
    _show(console, scaling.to_json(), scaling_lines(scaling), as_json=as_json)


def _show(console: Terminal, data: dict[str, Any], lines: list[str], *, as_json: bool, kept: str = "") -> None:
    console.clear()
    print_answer(data, lines, as_json=as_json)
    if kept and not as_json:
        console.report(kept)
