"""How the GPUs and network adapters of a host are joined: what `nvidia-smi topo -m` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines the head of its table, also where nobody can see it."""
LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")
JOINT = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
ORDER = {"X": 0, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 5, "SYS": 6}
"""Nearest first; NVLink, which is not in it, is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What lies between two devices: NV# (NVLinks), PIX, PXB, PHB (bridges), NODE (one NUMA node), SYS (several)."""

    one: str
    other: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The CPUs and the NUMA node that are near a GPU."""

    device: str
    cpus: str
    numa: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The table of a host."""

    devices: tuple[str, ...]
    """GPU0, GPU1, ...; network adapters by the names that sysfs has for them."""
    joints: tuple[Joint, ...]
    affinities: tuple[Affinity, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs."""
        return tuple(name for name in self.devices if re.fullmatch(r"GPU\d+", name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The network adapters."""
        return tuple(name for name in self.devices if not re.fullmatch(r"GPU\d+", name))

    def joint(self, one: str, other: str) -> str | None:
        """What lies between two devices."""
        return next((row.kind for row in self.joints if (row.one, row.other) == (one, other)), None)

    def nearest(self, device: str, others: tuple[str, ...]) -> str | None:
        """The best way from a device to one of others."""
        ways = [kind for other in others if other != device and (kind := self.joint(device, other)) is not None]
        return min(ways, key=distance, default=None)


def distance(kind: str) -> int:
    """Small is near."""
    return ORDER.get(kind, 1)


def parse_topology(text: str) -> Topology | None:
    """The table in the output of `nvidia-smi topo -m`; None where there is none."""
    lines = ESCAPE.sub("", text).splitlines()
    head = next((number for number, line in enumerate(lines) if re.search(r"\bGPU0\b", line)), None)
    if head is None:
        return None
    columns = _columns(lines[head])
    legend = {found[1]: found[2] for line in lines if (found := LEGEND.fullmatch(line))}
    rows = [cells for line in lines[head + 1 :] if (cells := _row(line, columns)) is not None]
    if not rows:
        return None
    return Topology(
        devices=tuple(legend.get(cells[0], cells[0]) for cells in rows),
        joints=tuple(
            Joint(one=legend.get(cells[0], cells[0]), other=legend.get(column, column), kind=kind)
            for cells in rows
            for column, kind in zip(columns, cells[1:], strict=False)
            if kind != "X"
        ),
        affinities=tuple(_affinities(rows, len(columns))),
    )


def _columns(head: str) -> list[str]:
    """Device names at the head of the table, up to the columns of affinity."""
    names = [cell.strip() for cell in re.split(r"\t+|\s{2,}", head) if cell.strip()]
    return [name for name in names if "Affinity" not in name and "NUMA" not in name]


def _row(line: str, columns: list[str]) -> list[str] | None:
    """Label, a cell for every column, and what follows; None for a line that is none of the table."""
    cells = [cell.strip() for cell in re.split(r"\t+|\s{2,}", line.strip()) if cell.strip()]
    if len(cells) <= len(columns) or cells[0] not in columns:
        return None
    return cells if all(JOINT.fullmatch(cell) for cell in cells[1 : len(columns) + 1]) else None


def _affinities(rows: list[list[str]], num_columns: int) -> list[Affinity]:
    rest = [(cells[0], cells[num_columns + 1 :]) for cells in rows]
    return [Affinity(device=name, cpus=words[0], numa=words[1]) for name, words in rest if len(words) >= 2]
