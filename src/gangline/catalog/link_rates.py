"""What links carry: their line rate, and the payload that collectives really get through them.

For a plan before `gangline bench network` has measured the link, and for questions about one that is not there yet.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
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


_FILE = json.loads(Path(__file__).with_name("links.json").read_text(encoding="utf-8"))
SOURCES: dict[str, str] = _FILE["sources"]
"""Short names of sources -> their meaning."""
TCP_PAYLOAD_SHARE = 0.94
"""Of the line rate, up to `_LAST_WIRE_BOUND_GBPS`; see `SOURCES["tcp"]`."""
_LAST_WIRE_BOUND_GBPS = 5.0
_TCP_HOP_S = 100e-6


def _spec(name: str, line_gbps: float, payload_gb_s: float, latency_s: float, *words: str) -> LinkSpec:
    return LinkSpec(name, line_gbps, payload_gb_s * 1e9, latency_s, *words)


LINKS: tuple[LinkSpec, ...] = tuple(_spec(*row) for row in _FILE["rows"])
"""By kind; Ethernet is TCP over sockets, with RDMA the same wire has its own rows."""

_PORTS = re.compile(r"([1-9]\d?) ?[x*] ?(.+)")
_PING = re.compile(r"(.+?),? (\d+(?:\.\d+)?) ?ms(?: (?:ping|rtt|latency))?")
_WAN = re.compile(r"(?:(?:wan|internet|wireguard|vpn|tailscale|zerotier)(?: over the internet)?) ?(.*)")
_RDMA = re.compile(r"\b(?:ib|infiniband|roce ?v?[12]?|rdma)\b")
WAN_PING_S, WAN_PAYLOAD_SHARE = 30e-3, 0.89
"""Between two homes of one country, where nobody names the ping; see `SOURCES["wan"]`."""
_RDMA_PAYLOAD_SHARE, _RDMA_HOP_S = 0.96, 14e-6
_ETHERNET = tuple(link for link in LINKS if link.source in {"tcp", "tcp-fast"})
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([gm])(?:bit|bits|bps|be|b|ige|igabit|egabit)?(?:/s)?(?: ?(?:ethernet|lan|tcp))?")


def find_link(text: str) -> LinkSpec | None:
    """The link that somebody means, such as "1gbit", "hdr", "roce 25g", "8x400G", "wifi 7" or "wan 50mbit 30ms".

    A rate that is not in the table, such as "20gbit", is Ethernet with TCP, see `ethernet`; behind `wan` or `wireguard`
    it is what the slower end uploads. "30 ms" is a ping. Several ports of a host carry what one does, times their
    number, "1xhdr" what one does; from 100G on they are RDMA, unless they are called Ethernet. None where nothing fits.
    """
    plain = re.sub(r"(?<=\S)[-_:@(), ]+", " ", text.strip().lower()).strip().replace("gbase t", "g")
    plain = re.sub(r" ?\b(?:q?sfp(?:28|56|dd|\+)?|dac)(?!\w)", "", plain)
    if ports := _PORTS.fullmatch(plain):
        return _several(int(ports[1]), ports[2])
    if ping := _PING.fullmatch(plain):
        found = find_link(ping[1])
        return found and dataclasses.replace(
            found, name=f"{found.name}, ping {ping[2]} ms", latency_s=max(1e-6, float(ping[2]) / 2e3)
        )
    if wan := _WAN.fullmatch(plain):
        return _wan(_rate(wan[1]))
    if (gbps := _rate(plain)) is not None:
        return ethernet(gbps)
    if _RDMA.search(plain) and (gbps := _rate(_RDMA.sub("", plain).strip())) is not None:
        return _rdma(gbps)
    return _by_name(plain)


def _rate(plain: str) -> float | None:
    """Gbit/s of "2.5gbit"; None for what is no rate."""
    rate = _RATE.fullmatch(plain)
    gbps = float(rate[1]) / (1 if rate[2] == "g" else 1000) if rate else 0.0
    return gbps if 0 < gbps < math.inf else None


def _several(count: int, plain: str) -> LinkSpec | None:
    one = find_link(plain)
    if re.fullmatch(r"[1-8]00 ?g(?:bit|bit/s|bps|b|b/s)?", plain):
        one = _rdma(float(plain.split("g", maxsplit=1)[0]))
    return one and dataclasses.replace(
        one,
        name=f"{count} x {one.name}",
        line_gbps=count * one.line_gbps,
        payload_bytes_per_s=count * one.payload_bytes_per_s,
        source="ports",
    )


def _rdma(line_gbps: float) -> LinkSpec:
    """InfiniBand or RoCE of any rate: the table's row, or as much of the line as those carry."""
    known = (link for link in LINKS if link.source == "rdma" and link.line_gbps == line_gbps)
    return next(known, None) or _spec(
        f"RoCE {line_gbps:g}", line_gbps, line_gbps / 8 * _RDMA_PAYLOAD_SHARE, _RDMA_HOP_S, "rdma"
    )


