"""The machines that a plan is for: asked ones, and ones that somebody thinks of buying. Pure."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gangline.catalog.gpu_specs import GpuSpec, find_gpu, suggest_gpus
from gangline.catalog.link_rates import find_link, nvlink_of, suggest_links
from gangline.errors import UsageError
from gangline.planner.traffic import Fabric, LinkModel

MOST_RANKS = 4096
DISPLAY_BYTES = 300 << 20
"""Of a card that nobody asked: what a desktop, or the driver, has taken of it already."""
ASSUMED_LINK = "1gbit"
"""Where nothing is known of the network: what most homes have."""
USUAL_BUS = "pcie4-x16"
CATALOGUE_SPREAD, MISLEADING_SPREAD = 0.15, 1.0
"""How far a link may be from its catalogue's figure; Wi-Fi and the like: twice as slow."""
_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=)?(?:(?P<count>[1-9][0-9]{0,2})\s*[x*]\s*)?(?P<gpu>.+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A place for one rank: a GPU, or the processor of a host without one."""

    host: str
    device: int = 0
    """Index of the GPU on its machine."""
    gpu: str | None = None
    """Its name as NVML says it; None: the rank computes on the processor."""
    spec: GpuSpec | None = None
    """What the catalogue knows of the card."""
    free_bytes: int | None = None
    """Memory that a rank may take; None: not known."""
    ram_bytes: int | None = None
    """Of the machine: what programs can get, of all ranks of the host together; None: not known."""
    memory_from: Literal["measured", "catalogue", "unknown"] = "unknown"
    power_limit_w: float | None = None
    """What the card may take, as its driver says."""
    weight: float | None = None
    """The user's own word on its speed, relative to the others."""
    num_sharing: int = 1
    """Ranks on this card: `free_bytes` is one's part."""

    @property
    def label(self) -> str:
        """For tables: the card without the maker's name, or cpu."""
        return "cpu" if self.gpu is None else re.sub(r"^(NVIDIA |GeForce )+| GPU$", "", self.gpu)


@dataclass(frozen=True, kw_only=True)  # no slots: the fabric is computed once, and kept
class PlannedCluster:
    """Placements by global rank, and the links between them."""

    placements: tuple[Placement, ...]
    """Those of a host are adjacent."""
    wire: LinkModel
    """Between hosts: the slowest way of the ring."""
    inside: LinkModel
    """Between cards of one host."""
    asked: bool = True
    """Whether the machines were looked at; False: thought of."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names, in the order of ranks."""
        return tuple(dict.fromkeys(placement.host for placement in self.placements))

    @functools.cached_property
    def fabric(self) -> Fabric:
        """The links of its ranks."""
        slots = tuple(Counter(placement.host for placement in self.placements).values())
        return Fabric(slots=slots, wire=self.wire, inside=self.inside)

    @property
    def crowded(self) -> tuple[str, ...]:
        """Hosts with more ranks than GPUs, where they have some."""
        return tuple(
            dict.fromkeys(
                placement.host
                for placement in self.placements
                if placement.gpu is not None and placement.num_sharing > 1
            )
        )

    def placements_of(self, host: str) -> tuple[Placement, ...]:
        """The placements of one host."""
        return tuple(placement for placement in self.placements if placement.host == host)

    def only(self, hosts: Sequence[str]) -> PlannedCluster:
        """The same world with these hosts alone."""
        return dataclasses.replace(
            self, placements=tuple(placement for placement in self.placements if placement.host in hosts)
        )


def imagine(text: str, *, taken: Sequence[str] = ()) -> tuple[Placement, ...]:
    """Placements of machines that nobody asks: `[name=][Nx]GPU`, separated by commas.

    "pc1=rtx4090, 2xrtx3090" is two hosts, pc1 with one card and host2 with two. taken: names that are in use. Raises
    UsageError for cards that the catalogue does not have.
    """
    placements: list[Placement] = []
    names = list(taken)
    for part in (piece.strip() for piece in text.split(",")):
        match = _HOST.fullmatch(part)
        if match is None:
            raise UsageError(
                f"no machine can be read from {part!r}",
                seen="expected [name=][Nx]GPU, separated by commas",
                fix="such as --hosts pc1=rtx4090,pc2=2xrtx3090",
            )
        name = match["name"] or _next_name(names)
        if name in names:
            raise UsageError(f"two machines are called {name}", seen=f"{text!r}", fix="give each one its own name")
        names.append(name)
        spec = card(match["gpu"])
        placements += [_imagined(name, device, spec) for device in range(int(match["count"] or 1))]
    if len(placements) > MOST_RANKS:
        raise UsageError(
            f"{len(placements)} ranks", seen=f"expected {MOST_RANKS} at the most", fix="name fewer machines"
        )
    return tuple(placements)


def card(text: str) -> GpuSpec:
    """The card of the catalogue that is meant; raises UsageError with those that are spelled alike."""
    spec = find_gpu(text.strip())
    if spec is None:
        near = ", ".join(suggest_gpus(text))
        raise UsageError(
            f"the catalogue has no GPU named {text.strip()!r}",
            seen=f"expected a name such as rtx4090, a100-80gb or what nvidia-smi -L says; near: {near or 'none'}",
            fix="write one of these names" if near else "write, for example, 3 machines as 3xrtx4090",
        )
    return spec


def link(text: str) -> LinkModel:
    """The link that is meant, as the catalogue knows it; raises UsageError with those that are spelled alike."""
    spec = find_link(text.strip())
    if spec is None:
        near = ", ".join(suggest_links(text)) or "no similar name"
        raise UsageError(
            f"the catalogue has no link named {text.strip()!r}",
            seen=f"expected a name such as 1gbit, 2.5gbit, 10gbit or hdr; near: {near}",
            fix="write one of these names",
        )
    return LinkModel(
        latency_s=spec.latency_s,
        bytes_per_s=spec.payload_bytes_per_s,
        source=f"catalogue: {spec.name}",
        spread=MISLEADING_SPREAD if spec.warning else CATALOGUE_SPREAD,
    )


def with_hosts(world: PlannedCluster, text: str) -> PlannedCluster:
    """The world with more machines; where there was one, with an assumed network between them."""
    more = imagine(text, taken=world.hosts)
    wire = world.wire if len(world.hosts) > 1 else assumed_link()
    inside = world.inside
    if len({placement.host for placement in more}) < len(more):
        inside = min(inside, bus_of(more), key=lambda model: model.bytes_per_s)
    return dataclasses.replace(world, placements=(*world.placements, *more), wire=wire, inside=inside)


def assumed_link() -> LinkModel:
    """Between hosts of whose network nothing is known."""
    return dataclasses.replace(
        link(ASSUMED_LINK), source=f"assumed to be {ASSUMED_LINK}; --link names another", spread=1.0
    )


def bus_of(placements: Sequence[Placement]) -> LinkModel:
    """What joins the cards of a host whose table nobody read: NVLink where the card's name says so, else the bus."""
    names = {(nvlink_of(placement.gpu or "") or USUAL_BUS) for placement in placements}
    return min((link(each) for each in names), key=lambda model: model.bytes_per_s)


def without_hosts(world: PlannedCluster, names: Sequence[str]) -> PlannedCluster:
    """The world without some machines; raises UsageError for a name that is not there, or if none is left."""
    for name in names:
        if name not in world.hosts:
            raise UsageError(
                f"there is no host {name!r}", seen=f"the hosts are {', '.join(world.hosts)}", fix="name one of these"
            )
    rest = world.only([host for host in world.hosts if host not in names])
    if not rest.placements:
        raise UsageError("no host is left", seen=f"without {', '.join(names)}", fix="leave one")
    return rest


def _imagined(host: str, device: int, spec: GpuSpec) -> Placement:
    return Placement(
        host=host,
        device=device,
        gpu=spec.name,
        spec=spec,
        free_bytes=spec.total_bytes - DISPLAY_BYTES,
        memory_from="catalogue",
    )


def _next_name(names: Sequence[str]) -> str:
    number = len(names) + 1
    while f"host{number}" in names:
        number += 1
    return f"host{number}"
