"""`gangline check [CLUSTER]`: look at every host."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.checks.judge import require
from gangline.cli.output import Terminal, print_data, print_json
from gangline.errors import CheckFailed
from gangline.report.check_view import finding_lines, host_table, network_lines, pair_lines, skipped_line, sum_line


class CheckTier(str, enum.Enum):
    """How closely to look."""

    quick = "quick"
    full = "full"
    burn = "burn"


def command(
    cluster: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER",
            help="cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[
        CheckTier,
        typer.Option(
            help="quick: takes seconds. full: adds throughput, packet loss and disks. burn: full, for minutes"
        ),
    ] = CheckTier.quick,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="only this family (network, gpus, ...) or id (E-NET-07)", show_default=False),
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="compare this model or data set on all hosts by hash", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="treat warnings as failures")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Look for faults on every host; changes nothing. Exit code 3 if a check fails, 4 if a host does not answer."""
    options = app.InspectOptions(tier=tier.value, only=tuple(only or ()), paths=tuple(same or ()))
    console = Terminal()
    inspection = app.check(app.cluster_file(cluster), home=app.default_home(), options=options, console=console)
    console.clear()
    if as_json:
        said = {
            **inspection.documents(),
            "findings": [finding.to_json() for finding in inspection.findings],
            "skipped": [{"what": row.what, "why": row.why} for row in inspection.skipped],
        }
        print_json({**said, "tier": tier.value, "seconds": round(inspection.seconds, 2)})
    else:
        print_data(_screen(inspection, options))
    require(inspection.findings)
    if strict and any(finding.severity == "warn" for finding in inspection.findings):
        raise CheckFailed("a check warns, and --strict was asked for", fix="see above")


def _screen(inspection: app.InspectResult, options: app.InspectOptions) -> list[str]:
    inventory, findings = inspection.inventory, inspection.findings
    hosts = len(inspection.cluster.hosts)
    return [
        *host_table(inventory),
        "",
        *(network_lines(inspection.networks) if options.wants("network") else []),
        *pair_lines(inventory.pairs),
        *finding_lines(inventory, findings),
        *skipped_line(inspection.skipped),
        sum_line(findings, hosts=hosts, tier=options.tier, seconds=inspection.seconds),
    ]
