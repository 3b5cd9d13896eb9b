"""A real Slurm cluster on lab hosts (tests/lab), for tests: slurmctld, slurmd, munge, and slurmdbd if asked for.

    from tests.slurm.cluster import SlurmLab

    with SlurmLab(3, gpus={"n0": 2, "n1": 1}, accounting=True) as lab:
        lab.login.run(["sbatch", "--wrap", "hostname"])     # in the user's home, which all hosts share (shared=True)
        lab.jobs()                                          # [Job(id="1", state="RUNNING", reason="None", ...)]
        lab.submit("sleep 100", "--nodes=2")                # "1", the job's id
        lab.wait_state("1", "RUNNING")
        lab.node("n1").run(["ps"])
        lab.pids("n1", "1")                                 # {pid: command line} of the job's processes
        lab.power_off("n1"), lab.power_on("n1")             # it comes back with an empty disk
        lab.kill_controller(), lab.start_controller()
        with lab.broken("squeue", "hangs"): ...             # also: "missing", "fails"
        lab.left()                                          # jobs, steps, processes and files, in words; [] if none
        lab.log("ctl"), lab.log("n0")

Hosts: `ctl` (slurmctld, slurmdbd, MariaDB), `login` (the user's commands) and the nodes n0, n1, ... No systemd; every
host has its own spool, log and pid folders. The GPUs are device files and nothing more: simulated.

What it cannot show: proctrack/linuxproc follows parents, so that what a job leaves to process 1 is not found and lives
on; proctrack/cgroup, which most sites have, ends it. Nor are memory, cores and devices confined.
"""

import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab import limits
from tests.lab.hosts import Lab, LabFailed, LabHost, lab_folders
from tests.slurm import conf

HOME = Path("/home/ada")


START_TIMEOUT_S = 60.0
FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "nodes": "%N",
    "partition": "%P",
    "name": "%j",
    "time_left": "%L",
    "start": "%S",
}
"""Of a job, as squeue prints them."""


@dataclass(frozen=True, slots=True)
class Job:
    """What squeue says of a job."""

    id: str
    state: str
    reason: str
    nodes: str
    partition: str
    name: str
    time_left: str
    start: str


