"""Slurm's own commands: what they are given, what their words mean, and how a job stands."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.runs.cluster import IN_ALLOCATION, Host
from gangline.transport.ssh_options import printable
from gangline.transport.transport import SECRETS

COMMAND_S = 60.0
"""A controller that is busy answers within it; srun itself tries for as long."""
KEPT = ("SLURM_CONF", "SLURM_TIME_FORMAT")
ALLOCATION_VARIABLES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
WORDS = 600


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands see: no options of an allocation around us, and no secrets, for Slurm stores the
    environment of a step.
    """
    return {
        name: value
        for name, value in variables.items()
        if name in KEPT or not (name.startswith(ALLOCATION_VARIABLES) or name in SECRETS)
    }


def slurm(*argv: str, timeout_s: float = COMMAND_S) -> str:
    """The output of one of Slurm's commands.

    Raises UsageError where Slurm is not on this computer, HostUnreachable where its controller does not answer, and
    GanglineError with Slurm's own words where it refuses.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=timeout_s,
            env=environment(os.environ),
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"{argv[0]} is not on this computer",
            seen=f"no program {argv[0]} on PATH",
            fix="log in to the login host of the Slurm cluster and start gangline there; `module load slurm` where "
            "the site asks for it",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostUnreachable(
            f"Slurm does not answer: {argv[0]} had no answer within {timeout_s:g} s",
            seen=" ".join(argv),
            fix="what runs goes on; try again later, or ask the site whether slurmctld is up",
        ) from error
    if done.returncode:
        raise refused(argv, done.stderr.decode("utf-8", "replace"))
    return done.stdout.decode("utf-8", "replace")


SILENT_CONTROLLER = ("Unable to contact slurm controller", "Connection timed out", "Socket timed out", "not responding")
MEANINGS: tuple[tuple[str, str], ...] = (
    ("invalid partition", "`sinfo -s` lists the partitions; write one of them as `slurm.partition`"),
    ("Invalid account", "`sacctmgr show assoc user=$USER format=account,qos` lists yours; write it as `slurm.account`"),
    ("Invalid qos", "`sacctmgr show assoc user=$USER format=account,qos` lists yours; write it as `slurm.qos`"),
    ("Invalid generic resource", "`sinfo -o '%P %G'` lists the GPUs of each partition; see `slurm.gpus_per_node`"),
    ("Requested node configuration is not available", "`sinfo -N -o '%N %c %m %G %f'` lists what the nodes have"),
    ("More processors requested", "ask for fewer nodes or cores; `sinfo -N -o '%N %c %m %G'` lists what there is"),
    ("Requested time limit is invalid", "`sinfo -o '%P %l'` lists the longest time of each partition"),
    ("Invalid feature", "`sinfo -N -o '%N %f'` lists the features; see `slurm.constraint`"),
    ("Node count specification invalid", "ask for at least one node, and for no more than the partition has"),
    ("violates accounting", "ask for less, or for another qos: `sacctmgr show qos`"),
    ("Invalid job array", "an array has fewer than MaxArraySize tasks: scontrol show config | grep MaxArraySize"),
    ("Invalid job id", "the job has ended, and Slurm has forgotten it"),
)
"""Slurm's words -> what to do."""


def refused(argv: Sequence[str], stderr: str) -> GanglineError:
    """The error of one of Slurm's commands, with its own words."""
    said = words_of(stderr)
    if any(words in stderr for words in SILENT_CONTROLLER):
        return HostUnreachable(
            f"{argv[0]} cannot reach Slurm's controller",
            seen=said,
            fix="what runs goes on; try again later, or ask the site whether slurmctld is up",
        )
    fix = next((fix for words, fix in MEANINGS if words.lower() in stderr.lower()), "see what Slurm says above")
    return GanglineError(f"{argv[0]} refused", seen=said or f"{' '.join(argv)} printed nothing", fix=fix)


def in_script(word: str) -> str:
    """A word for bash, and for the lines that sbatch reads."""
    plain = all(char.isalnum() or char in "-_=./:,@%+~" for char in word)
    return word if plain else "'" + word.replace("'", "'\\''") + "'"


def job_name(run_id: str) -> str:
    """What the job of a run is called."""
    return f"gangline-{run_id}"


HARMLESS = "lacks support for cpu binding"
"""A site without the plug-in says so about every step, whose cores are free then anyway."""


def words_of(stderr: str) -> str:
    """What one of Slurm's commands says on stderr, fit for a terminal."""
    lines = (line for line in stderr.splitlines() if line.strip() and HARMLESS not in line)
    return printable(" / ".join(lines))[:WORDS]


# A step on a node.


