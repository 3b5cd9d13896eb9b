"""What links carry: their line rate, and the payload that collectives really get through them.

For a plan before `gangline bench network` has measured the link, and for questions about one that is not there yet.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One kind of link, full duplex but where the warning says otherwise; all figures are for one direction."""

    name: str
    line_gbps: float
    """What is printed on it, Gbit/s."""
    payload_bytes_per_s: float
    """What a collective of one process per end gets through it (nccl-tests: bus bandwidth), bytes/s."""
    latency_s: float
    """Of one hop of a collective."""
    source: str
    """Key of `SOURCES`."""
    warning: str = ""
    """Why the figure may mislead; empty for most."""


SOURCES: dict[str, str] = {
    "tcp": "94 % of the line is left of Ethernet, IP and TCP at an MTU of 1500: 1448 / 1538 bytes; iperf on 1 GbE shows"
    " 941 Mb/s. Hops of 50 to 200 us (64 B all-reduce over EC2 sockets: 164 us).",
    "tcp-fast": "One NIC, NCCL over sockets: 10 GbE 80 to 92 % (nccl-tests#107), 25 to 50 GbE 60 to 70 % (nccl#209,"
    " nccl-tests#83; 40 GbE the same), 100 GbE 4 to 6 GB/s (nccl#450; nccl#209: 18 to 41 Gb/s where iperf shows 92).",
    "wifi": "Typical of one client near the access point: about half of the PHY rate. General knowledge, NOT VERIFIED.",
    "rdma": "NVIDIA in nccl-tests#119: 24 GB/s for a 200G NIC, 12 for a 100G one; NDR 47 to 49 GB/s (general"
    " knowledge). Hop: 14 us, NCCL's own cost model (src/graph/tuning.cc, NET, Simple).",
    "pcie": "All-reduce bus bandwidth of GeForce cards, which have no P2P and go through host memory: PCIe 4.0 x16 10"
    " to 20 GB/s, PCIe 5.0 x16 28 (8 cards) to 35 (4 cards), nccl#1639. PCIe 3.0 and x8 in proportion: NOT VERIFIED."
    " Hop: 5.7 us, NCCL's cost model.",
    "nvlink": "All-reduce bus bandwidth of 8 GPUs: A100 208 to 235 GB/s (ml-engineering, nccl-tests#178), H100 350 to"
    " 480 (480 with NVLS; H200 475, nccl-tests#272), B200 830 with NVLS of which NCCL's model counts 720 (nccl#1807)."
    " Hop: 3.4 us, NCCL's cost model.",
}
"""Short names of sources -> what is meant."""

TCP_PAYLOAD_SHARE = 0.94
"""Of the line rate, up to `_LAST_WIRE_BOUND_GBPS`; see `SOURCES["tcp"]`."""
_LAST_WIRE_BOUND_GBPS = 5.0
_TCP_HOP_S = 100e-6
_RDMA_HOP_S = 14e-6
_PCIE_HOP_S = 5.7e-6
_NVLINK_HOP_S = 3.4e-6
_AIR = "Wi-Fi is shared, half duplex and uneven: all machines share this figure, and a step waits for the worst moment."


def _link(
    name: str, line_gbps: float, payload_gb_s: float, latency_s: float, source: str, warning: str = ""
) -> LinkSpec:
    return LinkSpec(
        name=name,
        line_gbps=line_gbps,
        payload_bytes_per_s=payload_gb_s * 1e9,
        latency_s=latency_s,
        source=source,
        warning=warning,
    )


