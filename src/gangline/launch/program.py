"""What torchrun starts as each rank: our worker, or the words of the user. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from gangline.errors import UsageError
from gangline.launch.launchers import PYTHON, find_launcher
from gangline.runs.decode import build

SHIM = "rank_start.py"
"""The file that the guard lays beside its own, and which becomes the user's program (gangline.agent.rank_start)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """What is done once no rank of the user's own program prints any more."""

    after_s: float
    """How long no rank has printed anything then."""
    action: Literal["tell", "stop"] = "tell"
    """tell: it is said. stop: the run is ended, and has failed."""
    can_resume: bool = False
    """The user has said how the program goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank runs."""

    kind: Literal["worker", "command"] = "worker"
    """worker: our trainer. command: the user's own, which knows nothing of gangline."""
    argv: tuple[str, ...] = ()
    """command: the user's words."""
    cwd: str | None = None
    """command: where it runs, a folder on every host; one that is not absolute lies in the host's work folder."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables on top of those of the host."""
    stall: StallWatch | None = None
    """command: None: nobody looks whether it prints."""
    rest_s: float = 0.0
    """worker: how long guards rest after an attempt (`backend.StandBy`); 0: they end with it."""
    alone: bool = False
    """worker: launchers do not meet, only ranks do: in an attempt that follows one whose guards may still rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """again.json: how the user's own program is started once more after a failure, without anybody being asked."""

    restarts: int
    """How often at the most."""
    program: Program

    def to_json(self) -> dict[str, Any]:
        """Plain data for again.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Again:
        """What `to_json` wrote; raises TypeError or ValueError for anything else."""
        return build(Again, data)


WORKER = Program()


def rank_words(words: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """The user's words as a command that starts one rank. python: of the host.

    A script (`train.py`) or a module (`-m package.train`) is run by the host's Python; `python` means that Python, too;
    any other program is started as it is. Raises UsageError for programs that start ranks themselves.
    """
    require_runnable(words)
    first, *rest = words
    if first.endswith(".py") or first == "-m":
        return (python, *words)
    if PYTHON.fullmatch(PurePosixPath(first).name) and "/" not in first:
        return (python, *rest)
    return words


def require_runnable(words: tuple[str, ...]) -> None:
    """Raise UsageError for words that cannot be the program of a rank."""
    if not words:
        raise UsageError("there is nothing to run", fix="gangline run -- train.py --option value")
    launch = find_launcher(words)
    if launch is not None:
        program = shlex.join(launch.program) or "train.py --option value"
        raise UsageError(
            f"{launch.name} starts ranks itself, and so does gangline: every rank would start a gang of its own",
            seen=shlex.join(words),
            fix=f"leave it away: gangline run -- {program}; hosts and ranks stand in cluster.yaml (hosts, slots)",
        )
    if words[0].startswith("-") and (words[0] != "-m" or len(words) == 1):
        raise UsageError(
            f"{words[0]} is no program",
            seen="expected a script, -m and a module, or a program",
            fix="gangline run -- train.py --option value",
        )
