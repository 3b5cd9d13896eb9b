"""A node of an allocation of Slurm as a host: its agent answers over `srun --overlap`.

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

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport.bootstrap import BOOTSTRAP, compiled_first_words
from gangline.transport.channel import AgentChannel, Hello, Lost
from gangline.transport.connection import HostLink
from gangline.transport.slurm_commands import SILENT_CONTROLLER, environment, step_argv, words_of
from gangline.transport.ssh import ChannelTransport
from gangline.transport.ssh_options import NO_PYTHON
from gangline.transport.transport import OUTPUT_LIMIT_BYTES, CommandResult

GREET_S = 60.0
"""From srun to the agent's first word: the prolog of a node and a slow disk included."""
STDERR_BYTES = 1 << 14


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
        said = words_of(self.channel.stderr.decode("utf-8", "replace"))
        if job is None:
            return HostUnreachable(
                f"{name} cannot be read: Slurm starts no job there now",
                seen=said or str(lost),
                fix=f"sinfo -n {name} says how the node stands; try again once it is free",
                reason="unreachable",
            )
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


class SuspendedLink(HostLink):
    """The way to a node of a job that Slurm has suspended: a step would wait until the job goes on."""

    def _connect(self) -> SrunConnection:
        job = self.host.allocation
        raise HostUnreachable(
            f"{self.host.name} cannot be asked: Slurm has suspended job {job}",
            seen=f"squeue -j {job}: SUSPENDED",
            fix=f"wait, or ask the site why; who suspended it lets it go on: scontrol resume {job}",
            reason="unreachable",
        )


def suspended_node(host: Host) -> ChannelTransport:
    """A transport to a node of a suspended job: every call raises HostUnreachable at once."""
    return ChannelTransport(
        host.name, SuspendedLink(host, "", compiled_first_words), output_limit_bytes=OUTPUT_LIMIT_BYTES
    )


class SrunTransport(ChannelTransport):
    """A node of an allocation. Connects at the first call, and again after a connection was lost."""

    def __init__(self, host: Host, *, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        super().__init__(host.name, SrunLink(host, "", compiled_first_words), output_limit_bytes=output_limit_bytes)
        self._ahead: WaitingStep | None = None

    def begin_ahead(self, step: WaitingStep) -> None:
        """Keep a step until it is taken; it ends with this transport."""
        self._end_ahead()
        self._ahead = step

    def take_ahead(self) -> WaitingStep | None:
        """The step that was begun; None where none was, or where it was taken."""
        step, self._ahead = self._ahead, None
        return step

    def close(self) -> None:
        """See `ChannelTransport.close`."""
        self._end_ahead()
        super().close()

    def _end_ahead(self) -> None:
        if (step := self.take_ahead()) is not None:
            step.close()


class WaitingStep:
    """A step that imports what it needs, waits for its stdin, and then stays. Its srun runs on without us.

    argv: a program that ends when its stdin is closed and nothing came.
    """

    def __init__(self, host: Host, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._host, self._argv = host, tuple(argv)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the step
        self._process = subprocess.Popen(
            [*step_argv(host), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**environment(os.environ), **env},
            cwd="/",
            start_new_session=True,
        )

    def tell(self, stdin: bytes, *, within_s: float) -> CommandResult:
        """Its first line of output, with code 0 while it runs. Raises TimeoutError where nothing comes in time."""
        process = self._process
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
        self._errors.seek(0)
        said = self._errors.read(STDERR_BYTES).decode("utf-8", "replace")
        self._errors.close()
        return CommandResult(host=self._host.name, argv=self._argv, returncode=code, stdout=line, stderr=said)

    def close(self) -> None:
        """End it, if nothing was said to it."""
        process = self._process
        for stream in (process.stdin, process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        process.terminate()
        process.wait()
