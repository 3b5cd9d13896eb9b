"""Facts of one host, and the inventory of all: plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from gangline.inventory.folders import Compared, SharedProbe, WriteTry
from gangline.inventory.pairs import Pairs
from gangline.runs.decode import build, known_part
from gangline.runs.record_versions import Record

# Parts of a machine, as its agent read them. None: could not be read, or the part cannot say.


UNLIMITED = -1
"""A limit that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A program that computes on a GPU."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it."""

    index: int
    name: str
    uuid: str
    memory_total_bytes: int
    memory_free_bytes: int
    driver: str
    unified_memory: bool | None = None
    """Whether it uses the computer's own memory."""
    compute_capability: str | None = None
    """Such as "8.9"."""
    pci: str | None = None
    """Bus id, such as 00000000:01:00.0."""
    numa_node: int | None = None
    pcie_generation: int | None = None
    """Now: lower while the card is idle."""
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    """Lanes now."""
    pcie_width_max: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle: tuple[str, ...] = ()
    """Why its clocks are lower than they could be; heat and power only."""
    utilization_percent: int | None = None
    ecc_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    mig: bool | None = None
    """Whether it is cut into instances."""
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """A card that the driver counts and that does not answer."""

    index: int
    kind: str
    """lost, no-permission or other."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """What stands between the cards and us."""

    version: str | None = None
    """Of the library."""
    module: str | None = None
    """Of the kernel module that is loaded."""
    open_module: bool | None = None
    """Whether it is the open one, which shares memory with network cards by itself."""
    cuda: str | None = None
    """The newest CUDA that it knows."""
    trouble: str | None = None
    """Why there are no cards: no-library, driver-not-loaded, mismatch, no-permission, lost or other."""
    on_the_bus: int = 0
    """NVIDIA display adapters that the kernel sees."""
    simulated: bool = False
    """A stand-in for tests: nothing that it says is a figure of a real card."""
    faults: tuple[GpuFault, ...] = ()


CARD_BYTES = 16 << 30
"""From which own memory on graphics that are one with a processor count as a card: only Strix Halo and the like, whose
owner gave it to them, have so much. Others have 0.5 to 8 GiB, for a screen.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherGpu:
    """A GPU that is not NVIDIA's, as the kernel shows it."""

    maker: str
    """AMD, Intel or Apple."""
    name: str
    pci: str | None = None
    memory_bytes: int | None = None
    """Of its own, or given to it; None: its driver is not loaded, or does not say."""
    integrated: bool = False
    """Whether it is one with a processor: Intel's in the first slot of the first bus, AMD's beside a security
    processor.
    """

    @property
    def is_card(self) -> bool:
        """Whether somebody may think that it trains: a card, or graphics with much memory of their own."""
        return not self.integrated or (self.memory_bytes or 0) >= CARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface."""

    name: str
    kind: str = "other"
    """ethernet, wifi, bridge, bond, vlan, veth, tunnel, infiniband, loopback or other."""
    up: bool | None = None
    carrier: bool | None = None
    mtu: int | None = None
    speed_mbps: int | None = None
    duplex: str | None = None
    mac: str | None = None
    driver: str | None = None
    addresses: tuple[str, ...] = ()
    """With their prefix: 10.0.0.1/24."""
    numa_node: int | None = None
    ports: tuple[str, ...] = ()
    """Interfaces that a bridge joins."""

    def holds(self, address: str) -> bool:
        """Whether this interface has an address, however it is written."""
        return any(_same(text.partition("/")[0], address) for text in self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an InfiniBand or RoCE adapter."""

    device: str
    port: int | None = None
    state: str | None = None
    physical_state: str | None = None
    link_layer: str | None = None
    """InfiniBand or Ethernet."""
    rate_gbps: float | None = None
    interface: str | None = None
    gids: tuple[str, ...] = ()
    numa_node: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether it can carry traffic."""
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        """As NCCL writes it: mlx5_0:1."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """InfiniBand and RoCE of a host."""

    ports: tuple[RdmaPort, ...] = ()
    peer_memory: bool | None = None
    """Whether nvidia_peermem is loaded."""
    may_open: bool | None = None
    """Whether this user may open /dev/infiniband/uverbs*; None where there is none."""

    @property
    def active(self) -> tuple[RdmaPort, ...]:
        """Ports that can carry traffic."""
        return tuple(port for port in self.ports if port.is_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Room, kind and rights of a folder; of one that is not there yet: of the one that it would be in."""

    path: str
    real_path: str | None = None
    exists: bool | None = None
    filesystem: str | None = None
    mount: str | None = None
    source: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    inodes_total: int | None = None
    inodes_free: int | None = None
    read_only: bool | None = None
    writable: bool | None = None
    owner: str | None = None
    """Somebody else who decides what lies there, in words."""
    may_replace: str | None = None
    """Somebody else who could, in words."""
    error: str | None = None
    """Why nothing of this is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What a process of this user may have; -1: as much as there is."""

    nofile_soft: int | None = None
    nofile_hard: int | None = None
    memlock_soft: int | None = None
    memlock_hard: int | None = None
    nproc_soft: int | None = None
    nproc_hard: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None


