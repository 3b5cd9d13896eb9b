"""Parts of a machine, as its agent read them. None: could not be read, or the part cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

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
class Route:
    """How the kernel would go to an address or name."""

    to: str
    source: str | None = None
    interface: str | None = None


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
    door: str | None = None
    """Somebody else who could, in words."""
    error: str | None = None
    """Why nothing of this is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
