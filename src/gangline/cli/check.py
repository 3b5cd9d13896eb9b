"""`gangline check [CLUSTER]`: look at every host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.checks.finding import Finding, fold_names
from gangline.checks.judge import require
from gangline.cli.output import print_data, print_json
from gangline.inventory.facts import HostFacts, Inventory
from gangline.units import format_bytes
from gangline.watch.table import table


def command(
    cluster: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER", help="cluster.yaml or a hostfile; without it, this computer", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Look at every host; changes nothing. Exit code 3 where a check fails, 4 where a host does not answer."""
    inventory, findings = app.check(cluster, home=app.default_home())
    if as_json:
        print_json({"inventory": inventory.to_json(), "findings": [finding.to_json() for finding in findings]})
    else:
        print_data([*_host_table(inventory), "", *_judgement(inventory, findings)])
    require(findings)


def _host_table(inventory: Inventory) -> list[str]:
    header = ("host", "cpus", "memory free", "disk free", "python", "torch", "gpus")
    return table(header, [_row(facts) for facts in inventory.hosts])


def _row(facts: HostFacts) -> tuple[str, ...]:
    memory = facts.memory_available_bytes
    return (
        facts.host,
        str(facts.num_cpus),
        "?" if memory is None else format_bytes(memory),
        format_bytes(facts.disk_free_bytes),
        facts.python,
        facts.packages.get("torch") or "-",
        ", ".join(f"{gpu.name} {format_bytes(gpu.memory_total_bytes)}" for gpu in facts.gpus)
        or f"none: {facts.gpu_reason}",
    )


def _judgement(inventory: Inventory, findings: tuple[Finding, ...]) -> list[str]:
    troubled = {host for finding in findings for host in finding.hosts}
    good = [facts.host for facts in inventory.hosts if facts.host not in troubled]
    lines = [line for finding in findings for line in finding.lines()]
    return [*lines, f"ok   {fold_names(good)}"] if good else lines