def step_argv(host: Host) -> list[str]:
    """The srun that runs one command on a node: of an allocation beside whatever else runs there, or as a job."""
    if host.allocation is None:
        one = (f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", "--job-name=gangline-read", "--quiet")
        return ["srun", *one, f"--immediate={IMMEDIATE_S}", *host.job_options]
    return [
        "srun",
        *component_words(host.allocation),
        f"--nodelist={host.name}",
        "--nodes=1",
        "--ntasks=1",
        *OVERLAP,
        *host.job_options,
    ]


def component_words(allocation: str) -> list[str]:
    """The options of srun for a job, or for a component of a heterogeneous one, such as 41+1."""
    job, _, component = allocation.partition("+")
    return [f"--jobid={job}", *([f"--het-group={component}"] if component else [])]


IMMEDIATE_S = 50
"""How long a command waits for a node that is to be read by a job of its own."""
OVERLAP = ("--overlap", "--mem=0", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--quiet")
"""A step that takes nothing from others, keeps all of the node's cores, and outlives other nodes."""


# Jobs.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job of Slurm, as squeue shows it."""

    id: str
    state: str
    """PENDING, RUNNING, COMPLETING, ..."""
    reason: str = ""
    """Why it waits."""
    nodes: tuple[str, ...] = ()
    """Names, in Slurm's order; () while it waits."""
    starts: str = ""
    """ISO time, expected while it waits; "" where Slurm does not know."""
    partition: str = ""
    number: str = ""
    """The number that its steps have. One task of an array has that of the whole array."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or will."""
        return self.waits or self.state in {"RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"}


FORMAT = "%i|%T|%r|%N|%S|%P|%A"
NOTHING = {"", "N/A", "(null)", "None"}


def find_job(job_id: str) -> SlurmJob | None:
    """The job, or the task of an array (4711_3), while Slurm knows it; raises HostUnreachable where Slurm does not
    answer.
    """
    job_id, known = job_id.partition("+")[0], _Snapshot.now
    return known.find(job_id) if known and job_id in known.ids else find_jobs([job_id]).get(job_id)


def find_jobs(job_ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Of these jobs, and tasks of arrays, those that Slurm knows, by one question; raises as `find_job` does."""
    if not (wanted := set(job_ids)):
        return {}
    arrays = sorted({job_id.partition("_")[0] for job_id in wanted})
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(arrays)}", f"--format={FORMAT}"]
    try:
        lines = [line.strip().split("|") for line in slurm(*argv).splitlines()]
    except GanglineError as error:
        if "Invalid job id" in error.seen:
            return {}
        raise
    lines = _whole(lines)
    # by its number first: one task of an array has the number of the array
    found = {words[-1]: words for words in lines} | {words[0]: words for words in lines}
    return {job_id: _job(found[job_id]) for job_id in wanted & found.keys()}


def _whole(lines: Iterable[list[str]]) -> list[list[str]]:
    """Lines in FORMAT in which a heterogeneous job (41+0, 41+1) is one, with the nodes of all its components."""
    whole: dict[str, list[str]] = {}
    for words in lines:
        job_id, is_component, _ = words[0].partition("+")
        first = whole.setdefault(job_id, [job_id, *words[1:]])
        if is_component and first[1:] != words[1:]:
            first[3] = ",".join(nodes for nodes in (first[3], words[3]) if nodes not in NOTHING)
    return list(whole.values())


def own_job(variables: Mapping[str, str]) -> str | None:
    """The id of the job around us as every command of Slurm takes it, which for a task of an array is 4711_3: with its
    number alone `scontrol requeue` may mean all tasks. None: there is no job around us.
    """
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get(IN_ALLOCATION)


class _Snapshot:
    """What one squeue said of several jobs."""

    now: ClassVar[_Snapshot | None] = None

    def __init__(self, job_ids: Collection[str]) -> None:
        self.ids = frozenset(job_ids)
        self._jobs: dict[str, SlurmJob] = {}
        self._error: GanglineError | None = None
        try:
            self._jobs = find_jobs(self.ids)
        except GanglineError as error:
            self._error = error

    def find(self, job_id: str) -> SlurmJob | None:
        """As `find_job`."""
        if self._error is not None:
            raise self._error
        return self._jobs.get(job_id)


@contextlib.contextmanager
def asked_once(job_ids: Collection[str]) -> Iterator[None]:
    """Within it `find_job` knows these jobs by one squeue for all of them, in every thread."""
    _Snapshot.now = _Snapshot(job_ids) if job_ids else None
    try:
        yield
    finally:
        _Snapshot.now = None


def place_in_queue(job: SlurmJob) -> tuple[int, int] | None:
    """Its place among the jobs that wait in its partition, by Slurm's priority, and how many wait there; None where it
    is the only one that the site shows, and where Slurm does not say.
    """
    if not job.partition:
        return None
    try:
        said = slurm(
            *("squeue", "--noheader", "--array", "--states=PENDING", f"--partition={job.partition}"),
            *("--sort=-p,i", "--format=%i"),
        )
    except GanglineError:
        return None
    ids = list(dict.fromkeys(line.strip().partition("+")[0] for line in said.splitlines()))
    return (ids.index(job.id) + 1, len(ids)) if job.id in ids and len(ids) > 1 else None


def find_named(name: str) -> SlurmJob | None:
    """The newest of the user's jobs of that name, while Slurm knows one; raises HostUnreachable."""
    said = slurm("squeue", "--me", "--noheader", "--states=all", f"--name={name}", f"--format={FORMAT}")
    newest = max((int(read_job(line).id.partition("+")[0]) for line in said.splitlines()), default=None)
    return None if newest is None else find_job(str(newest))


def read_job(line: str) -> SlurmJob:
    """The job that a line of squeue in FORMAT shows."""
    return _job(line.strip().split("|"))


def _job(words: Sequence[str]) -> SlurmJob:
    job_id, state, reason, nodes, starts, partition, number = ("" if word in NOTHING else word for word in words)
    return SlurmJob(
        id=job_id,
        number=number,
        state=state,
        reason=reason,
        nodes=tuple(node_names(nodes)) if nodes else (),
        starts=starts,
        partition=partition,
    )


def node_names(listed: str) -> list[str]:
    """The names that a list such as n[1-3,7] stands for, as Slurm writes them out."""
    if "[" not in listed:
        return listed.split(",")
    return slurm("scontrol", "show", "hostnames", listed).split()
