"""Real hosts on one machine, for tests: namespaces, each with its own sshd, address, disk, home and process list.

    from tests.lab.hosts import Lab

    with Lab(3, special={"h1": {"hide": ("rsync", "ensurepip")}, "h2": {"python": "3.8"}}) as lab:
        h0, h1, h2 = lab.hosts                        # names h0..h2, addresses 10.77.0.10 .. 10.77.0.12
        lab.user.run(["ssh", "h0", "hostname"])       # the user's computer ("desk"): key and ssh config for all hosts
        lab.user.run(["gangline", "check", "c.yaml"], timeout_s=60)     # it sees this repository and this venv
        lab.user.write("c.yaml", "hosts: [h0, h1]")   # relative to the home folder
        h1.run(["df", "-h", "."]).stdout              # a CompletedProcess with text; in h1, without ssh
        server = h1.popen(["sleep", "100"])           # stays; dies with the host
        h1.host_key                                   # "ssh-ed25519 AAAA...", to pin
        h1.faults.drop(port=29500)                    # reject(), loss(5), rate("100mbit"), unplug(), black_hole()
        h1.faults.heal()
        h1.limit(memory_mb=900, cpus=0.5)             # needs the capability "cgroup"
        h2.power_off()                                # the cable first, then the host: nobody gets a reset
        h0.kill()                                     # as a crash: peers get a reset
        h2 = lab.replace("h2")                        # one with its name and address is there again, with a new disk
        lab.outsider.run(["ssh", "-p", "22", h1.address])               # on the same switch, but no member

In a test, take the fixture `lab` (see conftest.py): `lab(3, nics=2)`; it closes what it made. Options of all hosts go
to Lab(...) by keyword, those of one host into `special`: see `HostKind`. A new user's hosts have nothing of ours: the
repository, the venv of the tests and the user's home are masked there; `binds=lab_folders()` shows them, read-only.

Not namespaced: the clock (nobody in a lab may set it), the kernel log, the number of CPUs and the size of memory that
`free` and `nproc` say. GPUs are simulated (gpus.py).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.lab import network
from tests.lab.machine import LabHost
from tests.lab.namespaces import PATH, LabFailed, Mode, Space, end, lab_id
from tests.lab.settings import ROOT, HostKind, Settings, Site, lab_folders, login_key, new_keys

__all__ = ["ROOT", "HostKind", "Lab", "LabFailed", "LabHost", "end", "lab_folders"]


class Lab:
    """So many hosts, a user's computer (`user`) that can log in to them, and a switch between them.

    names: what they are called. nics: network cards of each. rate: speed of all links. meshed: hosts may log in to each
    other (by default only the user can). known: the user has logged in to all before, so that their keys are known.
    rootless: as an ordinary user, also where the tests run as root. ttl_s: the longest that it lives, whatever happens.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        names: Sequence[str] | None = None,
        nics: int = 1,
        rate: str | None = None,
        meshed: bool = False,
        known: bool = True,
        rootless: bool | None = None,
        ttl_s: int = 600,
        special: Mapping[str, Mapping] | None = None,
        **kind,
    ) -> None:
        names = names or [f"h{index}" for index in range(num_hosts)]
        assert len(names) == num_hosts, "as many names as hosts"
        self.mode = Mode(rootless=os.getuid() != 0 if rootless is None else rootless)
        self._kinds = {name: HostKind(**{**kind, **(special or {}).get(name, {})}) for name in names}
        self._rate, self._meshed, self._known = rate, meshed, known
        self._site = Site(mode=self.mode, names=names, num_nics=nics, ttl_s=ttl_s, folder=self._shared_folder())
        self.hosts: list[LabHost] = []
        self.user: LabHost
        self.machines: list[LabHost] = []
        self._outsider: LabHost | None = None
        self._network: network.Network | None = None

    def __enter__(self) -> "Lab":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> LabHost:
        return next(host for host in self.hosts if host.name == name)

    @property
    def outsider(self) -> LabHost:
        """A computer on the same switch that is no member: no keys, no sshd. Made at the first use."""
        if self._outsider is None:
            settings = self._site.machine("outsider", network.OUTSIDER_NUMBER, HostKind())
            (self._outsider,) = self._boot([(network.OUTSIDER_NUMBER, settings)])
        return self._outsider

    def replace(self, name: str) -> LabHost:
        """After its end: a host with the same name and address, a new disk and a new host key."""
        old = self[name]
        self._network.pull(old.number)
        settings = self._site.host(self._site.names.index(name), self._kinds[name], accepts=self._accepts)
        (host,) = self._boot([(old.number, {**settings, **self._mesh})])
        self.hosts[self.hosts.index(old)] = host
        return host

    def close(self) -> None:
        """End everything and leave nothing behind."""
        for machine in self.machines:
            machine.space.kill()
        for machine in self.machines:
            machine.close()
            machine.space.forget()
        self.machines.clear()
        if self._network:
            self._network.space.close()
            self._network.space.forget()
            self._network = None
        if self._site.folder:
            shutil.rmtree(self._site.folder, ignore_errors=True)

    def _shared_folder(self) -> Path | None:
        if not any(kind.shared for kind in self._kinds.values()):
            return None
        folder = Path(tempfile.mkdtemp(prefix=f"{lab_id()}-"))
        os.chown(folder, self.mode.uid, self.mode.gid)
        return folder

    def _build(self) -> None:
        self._network = network.Network(self.mode, num_nics=self._site.num_nics, env=self._switch_env())
        user_key, mesh_key = new_keys(2)
        self._accepts = [user_key[1], mesh_key[1]] if self._meshed else [user_key[1]]
        self._mesh = (
            {**login_key(mesh_key), "SSH_config": f"Port {self.mode.ssh_port}\nStrictHostKeyChecking accept-new"}
            if self._meshed
            else {}
        )
        hosts = [
            (
                network.FIRST_NUMBER + index,
                {**self._site.host(index, self._kinds[name], accepts=self._accepts), **self._mesh},
            )
            for index, name in enumerate(self._site.names)
        ]
        self.user, *self.hosts = self._boot([(network.DESK_NUMBER, self._desk(user_key)), *hosts])
        self.user.env = {"PATH": f"{Path(sys.prefix) / 'bin'}:{PATH}"}
        if self._known:
            lines = [f"{self._site.known_name(host.address)} {host.host_key}\n" for host in self.hosts]
            self.user.write(".ssh/known_hosts", "".join(lines))
        if self._rate:
            for host in self.hosts:
                host.faults.rate(self._rate)

    def _switch_env(self) -> dict[str, str]:
        return {"TTL": str(self._site.ttl_s), "LAB_ID": lab_id(), "FOLDER": str(self._site.folder or "")}

    def _desk(self, key: tuple[str, str]) -> Settings:
        """The user's computer: it sees what the tests see, and has a home of its own."""
        kind = HostKind(binds=tuple(filter(self.mode.can_enter, lab_folders())))
        settings = self._site.machine("desk", network.DESK_NUMBER, kind)
        return {**settings, **login_key(key), "MASKS": "", "SSH_config": self._site.ssh_config()}

    def _boot(self, machines: Iterable[tuple[int, Settings]]) -> list[LabHost]:
        hosts = [self._start(*machine) for machine in machines]
        for host in hosts:
            host.space.await_pid()
        self._network.plug([(host.pid, host.number) for host in hosts])
        for host in hosts:
            host.space.go()
        for host in hosts:
            host.host_key = " ".join(host.space.await_line("ready").split()[:2])
        return hosts

    def _start(self, number: int, settings: Settings) -> LabHost:
        space = Space(settings["NAME"], self.mode.host_argv(self._network.space.pid), settings)
        host = LabHost(space, mode=self.mode, number=number, faults=network.Faults(self._network, space, number))
        self.machines.append(host)
        return host