LINKS: tuple[LinkSpec, ...] = (
    _link("100 Mbit Ethernet", 0.1, 0.01175, _TCP_HOP_S, "tcp"),
    _link("1 GbE", 1, 0.117, _TCP_HOP_S, "tcp"),
    _link("2.5 GbE", 2.5, 0.29, _TCP_HOP_S, "tcp"),
    _link("5 GbE", 5, 0.5875, _TCP_HOP_S, "tcp"),
    _link("10 GbE", 10, 1.075, _TCP_HOP_S, "tcp-fast"),
    _link("25 GbE", 25, 2.0, _TCP_HOP_S, "tcp-fast"),
    _link("40 GbE", 40, 3.2, _TCP_HOP_S, "tcp-fast"),
    _link("50 GbE", 50, 4.0, _TCP_HOP_S, "tcp-fast"),
    _link("100 GbE", 100, 5.0, _TCP_HOP_S, "tcp-fast"),
    _link("Wi-Fi 5", 0.867, 0.05, 3e-3, "wifi", _AIR),
    _link("Wi-Fi 6", 1.2, 0.08, 3e-3, "wifi", _AIR),
    _link("InfiniBand EDR or RoCE 100", 100, 12, _RDMA_HOP_S, "rdma"),
    _link("InfiniBand HDR or RoCE 200", 200, 24, _RDMA_HOP_S, "rdma"),
    _link("InfiniBand NDR or RoCE 400", 400, 48, _RDMA_HOP_S, "rdma"),
    _link("PCIe 3.0 x8 without P2P", 64, 3.75, _PCIE_HOP_S, "pcie"),
    _link("PCIe 3.0 x16 without P2P", 128, 7.5, _PCIE_HOP_S, "pcie"),
    _link("PCIe 4.0 x8 without P2P", 128, 7.5, _PCIE_HOP_S, "pcie"),
    _link("PCIe 4.0 x16 without P2P", 256, 15, _PCIE_HOP_S, "pcie"),
    _link("PCIe 5.0 x8 without P2P", 256, 15, _PCIE_HOP_S, "pcie"),
    _link("PCIe 5.0 x16 without P2P", 512, 30, _PCIE_HOP_S, "pcie"),
    _link("NVLink A100", 2400, 235, _NVLINK_HOP_S, "nvlink"),
    _link("NVLink H100", 3600, 370, _NVLINK_HOP_S, "nvlink"),
    _link("NVLink B200", 7200, 720, _NVLINK_HOP_S, "nvlink"),
)
"""By kind; Ethernet is TCP over sockets, with RDMA the same wire has its own rows."""

_ETHERNET = tuple(link for link in LINKS if link.source in {"tcp", "tcp-fast"})
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([gm])(?:bit|bits|bps|be|b|ige|igabit|egabit)?(?:/s)?(?: ?(?:ethernet|lan|tcp))?")
_OTHER_NAMES = {
    "ethernet": "1 GbE",
    "fast ethernet": "100 Mbit Ethernet",
    "wifi": "Wi-Fi 5",
    "wlan": "Wi-Fi 5",
    "edr": "InfiniBand EDR or RoCE 100",
    "hdr": "InfiniBand HDR or RoCE 200",
    "ndr": "InfiniBand NDR or RoCE 400",
    "roce": "InfiniBand EDR or RoCE 100",
    "nvlink h200": "NVLink H100",
    "nvlink h800": "NVLink A100",
}


def find_link(text: str) -> LinkSpec | None:
    """The link that somebody means: "1gbit", "10 GbE", "100mbit", "hdr", "roce 200", "pcie4 x16", "nvlink-h100".

    A rate that is not in the table, such as "20gbit", is Ethernet with TCP: see `ethernet`. None where nothing fits.
    """
    plain = re.sub(r"[-_ ]+", " ", text.strip().lower())
    rate = _RATE.fullmatch(plain)
    if rate:
        gbps = float(rate[1]) / (1 if rate[2] == "g" else 1000)
        return ethernet(gbps) if 0 < gbps < math.inf else None
    return _by_name(plain)


