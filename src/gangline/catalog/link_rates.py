"""What links carry: their line rate, and the payload that collectives really get through them.

For a plan before `gangline bench network` has measured the link, and for questions about one that is not there yet.
"""

from __future__ import annotations

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

_ETHERNET = tuple(link for link in LINKS if link.source in {"tcp", "tcp-fast"})
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([gm])(?:bit|bits|bps|be|b|ige|igabit|egabit)?(?:/s)?(?: ?(?:ethernet|lan|tcp))?")


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
    if (name := _FILE["other_names"].get(plain)) is not None:
        return next(link for link in LINKS if link.name == name)
    wanted = _words(plain)
    if not wanted - _KINDS or all(word.isdigit() for word in wanted):
        return None
    return next((link for link in LINKS if wanted <= _words(link.name)), None)


_KINDS = frozenset({"ethernet", "infiniband", "roce", "or", "without", "p2p", "wifi", "pcie", "nvlink", "x8", "x16"})
"""Words that do not say which of several links is meant."""


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
