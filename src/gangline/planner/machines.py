"""The machines that a plan is for: asked ones, and ones that somebody thinks of buying. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gangline.catalog.gpu_specs import (
    OWN_FIGURES,
    GpuSpec,
    accelerator,
    find_gpu,
    is_memory,
    meanings,
    own_gpu,
    sizes_of,
    suggest_gpus,
    words,
)
from gangline.catalog.link_rates import find_link, nvlink_of, suggest_links
from gangline.errors import UsageError
from gangline.planner.traffic import HOST_LINK_BYTES_PER_S, Fabric, LinkModel

MOST_RANKS = 4096
DISPLAY_BYTES = 300 << 20
"""Of a card that nobody asked: what a desktop, or the driver, has taken of it already."""
ASSUMED_LINK = "1gbit"
"""Where nothing is known of the network: what most homes have."""
USUAL_BUS = "pcie4-x16"
CATALOGUE_SPREAD, MISLEADING_SPREAD = 0.15, 1.0
"""How far a link may be from its catalogue's figure; Wi-Fi and the like: twice as slow."""
_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=)?(?:(?P<count>[1-9][0-9]{0,2})\s*[x*]\s*)?(?P<gpu>.+?)(?P<more>(?::\s*[a-z_]+\s*=[^:{}]+)*)"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", re.IGNORECASE)


_OWN_FORM = "{tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}"
_BETWEEN = re.compile(r",(?![^{}]*\})")
"""A comma between machines, not between the figures of a card."""


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
    bus: str = ""
    """The catalogue's name of the slot that it sits in; "": not known."""
    note: str = ""
    """What is to know of a card that nobody asked: how its name was understood, and what the catalogue says of it."""

    @property
    def host_bytes_per_s(self) -> float:
        """Between the card and its machine's memory; a table of NVLink says nothing of that."""
        return link(self.bus).bytes_per_s if self.bus.startswith("pcie") else HOST_LINK_BYTES_PER_S

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
        ports = min(slots) if self.wire.per_port and all(nvlink_of(each.gpu or "") for each in self.placements) else 1
        wire = dataclasses.replace(self.wire, bytes_per_s=ports * self.wire.bytes_per_s)
        slowest = min(placement.host_bytes_per_s for placement in self.placements)
        return Fabric(slots=slots, wire=wire, inside=self.inside, host_bytes_per_s=slowest)

    @property
    def makers(self) -> dict[str, tuple[str, ...]]:
        """Hosts by the maker of their cards. Cards of two makers have no collective library in common."""
        found: dict[str, dict[str, None]] = {}
        for placement in self.placements:
            if placement.spec is not None:
                found.setdefault(placement.spec.vendor, {})[placement.host] = None
        return {maker: tuple(hosts) for maker, hosts in found.items()}

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
    """Placements of machines that nobody asks: `[name=][Nx]GPU[:bus=SLOT][:ram=GIB]`, separated by commas.

    "pc1=rtx4090, 2xrtx3090" is two hosts, pc1 with one card and host2 with two. A card that is in no list is written as
    its figures: "pc1=2x{tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}". "2xrtx3090:bus=pcie3-x8:ram=64" says
    which slots the cards sit in, and how many GiB programs can get of the machine's memory. taken: names that are in
    use. Raises UsageError for cards that the catalogue does not have, and for other words.
    """
    placements: list[Placement] = []
    names = list(taken)
    for part in (piece.strip() for piece in _BETWEEN.split(text)):
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
        spec, more = card(match["gpu"]), _more(match["more"])
        devices = range(int(match["count"] or 1) * spec.devices)
        placements += [
            dataclasses.replace(_imagined(name, device, spec, typed=match["gpu"]), **more) for device in devices
        ]
    if len(placements) > MOST_RANKS:
        raise UsageError(
            f"{len(placements)} ranks", seen=f"expected {MOST_RANKS} at the most", fix="name fewer machines"
        )
    return tuple(placements)


