"""What `check` shows: equal hosts in one line, nothing that a healthy computer does not have to explain."""

from __future__ import annotations

from gangline.inventory.facts import GpuDriver, HostFacts, Inventory
from gangline.inventory.pairs import Pair, Pairs, Skipped
from gangline.inventory.rank_interface import NetworkChoice
from gangline.report.check_view import host_table, network_lines, pair_lines, skipped_line


def facts(name: str, **more: object) -> HostFacts:
    known: dict[str, object] = {
        "host": name,
        "hostname": name,
        "num_cpus": 8,
        "memory_total_bytes": 16 << 30,
        "memory_available_bytes": 12 << 30,
        "workdir": "/home/me/gangline",
        "disk_free_bytes": 80 << 30,
        "python": "",
        "packages": {},
        "gpu_reason": "libnvidia-ml.so.1: cannot open shared object file",
        "gpu_driver": GpuDriver(trouble="no-library"),
    }
    return HostFacts(**{**known, **more})  # type: ignore[arg-type]


def last_column(row: HostFacts) -> str:
    return host_table(Inventory(gathered="2026-01-01T00:00:00Z", hosts=(row,)))[-1].rpartition("  ")[2]


def test_a_computer_without_a_card_has_none_and_one_with_a_card_says_what_is_wrong() -> None:
    assert last_column(facts("pc1")) == "none"
    broken = facts("pc2", gpu_driver=GpuDriver(trouble="no-library", on_the_bus=1))
    assert last_column(broken).startswith("none: libnvidia-ml")


def test_a_python_that_is_not_there_yet_leaves_no_hole_in_the_table() -> None:
    header, row = host_table(Inventory(gathered="", hosts=(facts("pc1"),)))
    assert row[header.index("python")] == "-"


def choice(interface: str) -> NetworkChoice:
    variable = {"GLOO_SOCKET_IFNAME": interface}
    return NetworkChoice(interface=interface, reason="why", env=variable, reasons={"GLOO_SOCKET_IFNAME": "why"})


def test_hosts_with_the_same_variables_are_one_row() -> None:
    networks = {"pc1": choice("eno1"), "pc2": choice("eno1"), "pc3": choice("wlan0")}
    assert network_lines(networks) == [
        "ranks  pc[1-2]",
        "  GLOO_SOCKET_IFNAME=eno1  why",
        "ranks  pc3",
        "  GLOO_SOCKET_IFNAME=wlan0  why",
    ]


def test_what_was_skipped_on_several_hosts_is_said_once() -> None:
    why = "its environment is made at the start"
    rows = [Skipped(what=f"packages of pc{number}", why=why) for number in (1, 2, 3)]
    (line,) = skipped_line([*rows, Skipped(what="fabric", why="none")])
    assert line == f"skipped  packages of pc[1-3] ({why}) · fabric (none)"


def test_the_slowest_way_between_hosts_is_shown_where_it_was_measured() -> None:
    ways = [("pc1", "pc2", 940.0, 0.0002), ("pc2", "pc1", 95.2, 0.0004)]
    pairs = [
        Pair(source=source, target=target, tries=(), throughput_mbps=speed, latency_median_s=latency)
        for source, target, speed, latency in ways
    ]
    seen = Pairs(measured="2026-01-01T00:00:00Z", tier="full", pairs=tuple(pairs))
    assert pair_lines(seen) == ["between hosts: at least 95 Mbit/s (pc2 to pc1), at most 0.40 ms (pc2 to pc1)"]
    assert pair_lines(Pairs(measured="", tier="quick", pairs=(Pair(source="a", target="b", tries=()),))) == []
