"""What a link carries, by whatever name it is asked for."""

import pytest

from gangline.catalog.link_rates import LINKS, SOURCES, ethernet, find_link, suggest_links


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
    assert {link.source for link in LINKS} == set(SOURCES)


@pytest.mark.parametrize(
    "typed", ["", "pigeon", "0gbit", "-5gbit", "nvlink", "pcie", "infiniband", "x16", "100", "gbit"]
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


def test_wifi_comes_with_a_warning_and_cables_do_not():
    warned = {link.name for link in LINKS if link.warning}
    assert warned == {"Wi-Fi 5", "Wi-Fi 6"}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("nvlink", ["NVLink A100", "NVLink H100", "NVLink B200"]),
        ("infiniband", ["InfiniBand EDR or RoCE 100", "InfiniBand HDR or RoCE 200", "InfiniBand NDR or RoCE 400"]),
        ("nvlink h1000", ["NVLink H100", "NVLink A100", "NVLink B200"]),
        ("carrier pigeon", []),
    ],
)
def test_an_unknown_link_gets_its_neighbours(typed, expected):
    assert sorted(suggest_links(typed)) == sorted(expected)
    assert len(suggest_links("pcie")) <= 5