def _same(one: str, other: str) -> bool:
    try:
        return ip_address(one) == ip_address(other)
    except ValueError:
        return False


# How the GPUs and network adapters of a host are joined: what `nvidia-smi topo -m` prints.


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
class Topology:
    """The table of a host."""

    devices: tuple[str, ...]
    """GPU0, GPU1, ...; network adapters by the names that sysfs has for them."""
    joints: tuple[Joint, ...]

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


# The Pythons of a host, and whether an environment can be built with them. Pure.


LOWEST = (3, 10)
"""What gangline's worker, and torch, run with."""
HIGHEST = (3, 14)
"""The newest that the packages of gangline's own lock have wheels for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPython:
    """A Python that answered."""

    path: str
    version: tuple[int, ...]
    implementation: str
    machine: str
    libc: tuple[str, ...]
    """Name and version of the C library, such as "glibc", "2.39"."""
    free_threaded: bool

    @property
    def glibc(self) -> tuple[int, int]:
        """The version of its C library; only of one that is fit, see `why_not`."""
        major, minor = self.libc[1].split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What a host has to build its environment with."""

    lock: str = ""
    """Hash of the lock; the names of its environments begin with it."""
    torch: str | None = None
    """The version that the lock names; None: it names none."""
    pythons: tuple[FoundPython, ...] = ()
    built: tuple[str, ...] = ()
    """Names of environments that are there already."""
    free_bytes: int | None = None
    """Where the environment would be."""
    error: str | None = None
    """Why nobody can say."""

    def is_built(self, *, has_gpu: bool) -> bool:
        """Whether the environment of this lock is there already."""
        end = "-gpu" if has_gpu else "-cpu"
        return any(name.startswith(f"{self.lock}-") and name.endswith(end) for name in self.built)


def why_not(python: FoundPython, *, own_lock: bool) -> str | None:
    """Why no environment can be built with a Python; None: it can. own_lock: whether the lock is gangline's."""
    version = ".".join(map(str, python.version))
    if python.implementation != "CPython" or python.free_threaded or len(python.version) != 3:
        return f"{python.implementation} {version}{', free-threaded' if python.free_threaded else ''}"
    if python.version[:2] < LOWEST or (own_lock and python.version[:2] > HIGHEST):
        return f"Python {version}"
    if python.libc[:1] != ("glibc",) or not re.fullmatch(r"[0-9]+\.[0-9]+", "".join(python.libc[1:])):
        return "not built with glibc, which the wheels need"
    return None


SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Marks by which two hosts are known to be one machine; hashed where they are not meant to leave it."""

    id: str | None = None
    """Of the installation: clones of a disk have the same."""
    boot: str | None = None
    """Of the running kernel."""
    network: str | None = None
    """Of its network: containers of one kernel have different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The machine and its operating system."""

    machine: Machine = field(default_factory=Machine)
    kernel: str | None = None
    os: str | None = None
    arch: str | None = None
    libc: str | None = None
    agent_python: str | None = None
    """The Python that read the facts, which need not be that of the ranks."""
    uptime_s: float | None = None
    time_s: float | None = None
    """Its clock while the facts were read."""
    memory_limit_bytes: int | None = None
    """Of the control group, as in a container."""
    swap_total_bytes: int | None = None
    wsl: bool | None = None
    container: str | None = None
    linger: bool | None = None
    """Whether systemd lets the user's processes live on after logout; None without systemd."""
    kill_user_processes: bool | None = None
    """Whether systemd ends what a user leaves behind; None without systemd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a name means on a host."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable that changes how ranks talk."""

    name: str
    value: str | None = None
    """None: withheld, it sounds like a secret."""
    source: str = "environment"
    """"environment", or the file and line that sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What a torch was built for, from its files."""

    cuda: str | None = None
    hip: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A small file that was asked for."""

    path: str
    text: str | None = None
    digest: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A section of the facts that could not be read, and why."""

    section: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLease:
    """What a run of another user of a host has there."""

    slot: str
    """gpu-<UUID>, or cpu."""
    user: str
    run: str = ""
    """"" where no run is named."""
    seen: str = ""
    """Since when, and which process holds it."""

    @property
    def what(self) -> str:
        """What it is, for people."""
        return "a core" if self.slot == "cpu" else self.slot.removeprefix("gpu-")

    @property
    def words(self) -> str:
        """Whose it is, and since when."""
        return f"{self.user}: {self.run or 'no run is named'} {self.seen}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts(Record):
    """What was read off one host."""

    host: str
    """The name the cluster gives it."""
    hostname: str
    """The name it gives itself."""
    num_cpus: int
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    workdir: str
    """The work folder with symbolic links resolved."""
    disk_free_bytes: int
    """0 where it is not known: `folder(workdir)` says why."""
    python: str
    """Version of the Python that ranks run with; "" where it is not known."""
    packages: dict[str, str | None]
    """Version by distribution name; None where it is not installed; {} where nobody could be asked."""
    python_reason: str | None = None
    """Why `python` and `packages` are not known."""
    python_arch: str | None = None
    torch: TorchBuild | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_reason: str | None = None
    """Why `gpus` is empty."""
    gpu_driver: GpuDriver = field(default_factory=GpuDriver)
    other_gpus: tuple[OtherGpu, ...] = ()
    """GPUs of other makers, those of processors too."""
    leases: tuple[OtherLease, ...] = ()
    """Of other users."""
    topology: Topology | None = None
    """How the GPUs and network adapters are joined."""
    system: System = field(default_factory=System)
    names: tuple[Resolved, ...] = ()
    nics: tuple[Nic, ...] = ()
    rdma: Rdma = field(default_factory=Rdma)
    storage: tuple[Folder, ...] = ()
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    variables: tuple[Variable, ...] = ()
    programs: dict[str, str | None] = field(default_factory=dict)
    """Path by name; None where it is not installed."""
    pythons: tuple[str, ...] = ()
    building: BuildFacts | None = None
    """What its environment can be built with; None: gangline does not build it, or nobody was asked."""
    files: tuple[File, ...] = ()
    unread: tuple[Unread, ...] = ()
    asked_s: float | None = None
    """The controller's clock when the host was asked; `system.time_s` is the host's, some time between these two."""
    answered_s: float | None = None

    @property
    def foreign_cards(self) -> tuple[OtherGpu, ...]:
        """Cards of other makers, where there is none that gangline trains on.

        A container sees every card of its machine on the bus, whichever it was given.
        """
        return () if self.gpus or self.system.container else tuple(gpu for gpu in self.other_gpus if gpu.is_card)

    @property
    def work_folder(self) -> Folder | None:
        """What is known of the work folder."""
        return next((row for row in self.storage if self.workdir in {row.real_path, row.path}), None)

    def nic(self, name: str) -> Nic | None:
        """The interface of that name."""
        return next((nic for nic in self.nics if nic.name == name), None)

    def holder(self, address: str) -> Nic | None:
        """The interface that has an address."""
        return next((nic for nic in self.nics if nic.holds(address)), None)

    def resolved(self, name: str) -> Resolved | None:
        """What a name means there, if it was asked for."""
        return next((answer for answer in self.names if answer.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailure:
    """A host whose facts could not be read."""

    host: str
    why: str
    unreachable: bool
    """True where the host does not answer; False where it answers but cannot say its facts."""
    kind: str = ""
    """unreachable, refused, unknown-name, denied, key-changed, key-unpinned, no-python or no-facts; "": by
    `unreachable`.
    """
    fix: str = ""
    """What the transport says to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Record):
    """What was read off every host, in the cluster's order."""

    gathered: str
    """When, in ISO format."""
    hosts: tuple[HostFacts, ...]
    failures: tuple[HostFailure, ...] = ()
    shared: tuple[SharedProbe, ...] = ()
    """What was seen of folders that should be the same on all hosts."""
    writes: tuple[WriteTry, ...] = ()
    """Files that were really written."""
    data: tuple[Compared, ...] = ()
    """Models and data that were compared by content."""
    pairs: Pairs | None = None
    """What was tried between every two hosts; None: nothing was."""
    schema_version: int = SCHEMA_VERSION

    def of(self, host: str) -> HostFacts | None:
        """The facts of a host; None where they could not be read."""
        return next((facts for facts in self.hosts if facts.host == host), None)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Inventory:
        """The inventory that `to_json` gave, also an older one with facts that are no longer kept."""
        return build(Inventory, known_part(Inventory, data))
