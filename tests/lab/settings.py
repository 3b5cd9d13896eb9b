"""What a machine of a lab has and lacks, in the words of hostinit.sh: variables with one item per line."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.lab import network, pythons
from tests.lab.namespaces import HERE, LabFailed, Mode, lab_id

ROOT = HERE.parents[1]
Settings = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """What a host has and lacks."""

    disk: str = "2g"
    """Size of its one disk: /, home and /tmp."""
    shm: str = "256m"
    """Size of /dev/shm."""
    hide: tuple[str, ...] = ()
    """Programs and modules of the machine's Python that are not installed there ("rsync", "ensurepip"), and paths."""
    python: str | None = None
    """Version of its `python3` ("3.8"); None: the machine's own. See `pythons.find`."""
    binds: tuple[str | Path, ...] = ()
    """Folders of this machine that it has, too, read-only and at the same path."""
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Folders that hosts share: {"/data": "a"}. Hosts with the same word there have the same folder."""
    hosts_file: Literal["all", "debian", "own"] = "all"
    """all: /etc/hosts has every host. debian: also `127.0.1.1 NAME` for itself, above. own: localhost only."""
    sshd: tuple[str, ...] = ()
    """More lines for sshd_config; they win over the lab's."""


def lab_folders() -> tuple[Path, ...]:
    """The repository, the venv that runs the tests and the Python below it: what `binds` takes to run ranks."""
    folders = dict.fromkeys(Path(folder).resolve() for folder in (ROOT, sys.prefix, sys.base_prefix))
    return tuple(folder for folder in folders if folder not in {Path("/usr"), Path("/usr/local"), Path("/")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What all machines of a lab have in common."""

    mode: Mode
    names: Sequence[str]
    """Of the hosts; host number i is 10.77.0.(10+i)."""
    num_nics: int
    ttl_s: int
    folder: Path | None
    """Where the folders lie that hosts share."""

    def machine(self, name: str, number: int, kind: HostKind) -> Settings:
        """A computer without keys and sshd."""
        python = pythons.find(kind.python) if kind.python else None
        binds = [str(folder) for folder in kind.binds]
        if python and python.folder:
            binds.append(python.folder)
        return {
            "NAME": name,
            "LAB_ID": lab_id(),
            "BASE": mount_point(binds),
            "DISK": kind.disk,
            "SHM": kind.shm,
            "TTL": str(self.ttl_s),
            "HOME": self.mode.home,
            "LOGIN": self.mode.login if self.mode.rootless else "",
            "LOGIN_UID": str(self.mode.uid),
            "LOGIN_GID": str(self.mode.gid),
            "TTY_GROUP": "" if self.mode.rootless else "5",
            "MASKS": "\n".join(str(folder) for folder in lab_folders() if str(folder) not in binds),
            "BINDS": "\n".join(binds),
            "SHARES": "\n".join(f"{self._share(word)} {path}" for path, word in kind.shared.items()),
            "HIDE": "\n".join(kind.hide),
            "PYTHON_EXECUTABLE": python.executable if python else "",
            "HOSTS": self._hosts_file(name, kind),
            "SSHD": "",
            "NETWORK": "\n".join(["link set lo up", *self._cards(number)]),
        }

    def host(self, index: int, kind: HostKind, *, accepts: Sequence[str]) -> Settings:
        """Host number `index`, which lets these public keys in."""
        settings = self.machine(self.names[index], network.FIRST_NUMBER + index, kind)
        return {**settings, "SSHD": self._sshd_config(kind), "SSH_authorized_keys": "\n".join(accepts)}

    def ssh_config(self) -> str:
        """How the user reaches every host by its name."""
        return "\n".join(
            f"Host {name}\n HostName {network.address(network.FIRST_NUMBER + index)}\n User {self.mode.login}\n"
            f" Port {self.mode.ssh_port}\n IdentityFile ~/.ssh/id_ed25519\n"
            for index, name in enumerate(self.names)
        )

    def known_name(self, address: str) -> str:
        """What a host is called in a known_hosts file."""
        return address if self.mode.ssh_port == 22 else f"[{address}]:{self.mode.ssh_port}"

    def _cards(self, number: int) -> list[str]:
        lines = []
        for nic in range(self.num_nics):
            lines += [f"addr add {network.address(number, nic)}/24 dev eth{nic}", f"link set eth{nic} up"]
        return lines

    def _hosts_file(self, name: str, kind: HostKind) -> str:
        lines = ["127.0.0.1 localhost"]
        if kind.hosts_file == "debian":
            lines.append(f"127.0.1.1 {name}")
        if kind.hosts_file != "own":
            lines += [
                f"{network.address(network.FIRST_NUMBER + index)} {each}" for index, each in enumerate(self.names)
            ]
        return "\n".join(lines)

    def _sshd_config(self, kind: HostKind) -> str:
        # sshd takes the first line of a kind.
        lines = [
            *kind.sshd,
            f"Port {self.mode.ssh_port}",
            "HostKey /etc/ssh/ssh_host_ed25519_key",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "MaxStartups 100:30:200",
            "PrintMotd no",
            "Subsystem sftp internal-sftp",
        ]
        if self.mode.rootless:
            lines += ["StrictModes no", "PidFile none"]
        return "\n".join(lines)

    def _share(self, word: str) -> Path:
        assert self.folder
        folder = self.folder / word
        if not folder.exists():
            folder.mkdir(mode=0o755)
            os.chown(folder, self.mode.uid, self.mode.gid)
        return folder


def mount_point(binds: Sequence[str]) -> str:
    """An empty folder of every Linux that a host's disk can be mounted on, in its own mount namespace."""
    for folder in ("/media", "/mnt", "/srv"):
        if Path(folder).is_dir() and not any(f"{bind}/".startswith(f"{folder}/") for bind in binds):
            return folder
    raise LabFailed("/media, /mnt and /srv are all missing or in use")


def new_keys(count: int) -> list[tuple[str, str]]:
    """So many pairs of a private and a public key."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(count)]
        for path in paths:
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        return [(path.read_text().strip(), path.with_suffix(".pub").read_text().strip()) for path in paths]


def login_key(key: tuple[str, str]) -> Settings:
    """A key that a machine logs in to others with."""
    return {"SSH_id_ed25519": key[0], "SSH_id_ed25519_pub": key[1]}
