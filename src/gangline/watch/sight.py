"""What `check` shows: a row per host, the findings, what was not checked, and a line that sums it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gangline.checks.finding import Finding, fold_names
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.nics import NetworkChoice
from gangline.inventory.pairs import Skipped
from gangline.units import format_bytes
from gangline.watch.table import table
from gangline.watch.text import clean


def host_table(inventory: Inventory) -> list[str]:
    """A row for each host that answered."""
    header = ("host", "cpus", "memory free", "disk free", "python", "torch", "gpus")
    return table(header, [_row(facts) for facts in inventory.hosts])


def network_lines(networks: Mapping[str, NetworkChoice]) -> list[str]:
    """The interface of each host, the exact variables of its ranks, and why; equal hosts in one line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for host, choice in networks.items():
        groups.setdefault(_variables(choice), []).append(host)
    return [
        clean(line)
        for variables, hosts in groups.items()
        for line in ([f"ranks  {fold_names(hosts)}", *(f"  {row}" for row in variables)] if variables else [])
    ]


def finding_lines(inventory: Inventory, findings: Sequence[Finding]) -> list[str]:
    """Every finding, worst first, then the hosts that have none."""
    troubled = {host for finding in findings for host in finding.hosts}
    good = [facts.host for facts in inventory.hosts if facts.host not in troubled]
    lines = [clean(line) for finding in findings for line in finding.lines()]
    return [*lines, f"ok   {fold_names(good)}"] if good else lines


def skipped_line(skipped: Sequence[Skipped]) -> list[str]:
    """What was not checked, with the reason."""
    return [clean("skipped  " + " · ".join(f"{row.what} ({row.why})" for row in skipped))] if skipped else []


def sum_line(findings: Sequence[Finding], *, hosts: int, tier: str, seconds: float) -> str:
    """How it looks in all: 1 failed, 2 warnings · quick tier · 3 hosts · 2.1 s."""
    failed, warned = (sum(finding.severity == severity for finding in findings) for severity in ("fail", "warn"))
    counts = f"{failed} failed, {warned} {'warning' if warned == 1 else 'warnings'}" if failed or warned else "all ok"
    return f"{counts} · {tier} tier · {hosts} {'host' if hosts == 1 else 'hosts'} · {seconds:.1f} s"


def _variables(choice: NetworkChoice) -> tuple[str, ...]:
    return tuple(f"{name}={value}  {choice.reasons.get(name, choice.reason)}" for name, value in choice.env.items())


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
