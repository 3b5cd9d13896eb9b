"""The machine and its operating system, and what names mean on it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shlex
import socket
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gangline.agent.bounded import run, within
from gangline.agent.host_files import AnyPath, read_link, read_text

NAME_S = 4.0
"""A name server that does not answer keeps us no longer."""
NUM_NAMES = 64
UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 write a number above this for "no limit"."""
SYSTEMD = Path("/run/systemd/system")


def system(_request: Dict[str, Any]) -> Dict[str, Any]:
    """What machine this is, what runs on it, and what it lets us use."""
    memory, groups = meminfo(), memory_groups()
    return {
        "hostname": platform.node(),
        "machine": machine(),
        "kernel": platform.release(),
        "os": _os_name(),
        "arch": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "agent_python": platform.python_version(),
        "user": os.getuid(),
        "uptime_s": _uptime(),
        "time_s": time.time(),
        "num_cpus": num_cpus(),
        "memory_total_bytes": memory.get("MemTotal"),
        "memory_available_bytes": available(memory.get("MemAvailable"), groups),
        "memory_limit_bytes": min((limit for limit, _ in groups), default=None),
        "swap_total_bytes": memory.get("SwapTotal"),
        "wsl": "microsoft" in platform.release().lower(),
        "container": _container(),
        "linger": _linger(),
        "kill_user_processes": _kills_user_processes(),
    }


def machine() -> Dict[str, Optional[str]]:
    """Marks of the machine: equal boots are one kernel, equal boots with one network are one host of it.

    Hashed: a machine id is not meant to leave its machine.
    """
    return {
        "id": _hashed(read_text("/etc/machine-id") or read_text("/var/lib/dbus/machine-id")),
        "boot": _hashed(read_text("/proc/sys/kernel/random/boot_id")),
        "network": read_link("/proc/self/ns/net"),
    }


def num_cpus() -> int:
    """CPUs this process may use; a container or taskset often allows fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def meminfo() -> Dict[str, int]:
    """Figures of /proc/meminfo in bytes."""
    rows = [line.partition(":") for line in (read_text("/proc/meminfo") or "").splitlines()]
    found = {key: rest.split() for key, _, rest in rows}
    return {key: int(words[0]) * 1024 for key, words in found.items() if words and words[0].isdigit()}


def available(of_machine: Optional[int], groups: List[Tuple[int, int]]) -> Optional[int]:
    """Bytes that programs can still get: what the machine has to give, and no control group holds back.

    of_machine: MemAvailable, which knows nothing of control groups. groups: see `memory_groups`. None where neither
    says anything.
    """
    rooms = [max(0, limit - used) for limit, used in groups]
    return min(rooms if of_machine is None else [of_machine, *rooms], default=None)


def memory_groups(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> List[Tuple[int, int]]:
    """(limit, used) in bytes of each control group above this process that has a memory limit, the nearest first.

    Pages of files that nobody has touched for a while count as used there, but make room as soon as it is asked for:
    they are taken off, as the kubelet does for its working set.
    """
    found = []
    for group, place, is_old in own_groups(Path(root), own):
        files = ("memory.max", "memory.current", "inactive_file")
        if is_old:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        # In a container the group is often named from outside and not there: then the top is our own.
        folder = place / group.strip("/")
        for above in [folder, *folder.parents]:
            found.append(_limit_and_use(above, *files))
            if above == place:
                break
    return [each for each in found if each is not None]


def own_groups(root: Path, own: AnyPath) -> Iterator[Tuple[str, Path, bool]]:
    """Control groups for memory that this process is in: name, the folder of their hierarchy, whether of version 1."""
    for line in (read_text(own) or "").splitlines():
        number, controllers, group = [*line.split(":", 2), "", "", ""][:3]
        if number == "0":
            yield group, root, False
        elif "memory" in controllers.split(","):
            yield group, root / "memory", True


def _limit_and_use(folder: Path, limit: str, used: str, reclaimable: str) -> Optional[Tuple[int, int]]:
    """Of one control group; None where it has no limit. What it uses counts as nothing where that cannot be read."""
    most = read_text(folder / limit) or ""
    if not most.isdigit() or int(most) >= UNLIMITED_BYTES:
        return None
    held = read_text(folder / used) or ""
    rows = [line.split() for line in (read_text(folder / "memory.stat") or "").splitlines()]
    cache = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == reclaimable and row[1].isdigit()), 0)
    return int(most), max(0, int(held) - cache) if held.isdigit() else 0


def names(request: Dict[str, Any]) -> Dict[str, Any]:
    """What each name of the request, and this computer's own, resolves to here."""
    own = platform.node()
    asked = list(dict.fromkeys([own, *map(str, request.get("names") or [])]))[:NUM_NAMES]
    found = within(NAME_S + 1, lambda: resolve_all(asked))
    return {"own": own, "addresses": found}


