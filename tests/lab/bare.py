"""Bare machines for tests of `gangline prepare`: what comes out of the shop, below a real systemd.

    from tests.lab.bare import BareKind, BareLab

    with BareLab({"pc1": BareKind(firewall="ufw"), "pc2": BareKind(firewall="firewalld")}) as lab:
        pc1, pc2 = lab.hosts
        lab.user.run(["gangline", "prepare", ...])      # the desk has no key, no ssh_config and no known host
        pc1.login, pc1.password                         # "alice", who may use sudo with that password; root has none
        lab.can_log_in(pc1)                             # a new login with the password; lab.can_log_in(pc1, key=True) with a key
        before = pc1.snapshot()                         # every file of /etc, /root and /home, firewall rules, names
        differences(before, pc1.snapshot())             # ["/etc/hosts: content", ...]
        pc1.reboot()                                    # process 1 is killed, and started again on the same files

Each has a wrong name (several machines are called `ubuntu`), `127.0.1.1` in its hosts file, Debian's own sshd_config
with PAM, and a firewall that lets ssh in and nothing else. systemd is real: units, journal, logind, hostnamed, networkd.

Not there: udev, timesyncd, getty. Nobody can set the clock: the capability is dropped. A machine with
`clock=True` has Debian's chronyd with `-x`, which measures the clock and leaves it alone; it asks the desk for the time:

    lab.tell_time(1000.0)                           # 1,000 s ahead; never stepped: pc1.check(["chronyc", "tracking"])
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.lab import network
from tests.lab.hosts import Lab, LabFailed
from tests.lab.machine import LabHost
from tests.lab.namespaces import PATH, Space, end
from tests.lab.settings import HostKind, Settings, lab_folders

LOGIN = "alice"
PASSWORD = "correct horse 7 battery"
BOOT_S = 90.0
MASKED = (
    "systemd-udevd.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udev-trigger.service",
    "systemd-timesyncd.service",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-networkd-wait-online.service",
    "NetworkManager-wait-online.service",
    "openipmi.service",
    "getty.target",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "sys-fs-fuse-connections.mount",
    "proc-sys-fs-binfmt_misc.automount",
)
"""Units for which a host in namespaces has no hardware, or that must not touch this machine."""

SSHD_CONFIG = """\
Include /etc/ssh/sshd_config.d/*.conf
KbdInteractiveAuthentication no
UsePAM yes
X11Forwarding yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
NFTABLES = """\
#!/usr/sbin/nft -f
flush ruleset
table inet filter {
	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		iif "lo" accept
		meta l4proto { icmp, ipv6-icmp } accept
		tcp dport 22 accept
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
	}
	chain output {
		type filter hook output priority filter; policy accept;
	}
}
"""
NETWORKD = "[Match]\nName=eth0\n\n[Network]\nAddress={address}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
KEYFILE = """\
[connection]
id=lan
type=ethernet
interface-name=eth0

[ipv4]
method=manual
address1={address}/24

[ipv6]
method=disabled
"""
CHRONY = {
    "/etc/default/chrony": 'DAEMON_OPTS="-F 1 -x"\n',
    "/etc/systemd/system/chrony.service.d/10-lab.conf": "# without the right to set the clock, too\n[Unit]\nConditionCapability=\n",
    "/etc/chrony/sources.d/10-lab.sources": "server {desk} iburst\n",
}
"""Beside Debian's own chrony.conf, with `makestep 1 3`."""
TIME_SERVER = r"""
import socket, struct, sys, time
AHEAD_S, SINCE_1900_S = float(sys.argv[1]), 2208988800
def stamp():
    seconds = time.time() + AHEAD_S + SINCE_1900_S
    return struct.pack("!II", int(seconds), int(seconds % 1 * 2**32))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("", 123))
    print("listens", flush=True)
    while True:
        asked, guest = server.recvfrom(512)
        received = stamp()
        head = struct.pack("!BBbbII4s", asked[0] & 0x38 | 4, 2, asked[2], -20, 0, 0, b"LAB ")
        server.sendto(head + received + asked[40:48] + received + stamp(), guest)
"""
"""NTP (RFC 5905, section 7.3): mode 4, stratum 2."""
SET_UP = r"""
umask 022
login=$1 name=$2 units=$3 masked=$4
[ ! -e /etc/systemd/system/chronyd.service ] || SYSTEMD_OFFLINE=1 systemctl disable --quiet chrony.service
rm -rf /etc/systemd/system/*.wants /etc/systemd/system/*.requires
ln -sfn /lib/systemd/system/multi-user.target /etc/systemd/system/default.target
for unit in $masked; do ln -sfn /dev/null "/etc/systemd/system/$unit"; done
SYSTEMD_OFFLINE=1 systemctl enable --quiet $units
tr -dc a-f0-9 < /dev/urandom | head -c 32 > /etc/machine-id
printf '%s\n' "$name" > /etc/hostname
printf '127.0.0.1\tlocalhost\n127.0.1.1\t%s\n' "$name" > /etc/hosts
rm -f /etc/ssh/ssh_host_* /etc/ssh/sshd_config.d/*
ssh-keygen -q -t ed25519 -N '' -C "root@$name" -f /etc/ssh/ssh_host_ed25519_key
useradd --create-home --shell /bin/bash --groups sudo "$login"
chpasswd --crypt-method SHA512
passwd --quiet --lock root
"""
SNAPSHOT = r"""
import hashlib, json, os, socket, stat, subprocess, sys
files = {}
def look(path):
    found = os.lstat(path)
    kind = stat.S_IFMT(found.st_mode)
    row = {"mode": oct(found.st_mode), "owner": [found.st_uid, found.st_gid]}
    row["xattrs"] = {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in os.listxattr(path, follow_symlinks=False)}
    if kind == stat.S_IFLNK:
        row["content"] = os.readlink(path)
    elif kind == stat.S_IFREG:
        with open(path, "rb") as stream:
            row["content"] = hashlib.sha256(stream.read()).hexdigest()
    files[path] = row
for top in sys.argv[1:]:
    look(top)
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
        for name in folders + names:
            look(os.path.join(folder, name))
rules = subprocess.run(["nft", "--json", "list", "ruleset"], stdout=subprocess.PIPE, check=True).stdout
print(json.dumps({"files": files, "hostname": socket.gethostname(), "rules": json.loads(rules)["nftables"]}))
"""
FOLDERS = ("/etc", "/root", "/home")


LEFT_BY_PREPARE = rf"/home/{LOGIN}/(\.local(/state(/gangline(/prepare(/.*)?)?)?)?|\.sudo_as_admin_successful)"
"""The user's journal of `gangline prepare`, and the mark that sudo sets at its first use: an undo leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BareKind:
    """What a bare machine has."""

    firewall: Literal["ufw", "firewalld", "nftables", ""] = ""
    """Which firewall is active: it lets ssh in and nothing else. Empty: none."""
    network: Literal["networkd", "NetworkManager"] = "networkd"
    """What gives eth0 its address."""
    services: tuple[str, ...] = ()
    """More units that are enabled ("avahi-daemon.service")."""
    clock: bool = False
    """chronyd is its time service, with `-x`; it runs at each boot where `services` names chrony.service."""
    hostname: str = "ubuntu"
    disk: str = "1g"
    binds: tuple[str | Path, ...] = ()
    """Folders of this machine that it has, too, read-only: `lab_folders()` to train with the Python of the tests."""

    @property
    def units(self) -> tuple[str, ...]:
        """The services that its maker has enabled."""
        own = {"networkd": "systemd-networkd.service", "NetworkManager": "NetworkManager.service"}[self.network]
        return ("ssh.service", own, *([f"{self.firewall}.service"] if self.firewall else []), *self.services)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a machine was at one moment."""

    files: Mapping[str, Mapping[str, object]]
    """Every file and folder of /etc, /root and /home: mode, owner, extended attributes, content as a hash."""
    hostname: str
    rules: tuple[str, ...]
    """The kernel's firewall, without counters and handles."""


def differences(before: Snapshot, after: Snapshot, *, ignore: str = r"(?!)") -> list[str]:
    """What is not the same, in words. ignore: paths (a pattern of the whole path) that may differ."""
    found = []
    for path in sorted({*before.files, *after.files}):
        old, new = before.files.get(path), after.files.get(path)
        if old == new or re.fullmatch(ignore, path):
            continue
        if old is None or new is None:
            found.append(f"{path}: {'new' if old is None else 'gone'}")
        else:
            found += [f"{path}: {key}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if before.hostname != after.hostname:
        found.append(f"hostname: {before.hostname} -> {after.hostname}")
    found += [f"firewall, gone: {rule}" for rule in before.rules if rule not in after.rules]
    found += [f"firewall, new: {rule}" for rule in after.rules if rule not in before.rules]
    return found


def plain_rules(rows: list[Mapping[str, object]]) -> tuple[str, ...]:
    """Rules without what counts packets or numbers rows."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            kept = {key: plain(each) for key, each in value.items() if key not in {"handle", "index"}}
            return {**kept, "counter": None} if "counter" in kept else kept
        return [plain(each) for each in value] if isinstance(value, list) else value

    return tuple(json.dumps(plain(row), sort_keys=True) for row in rows if "metainfo" not in row)


class BareHost(LabHost):
    """A bare machine."""

    def __init__(self, *arguments: object, kind: BareKind, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.kind = kind
        self.login = LOGIN
        self.password = PASSWORD
        self._init = 0

    @property
    def pid(self) -> int:
        """Its systemd, as seen outside; before it is booted, what waits to start it."""
        return self._init or self.space.pid

    def set_up(self) -> None:
        """Before the first boot: what its maker left on it."""
        argv = ["sh", "-ec", SET_UP, "set-up", LOGIN, self.kind.hostname, " ".join(self.kind.units), " ".join(MASKED)]
        self.check(argv, stdin=f"{LOGIN}:{PASSWORD}\n")
        if self.kind.binds:
            self.check(["chmod", "711", str(self.home)])  # below it may lie what the user runs
        for path, text in CHRONY.items() if self.kind.clock else ():
            self.write(path, text.format(desk=network.address(network.DESK_NUMBER)))
        self.write("/etc/ssh/sshd_config", SSHD_CONFIG)
        self.host_key = " ".join(self.read("/etc/ssh/ssh_host_ed25519_key.pub").decode().split()[:2])
        if self.kind.network == "networkd":
            self.write("/etc/systemd/network/10-lan.network", NETWORKD.format(address=self.address))
        else:
            path = "/etc/NetworkManager/system-connections/lan.nmconnection"
            self.write(path, KEYFILE.format(address=self.address), 0o600)
        if self.kind.firewall == "nftables":
            self.write("/etc/nftables.conf", NFTABLES, 0o755)
        elif self.kind.firewall == "ufw":
            self.check(["ufw", "allow", "22/tcp"])
            self.check(["sed", "-i", "s/^ENABLED=.*/ENABLED=yes/", "/etc/ufw/ufw.conf"])

    def boot(self) -> None:
        """Start its systemd; `await_boot` waits for it."""
        self.space.tell("boot")
        self.space.await_line("did")
        found = _first_of_inner_namespace(self.space.pid)
        if found is None:
            raise LabFailed(f"{self.name}: systemd does not come up: {self.space.errors()}")
        self._init = found

    def await_boot(self) -> None:
        """Wait until systemd has started everything; LabFailed with what failed."""
        deadline = time.monotonic() + BOOT_S
        said = ""
        while time.monotonic() < deadline:
            said = self.run(["systemctl", "is-system-running"]).stdout.strip()
            if said in {"running", "degraded"}:
                break
            time.sleep(0.1)
        if said != "running":
            failed = self.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
            jobs = self.run(["systemctl", "list-jobs"]).stdout
            journal = self.run(["journalctl", "--boot", "--no-pager", "--priority=warning", "--lines=30"]).stdout
            raise LabFailed(f"{self.name} is {said}: {failed}{jobs}{journal}")

    def reboot(self) -> None:
        """Kill all that runs on it, and start it again on the same files."""
        for process in self._started:
            end(process)
        self._started.clear()
        self._init = 0
        self.space.tell("halt")
        self.space.await_line("did")
        self.boot()
        self.await_boot()

    def snapshot(self) -> Snapshot:
        """All that `prepare` may change. See `Snapshot`."""
        said = json.loads(self.check(["python3", "-", *FOLDERS], stdin=SNAPSHOT))
        return Snapshot(files=said["files"], hostname=said["hostname"], rules=plain_rules(said["rules"]))


