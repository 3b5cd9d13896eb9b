"""The resolved cluster: what `cluster.yaml` means, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there, load_record

ENGINES = ("podman", "docker")
"""Kinds of environment that are an image of such a program."""
LEAST_VOICES = 3
"""Hosts that elect one of them, a witness among them: of two, neither is more than half without the other."""


def voices(hosts: Sequence[str], witness: str | None) -> tuple[str, ...]:
    """Who elects a supervisor of these hosts: with them the witness, where it makes their number odd."""
    return (*hosts, witness) if witness is not None and hosts and len(hosts) % 2 == 0 else tuple(hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the Python of a host comes from."""

    kind: Literal["own", "locked", "conda", "modules", "apptainer", "podman", "docker"] = "own"
    """own: a Python that the user names. locked: a venv that gangline builds from a lock. conda: a conda environment.
    modules: a Python behind `module load`. apptainer, podman, docker: a Python inside an image."""
    path: str | None = None
    """own: the Python. locked: the lock file on the user's computer, None: gangline's own. conda: the environment's
    folder. apptainer: the image. On the host, but for the lock. podman, docker: the image's name."""
    python: str | None = None
    """podman, docker: the Python inside the image; None: python3."""
    modules: tuple[str, ...] = ()
    """modules: what to load, in this order."""
    packages: tuple[str, ...] = ()
    """locked: what the job needs beyond gangline's own lock, such as "wandb==0.31.0"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine, and how to reach it."""

    name: str
    workdir: str
    """Absolute folder on the host below which everything of gangline lies there (`RunLayout.root`)."""
    python: str
    """The Python on the host that ranks run with; "" until it is known (see `environment`)."""
    transport: Literal["local", "ssh", "srun"] = "local"
    ssh: str | None = None
    """What `ssh` is told: a name of the user's ssh_config, or user@address; None: the host's name."""
    ssh_port: int | None = None
    """None: as ssh_config says."""
    host_key: str | None = None
    """The pinned public key of its sshd: "ssh-ed25519 AAAA..."; nothing else is trusted."""
    allocation: str | None = None
    """srun: the id of the Slurm job whose node it is; None: it is reached by a short job of its own."""
    job_options: tuple[str, ...] = ()
    """srun: more options for a step on it, or for that job."""
    environment: Environment = dataclasses.field(default_factory=Environment)
    """Where `python` comes from."""
    prefix: tuple[str, ...] = ()
    """Words before `python` that put its environment in place (a module system, a container)."""
    code: str | None = None
    """Folder on the host with gangline's own source, put in front of Python's path; None: it is installed there."""
    address: str = "127.0.0.1"
    """Where the other hosts reach this one."""
    interface: str | None = None
    """Network interface for the ranks' traffic; None: the system's choice."""
    slots: int = 1
    """Ranks that run here."""
    share: float | None = None
    """Speed of this host relative to the others; None: all slots of the cluster count the same."""
    gpu: dict[str, float] | None = None
    """Figures of its GPUs, which no list has (`catalog.gpu_specs.OWN_FIGURES`); {}: its processor trains, whatever GPU
    it has; None: as the host says and the catalogue knows.
    """
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def argv(self, *words: str) -> tuple[str, ...]:
        """The command that runs the host's Python with `words`; run it with `code_env`."""
        return (*self.prefix, self.python, *words)

    @property
    def code_env(self) -> dict[str, str]:
        """The variables under which `argv("-m", "gangline...")` finds gangline, whatever lies in the current folder.

        (That needs Python 3.11 or newer.) Not for the user's own program: it imports what lies beside it.
        """
        return {"PYTHONSAFEPATH": "1"} | ({} if self.code is None else {"PYTHONPATH": self.code})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmComponent:
    """Nodes of another kind in the same job; see `SlurmRequest` for the fields."""

    nodes: int
    partition: str | None = None
    gpus_per_node: str | None = None
    gpu: str | None = None
    cpus_per_node: int | None = None
    memory: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    slots: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """The allocation that every run of a cluster asks for, and what its nodes have in common."""

    nodes: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None
    """A number, or a type and a number such as "a100:4"; None: no GPUs are asked for."""
    gpu: str | None = None
    """Their name in the catalogue, where Slurm's type is not one."""
    cpus_per_node: int | None = None
    memory: str | None = None
    """Per node, in Slurm's words, such as "64G"; "0": all of it."""
    constraint: str | None = None
    time: str | None = None
    """The limit of one allocation, in Slurm's words; None: that of the partition."""
    exclude: str | None = None
    dialect: str = "gpus-per-node"
    """How GPUs are asked for: gpus-per-node or gres."""
    options: tuple[str, ...] = ()
    """More options of sbatch, as they are."""
    setup: tuple[str, ...] = ()
    """Lines of the batch script before gangline, such as `module load python`."""
    notice_s: int = 120
    """How long before the limit the run begins to save."""
    poll_s: int = 15
    """How often Slurm is asked about a job that waits, at most."""
    slots: int = 1
    """Ranks per node where no GPUs are asked for."""
    shared_home: bool = True
    """Whether nodes see gangline's home on the login host; otherwise the batch script brings what a run needs."""
    nodelist: str | None = None
    """Nodes that have to be among those of the job: a run lies on their disks."""
    components: tuple[SlurmComponent, ...] = ()
    """Nodes of other kinds: with them it is a heterogeneous job."""
    workdir: str = "~/gangline"
    """Each node works in a folder of its own below it."""
    python: str = ""
    environment: Environment = dataclasses.field(default_factory=Environment)
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> tuple[SlurmRequest, ...]:
        """What it asks for, one kind of nodes after the other."""
        whole = dataclasses.replace(self, components=())
        fields = [
            {each.name: getattr(part, each.name) for each in dataclasses.fields(part)} for part in self.components
        ]
        return (whole, *(dataclasses.replace(whole, **values) for values in fields))

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(kind.nodes for kind in self.kinds)

    @property
    def directives(self) -> list[str]:
        """The options of sbatch that it stands for; "hetjob" stands between two kinds of nodes."""
        first, *others = (kind._directives for kind in self.kinds)
        return [*first, *(word for other in others for word in (HETJOB, *other))]

    @property
    def _directives(self) -> list[str]:
        gpus = self.gpus_per_node and (
            f"--gres=gpu:{self.gpus_per_node}" if self.dialect == "gres" else f"--gpus-per-node={self.gpus_per_node}"
        )
        named = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "nodes": str(self.nodes),
            "mem": self.memory,
            "constraint": self.constraint,
            "time": self.time,
            "exclude": self.exclude,
            "nodelist": self.nodelist,
        }
        return [
            *(f"--{name}={value}" for name, value in named.items() if value is not None),
            "--ntasks-per-node=1",
            *([f"--cpus-per-task={self.cpus_per_node}"] if self.cpus_per_node else []),
            *([gpus] if gpus else []),
            *self.options,
        ]


