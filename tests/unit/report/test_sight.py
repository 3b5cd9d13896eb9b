"""What `check` shows: equal hosts in one line, nothing that a healthy computer does not have to explain."""

from __future__ import annotations

from gangline.inventory.facts import Gpu, GpuDriver, HostFacts, Inventory, Nic, Topology, parse_topology
from gangline.inventory.pairs import Pair, Pairs, Skipped
from gangline.inventory.rank_interface import NetworkChoice
from gangline.report.check_view import host_table, network_lines, pair_lines, skipped_line, topology_lines


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


TWO_PAIRS = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\tPIX\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\tPIX\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tPHB\tSYS\tNODE\t16-31\t1
GPU3\tSYS\tSYS\tPHB\t X \tSYS\tNODE\t16-31\t1
NIC0\tPIX\tPIX\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tNODE\tNODE\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def cards(num_cards: int, topology: Topology | None, *, simulated: bool = False) -> dict[str, object]:
    known = {"name": "A40", "memory_total_bytes": 48 << 30, "memory_free_bytes": 48 << 30, "driver": "570"}
    gpus = tuple(
        Gpu(index=number, uuid=f"GPU-{number}", numa_node=number // 2, pcie_generation_max=4, pcie_width=16, **known)  # type: ignore[arg-type]
        for number in range(num_cards)
    )
    nics = (
        Nic(name="ib0", kind="infiniband", up=True, driver="mlx5_core", numa_node=0, speed_mbps=200000),
        Nic(name="eno2", kind="ethernet", up=False, driver="tg3", numa_node=-1),
        Nic(name="lo", kind="loopback", up=True),
    )
    return {"gpus": gpus, "topology": topology, "nics": nics, "gpu_driver": GpuDriver(simulated=simulated)}


def test_topology_tells_for_every_card_what_lies_between_it_and_the_others_nearest_first() -> None:
    joined = cards(4, parse_topology(TWO_PAIRS), simulated=True)
    hosts = (facts("gpu1", **joined), facts("gpu2", **joined))
    _, title, header, *rows, ways, end = topology_lines(Inventory(gathered="", hosts=hosts))
    assert title == "topology  gpu[1-2] (simulated cards)"
    assert [row[header.index("other") :].split("  ")[0] for row in rows[:4]] == [
        "NV4 GPU1; SYS GPU[2-3]",
        "NV4 GPU0; SYS GPU[2-3]",
        "PHB GPU3; SYS GPU[0-1]",
        "PHB GPU2; SYS GPU[0-1]",
    ]
    assert [row[header.index("network") :] for row in rows[:4]] == ["PIX mlx5_0"] * 2 + ["NODE mlx5_1"] * 2
    assert [row[header.index("numa") :].split()[:3] for row in rows[:4:3]] == [["0", "PCIe", "4"], ["1", "PCIe", "4"]]
    assert rows[4].split() == ["ib0", "mlx5_core", "0", "200", "Gbit/s"]
    assert len(rows) == 5
    assert "SYS: between processors" in ways
    assert end == ""


def test_a_host_whose_table_is_missing_says_so_and_one_card_needs_none() -> None:
    hosts = (facts("gpu1", **cards(2, None)), facts("pc1", **cards(1, None)), facts("pc2"))
    lines = topology_lines(Inventory(gathered="", hosts=hosts))
    unknown = [number for number, line in enumerate(lines) if "is not known" in line]
    assert len(unknown) == 1
    assert lines[unknown[0] - 2].split()[-2:] == ["?", "?"]
    assert lines[lines.index("topology  pc1") + 2].split()[-2:] == ["-", "?"]
    assert lines[lines.index("topology  pc2") + 1] == "no device"
    assert not any("NVLinks" in line for line in lines)