def _first_of_inner_namespace(outer: int) -> int | None:
    """The process that is number 1 of a pid namespace inside that of `outer`."""
    deadline = time.monotonic() + BOOT_S
    outer_depth = len(_numbers(outer))
    while time.monotonic() < deadline:
        for child in _children(outer):
            for inner in _children(child):
                numbers = _numbers(inner)
                if len(numbers) > outer_depth and numbers[-1] == 1 and _is_systemd(inner):
                    return inner
        time.sleep(0.02)
    return None


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _numbers(pid: int) -> list[int]:
    try:
        found = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return []
    return [int(word) for word in found[1].split()] if found else []


def _is_systemd(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "systemd"
    except OSError:
        return False


class BareLab(Lab):
    """Bare machines on a switch, and a user's computer (`user`) that knows nothing of them but their addresses.

    kinds: by the name that the tests call them; none of them has that name itself.
    """

    hosts: list[BareHost]

    def __init__(self, kinds: Mapping[str, BareKind], *, ttl_s: int = 900) -> None:
        super().__init__(len(kinds), names=list(kinds), known=False, rootless=False, ttl_s=ttl_s)
        self._bare = dict(kinds)

    def can_log_in(self, host: BareHost, *, key: bool = False, login: str = LOGIN) -> bool:
        """Whether a new login works now, from the desk: with the password, or with a key of the desk's user."""
        try:
            return self.log_in(host, ["true"], key=key, login=login).returncode == 0
        except subprocess.TimeoutExpired:  # let in, and cut off in the middle
            return False

    def log_in(self, host: BareHost, argv: list[str], *, key: bool = False, login: str = LOGIN):
        """Run a command by a new login from the desk."""
        how = "publickey" if key else "password"
        options = [
            f"PreferredAuthentications={how}",
            f"BatchMode={'yes' if key else 'no'}",
            "ConnectTimeout=5",
            "ServerAliveInterval=2",
            "ServerAliveCountMax=2",
            "NumberOfPasswordPrompts=1",
            "ControlPath=none",
            "StrictHostKeyChecking=accept-new",
            "UserKnownHostsFile=~/.ssh/known_to_the_test",
        ]
        words = [word for option in options for word in ("-o", option)]
        env = {
            "SSH_ASKPASS": "/usr/local/bin/lab-password",
            "SSH_ASKPASS_REQUIRE": "force",
            "LAB_PASSWORD": host.password,
        }
        return self.user.run(["ssh", *words, f"{login}@{host.address}", *argv], env=env, timeout_s=30)

    def tell_time(self, ahead_s: float) -> None:
        """Answer NTP on the desk, with a time that is so far ahead."""
        argv = ["python3", "-c", TIME_SERVER, str(ahead_s)]
        server = self.user.popen(argv, stdout=subprocess.PIPE)
        if server.stdout is None or server.stdout.readline() != b"listens\n":
            raise LabFailed("nobody tells the time on the desk")

    def let_in_by_key(self) -> None:
        """What `ssh-keygen` and `ssh-copy-id` do, once for each host, and names for them in the desk's ssh_config."""
        self.user.check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.user.home}/.ssh/id_ed25519"])
        key = self.user.read(".ssh/id_ed25519.pub").decode().strip()
        for host in self.hosts:
            bring = f"umask 077 && mkdir -p ~/.ssh && echo '{key}' >> ~/.ssh/authorized_keys"
            done = self.log_in(host, [bring])
            if done.returncode:
                raise LabFailed(f"{host.name}: {done.stderr}")
        rows = [f"Host {host.name}\n HostName {host.address}\n User {host.login}\n" for host in self.hosts]
        self.user.write(".ssh/config", "".join(rows), 0o600)

    def _build(self) -> None:
        self._network = network.Network(self.mode, num_nics=self._site.num_nics, env=self._switch_env())
        machines = [(network.FIRST_NUMBER + index, self._bare_machine(index)) for index in range(len(self._bare))]
        self.user, *self.hosts = self._boot([(network.DESK_NUMBER, self._bare_desk()), *machines])
        self.user.env = {"PATH": f"{Path(sys.prefix) / 'bin'}:{PATH}"}
        self.user.write("/usr/local/bin/lab-password", "#!/bin/sh\nprintf '%s\\n' \"$LAB_PASSWORD\"\n", 0o755)
        for host in self.hosts:
            host.set_up()
        for host in self.hosts:
            host.boot()
        for host in self.hosts:
            host.await_boot()

    def _bare_machine(self, index: int) -> Settings:
        name = self._site.names[index]
        kind = HostKind(hosts_file="own", disk=self._bare[name].disk, binds=self._bare[name].binds)
        settings = self._site.machine(name, network.FIRST_NUMBER + index, kind)
        return {**settings, "INIT": "systemd", "NETWORK": "link set lo up"}

    def _bare_desk(self) -> Settings:
        kind = HostKind(binds=lab_folders(), hosts_file="own")
        return {**self._site.machine("desk", network.DESK_NUMBER, kind), "MASKS": ""}

    def _start(self, number: int, settings: Settings) -> LabHost:
        if "INIT" not in settings:
            return super()._start(number, settings)
        space = Space(settings["NAME"], self.mode.host_argv(self._network.space.pid), settings)
        faults = network.Faults(self._network, space, number)
        host = BareHost(space, mode=self.mode, number=number, faults=faults, kind=self._bare[settings["NAME"]])
        self.machines.append(host)
        return host