HETJOB = "hetjob"
"""A line of a batch script: what follows are options for nodes of another kind."""
IN_ALLOCATION = "SLURM_JOB_ID"
"""Set inside an allocation of Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Record):
    """The machines of a run; the first host is the head."""

    name: str
    hosts: tuple[Host, ...]
    shared: tuple[str, ...] = ()
    """Folders that are one and the same on all hosts."""
    ports: tuple[int, int] | None = None
    """First and last port that the ranks may meet on; None: any free one."""
    supervisor: Literal["auto", "head", "here"] = "auto"
    """Where the process lives that looks after a run; auto: on the head, if it reaches the other hosts by ssh."""
    takeover: Literal["none", "votes"] = "none"
    """Whether another host goes on with a run whose supervisor is lost with the head; votes: one that more than half
    of them have elected."""
    witness: Host | None = None
    """A machine that trains nothing and has a voice where the hosts are of an even number."""
    backend: str = "direct"
    """What starts the host agents (`gangline.launch.backends`)."""
    slurm: SlurmRequest | None = None
    """The allocation that gives its hosts; without one there are none."""
    acknowledged: tuple[str, ...] = ()
    """Ids of warnings that the user knows of."""

    @property
    def head(self) -> Host:
        """The host with rank 0."""
        return self.hosts[0]

    @property
    def is_one_machine(self) -> bool:
        """Whether all hosts are this one computer."""
        return all(host.transport == "local" for host in self.hosts)

    @property
    def reached(self) -> tuple[Host, ...]:
        """The hosts, and the witness where there is one: all machines that are ever talked to."""
        return self.hosts if self.witness is None else (*self.hosts, self.witness)

    @property
    def voters(self) -> tuple[Host, ...]:
        """The machines that elect a supervisor; too few to do so are none."""
        names = voices([host.name for host in self.hosts], None if self.witness is None else self.witness.name)
        return tuple(map(self.host, names)) if len(names) >= LEAST_VOICES else ()

    def host(self, name: str) -> Host:
        """The host of that name, or the witness; raises KeyError."""
        return {host.name: host for host in self.reached}[name]

    @staticmethod
    def of_attempt(layout: RunLayout, number: int) -> Cluster:
        """The hosts of one attempt; until it has been written down, those of the run. Raises FileNotFoundError."""
        return load_if_there(layout.attempt_cluster(number), Cluster) or load_record(layout.cluster, Cluster)


def in_allocation(*, python: str) -> Cluster:
    """The allocation that we are in as a cluster; its backend finds its hosts. python: that of the ranks."""
    return Cluster(name="slurm", hosts=(), backend="slurm", slurm=SlurmRequest(nodes=1, python=python))
