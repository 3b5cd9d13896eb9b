"""The partitions of a Slurm cluster and the nodes in them, as `sinfo` shows them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gangline.errors import UsageError
from gangline.transport.slurm_commands import slurm
from gangline.units import listed

FORMAT = "%P|%N|%c|%m|%G|%T|%l"
GRES_GPU = re.compile(r"gpu(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
FREE = ("idle", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionNode:
    """One node, as a partition has it."""

    name: str
    cpus: int
    memory_mib: int
    gpus: tuple[tuple[str, int], ...]
    """(type, number); the type is "" where Slurm does not say it."""
    state: str

    @property
    def is_usable(self) -> bool:
        """Whether jobs run there, now or later."""
        return self.state.rstrip("*~#$@+").startswith(USABLE) and not self.state.endswith("*")

    @property
    def num_gpus(self) -> int:
        """GPUs of any type."""
        return sum(count for _, count in self.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """One partition."""

    name: str
    is_default: bool
    limit: str
    """The longest time of a job, in Slurm's words; "infinite"."""
    nodes: tuple[PartitionNode, ...]

    @property
    def limit_s(self) -> float | None:
        """The same in seconds; None: no limit."""
        return seconds_of(self.limit)

    def lines(self) -> list[str]:
        """What it has, equal nodes folded: `8 nodes with 64 cores, 512 GB and 4 x a100, 3 of them free`."""
        kinds = Counter((node.cpus, node.memory_mib, node.gpus) for node in self.nodes)
        free = Counter(
            (node.cpus, node.memory_mib, node.gpus) for node in self.nodes if node.state.startswith(FREE[:1])
        )
        lines = []
        for kind, count in kinds.items():
            cpus, memory_mib, gpus = kind
            cards = "".join(f" and {number} x {name or 'GPU'}" for name, number in gpus)
            nodes = f"{count} node{'s' if count > 1 else ''}"
            lines.append(f"{nodes} with {cpus} cores, {memory_mib // 1000} GB{cards}, {free[kind]} idle")
        return lines


def read_partitions(read: Callable[..., str] = slurm) -> tuple[SlurmPartition, ...]:
    """All partitions that the user sees, in Slurm's order; raises what `slurm` does."""
    rows: dict[str, list[PartitionNode]] = {}
    limits: dict[str, str] = {}
    for line in read("sinfo", "--noheader", "--Node", f"--format={FORMAT}").splitlines():
        partition, name, cpus, memory, gres, state, limit = line.strip().split("|")
        gpus = tuple((found["type"] or "", int(found["count"])) for found in GRES_GPU.finditer(gres))
        node = PartitionNode(name=name, cpus=_number(cpus), memory_mib=_number(memory), gpus=gpus, state=state.lower())
        rows.setdefault(partition, []).append(node)
        limits[partition] = limit
    return tuple(
        SlurmPartition(name=name.rstrip("*"), is_default=name.endswith("*"), limit=limits[name], nodes=tuple(nodes))
        for name, nodes in rows.items()
    )


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def partition_named(partitions: Sequence[SlurmPartition], name: str | None) -> SlurmPartition:
    """The partition of that name, or the site's default; raises UsageError."""
    found = next((each for each in partitions if each.name == name or (name is None and each.is_default)), None)
    if found is not None:
        return found
    raise UsageError(
        "this site has no default partition" if name is None else f"there is no partition {name!r}",
        seen=f"sinfo shows {listed([each.name for each in partitions]) or 'none'}",
        fix="write one of them as `slurm.partition`",
    )


def seconds_of(time: str) -> float | None:
    """A time as Slurm writes it (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS) in seconds; None: no limit."""
    found = TIME.fullmatch(time.strip())
    if found is None:
        return None
    days, first, second, third = (found[name] for name in ("days", "first", "second", "third"))
    if days is not None:
        parts = (int(days) * 24 + int(first), int(second or 0), int(third or 0))
    elif third is not None:
        parts = (int(first), int(second), int(third))
    else:
        parts = (0, int(first), int(second or 0))
    return parts[0] * 3600.0 + parts[1] * 60.0 + parts[2]


def as_time(seconds: float) -> str:
    """Seconds, up to a whole quarter of an hour, as Slurm reads them: 1-06:15:00."""
    quarters = max(1, -(-int(seconds) // 900))
    hours, rest = divmod(quarters, 4)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{rest * 15:02d}:00"
    return f"{days}-{clock}" if days else clock
