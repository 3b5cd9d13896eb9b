"""Slurm's own commands, and a node of an allocation as a host: its agent answers over `srun --overlap`.

No daemon and no port: what starts on a node is a step of the user's job, so Slurm ends it with the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.runs.cluster import Host
from gangline.transport.bootstrap import BOOTSTRAP, first_words
from gangline.transport.channel import AgentChannel, Hello, Lost
from gangline.transport.connection import HostLink
from gangline.transport.ssh import ChannelTransport
from gangline.transport.ssh_options import NO_PYTHON, printable
from gangline.transport.transport import OUTPUT_LIMIT_BYTES, SECRETS, CommandResult

COMMAND_S = 60.0
"""A controller that is busy answers within it; srun itself tries for as long."""
GREET_S = 60.0
"""From srun to the agent's first word: the prolog of a node and a slow disk included."""
KEPT = ("SLURM_CONF", "SLURM_TIME_FORMAT")
ALLOCATION_VARIABLES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
WORDS = 600
STDERR_BYTES = 1 << 14


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
    ("Invalid job id", "the job has ended, and Slurm has forgotten it"),
)
"""Slurm's words -> what to do."""


def refused(argv: Sequence[str], stderr: str) -> GanglineError:
    """The error of one of Slurm's commands, with its own words."""
    said = _words_of(stderr)
    if any(words in stderr for words in SILENT_CONTROLLER):
        return HostUnreachable(
            f"{argv[0]} cannot reach Slurm's controller",
            seen=said,
            fix="what runs goes on; try again later, or ask the site whether slurmctld is up",
        )
    fix = next((fix for words, fix in MEANINGS if words.lower() in stderr.lower()), "see what Slurm says above")
    return GanglineError(f"{argv[0]} refused", seen=said or f"{' '.join(argv)} printed nothing", fix=fix)


HARMLESS = "lacks support for cpu binding"
"""A site without the plug-in says so about every step, whose cores are free then anyway."""


def _words_of(stderr: str) -> str:
    lines = (line for line in stderr.splitlines() if line.strip() and HARMLESS not in line)
    return printable(" / ".join(lines))[:WORDS]


# A node.


def step_argv(host: Host) -> list[str]:
    """The srun that runs one command on a node of an allocation, beside whatever else runs there."""
    assert host.allocation is not None, "a host of an allocation"
    return [
        "srun",
        f"--jobid={host.allocation}",
        f"--nodelist={host.name}",
        "--nodes=1",
        "--ntasks=1",
        *OVERLAP,
    ]


