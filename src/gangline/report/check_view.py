"""The screen of `check`: a row per host, the findings, the skipped checks, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gangline.checks.rules import Finding
from gangline.inventory.facts import HostFacts, Inventory, Nic, Topology, distance
from gangline.inventory.pairs import Pairs, Skipped
from gangline.inventory.rank_interface import NetworkChoice
from gangline.report.machine_totals import totals_of
from gangline.report.text_table import clean, table
from gangline.units import fold_names, format_bytes


def host_table(inventory: Inventory) -> list[str]:
    """A row for each host that answered."""
    header = ("host", "cpus", "memory free", "disk free", "python", "torch", "gpus")
    return table(header, [_row(facts) for facts in inventory.hosts])


def total_lines(inventory: Inventory) -> list[str]:
    """What the hosts have in sum; nothing for one host without several cards."""
    totals = totals_of(inventory.hosts)
    if totals.hosts < 2 and totals.num_cards < 2:
        return []
    return ["", " · ".join(totals.words()), *filter(None, [totals.weights_line()])]


WAYS = (
    "NV#: NVLinks · PIX, PXB: one bridge of PCIe, several · PHB: through the processor · NODE: within one NUMA node · "
    "SYS: between processors"
)


def topology_lines(inventory: Inventory) -> list[str]:
    """How the cards and network adapters of each host are joined, a row per device; equal hosts in one table."""
    groups: dict[tuple[tuple[str, ...], ...], list[HostFacts]] = {}
    for facts in inventory.hosts:
        groups.setdefault(tuple(_devices(facts)), []).append(facts)
    lines: list[str] = []
    for rows, hosts in groups.items():
        first = hosts[0]
        label = " (simulated cards)" if first.gpu_driver.simulated else ""
        lines += ["", clean(f"topology  {fold_names([facts.host for facts in hosts])}{label}")]
        lines += table(("device", "what", "numa", "link", "other cards", "network"), rows) if rows else ["no device"]
        if len(first.gpus) > 1 and first.topology is None:
            lines.append("what lies between the cards is not known: nvidia-smi topo -m gave no table")
    is_known = any(facts.topology is not None for facts in inventory.hosts)
    return [*lines, *([WAYS] if is_known else []), ""]


def _devices(facts: HostFacts) -> list[tuple[str, ...]]:
    cards: list[tuple[str, ...]] = [
        (
            f"GPU{gpu.index}",
            gpu.name,
            _numa(gpu.numa_node),
            _link(gpu.pcie_generation_max, gpu.pcie_width),
            *_joined_to(f"GPU{gpu.index}", facts.topology, alone=len(facts.gpus) == 1),
        )
        for gpu in facts.gpus
    ]
    return cards + [
        (nic.name, nic.driver or nic.kind, _numa(nic.numa_node), _speed(nic), "", "")
        for nic in facts.nics
        if nic.kind in {"ethernet", "infiniband", "wifi"} and nic.up
    ]


def _joined_to(card: str, topology: Topology | None, *, alone: bool) -> tuple[str, str]:
    """The other cards by what lies between, nearest first; the nearest network adapters. alone: there is no other."""
    if topology is None:
        return "-" if alone else "?", "?"
    ways: dict[str, list[str]] = {}
    for other in topology.gpus:
        if (kind := topology.joint(card, other)) is not None:
            ways.setdefault(kind, []).append(other)
    others = "; ".join(f"{kind} {fold_names(ways[kind])}" for kind in sorted(ways, key=distance))
    best = topology.nearest(card, topology.adapters)
    near = [name for name in topology.adapters if best is not None and topology.joint(card, name) == best]
    return others or "-", f"{best} {fold_names(near)}" if near else "-"


def _numa(node: int | None) -> str:
    return "-" if node is None or node < 0 else str(node)


def _link(generation: int | None, lanes: int | None) -> str:
    return "-" if generation is None or lanes is None else f"PCIe {generation} x{lanes}"


def _speed(nic: Nic) -> str:
    """Of the link, in Gbit/s; that of a wireless one changes."""
    return "-" if nic.speed_mbps is None or nic.speed_mbps <= 0 else f"{nic.speed_mbps / 1000:g} Gbit/s"


def network_lines(networks: Mapping[str, NetworkChoice]) -> list[str]:
    """The exact variables of each host's ranks, and why; hosts with the same ones together."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, choice in networks.items():
        groups.setdefault(tuple(choice.env.items()), []).append(host)
    return [line for variables, hosts in groups.items() if variables for line in _ranks(hosts, networks)]


