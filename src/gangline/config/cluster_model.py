"""The words of `cluster.yaml`: every key, its type, its default and what it is for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gangline.config.fields import (
    ADDRESS,
    DESTINATION,
    FINDING,
    HOST_KEY,
    HOST_PATH,
    IMAGE,
    LOADABLE,
    PORTS,
    ROOT_PATH,
    SLURM_GPUS,
    SLURM_MEMORY,
    SLURM_OPTION,
    SLURM_TIME,
    SLURM_WORD,
    Count,
    Name,
    NotNegative,
    OneOrMore,
    OrNone,
    Section,
    Shorthand,
    Text,
)

NONE = OrNone()
SSH_FIX = "write, for example, `ssh: alice@192.168.1.10`, or a name of your ssh_config; `port` is a key of its own"
SHARED_FIX = "write the whole path, such as /mnt/nas"
FINDING_FIX = "write the id of a warning as `gangline check` prints it, such as E-SEC-04"
KEY_FIX = "delete the line, then gangline init --pin CLUSTER reads the key and writes it"
KIND_FIX = "write `locked`, or a mapping with one of the keys lock, conda, modules, podman, docker, apptainer, python"


class EnvironmentWords(Section):
    """Where the Python of a host comes from: the bare word `locked`, or one of the keys below."""

    kind: Annotated[Literal["locked"] | None, Field(json_schema_extra={"x-fix": KIND_FIX})] = None
    """`locked`: a virtual environment that gangline builds on the host, from the lock that comes with it."""
    lock: Annotated[Text | None, Field(examples=["./requirements.lock"])] = None
    """The same from a lock of your own: a file on this computer."""
    conda: Annotated[str | None, Field(pattern=HOST_PATH, examples=["/opt/conda/envs/train"])] = None
    """Folder of a conda environment on the host."""
    modules: Annotated[
        Annotated[list[Annotated[str, Field(pattern=LOADABLE)]], Field(min_length=1), OneOrMore()] | None,
        Field(examples=[["cuda/12.8", "python/3.12"]]),
    ] = None
    """What `module load` puts in place on the host, in this order."""
    apptainer: Annotated[str | None, Field(pattern=HOST_PATH, examples=["/images/train.sif"])] = None
    """An Apptainer image on the host."""
    podman: Annotated[str | None, Field(pattern=IMAGE, examples=["docker.io/pytorch/pytorch:2.13.0"])] = None
    """A container image of podman. One host has it or can pull it; the others get it from there."""
    docker: Annotated[str | None, Field(pattern=IMAGE, examples=["registry.lan/train@sha256:0123abcd"])] = None
    """The same with docker."""
    python: Text | None = None
    """A Python on the host: alone, or the one behind `modules` or inside the image (left out: python3)."""


GPU_FIX = "write `gpu: none`, or `gpu: {tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}`"


class GpuWords(Section):
    """The GPUs of a host: the bare word `none`, or the figures of a card that the catalogue does not have."""

    kind: Annotated[Literal["none"] | None, Field(json_schema_extra={"x-fix": GPU_FIX})] = None
    """`none`: its processor trains, and its GPUs stay unused."""
    tflops_bf16: Annotated[float | None, Field(ge=0.1, le=20_000, examples=[100])] = None
    """Dense rate in bf16 with sums in fp32, TFLOP/s: half of the one with sparsity; on GeForce cards half of the one
    with sums in fp16."""
    memory_gib: Annotated[float | None, Field(ge=1, le=2048, examples=[24])] = None
    """Memory of one card."""
    bandwidth_gbs: Annotated[float | None, Field(ge=1, le=50_000, examples=[900])] = None
    """Bandwidth of its memory, GB/s."""
    power_w: Annotated[float | None, Field(ge=1, le=5000, examples=[300])] = None
    """Its board power, for the energy of a run."""


class HostWords(Section):
    """One machine. A bare name stands for `name`."""

    name: Annotated[Name, Field(examples=["my-pc"])]
    """What the host is called in plans, logs and folders. `localhost` and this computer's own name mean this one."""
    transport: Literal["local", "ssh"] | None = None
    """`local`: the host is this computer, whatever it is called; several hosts may be. Left out: `ssh`, but `local` for
    a host that is named like this computer and has none of `ssh`, `port` and `host_key`."""
    ssh: Annotated[str | None, Field(pattern=DESTINATION, json_schema_extra={"x-fix": SSH_FIX})] = None
    """Destination for `ssh`; left out: the name. Your ssh_config applies."""
    port: Annotated[int | None, Field(ge=1, le=65535, examples=[2222])] = None
    """Port of its sshd; left out: as ssh_config says."""
    host_key: Annotated[str | None, Field(pattern=HOST_KEY, json_schema_extra={"x-fix": KEY_FIX})] = None
    """The one key of its sshd that is trusted. `gangline init` writes it."""
    workdir: Text | None = None
    """Folder on the host for everything that gangline writes there. Left out: `~/gangline` on a host over SSH,
    `hosts/<name>` in gangline's home on this computer."""
    python: Text | None = None
    """A Python on the host with the packages of gangline[train], in place of `environment`. On this computer, where
    neither is given: the one of `gangline setup`, else the one that runs gangline."""
    environment: Annotated[
        Annotated[EnvironmentWords, Shorthand("kind")] | None, Field(json_schema_extra={"x-fix": KIND_FIX})
    ] = None
    """Where its Python comes from; left out: what the cluster says, or `locked` on a host over SSH."""
    address: Annotated[str | None, Field(pattern=ADDRESS, examples=["192.168.1.10"])] = None
    """Where the other hosts reach this one: best an IP address. Left out: the IP address in `ssh` or `name`;
    127.0.0.1 where all hosts are this computer."""
    interface: Annotated[Name | None, NONE] = None
    """Network interface for the traffic between ranks; `none`: found out at each start from the address."""
    slots: Count = 1
    """Ranks that run here: one for each GPU."""
    gpu: Annotated[Annotated[GpuWords, Shorthand("kind")] | None, Field(json_schema_extra={"x-fix": GPU_FIX})] = None
    """What its GPUs can do, if the catalogue does not know them; `none`: its processor trains. Left out: the host
    says which GPUs it has."""
    share: Annotated[NotNegative | None, NONE] = None
    """Speed of this host relative to the others: a host with 3 gets three times the work of one with 1. Give it for
    every host, which fixes shares, or for none: they then follow measured speeds."""
    env: dict[Text, str | int | float | bool] = Field(default={})
    """Environment variables of the ranks here. Never a secret: this file is copied into the run."""


