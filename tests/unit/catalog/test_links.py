"""What a link carries, by whatever name it is asked for."""

import pytest

from gangline.catalog.link_rates import LINKS, SOURCES, ethernet, find_link, nvlink_of, suggest_links


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("1gbit", "1 GbE"),
        ("1gbe", "1 GbE"),
        ("1 Gb/s", "1 GbE"),
        ("1000mbit", "1 GbE"),
        ("10 GbE", "10 GbE"),
        ("10gbit", "10 GbE"),
        ("10 gigabit", "10 GbE"),
        ("10 gbit ethernet", "10 GbE"),
        ("2.5gbit", "2.5 GbE"),
        ("100mbit", "100 Mbit Ethernet"),
        ("100 Mbps", "100 Mbit Ethernet"),
        ("25gbps", "25 GbE"),
        ("hdr", "InfiniBand HDR or RoCE 200"),
        ("IB NDR", "InfiniBand NDR or RoCE 400"),
        ("hdr200", "InfiniBand HDR or RoCE 200"),
        ("roce-100", "InfiniBand EDR or RoCE 100"),
        ("nvlink-h100", "NVLink H100"),
        ("NVLink A100", "NVLink A100"),
        ("pcie4 x16", "PCIe 4.0 x16 without P2P"),
        ("PCIe 3.0 x8", "PCIe 3.0 x8 without P2P"),
        ("pcie5x16", "PCIe 5.0 x16 without P2P"),
        ("wifi", "Wi-Fi 5"),
        ("Wi-Fi 6", "Wi-Fi 6"),
        ("20gbit", "20 Gbit/s Ethernet"),
        ("50mbit", "50 Mbit/s Ethernet"),
        # the words of InfiniBand and RoCE
        ("sdr", "InfiniBand SDR"),
        ("InfiniBand QDR", "InfiniBand QDR"),
        ("ib fdr", "InfiniBand FDR"),
        ("IB HDR100", "InfiniBand EDR or RoCE 100"),
        ("ndr200", "InfiniBand HDR or RoCE 200"),
        ("XDR", "InfiniBand XDR or RoCE 800"),
        ("200G IB", "InfiniBand HDR or RoCE 200"),
        ("ib 400g", "InfiniBand NDR or RoCE 400"),
        ("RoCE v2 100G", "InfiniBand EDR or RoCE 100"),
        ("25g roce", "RoCE 25"),
        ("ConnectX-6", "InfiniBand HDR or RoCE 200"),
        ("cx7", "InfiniBand NDR or RoCE 400"),
        ("Mellanox ConnectX-3", "InfiniBand FDR"),
        # what is at home
        ("thunderbolt4", "Thunderbolt 4 or USB4"),
        ("Thunderbolt 3", "Thunderbolt 3"),
        ("tb5", "Thunderbolt 5 or USB4 v2"),
        ("usb4", "Thunderbolt 4 or USB4"),
        ("USB 4", "Thunderbolt 4 or USB4"),
        ("usb4 v2", "Thunderbolt 5 or USB4 v2"),
        ("wifi 6e", "Wi-Fi 6E"),
        ("wifi7", "Wi-Fi 7"),
        ("Wi-Fi 4", "Wi-Fi 4"),
        ("powerline", "Powerline 1200"),
        ("powerline AV 500", "Powerline 500"),
        ("powerline2000", "Powerline 2000"),
        ("moca", "MoCA 2.5"),
        # between homes
        ("wan 50mbit", "WireGuard over 50 Mbit/s of internet"),
        ("wireguard 100 mbit 20 ms", "WireGuard over 100 Mbit/s of internet, ping 20 ms"),
        ("internet 1gbit", "WireGuard over 1 Gbit/s of internet"),
        ("wan:50mbit:30ms", "WireGuard over 50 Mbit/s of internet, ping 30 ms"),
        ("wan (50 Mbit/s, 30 ms ping)", "WireGuard over 50 Mbit/s of internet, ping 30 ms"),
        ("tailscale 300mbit@15ms", "WireGuard over 300 Mbit/s of internet, ping 15 ms"),
        ("10g sfp+", "10 GbE"),
        ("10GBASE-T", "10 GbE"),
        ("25G SFP28 DAC", "25 GbE"),
        ("1gbit 5ms", "1 GbE, ping 5 ms"),
        # several ports
        ("2x25G", "2 x 25 GbE"),
        ("2 x 10gbit", "2 x 10 GbE"),
        ("8x400G", "8 x InfiniBand NDR or RoCE 400"),
        ("8xndr", "8 x InfiniBand NDR or RoCE 400"),
        ("4x 200g ib", "4 x InfiniBand HDR or RoCE 200"),
        ("2x100gbe", "2 x 100 GbE"),
        ("1xhdr", "1 x InfiniBand HDR or RoCE 200"),
    ],
)
def test_a_link_is_found_by_what_people_type(typed, name):
    assert find_link(typed).name == name


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_every_link_is_found_by_its_own_name_and_says_where_its_figure_is_from(link):
    assert find_link(link.name) == find_link(link.name.upper()) == link
    assert link.source in SOURCES
    assert 0 < link.payload_bytes_per_s < link.line_gbps / 8 * 1e9
    assert 1e-6 < link.latency_s < 0.01


