"""`gangline plan JOB`: who does what, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.checks.judge import require
from gangline.cli.output import Terminal, print_data, print_json
from gangline.inventory.network import load_network, network_line
from gangline.planning.explain import explain


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="job.yaml", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="laid over the file", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Say who would do what, and why. Starts nothing. Exit code 3 where a check would stop the start."""
    words, cluster = tuple(overrides or ()), app.cluster_file(cluster)
    start = app.Start(home=app.default_home(), job=job, overrides=words, cluster=cluster)
    talk = Terminal(quiet=True)
    decision = app.plan(start, talk=talk)
    talk.clear()
    if as_json:
        documents = decision.documents()
        print_json({"plan": documents["plan"], "findings": documents["findings"]})
    else:
        print_data(explain(decision.plan))
        if (network := load_network(start.home, decision.sight.cluster)) is not None:
            print_data([network_line(network)])
        print_data(line for finding in decision.findings for line in finding.lines())
    require(decision.findings)
