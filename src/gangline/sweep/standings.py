"""Where sweeps and their trials stand, for the screen and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.report.text_table import table
from gangline.runs.layout import SweepLayout
from gangline.sweep.points import varying
from gangline.sweep.records import (
    MetricRecord,
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
        best = ranking(trials, highest=request.highest)[0] if trials else None
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


def sweep_document(layout: SweepLayout, *, jobs: Mapping[int, str] | None = None) -> dict[str, Any]:
    """One sweep with its trials, best first, as plain data. jobs: trial -> its job of Slurm."""
    jobs = jobs or {}
    state, request, trials = SweepState.load(layout.state), SweepRecord.load(layout.request), load_trials(layout)
    best = best_trial(trials, highest=request.highest)
    return {
        "id": layout.sweep_id,
        "phase": state.shown,
        "job_file": request.job_file,
        "command": list(request.template.words) if request.template else None,
        "metric": dataclasses.asdict(request.metric) if request.metric else None,
        "words": list(request.words),
        "hosts": [host.name for host in request.cluster.hosts],
        "arrays": list(state.arrays),
        "at_once": request.at_once,
        "halving": dataclasses.asdict(request.halving) if request.halving else None,
        "error": state.error,
        "best": best.number if best else None,
        "export": export_words(best) if best and request.template is None else None,
        "trials": [
            {**trial.to_json(), "rank": rank, "job": jobs.get(trial.number)}
            for rank, trial in enumerate(ranking(trials, highest=request.highest), start=1)
        ],
    }


def export_words(trial: TrialRecord) -> list[str]:
    """The command that exports the trial as it was ranked: from its newest checkpoint."""
    return ["gangline", "export", str(trial.run)]


def trial_table(
    trials: Sequence[TrialRecord], *, metric: MetricRecord | None = None, jobs: Mapping[int, str] | None = None
) -> list[str]:
    """The trials, best first, in columns: the keys that vary are named by their last part where that is clear.

    metric: of the user's own script; None: the evaluation loss. jobs: trial -> its job of Slurm.
    """
    keys = varying([trial.point for trial in trials])
    short = [key.rpartition(".")[2] for key in keys]
    names = [part if short.count(part) == 1 else key for key, part in zip(keys, short, strict=True)]
    highest = metric is not None and metric.highest
    figures = [metric.name if metric else "loss", "highest" if highest else "lowest"]
    header = ["rank", "trial", *names, *figures, "step", "phase", "host", "run", *(["job"] if jobs else [])]
    rows = [
        [
            str(rank),
            *_cells(trial, keys, best=max if highest else min),
            *([jobs.get(trial.number, "-")] if jobs else []),
        ]
        for rank, trial in enumerate(ranking(trials, highest=highest), start=1)
    ]
    return table(header, rows)


def _cells(trial: TrialRecord, keys: Sequence[str], *, best: Callable[..., float | None]) -> list[str]:
    finite = [loss for loss in trial.losses.values() if loss is not None]
    return [
        str(trial.number),
        *(trial.point.get(key, "-") for key in keys),
        _figure(trial.loss, nothing="nan" if trial.losses else "-"),
        _figure(best(finite, default=None)),
        f"{trial.step}/{trial.steps}" if trial.steps else str(trial.step or "-"),
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
    refresh: Callable[[], object] = lambda: None,
) -> SweepState:
    """Show the sweep as it changes until it has ended, or nobody drives it any more; its last state. refresh: called
    before each look.
    """
    while True:
        refresh()
        state = SweepState.load(layout.state)
        show(state, load_trials(layout))
        if state.phase not in {"running", "stopping"} or (state.shown == "lost" and not has_supervisor(layout)):
            return state
        wait(poll_s)