def test_every_source_is_used():
    assert {link.source for link in LINKS} | {"wan", "ports"} == set(SOURCES)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "pigeon",
        "0gbit",
        "-5gbit",
        "nvlink",
        "pcie",
        "infiniband",
        "x16",
        "100",
        "gbit",
        "wan",
        "wireguard",
        "8x",
        "2xpigeon",
        "usb",
    ],
)
def test_what_is_ambiguous_or_no_link_is_not_guessed(typed):
    assert find_link(typed) is None


@pytest.mark.parametrize(
    ("name", "lowest_gb_s", "highest_gb_s"),
    [
        ("100mbit", 0.0117, 0.0118),
        ("1gbit", 0.117, 0.117),
        ("2.5gbit", 0.29, 0.29),
        ("10gbit", 1.0, 1.15),
        ("25gbit", 25 / 8 * 0.6, 25 / 8 * 0.7),
        ("40gbit", 40 / 8 * 0.6, 40 / 8 * 0.7),
        ("50gbit", 50 / 8 * 0.6, 50 / 8 * 0.7),
        ("100gbit", 4, 6),
        ("edr", 12, 12),
        ("hdr", 24, 24),
        ("ndr", 47, 49),
        ("qdr", 3, 4),
        ("fdr", 5.5, 6.8),
        # nccl#812 and nccl-tests#100
        ("8xhdr", 190, 195),
        ("4x200g", 88, 97),
        ("8x400g", 8 * 47, 8 * 49),
        ("thunderbolt 3", 1.1, 2.0),
        ("thunderbolt 4", 1.3, 2.5),
        ("wifi 7", 0.1, 0.4),
        ("powerline", 0.01, 0.05),
        ("wan 50mbit", 0.0053, 0.0057),
        ("pcie4 x16", 10, 20),
        ("pcie5 x16", 28, 35),
        ("nvlink-a100", 208, 235),
        ("nvlink-h100", 350, 480),
        ("nvlink-b200", 700, 850),
    ],
)
def test_the_payload_is_what_was_measured_on_such_links(name, lowest_gb_s, highest_gb_s):
    assert lowest_gb_s <= find_link(name).payload_bytes_per_s / 1e9 <= highest_gb_s


@pytest.mark.parametrize("gbps", [0.05, 0.2, 0.5, 2, 3])
def test_an_ethernet_of_another_rate_carries_94_percent(gbps):
    assert ethernet(gbps).payload_bytes_per_s == pytest.approx(gbps * 1e9 / 8 * 0.94)
    assert find_link(f"{gbps:g}gbit") == find_link(f"{gbps * 1000:g} mbit") == ethernet(gbps)


def test_fast_ethernet_is_bound_by_sockets_and_never_slower_than_a_slower_one():
    rates = [0.1, 0.5, 1, 2, 2.5, 4, 5, 5.1, 7, 10, 11, 20, 25, 30, 40, 45, 50, 80, 100, 200, 400]
    payloads = [ethernet(rate).payload_bytes_per_s for rate in rates]
    assert payloads == sorted(payloads)
    shares = [payload / rate for payload, rate in zip(payloads, rates, strict=True) if rate >= 5]
    assert shares == sorted(shares, reverse=True)
    assert ethernet(400).payload_bytes_per_s == ethernet(100).payload_bytes_per_s


def test_what_is_shared_or_uneven_comes_with_a_warning():
    warned = {link.source for link in LINKS if link.warning}
    assert warned == {"wifi", "powerline", "thunderbolt"}
    assert all(link.warning for link in LINKS if link.source in warned)
    assert find_link("wan 50mbit").warning


def test_a_ping_is_two_ways():
    assert find_link("wireguard 50mbit 40ms").latency_s == pytest.approx(0.02)
    assert find_link("wan 50mbit").latency_s == pytest.approx(0.015)


def test_newer_kinds_of_a_family_are_faster():
    for family in (
        ["wifi 4", "wifi 5", "wifi 6", "wifi 6e", "wifi 7"],
        ["sdr", "ddr", "qdr", "fdr", "edr", "hdr", "ndr", "xdr"],
        ["tb3", "tb4", "tb5"],
        ["powerline 500", "powerline 1200", "powerline 2000"],
    ):
        rates = [find_link(name).payload_bytes_per_s for name in family]
        assert rates == sorted(set(rates))


@pytest.mark.parametrize(
    ("gpu", "joined_by"),
    [
        ("Tesla V100-SXM2-32GB", "NVLink V100"),
        ("Tesla V100-PCIE-32GB", None),
        ("Instinct MI300X", "Infinity Fabric MI300X"),
        ("Instinct MI355X", "Infinity Fabric MI350X"),
        ("H100 80GB HBM3", "NVLink H100"),
        ("GeForce RTX 4090", None),
    ],
)
def test_cards_on_one_board_are_joined_by_their_own_links(gpu, joined_by):
    found = nvlink_of(gpu)
    assert (None if found is None else find_link(found).name) == joined_by


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("nvlink", ["NVLink V100", "NVLink A100", "NVLink H100", "NVLink B200"]),
        ("nvlink h1000", ["NVLink H100", "NVLink V100", "NVLink A100", "NVLink B200"]),
        ("carrier pigeon", []),
    ],
)
def test_an_unknown_link_gets_its_neighbours(typed, expected):
    assert sorted(suggest_links(typed)) == sorted(expected)
    assert len(suggest_links("pcie")) <= 5
    assert all("InfiniBand" in name for name in suggest_links("infiniband"))
