"""Hosts that are not there: the keys that they would show, and what they would say of themselves."""

import base64
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from gangline.discovery.search import Discovery
from gangline.errors import HostUnreachable
from gangline.init.dependencies import InitDependencies, Scan
from gangline.inventory.facts import Folder, Gpu, GpuDriver, HostFacts, HostFailure, Inventory, Machine, Nic, System
from tests.fakes.transport import FakeTransport

GIB = 1 << 30


def key(seed: str) -> str:
    """A host key, another one for each seed."""
    parts = (b"ssh-ed25519", hashlib.sha256(seed.encode()).digest())
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def fingerprint(line: str) -> str:
    """As OpenSSH prints it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def nic(name, *addresses, kind="ethernet", speed=1000, **more) -> Nic:
    """A network interface that is up."""
    return Nic(name=name, kind=kind, up=True, carrier=True, speed_mbps=speed, addresses=addresses, **more)


def gpu(name="NVIDIA GeForce RTX 4070", gib=8, index=0) -> Gpu:
    """A card."""
    return Gpu(
        index=index,
        name=name,
        uuid=f"GPU-{index}",
        memory_total_bytes=gib * GIB,
        memory_free_bytes=gib * GIB,
        driver="570.124",
    )


def facts(
    host, *nics, gpus=(), filesystem="ext4", source="/dev/sda1", boot=None, workdir="/home/fake/gangline"
) -> HostFacts:
    """What a host says of itself."""
    return HostFacts(
        host=host,
        hostname=host,
        num_cpus=8,
        memory_total_bytes=32 * GIB,
        memory_available_bytes=30 * GIB,
        workdir=workdir,
        disk_free_bytes=96 * GIB,
        python="",
        packages={},
        gpus=tuple(gpus),
        gpu_reason=None if gpus else "no driver",
        gpu_driver=GpuDriver(version="570.124" if gpus else None),
        nics=(nic("lo", "127.0.0.1/8", kind="loopback", speed=None), *nics),
        storage=(Folder(path=workdir, real_path=workdir, filesystem=filesystem, source=source),),
        system=System(machine=Machine(boot=boot or host, network="1"), agent_python="3.12.3"),
    )


@dataclass
class Talk:
    """A user who has laid down all answers beforehand; None: nobody is there."""

    answers: list[str] | None = None
    lines: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)

    def report(self, line):
        self.lines.append(line)

    def progress(self, line):
        pass

    def table(self, header, rows):
        self.lines += ["  ".join(row) for row in rows]

    def ask(self, question):
        self.questions.append(question)
        return self.answers.pop(0) if self.answers else None

    @property
    def text(self):
        return "\n".join(self.lines)


@dataclass
class World:
    """Every host there is, by what ssh is told."""

    hosts: dict[str, HostFacts]
    known: dict[str, str] = field(default_factory=dict)
    """The keys in the user's known_hosts."""
    silent: set[str] = field(default_factory=set)
    """Hosts that do not answer."""
    broken: dict[str, str] = field(default_factory=dict)
    """Hosts that show a key and cannot say their facts."""
    dead_networks: set[str] = field(default_factory=set)
    """Beginnings of addresses at which nobody reaches anybody."""
    ssh_config: Path = Path("/nonexistent")
    users: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Keys other than the usual."""
    found: Discovery | None = None
    """What is on the networks of this computer; None: nobody may look."""
    scans: list[bool] = field(default_factory=list)
    """Whether each look was a scan."""
    trusted: list[tuple[str, str | None]] = field(default_factory=list)
    """Hosts that were connected to, with the key that was pinned."""

    def deps(self) -> InitDependencies:
        """What touches the world."""
        return InitDependencies(
            user_of=lambda name: self.users.get(name, "alice"),
            scan=self._scan,
            connect=self._connect,
            gather=self._gather,
            reaches=self._reaches,
            address_of=lambda name: f"203.0.113.{ord(name[0])}",
            ssh_config=self.ssh_config,
            discover=self._discover,
        )

    def _discover(self, *, scan, cluster, console):
        assert self.found is not None, "nobody asked to look"
        self.scans.append(scan)
        return self.found

    def key_of(self, name: str) -> str:
        return self.keys.get(name) or key(name)

    def _scan(self, host):
        if host.name in self.silent:
            raise HostUnreachable(f"{host.name} does not answer", seen="timed out", fix="switch it on")
        line = self.key_of(host.name)
        known = self.known.get(host.name)
        return Scan(
            host=host,
            where=f"alice@{host.name}.lan",
            address=f"{host.name}.lan",
            key=line,
            fingerprint=fingerprint(line),
            known_key=fingerprint(known) if known else "",
        )

    def _connect(self, cluster):
        self.trusted += [(host.name, host.host_key) for host in cluster.hosts]
        return {host.name: FakeTransport(host.name) for host in cluster.hosts}

    def _gather(self, cluster, transports):
        assert all(host.workdir.startswith("/") for host in cluster.hosts)
        names = [host.name for host in cluster.hosts]
        return Inventory(
            gathered="2030-01-01T00:00:00+00:00",
            hosts=tuple(self.hosts[name] for name in names if name not in self.broken),
            failures=tuple(
                HostFailure(host=name, why=self.broken[name], unreachable=False)
                for name in names
                if name in self.broken
            ),
        )

    def _reaches(self, cluster, inventory, transports):
        return not any(host.address.startswith(tuple(self.dead_networks)) for host in cluster.hosts)


def home_lan() -> dict[str, HostFacts]:
    """Three computers on one switch; the second has a wireless card, too, and the third runs containers."""
    docker = nic("docker0", "172.17.0.1/16", kind="bridge", speed=10000)
    return {
        "pc1": facts("pc1", nic("eno1", "192.168.1.10/24", "fe80::1/64"), gpus=[gpu("NVIDIA GeForce RTX 5070 Ti", 12)]),
        "pc2": facts(
            "pc2",
            nic("wlan0", "192.168.1.21/24", kind="wifi", speed=None),
            nic("enp3s0", "192.168.1.11/24", speed=2500),
            gpus=[gpu(), gpu(index=1)],
        ),
        "pc3": facts("pc3", docker, nic("enp5s0", "192.168.1.12/24", speed=100)),
    }
