"""A run of the user's own command: its record and its gang."""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from gangline.context import Context
from gangline.errors import UsageError
from gangline.launch.launchers.launcher_table import take_off
from gangline.launch.launchers.taking_off import RankPlaces
from gangline.launch.program import Again, Program, StallWatch, require_runnable
from gangline.provision.code import lay_out, place_project, preview_project
from gangline.provision.console import Console
from gangline.provision.trees import write_documents
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import NotifyJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there

if TYPE_CHECKING:
    from gangline.control.equip import Ready

STALL_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord(Record):
    """command.json: what every attempt of such a run starts."""

    words: tuple[str, ...]
    resume_words: tuple[str, ...] | None
    """Options that are appended on a restart; None: it cannot be restarted."""
    folder: str
    """The folder on this computer."""
    project: dict[str, Any]
    """The copied folder: commit, whether it was changed, hash of all files."""
    stall_after_s: float | None = STALL_AFTER_S
    """How long no rank has printed anything when the run counts as stalled; None: it never does."""
    on_stall: Literal["report", "stop"] = "report"
    """stop: end the run as failed."""
    restarts: int = 0
    """Maximum number of automatic restarts after a failure, for each `run` or `resume`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the launchers in front of the program would set."""
    placement: RankPlaces | None = None
    """Where they would put ranks; None: one in each slot of the cluster."""
    host_words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> words that its ranks get behind all others."""
    notes: tuple[str, ...] = ()
    """What became of those launchers and their options, for the user; (): there was none."""
    notify: NotifyJob | None = None
    """Who gets messages about the run."""

    @property
    def name(self) -> str:
        """The name of the run: the script."""
        script = next((word for word in self.words if word.endswith(".py")), self.words[0])
        return PurePath(script).stem

    def words_of(self, attempt: int) -> tuple[str, ...]:
        """The command of one attempt."""
        return self.words if attempt == 1 else (*self.words, *(self.resume_words or ()))

    def on(self, cluster: Cluster) -> Cluster:
        """The part of a cluster that its ranks run on; raises UsageError where the cluster lacks what it asks for."""
        for name in self.host_words:
            if name not in {host.name for host in cluster.hosts}:
                raise UsageError(
                    f"--host-args {name}: no host of this cluster",
                    seen=f"its hosts: {', '.join(host.name for host in cluster.hosts)}",
                    fix="write the name of a host as in the cluster file",
                )
        return cluster if self.placement is None else self.placement.on(cluster)

    @property
    def stall(self) -> StallWatch | None:
        """The reaction to ranks without output."""
        if self.stall_after_s is None:
            return None
        can_resume = self.resume_words is not None
        return StallWatch(after_s=self.stall_after_s, action=self.on_stall, can_resume=can_resume)

    @staticmethod
    def of(layout: RunLayout) -> CommandRecord | None:
        """The command of a run; None where it is a job."""
        return load_if_there(layout.command, CommandRecord)


def draft(words: tuple[str, ...], *, folder: Path, resume_flag: str | None = None, **choices: Any) -> CommandRecord:
    """The record before the folder is copied; raises UsageError for a command that cannot be a rank's program.

    folder: copied to every host; the command runs in it. resume_flag: options that are appended on a restart. choices:
    the other fields of the record. Launchers in front of the program are taken off.
    """
    taken = take_off(words, folder=folder, variables=os.environ)
    words = taken.words
    require_runnable(words)
    choices = {"env": taken.env, "placement": taken.placement, "notes": taken.notes, **choices}
    choices["restarts"] = choices.get("restarts") or taken.restarts
    resume_words = None if resume_flag is None else split_words("--resume-flag", resume_flag)
    return CommandRecord(words=words, resume_words=resume_words, folder=str(folder.absolute()), project={}, **choices)


def split_words(option: str, text: str) -> tuple[str, ...]:
    """The words of the value of an option, as a shell would split it; raises UsageError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{option} cannot be split into words",
            seen=f"{text}: {error}",
            fix=f"close its quotes, as for a shell: {option} \"--resume_from_checkpoint 'my folder'\"",
        ) from error


def start_command(layout: RunLayout, record: CommandRecord, ready: Ready, number: int, context: Context) -> None:
    """Bring the user's folder to every host, verify it there byte for byte, and start the command in a copy of it.

    Every run has a copy of its own for all attempts, so the command finds the files that it wrote there before.
    """
    # imported here: it costs 0.1 s, and verbs that only read the record need none of it
    from gangline.control.start import start_attempt

    write_documents(layout, {"command": record.to_json()})  # first, so that the run can be resumed after any error
    project = place_project(Path(record.folder), ready.cluster, context.transports, console=context.console)
    record = dataclasses.replace(record, project=project.to_json())
    write_documents(layout, {"command": record.to_json()})
    for line in lay_out(project, layout.run_id, ready.cluster, context.transports).lines(number - 1):
        context.console.report(line)
    gang = command_gang(ready.cluster, layout.run_id, number)
    start_attempt(layout, ready, gang, context, program=program_of(record, gang), again=again_of(record, gang))


def preview_project_of(record: CommandRecord, *, console: Console) -> CommandRecord:
    """The record as it will be once the folder was copied; copies nothing."""
    project = preview_project(Path(record.folder), console=console)
    return dataclasses.replace(record, project=project.to_json())


def program_of(record: CommandRecord, gang: Gang) -> Program:
    """The program of every rank of an attempt; it runs in the run's copy of the folder."""
    folder = RunLayout(Path(), gang.run_id).project
    return Program(
        kind="command",
        argv=record.words_of(gang.attempt),
        host_words=record.host_words,
        cwd=str(folder),
        stall=record.stall,
        env=record.env,
    )


def again_of(record: CommandRecord, gang: Gang) -> Again | None:
    """The automatic restart after this attempt; None: there is none."""
    if not record.restarts:
        return None
    following = dataclasses.replace(gang, attempt=gang.attempt + 1)
    return Again(restarts=record.restarts, program=program_of(record, following))


def require_resumable(run_id: str, record: CommandRecord) -> None:
    """Raise UsageError for a run without --resume-flag: only the user's script knows how it resumes."""
    if record.resume_words is None:
        raise UsageError(
            f"{run_id} runs your own command, and nothing tells gangline how to resume it",
            seen="the run was started without --resume-flag",
            fix='start it again: gangline run --resume-flag "--resume_from_checkpoint last" -- CMD',
        )


def require_job(layout: RunLayout) -> None:
    """Raise UsageError for a run of the user's own command, whose model and metrics gangline does not know."""
    if (record := CommandRecord.of(layout)) is not None:
        raise UsageError(
            f"{layout.run_id} runs your own command, and only that command knows where its model and metrics are",
            seen=shlex.join(record.words),
            fix="look where your script writes them. Chat with a model folder on this computer: gangline chat FOLDER",
        )


def command_gang(cluster: Cluster, run_id: str, attempt: int) -> Gang:
    """One rank for every slot, without shares of work."""
    ranks = tuple(
        GangRank(host=host.name, share=0, device=index) for host in cluster.hosts for index in range(host.slots)
    )
    return Gang(run_id=run_id, attempt=attempt, ranks=ranks)