class WitnessWords(Section):
    """A machine that trains nothing and votes; the keys are those of a host. A bare name stands for `name`."""

    name: Annotated[Name, Field(examples=["nas"])]
    """What it is called in messages."""
    ssh: Annotated[str | None, Field(pattern=DESTINATION, json_schema_extra={"x-fix": SSH_FIX})] = None
    """Destination for `ssh`; left out: the name."""
    port: Annotated[int | None, Field(ge=1, le=65535, examples=[2222])] = None
    """Port of its sshd; left out: as ssh_config says."""
    host_key: Annotated[str | None, Field(pattern=HOST_KEY, json_schema_extra={"x-fix": KEY_FIX})] = None
    """The one key of its sshd that is trusted. `gangline init --pin` writes it."""
    workdir: Annotated[str, Field(pattern=HOST_PATH)] = "~/gangline"
    """Folder for the records of runs there, some hundred kB each."""
    address: Annotated[str | None, Field(pattern=ADDRESS, examples=["192.168.1.5"])] = None
    """Where the hosts reach it. Left out: the IP address in `ssh` or `name`."""


SlurmName = Annotated[str, Field(pattern=SLURM_WORD)]


class ComponentWords(Section):
    """Nodes of another kind in the same job of Slurm, which is a heterogeneous job then."""

    nodes: Count = 1
    """Nodes of this kind."""
    partition: SlurmName | None = None
    """Left out: that of the others."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | Annotated[str, Field(pattern=SLURM_GPUS)] | None = None
    """GPUs of each of these nodes, with or without their type."""
    gpu: Annotated[Text | None, Field(examples=["h100-80gb"])] = None
    """Which card they are, where the type does not say it."""
    cpus_per_node: Count | None = None
    """Cores of each of these nodes."""
    memory: Annotated[str, Field(pattern=SLURM_MEMORY)] | Annotated[int, Field(ge=0)] | None = None
    """Memory of each of these nodes."""
    constraint: SlurmName | None = None
    """Features that they must have."""
    exclude: SlurmName | None = None
    """Nodes that are not to be used."""
    slots: Count = 1
    """Ranks per node, where no GPUs are asked for."""
    options: Annotated[list[Annotated[str, Field(pattern=SLURM_OPTION)]], OneOrMore()] = Field(default=[])
    """More options of sbatch for these nodes."""


class SlurmWords(Section):
    """The allocation of a Slurm cluster that every run asks for."""

    nodes: Count = 1
    """Nodes of one run."""
    partition: SlurmName | None = None
    """Left out: the site's default, here and below."""
    account: SlurmName | None = None
    """What the time is charged to."""
    qos: SlurmName | None = None
    """Quality of service."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | Annotated[str, Field(pattern=SLURM_GPUS)] | None = None
    """GPUs of each node, with or without their type: 4, or a100:4. Left out: none, and the processors train."""
    gpus_by: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How this site wants GPUs to be asked for: `--gpus-per-node=4`, or `--gres=gpu:4`."""
    gpu: Annotated[Text | None, Field(examples=["a100-80gb"])] = None
    """Which card they are, for `gangline plan`, where the type that Slurm has for them does not say it."""
    cpus_per_node: Count | None = None
    """Cores of each node."""
    memory: Annotated[str, Field(pattern=SLURM_MEMORY)] | Annotated[int, Field(ge=0)] | None = None
    """Memory of each node, such as 64G; 0: all of it."""
    constraint: SlurmName | None = None
    """Features that nodes must have."""
    exclude: SlurmName | None = None
    """Nodes that are not to be used."""
    time: Annotated[str, Field(pattern=SLURM_TIME)] | Annotated[int, Field(ge=1)] | None = None
    """Time limit of one allocation, such as 04:00:00. A run that takes longer saves in time, is requeued, and
    continues."""
    save_before: Annotated[int, Field(ge=10, le=86_400)] = 120
    """How many seconds before the limit a run begins to save."""
    ask_every: Annotated[int, Field(ge=1, le=3600)] = 15
    """How often Slurm is asked about a waiting job at most, in seconds."""
    slots: Count = 1
    """Ranks per node, where no GPUs are asked for."""
    shared_home: bool = True
    """Whether the nodes see gangline's home on this login host (GANGLINE_HOME). `false`: the batch script brings the
    program, the model and the data, at most 4 MB of them packed."""
    workdir: Annotated[str, Field(pattern=HOST_PATH)] = "~/gangline"
    """Folder in which every node has a folder of its own for all that gangline writes there."""
    env: dict[Text, str | int | float | bool] = Field(default={})
    """Environment variables of the ranks. Never a secret: this file is copied into the run."""
    setup: Annotated[list[Text], OneOrMore(), Field(examples=[["module load python/3.12"]])] = Field(default=[])
    """Lines of the batch script before gangline starts."""
    options: Annotated[
        list[Annotated[str, Field(pattern=SLURM_OPTION)]], OneOrMore(), Field(examples=[["--reservation=course"]])
    ] = Field(default=[])
    """More options of sbatch, as they are."""
    components: list[ComponentWords] = Field(default=[])
    """Nodes of other kinds that every run gets, too, such as two with other cards: one heterogeneous job."""