def _more(text: str) -> dict[str, Any]:
    """What a machine says besides its cards: ":bus=pcie3-x8:ram=64gb"."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(":")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        size = _SIZE.fullmatch(value)
        if key == "bus":
            link(value)  # refused where no link has that name
            found["bus"] = re.sub(r"[\s_]+", "-", value.lower())
        elif key == "ram" and size is not None:
            found["ram_bytes"] = round(float(size[1]) * 2**30)
        else:
            raise UsageError(
                f"{part.strip()!r} says nothing of a machine",
                seen="expected bus=SLOT or ram=GIB",
                fix="such as --hosts pc1=2xrtx3090:bus=pcie3-x8:ram=64",
            )
    return found


def card(text: str) -> GpuSpec:
    """The card of the catalogue that is meant, or the one whose figures are given.

    Raises UsageError with those that are spelled alike.
    """
    if text.strip().startswith("{"):
        return _own_card(text.strip())
    if (whose := accelerator(text)) is not None:
        raise UsageError(
            f"{text.strip()} is {whose}, which gangline neither trains on nor plans for",
            seen="expected a GPU of NVIDIA, AMD, Intel or Apple",
            fix=f"write a GPU, or its figures: {_OWN_FORM}",
        )
    if several := meanings(text):
        raise UsageError(
            f"{text.strip()!r} is the name of {len(several)} cards",
            seen=", ".join(f"{each} ({found.name})" for each in several if (found := find_gpu(each))),
            fix=f"write {' or '.join(several)}",
        )
    spec = find_gpu(text.strip())
    if spec is None:
        near = ", ".join(suggest_gpus(text))
        raise UsageError(
            f"the catalogue has no GPU named {text.strip()!r}",
            seen=f"expected a name such as rtx4090, a100-80gb or what nvidia-smi -L says; near: {near or 'none'}",
            fix="write one of these names"
            if near
            else f"write, for example, 3 machines as 3xrtx4090, or a card's figures: {_OWN_FORM}",
        )
    return spec


def _own_card(text: str) -> GpuSpec:
    """A card by its figures, as cluster.yaml has them."""
    figures: dict[str, float] = {}
    for part in text.strip("{} ").split(","):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key not in OWN_FIGURES:
            known = ", ".join(OWN_FIGURES)
            raise UsageError(f"{text}: no figure is called {key!r}", seen=f"expected {known}", fix=f"write {_OWN_FORM}")
        least, most = OWN_FIGURES[key]
        try:
            figures[key] = float(value)
        except ValueError:
            figures[key] = math.nan
        if not least <= figures[key] <= most:
            raise UsageError(
                f"{text}: {key} is {value or 'nothing'}",
                seen=f"expected a number from {least:g} to {most:g}",
                fix=f"write it as in {_OWN_FORM}",
            )
    missing = [key for key in OWN_FIGURES if key not in figures and key != "power_w"]
    if missing:
        raise UsageError(
            f"{text}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            seen="expected all of tflops_bf16, memory_gib and bandwidth_gbs",
            fix=f"write it as in {_OWN_FORM}",
        )
    return own_gpu(**figures)


def link(text: str) -> LinkModel:
    """The link that is meant, as the catalogue knows it; raises UsageError with those that are spelled alike."""
    spec = find_link(text.strip())
    if spec is None:
        near = ", ".join(suggest_links(text)) or "no similar name"
        raise UsageError(
            f"the catalogue has no link named {text.strip()!r}",
            seen=f"expected a name such as 1gbit, hdr, 8x400g, wifi 6, thunderbolt 4 or wan 50mbit 30ms; near: {near}",
            fix="write one of these names",
        )
    return LinkModel(
        latency_s=spec.latency_s,
        bytes_per_s=spec.payload_bytes_per_s,
        source=f"catalogue: {spec.name}",
        spread=MISLEADING_SPREAD if spec.warning else CATALOGUE_SPREAD,
        warning=spec.warning,
        per_port=spec.source == "rdma" and " x " not in spec.name,  # "8 x ..." says how many there are
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
    """What joins the cards of hosts whose tables nobody read: as the user says, else NVLink where the card's name does,
    else the usual bus. A host with one card has nothing to join, and does not count beside others.
    """
    ranks = Counter(placement.host for placement in placements)
    several = [placement for placement in placements if ranks[placement.host] > 1] or placements
    names = {placement.bus or nvlink_of(placement.gpu or "") or USUAL_BUS for placement in several}
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


def _imagined(host: str, device: int, spec: GpuSpec, *, typed: str) -> Placement:
    return Placement(
        host=host,
        device=device,
        gpu=spec.name,
        spec=spec,
        free_bytes=spec.usable_bytes - (0 if spec.is_unified else DISPLAY_BYTES),
        memory_from="catalogue",
        note="; ".join(_notes(spec, typed)),
    )


def _notes(spec: GpuSpec, typed: str) -> Iterator[str]:
    """What to know of a card by that name: other sizes of memory, two devices in one card, whose memory it is."""
    others = [size for size in sizes_of(spec) if size != spec.memory_gb]
    if others and not any(is_memory(word) for word in words(typed)):
        sizes = " and ".join(f"{size:g}" for size in sorted(others))
        yield f"taken with {spec.memory_gb:g} GB; there are some with {sizes}, such as {typed.strip()}-{others[0]:g}gb"
    if spec.devices > 1:
        yield f"one card is {spec.devices} devices, each a rank's own, with {spec.memory_gb:g} GB"
    if spec.is_unified:
        yield f"its memory is the computer's: {spec.usable_bytes / 2**30:.0f} of {spec.memory_gb:g} GiB are counted"
    if spec.note:
        yield spec.note


def _next_name(names: Sequence[str]) -> str:
    number = len(names) + 1
    while f"host{number}" in names:
        number += 1
    return f"host{number}"
