"""Watching one run to its end in a terminal, and what is said when it is over."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from gangline.planning.outcome import Comparison
from gangline.planning.spent import TimeReport
from gangline.remote.said import NONSENSE
from gangline.runs.registry import RunRecord
from gangline.runs.versions import load_record
from gangline.watch.curve import curve
from gangline.watch.follow import Update, View, follow
from gangline.watch.history import History
from gangline.watch.progress import Progress
from gangline.watch.table import final_losses
from gangline.watch.text import clean
from gangline.watch.times import time_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What was seen of a run until it ended."""

    run: RunRecord
    history: History


def watch_run(
    view: View,
    stream: TextIO,
    *,
    live: bool,
    from_start: bool = True,
    on_update: Callable[[Update], None] = lambda _update: None,
) -> Watched:
    """Show a run's progress until it has ended. `from_start=False`: what happened before is only counted.

    `on_update` sees every update after it was shown. KeyboardInterrupt passes through once the live line is ended;
    the run does not notice.
    """
    progress = Progress(stream, live=live, width=terminal_width)
    run = None
    try:
        for update in follow(view):
            if run is None and not from_start:
                progress.skip(update)
            else:
                progress.show(update)
            run = update.run
            on_update(update)
    finally:
        progress.finish()
    assert run is not None
    return Watched(run=run, history=progress.history)


def summary(
    view: View, watched: Watched, *, width: int, plain: bool, is_job: bool = True, can_resume: bool = True
) -> list[str]:
    """How a run went: its loss curve, its losses, its checkpoints, where it lies, what to type next.

    is_job: it is no command of the user's own, of which only its logs are known.
    """
    history, run_id, state = watched.history, view.layout.run_id, watched.run.state
    view = view.at(state.attempt) if state else view
    chart = curve(history.losses(), marks=history.evaluation_losses(), width=min(width, 100), plain=plain)
    kept = view.committed_steps()
    rows = [
        *final_losses(history),
        *_measured(view, watched.run),
        *([f"{'checkpoints':<16} {_listed(kept) if kept else 'none'}"] if is_job else []),
        f"{'run directory':<16} {view.layout.folder}",
    ]
    if view.head_layout.root != view.layout.root:
        rows.append(f"{'on the head':<16} {view.head_layout.folder}")
    again = can_resume and watched.run.phase != "finished"
    meaning = "go on from the newest checkpoint" if is_job else "start it again, with the words of --resume-flag"
    commands = [(f"gangline resume {run_id}", meaning)] if again else []
    times = _times(view, watched.run)
    blocks = [chart, rows, times, _next_commands(run_id, commands, kept)]
    return [line for block in blocks if block for line in ["", *block]][1:]


def _measured(view: View, run: RunRecord) -> list[str]:
    """The plan beside what came of it, where that was compared of this attempt."""
    try:
        comparison = load_record(view.layout.comparison, Comparison)
    except (OSError, *NONSENSE):
        return []
    if run.state is None or comparison.attempt != run.state.attempt:
        return []
    return [f"{'measured':<16} {clean(comparison.line)}"]


def _times(view: View, run: RunRecord) -> list[str]:
    """Where time went, where that is known of this attempt."""
    try:
        return time_table(load_record(view.layout.times(run.state.attempt), TimeReport)) if run.state else []
    except (OSError, *NONSENSE):
        return []


def terminal_width(default: int = 80) -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((default, 24)).columns


def speaks_braille(stream: TextIO = sys.stdout) -> bool:
    """Whether the stream's encoding has braille characters."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def _listed(steps: Sequence[int]) -> str:
    return "steps " + ", ".join(str(step) for step in steps) if len(steps) > 1 else f"step {steps[0]}"


def _next_commands(run_id: str, commands: Sequence[tuple[str, str]], kept: Sequence[int]) -> list[str]:
    model = [
        (f"gangline chat {run_id}", "talk to the model"),
        (f"gangline export {run_id}", "write it in the format of transformers or peft"),
    ]
    shown = [*commands, *(model if kept else []), (f"gangline logs {run_id}", "what every rank wrote")]
    width = max(len(command) for command, _ in shown)
    return [f"{command:<{width}}   # {meaning}" for command, meaning in shown]
