"""`gangline check [CLUSTER | JOB]`: look at every host, and at the rows of a job."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.checks.judge import require
from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, print_answer, process_age_s
from gangline.context import StartOptions, cluster_file, default_home
from gangline.decide.inspect import InspectOptions, InspectResult
from gangline.decide.told_before import acknowledged_line, is_acknowledged
from gangline.errors import CheckFailed
from gangline.report.check_view import (
    finding_lines,
    host_table,
    network_lines,
    pair_lines,
    skipped_line,
    sum_line,
    topology_lines,
    total_lines,
)
from gangline.report.machine_totals import totals_of


class CheckTier(str, enum.Enum):
    """How closely to look."""

    quick = "quick"
    full = "full"
    burn = "burn"


class CheckTable(str, enum.Enum):
    """More to show."""

    topology = "topology"


def command(  # noqa: PLR0913  (options of a command line)
    cluster: Annotated[
        Path | None,
        argument(
            "CLUSTER | JOB",
            "cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer. A job.yaml: its rows, too",
        ),
    ] = None,
    tier: Annotated[
        CheckTier,
        typer.Option(
            help="quick: takes seconds. full: adds throughput, packet loss and disks. burn: full, for minutes"
        ),
    ] = CheckTier.quick,
    only: Annotated[list[str] | None, option("only this family (network, gpus, ...) or id (E-NET-07)", "WHAT")] = None,
    same: Annotated[list[str] | None, option("compare this model or data set on all hosts by hash", "PATH")] = None,
    show: Annotated[
        CheckTable | None, option("more tables: how cards and network adapters are joined", "topology")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="treat warnings as failures")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for faults on every host; changes nothing. Exit code 3 if a check fails, 4 if a host does not answer."""
    job, cluster = (cluster, None) if cluster is not None and _is_job(cluster) else (None, cluster)
    options = InspectOptions(tier=tier.value, only=tuple(only or ()), paths=tuple(same or ()))
    console = Terminal()
    home, hosts = default_home(), cluster_file(cluster)
    found = None
    if job is not None:
        found = app.check_rows(StartOptions(home=home, job=job, cluster=hosts), console=console)
    inspection = app.check(hosts, home=home, options=options, console=console)
    console.clear()
    seconds = process_age_s() or inspection.seconds
    answer = {
        **inspection.documents(),
        "totals": totals_of(inspection.inventory.hosts).to_json(),
        "findings": [finding.to_json() for finding in inspection.findings],
        "skipped": [{"what": row.what, "why": row.why} for row in inspection.skipped],
        "tier": tier.value,
        "seconds": round(seconds, 2),
    }
    rows = [] if found is None else found[1].lines(found[0])
    if found is not None:
        answer["rows"] = {"lines": rows, "errors": [error.to_json() for error in found[1].errors(found[0])]}
    more = topology_lines(inspection.inventory) if show is not None else []
    print_answer(answer, [*_screen(inspection, options, seconds, more), *rows], as_json=as_json)
    if found is not None:
        found[1].require(found[0])
    require(inspection.findings)
    warned = [finding for finding in inspection.findings if finding.severity == "warn"]
    if strict and not all(is_acknowledged(finding, inspection.cluster) for finding in warned):
        raise CheckFailed("a check warns, and --strict was asked for", fix="see above")


JOB_KEY = re.compile(r"^[\"']?(model|data|batch)[\"']?\s*:", re.MULTILINE)


def _is_job(path: Path) -> bool:
    """Whether a file describes a job; a cluster has none of these keys."""
    try:
        return JOB_KEY.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):  # its reader says so
        return False


def _screen(inspection: InspectResult, options: InspectOptions, seconds: float, more: list[str]) -> list[str]:
    """more: tables that were asked for."""
    inventory, findings = inspection.inventory, inspection.findings
    hosts = len(inspection.cluster.hosts)
    return [
        *host_table(inventory),
        *total_lines(inventory),
        *(more or [""]),
        *(network_lines(inspection.networks) if options.wants("network") else []),
        *pair_lines(inventory.pairs),
        *finding_lines(inventory, [each for each in findings if not is_acknowledged(each, inspection.cluster)]),
        *acknowledged_line(findings, inspection.cluster),
        *skipped_line(inspection.skipped),
        sum_line(findings, hosts=hosts, tier=options.tier, seconds=seconds),
    ]
