"""What labs can do on this machine: asked once, by trying."""

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab import limits, pythons
from tests.lab.namespaces import PATH, LabFailed

PROGRAMS = ("bash", "ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd", "pivot_root", "mount")
OPTIONAL_PROGRAMS = (
    "iperf3",
    "nft",
    "rsync",
    "gcc",
    "pdsh",
    "tc",
    "ansible",
    "mpirun",
    "mpiexec.hydra",
    "sudo",
    "podman",
    "crun",
    "docker-registry",
)
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "slurmdbd", "mariadbd", "mariadb-install-db")
BARE_PROGRAMS = (
    *("sudo", "useradd", "chpasswd", "dbus-daemon", "nft", "ufw", "firewalld"),
    *("NetworkManager", "avahi-daemon", "avahi-browse", "chronyd"),
)
SYSTEMD = Path("/lib/systemd/systemd")
NAMED_GROUPS = Path("/sys/fs/cgroup/systemd/cgroup.procs")
PYTHONS = ("3.8", "3.13")
EXTRAS = {"netem", "ansible", *(f"python{version}" for version in PYTHONS)}
"""What .ci/run cannot give a machine: a skip for one of these is never a failure."""


def has_program(name: str) -> bool:
    """Whether a program is installed, also where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}") is not None


@functools.cache
def capabilities() -> dict[str, str]:
    """Name of the capability -> "" if it is there, else what is missing.

    lab: labs at all. rootless: labs in a user namespace. root: labs as root, with their own control groups perhaps.
    cgroup: `LabHost.limit`. tbf: `rate`. netem: `delay`. python3.8: `python="3.8"`; slurm: a Slurm cluster (tests/slurm);
    bare: machines below a real systemd (tests/bare); and programs by their names.
    """
    programs = _lacks(PROGRAMS)
    root = "not root" if os.getuid() else programs or _trial(rootless=False)
    rootless = programs or _trial(rootless=True)
    return {
        "lab": root if not os.getuid() else rootless,
        "root": root,
        "rootless": rootless,
        "cgroup": "" if limits.version() else "no control groups for memory and cpu that we may write",
        "tbf": _qdisc("tbf", "rate", "1mbit", "burst", "32kb", "latency", "30ms"),
        "netem": _qdisc("netem", "delay", "1ms"),
        "slurm": _lacks(SLURM_PROGRAMS),
        "bare": _lacks(BARE_PROGRAMS) or _lacks_systemd(),
        **{name: _lacks([name]) for name in OPTIONAL_PROGRAMS},
        **{f"python{version}": "" if pythons.has(version) else "not on this machine" for version in PYTHONS},
    }


def _lacks(names: Sequence[str]) -> str:
    missing = [name for name in names if not has_program(name)]
    return f"not installed: {' '.join(missing)}" if missing else ""


def _lacks_systemd() -> str:
    if not os.access(SYSTEMD, os.X_OK):
        return f"not installed: {SYSTEMD}"
    return "" if os.access(NAMED_GROUPS, os.W_OK) else f"no control groups of systemd that we may write: {NAMED_GROUPS}"


def report() -> str:
    """One line about what labs can and cannot do here."""
    found = capabilities()
    have = " ".join(name for name, problem in found.items() if not problem)
    lack = "; ".join(f"{name} ({problem})" for name, problem in found.items() if problem)
    return f"lab: {have or 'nothing'}" + (f"; not here: {lack}" if lack else "")


def _trial(*, rootless: bool) -> str:
    """What goes wrong when a lab of one host is built; "" if nothing does.

    Twice: on a busy machine a host may be too late for the first connection, and a whole process of tests would go
    without a lab for it.
    """
    return _built(rootless=rootless) and _built(rootless=rootless)


def _built(*, rootless: bool) -> str:
    from tests.lab.hosts import Lab

    try:
        with Lab(1, rootless=rootless, ttl_s=60) as lab:
            done = lab.user.run(["ssh", "-o", "ConnectTimeout=5", "h0", "hostname"])
            return "" if done.stdout == "h0\n" else f"ssh to a host: {done.stderr.strip()}"
    except (LabFailed, OSError) as error:
        return str(error).strip().splitlines()[-1]


def _qdisc(*words: str) -> str:
    namespace = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    try:
        done = subprocess.run(
            [*namespace, "tc", "qdisc", "replace", "dev", "lo", "root", *words],
            env={"PATH": PATH},
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()