def resolve_all(asked: List[str]) -> Dict[str, Any]:
    """Name -> addresses, or {"error": ...}; all at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=16) as pool:
        return dict(zip(asked, pool.map(_resolve, asked)))


def _resolve(name: str) -> Any:
    try:
        rows = within(NAME_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        return {"error": getattr(error, "strerror", None) or str(error)}
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))[:16]


def _hashed(text: Optional[str]) -> Optional[str]:
    return hashlib.blake2b(text.encode(), digest_size=12, person=b"gangline").hexdigest() if text else None


def _uptime() -> Optional[float]:
    words = (read_text("/proc/uptime") or "").split()
    return float(words[0]) if words else None


def _os_name() -> str:
    rows = [line.partition("=") for line in (read_text("/etc/os-release") or "").splitlines()]
    return next((value.strip('"') for key, _, value in rows if key == "PRETTY_NAME"), platform.system())


def _container() -> Optional[str]:
    """What kind of container this is; None: none that shows."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if named := os.environ.get("container") or read_text("/run/systemd/container"):  # noqa: SIM112 - systemd writes it so
        return named[:40]
    groups = read_text("/proc/1/cgroup") or ""
    return next((kind for kind in ("kubepods", "docker", "lxc") if "/" + kind in groups), None)


def _linger() -> Optional[bool]:
    """Whether systemd lets this user's processes live on after logout; None without systemd."""
    if not SYSTEMD.is_dir():
        return None
    import pwd

    return Path("/var/lib/systemd/linger", pwd.getpwuid(os.getuid()).pw_name).exists()


def _kills_user_processes() -> Optional[bool]:
    """Whether systemd ends what a user leaves behind at logout; None without systemd."""
    if not SYSTEMD.is_dir():
        return None
    place = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"]
    try:
        answer = run(["busctl", "--system", "get-property", *place, "KillUserProcesses"], timeout_s=3.0)
    except OSError:
        answer = None
    if answer is not None and answer.returncode == 0:
        return "true" in answer.stdout
    return _configured_to_kill()


def _configured_to_kill() -> bool:
    """The same by logind's files: the last line that says so counts, "no" is what it does by itself."""
    folders = (Path("/usr/lib/systemd/logind.conf.d"), Path("/etc/systemd/logind.conf.d"))
    paths = [Path("/etc/systemd/logind.conf"), *(path for folder in folders for path in sorted(folder.glob("*.conf")))]
    lines = [line.strip() for path in paths for line in (read_text(path) or "").splitlines()]
    said = [line.partition("=")[2].strip().lower() for line in lines if line.startswith("KillUserProcesses=")]
    return bool(said) and said[-1] in {"yes", "true", "1", "on"}


# How much of everything this user's processes may have.


UNLIMITED = -1
NUMBERS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}


def limits(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Soft and hard limits of a process here (-1: none), and the room in /dev/shm."""
    found: Dict[str, Any] = {}
    for name, number in NUMBERS.items():
        for kind, value in zip(("soft", "hard"), resource.getrlimit(getattr(resource, number))):
            found[f"{name}_{kind}"] = UNLIMITED if value == resource.RLIM_INFINITY else value
    return {**found, **_shared_memory()}


def _shared_memory() -> Dict[str, Optional[int]]:
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108 - only looked at
    except OSError:
        return {"shm_total_bytes": None, "shm_free_bytes": None}
    return {"shm_total_bytes": room.f_blocks * room.f_frsize, "shm_free_bytes": room.f_bavail * room.f_frsize}


# Variables that change how ranks talk: those of this process, and those that files of the shell set.


WATCHED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|MASTER|OMP|UCX)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH"
)
SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|KEY", re.IGNORECASE)
FILES = ("~/.bashrc", "~/.profile", "~/.bash_profile", "~/.zshrc", "~/.zshenv", "/etc/environment")
PROFILES = Path("/etc/profile.d")
VALUE_LENGTH = 200
NUM_VARIABLES = 100
EXPORT = re.compile(r"\s*(?:export|declare\s+-x|typeset\s+-x)\s+(.*)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def variables(_request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Name, value (null for what sounds like a secret) and where it is set."""
    found = [_row(name, value, "environment") for name, value in sorted(os.environ.items()) if WATCHED.fullmatch(name)]
    for path in [*map(os.path.expanduser, FILES), *map(str, sorted(PROFILES.glob("*.sh")))]:
        for number, line in enumerate((read_text(path) or "").splitlines(), 1):
            found += [_row(name, value, f"{path}:{number}") for name, value in assignments(line)]
    return found[:NUM_VARIABLES]


def _row(name: str, value: str, source: str) -> Dict[str, Any]:
    return {"name": name, "value": None if SECRET.search(name) else value[:VALUE_LENGTH], "source": source}


def assignments(line: str) -> List[Tuple[str, str]]:
    """The watched variables that a line of a shell file sets; nothing is expanded."""
    exported = EXPORT.fullmatch(line)
    try:
        words = shlex.split(exported[1] if exported else line, comments=True)
    except ValueError:  # an open quote: the value goes on in the next line
        words = (exported[1] if exported else line).split()
    found = []
    for word in words:
        pair = ASSIGNMENT.fullmatch(word)
        if pair is None:
            break  # a command: what follows are its arguments
        if WATCHED.fullmatch(pair[1]):
            found.append((pair[1], pair[2]))
    return found
