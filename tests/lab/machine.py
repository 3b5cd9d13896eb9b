"""One machine of a lab: run commands in it, look at it, break it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab import limits, network
from tests.lab.namespaces import HERE, PATH, LabFailed, Mode, Space, end, lab_id


class LabHost:
    """One machine of a lab."""

    def __init__(self, space: Space, *, mode: Mode, number: int, faults: network.Faults) -> None:
        self.space = space
        self.name = space.name
        self.number = number
        self.address = network.address(number)
        self.home = Path(mode.home)
        self.login = mode.login
        self.ssh_port = mode.ssh_port
        self.host_key = ""
        self.faults = faults
        self.env: dict[str, str] = {}
        self._mode = mode
        self._cgroup: limits.ControlGroup | None = None
        self._started: list[subprocess.Popen] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    @property
    def pid(self) -> int:
        """Its PID 1, as seen outside."""
        return self.space.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.space.is_alive

    def popen(self, argv: Sequence[str], *, env=None, cwd=None, as_root: bool = False, **options) -> subprocess.Popen:
        """Start a command in it, in a clean environment, in the home folder; `options` go to subprocess.Popen.

        It ends with the host; see `end` to end it before.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        where = ["env", f"--chdir={cwd or self.home}"]
        enter = [*self._mode.enter_argv(self.pid, as_root=as_root), *where, *argv]
        base = {"PATH": PATH, "HOME": str(self.home), "USER": self.login, "LOGNAME": self.login, "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            self._cgroup.joined(enter) if self._cgroup else enter,
            env={**base, **self.env, **(env or {})},
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(
        self, argv: Sequence[str], *, env=None, stdin: str | None = None, timeout_s: float = 60, **options
    ) -> subprocess.CompletedProcess:
        """Run a command in it to its end; text in, text out. Raises subprocess.TimeoutExpired, and ends it."""
        pipes = {} if stdin is None else {"stdin": subprocess.PIPE}
        pipes |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        with self.popen(argv, env=env, **pipes, **options) as process:
            try:
                out, errors = process.communicate(stdin, timeout=timeout_s)
            except BaseException:
                end(process)
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, errors)

    def check(self, argv: Sequence[str], **options) -> str:
        """As `run`, for a command that has to work; what it printed."""
        done = self.run(argv, **options)
        if done.returncode:
            raise LabFailed(f"{self.name}: {argv} gave {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def write(self, path: str | Path, text: str | bytes, mode: int = 0o644) -> None:
        """Write a file; a relative path begins at the home folder."""
        script = 'mkdir -p "$(dirname "$1")" && { [ ! -e "$1" ] || [ -w "$1" ] || rm -f "$1"; } && cat > "$1" && chmod "$2" "$1"'
        argv = ["sh", "-c", script, "write", str(path), f"{mode:o}"]
        data = text.encode() if isinstance(text, str) else text
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(argv, as_root=Path(path).is_absolute(), **pipes) as process:
            _, errors = process.communicate(data, timeout=60)
        if process.returncode:
            raise OSError(f"{self.name}: {errors.decode(errors='replace').strip()}")

    def read(self, path: str | Path) -> bytes:
        """The content of a file; FileNotFoundError if it cannot be read."""
        with self.popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            data, errors = process.communicate(timeout=60)
        if process.returncode:
            raise FileNotFoundError(f"{self.name}: {errors.decode(errors='replace').strip()}")
        return data

    def exists(self, path: str | Path) -> bool:
        """Whether there is such a file or folder."""
        return self.run(["test", "-e", str(path)]).returncode == 0

    def call(self, function: str, **arguments: object) -> object:
        """What a function of the tests gives back when it runs there: call("tests.lab.cases_ssh:push", name="h1").

        For the user's computer and hosts with `binds=lab_folders()`. Arguments and result are JSON.
        """
        argv = [sys.executable, "-m", "tests.lab.call", function]
        done = self.run(argv, stdin=json.dumps(arguments), cwd=HERE.parents[1])
        if done.returncode:
            raise LabFailed(f"{self.name}: {function}: {done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def new_host_key(self) -> str:
        """Its sshd shows another key from now on, as after a new installation; which one."""
        script = (
            "cd /etc/ssh && rm ssh_host_ed25519_key* && ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key && "
            "pkill -HUP -f 'sshd: /usr/sbin/ss[h]d .listener.' && cat ssh_host_ed25519_key.pub && "
            # it starts itself anew, and does not listen for a moment
            'for _ in $(seq 100); do ssh-keyscan -t ed25519 -p "$0" "$1" 2>&1 | '
            'grep -qF "$(cut -d " " -f 2 ssh_host_ed25519_key.pub)" && exit; sleep 0.1; done; exit 1'
        )
        said = self.check(["sh", "-c", script, str(self.ssh_port), self.address], as_root=True)
        self.host_key = " ".join(said.split()[:2])
        return self.host_key

    def processes(self) -> list[str]:
        """The command lines of all that runs in it, but for its first processes and its sshd."""
        lines = self.check(["ps", "-eo", "args=", "ww"]).splitlines()
        own = (f"bash {HERE}", "sshd: /usr/sbin/sshd [listener]", "ps -eo args=")
        return [line for line in lines if not line.startswith(own)]

    def fill_disk(self, leave_kb: int = 0) -> None:
        """Its disk is full, but for so much."""
        script = 'dd if=/dev/zero of=/var/tmp/full bs=64k 2>/dev/null; truncate -s -"$1"K /var/tmp/full'
        self.check(["sh", "-c", script, "fill", str(leave_kb)], as_root=True)

    def limit(self, *, memory_mb: int | None = None, cpus: float | None = None) -> None:
        """Bound its memory and CPU time. The kernel kills what wants more memory."""
        if self._cgroup is None:
            self._cgroup = limits.ControlGroup(f"{lab_id()}-{self.name}")
            self._cgroup.add(limits.processes_of(self.pid))
        self._cgroup.limit(memory_mb=memory_mb, cpus=cpus)

    @property
    def held_mb(self) -> int:
        """MiB that its processes hold and cannot give back, once it has a bound on its memory."""
        return self._cgroup.held_mb() if self._cgroup is not None else 0

    @property
    def num_killed(self) -> int:
        """How many of its processes the kernel killed for want of memory, since it has a bound."""
        return self._cgroup.num_killed() if self._cgroup is not None else 0

    def kill(self) -> None:
        """It crashes: all its processes are gone at once, and its peers' connections are reset."""
        self.space.kill()
        self.close()

    def close(self) -> None:
        """Wait until it has ended, with all that was started in it."""
        self.space.close()
        for process in self._started:
            end(process)
        self._started.clear()

    def power_off(self) -> None:
        """It loses power: its peers hear nothing more, not even a reset."""
        self.faults.unplug()
        self.kill()
