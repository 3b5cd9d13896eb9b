"""A run of the user's own command: what is written down of it, and its gang."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from gangline.context import Context
from gangline.control.equip import Ready
from gangline.control.start import start_attempt
from gangline.errors import UsageError
from gangline.launch.program import Again, Program, StallWatch, require_runnable
from gangline.provision.code import foresee_project, lay_out, place_project
from gangline.provision.tell import Console
from gangline.provision.trees import write_documents
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there

STALL_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the user asked to be run on every host."""

    home: Path
    words: tuple[str, ...]
    folder: Path
    """What is copied to every host, and where the command runs."""
    cluster: Path | None = None
    resume_flag: str | None = None
    """Words added when it is started again."""
    stall_after_s: float | None = STALL_AFTER_S
    """How long no rank has printed anything when the run counts as stalled; None: it never does."""
    on_stall: Literal["tell", "stop"] = "tell"
    restarts: int = 0
    """How often it is started again by itself after a failure."""

    @property
    def name(self) -> str:
        """What the run is called: the script."""
        script = next((word for word in self.words if word.endswith(".py")), self.words[0])
        return PurePath(script).stem


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord(Record):
    """command.json: what every attempt of such a run starts."""

    words: tuple[str, ...]
    resume_words: tuple[str, ...] | None
    """What to add when it is started again; None: it cannot be."""
    folder: str
    """Where it came from, on this computer."""
    project: dict[str, Any]
    """What was copied: commit, whether it was changed, the hash of all files."""
    stall_after_s: float | None = STALL_AFTER_S
    """How long no rank has printed anything when the run counts as stalled; None: it never does."""
    on_stall: Literal["tell", "stop"] = "tell"
    """What is done then: it is said, or the run is ended as failed."""
    restarts: int = 0
    """How often it is started again by itself after a failure, by each `run` or `resume`."""

    def words_of(self, attempt: int) -> tuple[str, ...]:
        """The command of one attempt."""
        return self.words if attempt == 1 else (*self.words, *(self.resume_words or ()))

    @property
    def stall(self) -> StallWatch | None:
        """What is done once no rank prints any more."""
        if self.stall_after_s is None:
            return None
        can_resume = self.resume_words is not None
        return StallWatch(after_s=self.stall_after_s, action=self.on_stall, can_resume=can_resume)

    @staticmethod
    def of(layout: RunLayout) -> CommandRecord | None:
        """The command of a run; None where it is a job."""
        return load_if_there(layout.command, CommandRecord)


def draft(order: Command) -> CommandRecord:
    """What is known of it before anything is copied; raises UsageError for words that cannot be a rank's program."""
    require_runnable(order.words)
    flag = order.resume_flag
    return CommandRecord(
        words=order.words,
        resume_words=None if flag is None else _split(flag),
        folder=str(order.folder.absolute()),
        project={},
        stall_after_s=order.stall_after_s,
        on_stall=order.on_stall,
        restarts=order.restarts,
    )


def _split(flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flag))
    except ValueError as error:
        raise UsageError(
            "--resume-flag cannot be split into words",
            seen=f"{flag}: {error}",
            fix="close its quotes, as for a shell: --resume-flag \"--resume_from_checkpoint 'my folder'\"",
        ) from error


def start_command(layout: RunLayout, record: CommandRecord, ready: Ready, number: int, context: Context) -> None:
    """Bring the user's folder to every host, verify it there byte for byte, and start the command in a copy of it.

    Every run has its own, which stays the same from attempt to attempt: what the command wrote there is found again.
    """
    write_documents(layout, {"command": record.to_json()})  # whatever comes: it can be resumed
    project = place_project(Path(record.folder), ready.cluster, context.transports, tell=context.console)
    record = dataclasses.replace(record, project=project.to_json())
    write_documents(layout, {"command": record.to_json()})
    for line in lay_out(project, layout.run_id, ready.cluster, context.transports).lines(number - 1):
        context.console.report(line)
    gang = command_gang(ready.cluster, layout.run_id, number)
    start_attempt(layout, ready, gang, context, program=program_of(record, gang), again=again_of(record, gang))


def foresee_project_of(record: CommandRecord, *, console: Console) -> CommandRecord:
    """The record as it will be once the folder was copied; copies nothing."""
    project = foresee_project(Path(record.folder), tell=console)
    return dataclasses.replace(record, project=project.to_json())


def program_of(record: CommandRecord, gang: Gang) -> Program:
    """What every rank of an attempt runs, and where: in the run's own folder, below the work folder of its host."""
    folder = RunLayout(Path(), gang.run_id).project
    return Program(kind="command", argv=record.words_of(gang.attempt), cwd=str(folder), stall=record.stall)


def again_of(record: CommandRecord, gang: Gang) -> Again | None:
    """How it is started by itself after this attempt; None: it is not."""
    if not record.restarts:
        return None
    following = dataclasses.replace(gang, attempt=gang.attempt + 1)
    return Again(restarts=record.restarts, program=program_of(record, following))


def require_resumable(run_id: str, record: CommandRecord) -> None:
    """Only the user's script knows how it goes on; raises UsageError where nobody said with which words."""
    if record.resume_words is None:
        raise UsageError(
            f"{run_id} runs your own command, and nothing tells gangline how to resume it",
            seen="the run was started without --resume-flag",
            fix='start it again: gangline run --resume-flag "--resume_from_checkpoint last" -- CMD',
        )


def require_job(layout: RunLayout) -> None:
    """Raise UsageError for a run of the user's own command, of which gangline has no model and no figures."""
    if (record := CommandRecord.of(layout)) is not None:
        raise UsageError(
            f"{layout.run_id} runs your own command, and only that command knows where its model and metrics are",
            seen=shlex.join(record.words),
            fix="look where your script writes them. Chat with a model folder on this computer: gangline chat FOLDER",
        )


def command_gang(cluster: Cluster, run_id: str, attempt: int) -> Gang:
    """One rank for every slot; what they do is theirs."""
    ranks = tuple(
        GangRank(host=host.name, share=0, device=index) for host in cluster.hosts for index in range(host.slots)
    )
    return Gang(run_id=run_id, attempt=attempt, ranks=ranks)