class ClusterWords(Section):
    """The machines of a run."""

    name: Name | None = None
    """What the cluster is called; left out: the name of the file."""
    hosts: Annotated[
        list[Annotated[HostWords, Shorthand("name")]],
        Field(examples=[[{"name": "my-pc", "transport": "local"}]]),
    ] = Field(default=[])
    """The hosts; the first is the head, which has rank 0. Left out with `slurm`, whose allocations give them."""
    slurm: SlurmWords | None = None
    """A Slurm cluster in place of `hosts`: `gangline train` submits a job, whose nodes are the hosts."""
    environment: Annotated[
        Annotated[EnvironmentWords, Shorthand("kind")] | None, Field(json_schema_extra={"x-fix": KIND_FIX})
    ] = None
    """The same as at a host, for every host that has none of its own."""
    shared: Annotated[
        list[Annotated[str, Field(pattern=ROOT_PATH, json_schema_extra={"x-fix": SHARED_FIX})]],
        OneOrMore(),
        Field(examples=[["/mnt/nas"]]),
    ] = Field(default=[])
    """Folders that are one and the same on all hosts: what lies in them is used where it is, not copied."""
    ports: Annotated[str | None, Field(pattern=PORTS, examples=["29500-29599"])] = None
    """Range from which the port is taken where the ranks meet, for a firewall that lets only these through. Left out:
    any free port."""
    supervisor: Literal["auto", "head", "here"] = "auto"
    """Where the supervisor of a run lives: on the head, or on this computer. `auto`: on the head, if it
    reaches the other hosts by ssh."""
    takeover: Literal["none", "votes"] = "none"
    """Whether the others go on without a lost head. `votes`: most of three hosts or more elect one of the head and the
    four hosts after it, which log in to all; none is this computer."""
    witness: Annotated[WitnessWords, Shorthand("name")] | None = None
    """A machine that trains nothing and votes where the hosts are of an even number, such as two: a NAS, or
    your computer if the hosts log in to it."""
    backend: Annotated[Name, Field(examples=["direct", "mpirun"])] | None = None
    """What starts gangline on the hosts: `direct`, `mpirun`, `mpiexec.hydra`, `pdsh`, `ray`, `slurm`, or one of
    another package. Left out: `direct`, or `slurm` with the key `slurm`."""
    acknowledged: Annotated[
        list[Annotated[str, Field(pattern=FINDING, json_schema_extra={"x-fix": FINDING_FIX})]],
        OneOrMore(),
        Field(examples=[["E-SEC-04"]]),
    ] = Field(default=[])
    """Ids of warnings that you know of: starts and `check` then name them in one line. A failure stays one."""