class SlurmLab:
    """A Slurm cluster with so many nodes.

    shared: all hosts have the user's home folder in common. scratch: and /scratch/ada, too. accounting: slurmdbd with
    MariaDB, and the account and the QOS of `conf.ACCOUNTS`. gpus: simulated GPUs per node, one number or
    {"n0": 2, "n1": 1}. gpu_type: what Slurm calls them. partitions: lines of slurm.conf without "PartitionName=", the
    first is the default; by default `main` and `urgent`, which preempts it. cpus: per node.
    settings: lines of slurm.conf that win over ours. ttl_s: the longest that it lives, whatever happens.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        shared: bool = True,
        accounting: bool = False,
        scratch: bool = False,
        gpus: int | Mapping[str, int] = 0,
        gpu_type: str = "fake",
        partitions: Sequence[str] | None = None,
        cpus: int = 4,
        settings: Mapping[str, object] | None = None,
        ttl_s: int = 900,
        disk: str = "4g",
    ) -> None:
        self.names = [f"n{index}" for index in range(nodes)]
        self.gpus = (
            dict.fromkeys(self.names, gpus) if isinstance(gpus, int) else {**dict.fromkeys(self.names, 0), **gpus}
        )
        self.accounting = accounting
        self.shared = shared
        self._conf = conf.slurm_conf(
            self.names,
            gpus=self.gpus,
            gpu_type=gpu_type,
            cpus=cpus,
            partitions=partitions or conf.PARTITIONS,
            accounting=accounting,
            settings=settings or {},
        )
        self._munge_key = secrets.token_bytes(64)
        folders = ({str(HOME): "home"} if shared else {}) | ({"/scratch/ada": "scratch"} if scratch else {})
        self._gres = conf.gres_conf(self.gpus, gpu_type)
        self._lab = Lab(
            2 + nodes, names=["ctl", "login", *self.names], binds=lab_folders(), shared=folders, ttl_s=ttl_s, disk=disk
        )

    def __enter__(self) -> "SlurmLab":
        try:
            self._lab.__enter__()
            for host in self._lab.hosts:
                self._set_up(host)
            self.start_controller()
            for host in self._lab.hosts:
                if host.name in self.names:
                    self.start_slurmd(host.name)
            self.wait_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything and leave nothing behind."""
        self._lab.close()

    # --- hosts

    def node(self, name: str) -> LabHost:
        """A host by its name."""
        return self._lab[name]

    @property
    def login(self) -> LabHost:
        """Where the user types; it is no node."""
        return self._lab["login"]

    @property
    def ctl(self) -> LabHost:
        """Where slurmctld runs."""
        return self._lab["ctl"]

    @property
    def nodes(self) -> list[LabHost]:
        """Those that run jobs."""
        return [self._lab[name] for name in self.names]

    def _set_up(self, host: LabHost) -> None:
        host.check(["mkdir", "-p", str(HOME)], cwd="/")
        host.home = HOME
        host.env = {**host.env, **conf.user_env(HOME)}
        host.write("/etc/munge/munge.key", self._munge_key)
        host.write("/etc/slurm/slurm.conf", self._conf)
        host.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        host.write("/etc/slurm/gres.conf", self._gres)
        host.check(["sh", "-c", conf.SET_UP, "set-up", str(HOME), str(self.gpus.get(host.name, 0))], cwd="/")
        if host.name == "ctl" and self.accounting:
            host.write("/etc/slurm/slurmdbd.conf", conf.SLURMDBD_CONF, 0o600)
            host.check(["sh", "-c", conf.ACCOUNTING], cwd="/", timeout_s=START_TIMEOUT_S)
            host.check(["sh", "-c", conf.ACCOUNTS], cwd="/", timeout_s=START_TIMEOUT_S)

    def power_off(self, name: str) -> None:
        """A host loses power: its peers hear nothing more."""
        self._lab[name].power_off()

    def power_on(self, name: str) -> None:
        """It comes back as one with a new disk, and its slurmd starts."""
        host = self._lab.replace(name)
        self._set_up(host)
        if name in self.names:
            self.start_slurmd(name)
        else:
            self.start_controller()

    # --- daemons

    def start_controller(self) -> None:
        """slurmctld, and wait until it answers."""
        self.ctl.check(["slurmctld"], cwd="/")
        self._until(
            lambda: self.login.run(["scontrol", "ping"], timeout_s=20).returncode == 0, "slurmctld answers", "ctl"
        )

    def wait_for_steps(self, job: str) -> None:
        """Wait until Slurm starts steps of a job: for some seconds after slurmctld came back it says that memory is missing."""
        step = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--chdir=/"]
        argv = ["timeout", "5", "srun", f"--jobid={job}", *step, "true"]  # it may wait long between two tries
        self._until(lambda: self.login.run(argv).returncode == 0, f"a step of job {job} starts", "ctl")

    def kill_controller(self, number: int = 9) -> None:
        """slurmctld gets a signal; wait until it has gone."""
        self._kill_daemon("ctl", "slurmctld", number)

    def start_slurmd(self, name: str) -> None:
        """The slurmd of a node."""
        self.node(name).check(["slurmd"], cwd="/")

    def kill_slurmd(self, name: str, number: int = 9) -> None:
        """The slurmd of a node gets a signal; its job steps live on."""
        self._kill_daemon(name, "slurmd", number)

    def _kill_daemon(self, name: str, program: str, number: int) -> None:
        host = self.node(name)
        host.check(["sh", "-c", 'kill -"$1" "$(cat "$2")"', "kill", str(number), f"/run/{program}.pid"])
        self._until(lambda: host.run(["pgrep", "-x", program]).returncode == 1, f"{program} ends", name)

    def log(self, name: str) -> str:
        """What the daemon of a host wrote down."""
        program = "slurmctld" if name == "ctl" else "slurmd"
        return self.node(name).read(f"/var/log/{program}.log").decode(errors="replace")

    @contextlib.contextmanager
    def broken(self, program: str, how: str = "missing", *, hosts: Sequence[str] = ("login",)) -> Iterator[None]:
        """A command of Slurm is "missing" on these hosts, "hangs" or "fails" as with a busy slurmctld."""
        instead = {
            "missing": "",
            "hangs": "#!/bin/sh\nexec sleep 600\n",
            "fails": f"#!/bin/sh\necho '{program}: error: {conf.TIMED_OUT}' >&2\nexit 1\n",
        }[how]
        path = f"/usr/bin/{program}"
        for name in hosts:
            self.node(name).check(["mv", path, f"{path}.away"])
            if instead:
                self.node(name).write(path, instead, 0o755)
        try:
            yield
        finally:
            for name in hosts:
                self.node(name).check(["mv", f"{path}.away", path])

    @contextlib.contextmanager
    def counted(self, program: str) -> Iterator[Callable[[], list[str]]]:
        """A command of Slurm on the login host whose calls are written down; yields the function that reads them."""
        path, log = f"/usr/bin/{program}", f"/tmp/{program}.calls"
        self.login.check(["mv", path, f"{path}.away"])
        self.login.write(path, f'#!/bin/sh\necho "$@" >>{log}\nexec {path}.away "$@"\n', 0o755)

        def calls() -> list[str]:
            return self.login.run(["cat", log]).stdout.splitlines()

        try:
            yield calls
        finally:
            self.login.check(["mv", f"{path}.away", path])
            self.login.run(["rm", "-f", log])

    # --- jobs

    def submit(self, script: str, *options: str, **more) -> str:
        """Submit a script of a shell from the login host; the job's id."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        said = self.login.check(["sbatch", "--parsable", *options], stdin=text, **more)
        return said.strip().partition(";")[0]

    def jobs(self, *options: str) -> list[Job]:
        """What squeue says now, each task of an array as a job of its own."""
        argv = ["squeue", "--noheader", "--array", "--format", "|".join(FIELDS.values()), *options]
        return [Job(*line.split("|")) for line in self.login.check(argv).splitlines()]

    def steps(self, *options: str) -> list[str]:
        """The ids of running steps ("3.0"), without a batch script's own."""
        said = self.login.check(["squeue", "--steps", "--noheader", "--format", "%i", *options]).split()
        return [step for step in said if not step.endswith((".batch", ".extern"))]

    def shown(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, also of one that has ended within MinJobAge."""
        said = self.login.check(["scontrol", "show", "job", "--oneliner", job]).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def wait_state(self, job: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait until a job has one of these states; which one."""
        self._until(
            lambda: self.shown(job)["JobState"] in states, f"job {job} is {' or '.join(states)}", "ctl", timeout_s
        )
        return self.shown(job)["JobState"]

    def wait_idle(self, *, timeout_s: float = 60.0) -> None:
        """Wait until every node is idle."""
        wanted = [f"{name} idle" for name in self.names if self.node(name).is_alive]
        self._until(lambda: set(wanted) <= set(self.node_states()), f"idle: {' '.join(wanted)}", "ctl", timeout_s)

    def node_states(self) -> list[str]:
        """["n0 idle", "n1 down*", ...]."""
        return sorted(set(self.login.run(["sinfo", "--Node", "--noheader", "--format", "%n %T"]).stdout.splitlines()))

    def cancel_all(self) -> None:
        """Cancel every job and wait until all nodes are idle."""
        self.login.check(["scancel", "--user", "root"])
        self.wait_idle()

    def clear(self) -> None:
        """Delete files that jobs left on the nodes."""
        for host in (host for host in self.nodes if host.is_alive):
            host.check(["sh", "-c", f"{conf.FILES} -delete"])

    def pids(self, name: str, job: str | None = None) -> dict[int, str]:
        """Processes on a node with that job in their environment (None: any), by their numbers there."""
        wanted = f"SLURM_JOB_ID={job}\0".encode() if job else b"SLURM_JOB_ID="
        found = {}
        for pid in limits.processes_of(self.node(name).pid):
            folder = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError):
                environment = folder.joinpath("environ").read_bytes()
                words = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if words and (environment.startswith(wanted) or b"\0" + wanted in environment):
                    status = folder.joinpath("status").read_text()
                    found[int(re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)[1])] = words
        return found

    def left(self, *, within_s: float = 15.0) -> list[str]:
        """Jobs, steps, processes and files of jobs that are left after a while, in words."""
        deadline = time.monotonic() + within_s
        while (left := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left_now(self) -> list[str]:
        left = [f"job {job.id} {job.state}" for job in self.jobs()]
        left += [f"step {step}" for step in self.steps()]
        for host in (host for host in self.nodes if host.is_alive):
            left += [f"{host.name}: process {words}" for words in host.processes() if not conf.is_daemon(words)]
            found = host.run(["sh", "-c", conf.FILES]).stdout.splitlines()
            left += [f"{host.name}: file {path}" for path in found]
        return left

    def _until(self, condition, what: str, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        for turn in itertools.count():
            if condition():
                return
            if time.monotonic() > deadline:
                raise LabFailed(f"waited in vain: {what}\n{self.node_states()}\n{self.log(name)[-3000:]}")
            time.sleep(min(0.05 * (turn + 1), 0.5))
