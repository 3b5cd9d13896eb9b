"""Processes in namespaces of their own: how they are started, how another command gets in, and how they end."""

import contextlib
import os
import pwd
import select
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
# Nobody in a lab can set the clock, load a module or reboot: these are not namespaced, or do harm.
NEVER = "--bounding-set=-sys_time,-sys_module,-sys_boot,-sys_rawio"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_TIMEOUT_S = 60.0


def lab_id() -> str:
    """What everything is called that a lab of this process has to name on the machine."""
    return f"gangline-lab-{os.getpid()}"


class LabFailed(Exception):
    """The lab could not be built, or a command that has to work in it did not."""


class Mode:
    """How a lab gets its namespaces: as root, or as an ordinary user inside a user namespace.

    Root may ask for the second, too; the lab then runs as the user "nobody".
    """

    def __init__(self, *, rootless: bool) -> None:
        self.rootless = rootless
        uid = os.getuid()
        self.uid, self.gid = (65534, 65534) if rootless and uid == 0 else (uid, os.getgid())
        self._as_user = [] if self.uid == uid else [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        self.login = "lab" if rootless else pwd.getpwuid(uid).pw_name
        self.home = "/home/lab" if rootless else pwd.getpwuid(uid).pw_dir
        self.ssh_port = 2222 if rootless else 22

    def switch_argv(self) -> list[str]:
        """What starts the switch."""
        user = ["--user", "--map-root-user"] if self.rootless else []
        return [*self._drop(), "unshare", *user, "--net", "bash", str(HERE / "switch.sh")]

    def host_argv(self, switch_pid: int) -> list[str]:
        """What starts a host beside that switch."""
        inside = ["nsenter", f"--target={switch_pid}", "--user", "--preserve-credentials"] if self.rootless else []
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child"]
        return [*self._drop(), *inside, "unshare", *spaces, "bash", str(HERE / "hostinit.sh")]

    def enter_argv(self, pid: int, *, as_root: bool = True, only_network: bool = False) -> list[str]:
        """What comes before a command that runs in the namespaces of process `pid`."""
        user = ["--user", "--preserve-credentials"] if self.rootless else []
        spaces = ["--net"] if only_network else ["--net", "--uts", "--mount", "--ipc", "--pid", "--root", "--wd"]
        argv = [*self._drop(), "nsenter", f"--target={pid}", *user, *spaces, "--"]
        if self.rootless and not as_root:
            argv += ["unshare", "--user", f"--map-user={self.uid}", f"--map-group={self.gid}", "--"]
        return argv

    def can_enter(self, folder: Path) -> bool:
        """Whether the lab's user may look into a folder of this machine."""
        return self.uid == os.getuid() or all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))

    def _drop(self) -> list[str]:
        if self.rootless:
            return ["setpriv", *self._as_user, "--"] if self._as_user else []
        return ["setpriv", NEVER, "--"]


class Space:
    """A process that was started as the first of new namespaces."""

    def __init__(self, name: str, argv: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 it is closed by `forget`
        self._text = b""
        self._process = subprocess.Popen(
            argv,
            env={"PATH": PATH, "LANG": "C.UTF-8", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            cwd="/",
            bufsize=0,
        )
        self.pid = 0

    def await_pid(self) -> None:
        """Wait until it exists."""
        self.pid = int(self.await_line("pid"))

    def go(self) -> None:
        """Let it go on."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")

    def tell(self, word: str) -> None:
        """Give it an order, in one word."""
        self._process.stdin.write(f"{word}\n".encode())

    def await_line(self, word: str) -> str:
        """What follows `word` in the next line it says."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not data:
                raise LabFailed(f"{self.name} does not come up: {self.errors()}")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        said, _, value = line.decode().partition(" ")
        if said != word:
            raise LabFailed(f"{self.name} said {said!r} instead of {word!r}: {self.errors()}")
        return value

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL: everything in its pid namespace goes with it."""
        if self.pid and self.is_alive:
            _kill([self.pid])

    def close(self) -> None:
        """Ask it to end, and wait until it has."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            _kill(_session(self._process.pid))
            self._process.wait()

    def forget(self) -> None:
        """Close what its maker holds open."""
        self._process.stdout.close()
        self._errors.close()


def end(process: subprocess.Popen) -> None:
    """SIGKILL a command that was started in a host, with its session; wait until it has gone.

    `nsenter`, the leader of the session, is spared: it has to reap its child. Without it, that is left to the init of this
    machine, and a pid namespace cannot end while a dead process of it is not reaped.
    """
    if process.poll() is None:
        others = [pid for pid in _session(process.pid) if pid != process.pid]
        _kill(others or [process.pid])
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            _kill(_session(process.pid))
            process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold anything; after it: state, parent, group, session.
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