OVERLAP = ("--overlap", "--mem=0", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--quiet")
"""A step that takes nothing from others, keeps all of the node's cores, and outlives other nodes."""


class SrunConnection:
    """A channel to a node, over the pipes of an srun."""

    control_path = None
    """There is no way beside the channel: files go through it."""

    def __init__(self, host: Host) -> None:
        self.hello: Hello | None = None
        self._host = host
        try:
            process = subprocess.Popen(
                [*step_argv(host), "sh", "-c", f"trap '' TERM; {BOOTSTRAP}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(os.environ),
                cwd="/",  # srun changes to the same folder there, where it may not be
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise HostUnreachable(
                f"{host.name} cannot be reached: srun is not on this computer",
                seen=f"{host.name} is a node of Slurm's job {host.allocation}",
                fix="log in to the login host of the Slurm cluster",
            ) from error
        self.channel = AgentChannel(process)

    def greet(self, words: bytes) -> None:
        """Send the agent and wait for its first word; raises HostUnreachable."""
        try:
            self.hello = self.channel.greet(words, GREET_S)
        except Lost as lost:
            raise self.explain(lost) from None

    def explain(self, lost: Lost) -> HostUnreachable:
        """Why the connection ended."""
        name, job, code = self._host.name, self._host.allocation, self.channel.returncode
        said = _words_of(self.channel.stderr.decode("utf-8", "replace"))
        if code == NO_PYTHON:
            return HostUnreachable(
                f"{name} has no Python 3.8 or newer",
                seen="looked for python3, and python3.8 and newer, on the PATH of a step",
                fix="load one before the start (`module load python`): Slurm hands your environment on",
                reason="no-python",
            )
        if any(words in said for words in SILENT_CONTROLLER):
            return HostUnreachable(
                f"{name} cannot be reached: Slurm's controller does not answer",
                seen=said,
                fix=f"job {job} goes on; try again later, or ask the site whether slurmctld is up",
                reason="unreachable",
            )
        if any(words in said for words in ENDED):
            return HostUnreachable(
                f"{name}: Slurm's job {job} has ended", seen=said, fix=f"sacct -j {job} says how", reason="ended"
            )
        return HostUnreachable(
            f"{name}: the step of Slurm's job {job} {'was lost' if self.hello else 'did not start'}",
            seen=said or str(lost),
            fix=f"squeue -j {job} says how the job stands, sinfo -n {name} how the node does",
            reason="unreachable",
        )

    def close(self) -> None:
        """End srun."""
        self.channel.close()


ENDED = (
    "Invalid job id specified",
    "Job/step already completing or completed",
    "Expired or invalid job",
    "has been revoked",
    "Unable to confirm allocation",
)
"""srun's words for a job that is over."""


BUSY = ("Memory required by task is not available", "temporarily disabled", "Requested nodes are busy")
"""srun's words for a controller that has just come back, and does not know yet what its nodes have."""
TRIES = 4
BUSY_S = 2.0


class SrunLink(HostLink):
    """The way to one node."""

    def _connect(self) -> SrunConnection:
        for left in reversed(range(TRIES)):
            connection = SrunConnection(self.host)
            try:
                connection.greet(self._first_words())
                return connection
            except BaseException as error:
                connection.close()
                is_busy = isinstance(error, HostUnreachable) and any(words in error.seen for words in BUSY)
                if not (left and is_busy):
                    raise
            time.sleep(BUSY_S)
        raise AssertionError("the last try returns or raises")


class SrunTransport(ChannelTransport):
    """A node of an allocation. Connects at the first call, and again after a connection was lost."""

    def __init__(self, host: Host, *, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        super().__init__(host.name, SrunLink(host, "", first_words), output_limit_bytes=output_limit_bytes)


def run_step(
    host: Host, argv: Sequence[str], *, env: Mapping[str, str], stdin: bytes, within_s: float
) -> CommandResult:
    """Start a step that stays; its first line of output, with code 0 while it runs. Its srun runs on without us.

    Raises TimeoutError where nothing comes within `within_s`.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*step_argv(host), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment(os.environ), **env},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        if not select.select([process.stdout], [], [], within_s)[0]:
            process.kill()
            process.wait()
            raise TimeoutError(f"srun printed nothing within {within_s:g} s")
        line = process.stdout.readline().decode("utf-8", "replace")
        code = process.wait() if not line else 0
        process.stdout.close()
        errors.seek(0)
        said = errors.read(STDERR_BYTES).decode("utf-8", "replace")
    return CommandResult(host=host.name, argv=tuple(argv), returncode=code, stdout=line, stderr=said)


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

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or will."""
        return self.waits or self.state in {"RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING"}


FORMAT = "%i|%T|%r|%N|%S"
NOTHING = {"", "N/A", "(null)", "None"}


def find_job(job_id: str) -> SlurmJob | None:
    """The job, while Slurm knows it; raises HostUnreachable where Slurm does not answer."""
    try:
        lines = slurm("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={FORMAT}").splitlines()
    except GanglineError as error:
        if "Invalid job id" in error.seen:
            return None
        raise
    return read_job(lines[0]) if lines else None


def read_job(line: str) -> SlurmJob:
    """The job that a line of squeue in FORMAT shows."""
    number, state, reason, nodes, starts = ("" if word in NOTHING else word for word in line.strip().split("|"))
    return SlurmJob(
        id=number,
        state=state,
        reason=reason,
        nodes=tuple(node_names(nodes)) if nodes else (),
        starts=starts,
    )


def node_names(listed: str) -> list[str]:
    """The names that a list such as n[1-3,7] stands for, as Slurm writes them out."""
    if "[" not in listed:
        return listed.split(",")
    return slurm("scontrol", "show", "hostnames", listed).split()
