"""Facts of one host, and the inventory of all: plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gangline.inventory.disk import WriteTry
from gangline.inventory.hardware import Folder, Gpu, GpuDriver, Limits, Nic, Rdma, Route
from gangline.inventory.pairs import Pairs
from gangline.inventory.pythons import BuildFacts
from gangline.inventory.same import Compared
from gangline.inventory.shared import SharedProbe
from gangline.inventory.topology import Topology
from gangline.runs.decode import build

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
    git_version: str | None = None


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
class HostFacts:
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
    topology: Topology | None = None
    """How the GPUs and network adapters are joined."""
    system: System = field(default_factory=System)
    names: tuple[Resolved, ...] = ()
    nics: tuple[Nic, ...] = ()
    routes: tuple[Route, ...] = ()
    rdma: Rdma = field(default_factory=Rdma)
    storage: tuple[Folder, ...] = ()
    limits: Limits = field(default_factory=Limits)
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

    @staticmethod
    def from_json(data: dict[str, Any]) -> HostFacts:
        """Facts from plain data; raises TypeError or ValueError for anything else."""
        return build(HostFacts, data)


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
class Inventory:
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

    def to_json(self) -> dict[str, Any]:
        """Plain data for inventory.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Inventory:
        """The inventory that `to_json` wrote."""
        return build(Inventory, data)