def ethernet(line_gbps: float) -> LinkSpec:
    """Ethernet of any rate, with TCP: the table's row, or 94 % of the line up to 5 Gbit/s.

    Above that processors and sockets bound it, not the wire: the payload lies between those of the rates next to it in
    the table (a straight line in both logarithms). Beyond 100 Gbit/s one connection gets no more than at 100.
    """
    known = next((link for link in _ETHERNET if math.isclose(link.line_gbps, line_gbps)), None)
    if known:
        return known
    bound_by_wire = line_gbps <= _LAST_WIRE_BOUND_GBPS
    return LinkSpec(
        name=f"{line_gbps:g} Gbit/s Ethernet" if line_gbps >= 1 else f"{line_gbps * 1000:g} Mbit/s Ethernet",
        line_gbps=line_gbps,
        payload_bytes_per_s=line_gbps / 8 * 1e9 * TCP_PAYLOAD_SHARE if bound_by_wire else _between(line_gbps),
        latency_s=_TCP_HOP_S,
        source="tcp" if bound_by_wire else "tcp-fast",
    )


def _between(line_gbps: float) -> float:
    slower = max((link for link in _ETHERNET if link.line_gbps < line_gbps), key=lambda link: link.line_gbps)
    faster = min(
        (link for link in _ETHERNET if link.line_gbps > line_gbps), key=lambda link: link.line_gbps, default=slower
    )
    if faster is slower:
        return slower.payload_bytes_per_s
    place = math.log(line_gbps / slower.line_gbps) / math.log(faster.line_gbps / slower.line_gbps)
    growth: float = (faster.payload_bytes_per_s / slower.payload_bytes_per_s) ** place
    return slower.payload_bytes_per_s * growth


def _by_name(plain: str) -> LinkSpec | None:
    if plain in _OTHER_NAMES:
        return _named(_OTHER_NAMES[plain])
    wanted = _words(plain)
    if not wanted - _KINDS or all(word.isdigit() for word in wanted):
        return None
    return next((link for link in LINKS if wanted <= _words(link.name)), None)


_KINDS = frozenset({"ethernet", "infiniband", "roce", "or", "without", "p2p", "wifi", "pcie", "nvlink", "x8", "x16"})
"""Words that do not say which of several links is meant."""


def _named(name: str) -> LinkSpec:
    return next(link for link in LINKS if link.name == name)


def _words(text: str) -> frozenset[str]:
    """The words of a name: "PCIe4x16", "PCIe 4.0 x16" -> pcie, 4, x16."""
    plain = re.sub(r"wi[- ]?fi", "wifi ", text.lower())
    plain = re.sub(r"\b(pcie|pci e|pci express)(?: ?gen)? ?(?=\d)", "pcie ", plain)
    plain = re.sub(r"(?<=\d)x(?=\d)", " x", plain.replace(".0", " "))
    plain = re.sub(r"\b(nvlink|roce|infiniband|ib|hdr|ndr|edr)(?=[a-z]?\d)", r"\1 ", plain)
    return frozenset({"ib": "infiniband"}.get(word, word) for word in re.findall(r"[a-z0-9.]+", plain))


def suggest_links(text: str, *, at_most: int = 5) -> list[str]:
    """Names of the table that look like `text`, the nearest first, for an error message."""
    plain, wanted = text.strip().lower(), _words(text)

    def likeness(link: LinkSpec) -> tuple[int, float]:
        return len(_words(link.name) & wanted), difflib.SequenceMatcher(None, plain, link.name.lower()).ratio()

    likenesses = {link.name: likeness(link) for link in LINKS}
    near = [name for name, (shared, ratio) in likenesses.items() if shared or ratio >= 0.6]
    return sorted(near, key=likenesses.__getitem__, reverse=True)[:at_most]


def nvlink_of(gpu: str) -> str | None:
    """The NVLink that cards of this name are joined by on their board; None for cards in slots, bridged or not."""
    words = set(re.split(r"[-\s]+", gpu))
    if words & {"PCIe", "PCIE", "NVL"}:
        return None
    families = {
        "nvlink-b200": {"B200", "GB200", "B300", "GB300"},
        "nvlink-h100": {"H100", "H200", "GH200", "H20"},
        "nvlink-a100": {"SXM4", "H800", "A800"},
    }
    return next((name for name, members in families.items() if words & members), None)