def pair_lines(pairs: Pairs | None) -> list[str]:
    """The slowest way and the longest one between two hosts; nothing where no speed was measured."""
    measured = [pair for pair in (pairs.pairs if pairs else ()) if pair.throughput_mbps is not None]
    if not measured:
        return []
    slow = min(measured, key=lambda pair: pair.throughput_mbps or 0.0)
    far = max(measured, key=lambda pair: pair.latency_median_s or 0.0)
    speed = f"at least {slow.throughput_mbps:.0f} Mbit/s ({slow.source} to {slow.target})"
    latency = (
        f", at most {1000 * far.latency_median_s:.2f} ms ({far.source} to {far.target})" if far.latency_median_s else ""
    )
    return [clean(f"between hosts: {speed}{latency}")]


def finding_lines(inventory: Inventory, findings: Sequence[Finding]) -> list[str]:
    """Every finding, worst first, then the hosts that have none."""
    troubled = {host for finding in findings for host in finding.hosts}
    good = [facts.host for facts in inventory.hosts if facts.host not in troubled]
    lines = [clean(line) for finding in findings for line in finding.lines()]
    return [*lines, f"ok   {fold_names(good)}"] if good else lines


def skipped_line(skipped: Sequence[Skipped]) -> list[str]:
    """The skipped checks with their reason; equal ones of several hosts in one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in skipped:
        what, of, host = row.what.rpartition(" of ")
        groups.setdefault((what + of, row.why), []).append(host)
    rows = [f"{what}{fold_names(hosts)} ({why})" for (what, why), hosts in groups.items()]
    return [clean(f"skipped  {' · '.join(rows)}")] if rows else []


def sum_line(findings: Sequence[Finding], *, hosts: int, tier: str, seconds: float) -> str:
    """How it looks in all: 1 failed, 2 warnings · quick tier · 3 hosts · 2.1 s."""
    failed, warned = (sum(finding.severity == severity for finding in findings) for severity in ("fail", "warn"))
    counts = f"{failed} failed, {warned} {'warning' if warned == 1 else 'warnings'}" if failed or warned else "all ok"
    return f"{counts} · {tier} tier · {hosts} {'host' if hosts == 1 else 'hosts'} · {seconds:.1f} s"


def _ranks(hosts: Sequence[str], networks: Mapping[str, NetworkChoice]) -> list[str]:
    """The reasons are those of the first."""
    choice = networks[hosts[0]]
    rows = [(f"  {name}={value}", choice.reasons.get(name, choice.reason)) for name, value in choice.env.items()]
    width = max(len(variable) for variable, _ in rows)
    return [f"ranks  {fold_names(hosts)}", *(clean(f"{variable:<{width}}  {reason}") for variable, reason in rows)]


def _row(facts: HostFacts) -> tuple[str, ...]:
    memory = facts.memory_available_bytes
    return (
        facts.host,
        str(facts.num_cpus),
        "?" if memory is None else format_bytes(memory),
        format_bytes(facts.disk_free_bytes),
        facts.python or "-",
        facts.packages.get("torch") or "-",
        ", ".join(f"{gpu.name} {format_bytes(gpu.memory_total_bytes)}" for gpu in facts.gpus) or _no_gpus(facts),
    )


def _no_gpus(facts: HostFacts) -> str:
    """A computer without NVIDIA's library and without a card of theirs lacks nothing."""
    driver = facts.gpu_driver
    if facts.foreign_cards:
        return f"none that trains: {', '.join(gpu.name for gpu in facts.foreign_cards)}"
    return "none" if driver.trouble == "no-library" and not driver.on_the_bus else f"none: {facts.gpu_reason}"
