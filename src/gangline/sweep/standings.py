"""Where sweeps and their trials stand, for the screen and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gangline.report.text_table import table
from gangline.runs.layout import SweepLayout
from gangline.sweep.points import varying
from gangline.sweep.records import (
    SweepRecord,
    SweepState,
    TrialRecord,
    has_supervisor,
    load_trials,
    sweep_ids,
)
from gangline.sweep.schedule import best_trial, ranking


def sweep_rows(home: Path) -> list[dict[str, Any]]:
    """All sweeps, newest first, as plain data."""
    rows = []
    for sweep_id in sweep_ids(home):
        layout = SweepLayout(home, sweep_id)
        if not layout.state.exists():
            continue  # it was interrupted before it began
        state, request, trials = SweepState.load(layout.state), SweepRecord.load(layout.request), load_trials(layout)
        best = ranking(trials)[0] if trials else None
        rows.append(
            {
                "id": sweep_id,
                "job": request.name,
                "phase": state.shown,
                "trials": len(trials),
                "ended": sum(trial.ended for trial in trials),
                "running": sum(trial.phase == "running" for trial in trials),
                "failed": sum(trial.phase == "failed" for trial in trials),
                "best_loss": best.loss if best else None,
                "best_trial": best.number if best and best.loss is not None else None,
                "created": state.created,
            }
        )
    return sorted(rows, key=lambda row: str(row["created"]), reverse=True)


def sweep_document(layout: SweepLayout) -> dict[str, Any]:
    """One sweep with its trials, best first, as plain data."""
    state, request, trials = SweepState.load(layout.state), SweepRecord.load(layout.request), load_trials(layout)
    best = best_trial(trials)
    return {
        "id": layout.sweep_id,
        "phase": state.shown,
        "job_file": request.job_file,
        "words": list(request.words),
        "hosts": [host.name for host in request.cluster.hosts],
        "at_once": request.at_once,
        "halving": dataclasses.asdict(request.halving) if request.halving else None,
        "error": state.error,
        "best": best.number if best else None,
        "export": export_words(best) if best else None,
        "trials": [{**trial.to_json(), "rank": rank} for rank, trial in enumerate(ranking(trials), start=1)],
    }


def export_words(trial: TrialRecord) -> list[str]:
    """The command that exports the trial as it was ranked: from its newest checkpoint."""
    return ["gangline", "export", str(trial.run)]


def trial_table(trials: Sequence[TrialRecord]) -> list[str]:
    """The trials, best first, in columns: the keys that vary are named by their last part where that is clear."""
    keys = varying([trial.point for trial in trials])
    short = [key.rpartition(".")[2] for key in keys]
    names = [part if short.count(part) == 1 else key for key, part in zip(keys, short, strict=True)]
    header = ["rank", "trial", *names, "loss", "lowest", "step", "phase", "host", "run"]
    rows = [[str(rank), *_cells(trial, keys)] for rank, trial in enumerate(ranking(trials), start=1)]
    return table(header, rows)


def _cells(trial: TrialRecord, keys: Sequence[str]) -> list[str]:
    finite = [loss for loss in trial.losses.values() if loss is not None]
    lowest = min(finite, default=None)
    return [
        str(trial.number),
        *(trial.point.get(key, "-") for key in keys),
        _figure(trial.loss, nothing="nan" if trial.losses else "-"),
        _figure(lowest),
        f"{trial.step}/{trial.steps}" if trial.steps else "-",
        trial.phase,
        " ".join(trial.hosts) or "-",
        trial.run or "-",
    ]


def _figure(loss: float | None, nothing: str = "-") -> str:
    return nothing if loss is None else f"{loss:.4f}"


def failure_lines(trials: Sequence[TrialRecord]) -> list[str]:
    """One line for every trial that failed, with its cause, and for every run that a silent host may still have."""
    lines = []
    for trial in trials:
        if trial.phase == "failed" and trial.error:
            what = (str(trial.error.get("what") or "").splitlines() or [""])[0]
            more = f"gangline explain {trial.run}" if trial.run else str(trial.error.get("fix") or "")
            lines.append(f"trial {trial.number} failed: {what}; {more}")
        for run, host in trial.given_up.items():
            lines.append(f"{host} fell silent with {run} of trial {trial.number}; once it is back: gangline stop {run}")
    return lines


def summary_line(layout: SweepLayout, state: SweepState, trials: Sequence[TrialRecord]) -> str:
    """One line: `sweep-otter-3 running: 5 of 24 trials ended, 3 run, 16 wait`."""
    counts = {
        "run": sum(trial.phase == "running" for trial in trials),
        "wait": sum(trial.phase in {"waiting", "paused"} for trial in trials),
        "failed": sum(trial.phase == "failed" for trial in trials),
    }
    more = "".join(f", {count} {word}" for word, count in counts.items() if count)
    ended = sum(trial.ended for trial in trials)
    return f"{layout.sweep_id} {state.shown}: {ended} of {len(trials)} trials ended{more}"


def follow_sweep(
    layout: SweepLayout,
    show: Callable[[SweepState, list[TrialRecord]], None],
    *,
    wait: Callable[[float], None],
    poll_s: float = 1.0,
) -> SweepState:
    """Show the sweep as it changes until it has ended, or nobody drives it any more; its last state."""
    while True:
        state = SweepState.load(layout.state)
        show(state, load_trials(layout))
        if state.phase not in {"running", "stopping"} or (state.shown == "lost" and not has_supervisor(layout)):
            return state
        wait(poll_s)