def _wan(line_gbps: float | None) -> LinkSpec | None:
    if line_gbps is None:
        return None
    rate = f"{line_gbps:g} Gbit/s" if line_gbps >= 1 else f"{line_gbps * 1000:g} Mbit/s"
    warning = "The internet between two homes is uneven, and uploads share it."
    payload = line_gbps / 8 * WAN_PAYLOAD_SHARE
    return _spec(f"WireGuard over {rate} of internet", line_gbps, payload, WAN_PING_S / 2, "wan", warning)


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
        warning=_SLOW if line_gbps < _SLOWEST_GBPS else "",
    )


_SLOWEST_GBPS = 0.1
_SLOW = (
    "So slow a line is taken for a cable between the machines. For one over the internet write the upload of the "
    "slower end and the ping, such as wan 50mbit 30ms."
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
    plain = re.sub(r"^(?:ib|infiniband) (?=[a-z])", "", plain)
    plain = re.sub(r"^(mellanox |nvidia )?(?:connect ?x|cx|mcx) ?(?=\d)", "connectx ", plain)
    plain = re.sub(r"^(hdr|ndr|powerline|moca|homeplug) ?(av)? ?(?=\d{3,4}$)", r"\1 ", plain)
    if (name := _FILE["other_names"].get(plain)) is not None:
        return next(link for link in LINKS if link.name == name)
    wanted = _words(plain)
    if not wanted - _KINDS or all(word.isdigit() for word in wanted):
        return None
    return next((link for link in LINKS if wanted <= _words(link.name)), None)


_KINDS = frozenset(
    {"ethernet", "infiniband", "roce", "or", "without", "p2p", "wifi", "pcie", "nvlink", "x8", "x16", "usb"}
)
"""Words that do not say which of several links is meant."""


def _words(text: str) -> frozenset[str]:
    """The words of a name: "PCIe4x16", "PCIe 4.0 x16" -> pcie, 4, x16."""
    plain = re.sub(r"wi[- ]?fi", "wifi ", text.lower())
    plain = re.sub(r"\b(pcie|pci e|pci express)(?: ?gen)? ?(?=\d)", "pcie ", plain)
    plain = re.sub(r"(?<=\d)x(?=\d)", " x", plain.replace(".0", " "))
    plain = re.sub(r"\b(nvlink|roce|infiniband|ib|[sdqfehnx]dr|thunderbolt|tb|usb)(?=[a-z]?\d)", r"\1 ", plain)
    return frozenset(
        {"ib": "infiniband", "tb": "thunderbolt"}.get(word, word) for word in re.findall(r"[a-z0-9.]+", plain)
    )


def suggest_links(text: str, *, at_most: int = 5) -> list[str]:
    """Names of the table that look like `text`, the nearest first, for an error message."""
    plain, wanted = text.strip().lower(), _words(text)

    def likeness(link: LinkSpec) -> tuple[int, float]:
        return len(_words(link.name) & wanted), difflib.SequenceMatcher(None, plain, link.name.lower()).ratio()

    likenesses = {link.name: likeness(link) for link in LINKS}
    near = [name for name, (shared, ratio) in likenesses.items() if shared or ratio >= 0.6]
    return sorted(near, key=likenesses.__getitem__, reverse=True)[:at_most]


def nvlink_of(gpu: str) -> str | None:
    """The NVLink, or Infinity Fabric, that joins cards of this name on their board; None for cards in slots."""
    words = set(re.split(r"[-\s]+", gpu))
    if words & {"PCIe", "PCIE", "NVL"}:
        return None
    families = {
        "nvlink-b200": {"B200", "GB200", "B300", "GB300"},
        "nvlink-h100": {"H100", "H200", "GH200", "H20"},
        "nvlink-a100": {"SXM4", "H800", "A800"},
        "nvlink-v100": {"V100"},
        "infinity-fabric-mi350x": {"MI350X", "MI355X"},
        "infinity-fabric-mi300x": {"MI300X", "MI325X", "MI300A"},
        "infinity-fabric-mi250x": {"MI250", "MI250X"},
    }
    return next((name for name, members in families.items() if words & members), None)
