"""The program of each rank: our worker, or the command of the user. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from gangline.errors import UsageError
from gangline.launch.launchers.launcher_table import PYTHON, find_launcher
from gangline.runs.record_versions import Record

SHIM = "rank_start.py"
"""The file that the host agent writes beside its own, and which executes the user's program
(gangline.agent.supervise.rank_start).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """The reaction to ranks of the user's own program without output."""

    after_s: float
    """Seconds without output of any rank."""
    action: Literal["report", "stop"] = "report"
    """stop: the run is ended as failed, too."""
    can_resume: bool = False
    """The user has given a --resume-flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of every rank."""

    kind: Literal["worker", "command"] = "worker"
    """worker: our trainer. command: the user's own, which knows nothing of gangline."""
    argv: tuple[str, ...] = ()
    """command: the user's words."""
    host_words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """command: host -> words that its ranks get behind those."""
    cwd: str | None = None
    """command: where it runs, a folder on every host; one that is not absolute lies in the host's work folder."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables on top of those of the host."""
    stall: StallWatch | None = None
    """command: None: its output is not watched."""
    rest_s: float = 0.0
    """worker: how long host agents rest after an attempt (`backend.WarmPool`); 0: they end with it."""
    alone: bool = False
    """worker: launchers do not meet, only ranks do: in an attempt that follows one whose host agents may still rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again(Record):
    """again.json: the automatic restart of the user's own program after a failure."""

    restarts: int
    """The maximum number."""
    program: Program


WORKER = Program()


def rank_words(words: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """The user's command as the command of one rank. python: of the host.

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
    """Raise UsageError for a command that cannot be the program of a rank."""
    if not words:
        raise UsageError("there is nothing to run", fix="gangline run -- train.py --option value")
    launcher = find_launcher(words)
    if launcher is not None:
        raise UsageError(
            f"{launcher} starts ranks itself, and so does gangline: every rank would start a gang of its own",
            seen=shlex.join(words),
            fix="leave it away: gangline run -- train.py --option value; hosts and ranks stand in cluster.yaml "
            "(hosts, slots)",
        )
    if words[0].startswith("-") and (words[0] != "-m" or len(words) == 1):
        raise UsageError(
            f"{words[0]} is no program",
            seen="expected a script, -m and a module, or a program",
            fix="gangline run -- train.py --option value",
        )
