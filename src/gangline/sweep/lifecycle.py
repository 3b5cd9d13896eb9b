"""What a verb does to a sweep that exists: start it, add points, stop it, resume it."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Literal

from gangline.context import REAL, Dependencies
from gangline.errors import RunFailed, UsageError
from gangline.provision.console import SILENT, Console
from gangline.runs.layout import SweepLayout
from gangline.runs.record_versions import write_record
from gangline.sweep import job_array
from gangline.sweep.begin import PlannedTrial, add_trials
from gangline.sweep.records import (
    SweepRecord,
    SweepState,
    has_supervisor,
    load_trials,
    save_state,
    save_trial,
)
from gangline.transport.local import our_python

START_TIMEOUT_S = 60.0


def start_sweep(layout: SweepLayout, *, console: Console, deps: Dependencies = REAL) -> None:
    """Start a new sweep: its supervisor, or its array on Slurm. Raises RunFailed, and GanglineError with Slurm's own
    words where Slurm refuses; then nothing of it stays.
    """
    if not SweepRecord.load(layout.request).is_array:
        spawn_supervisor(layout)
        return
    try:
        job_array.submit_trials(layout, layout.numbers(), console=console, deps=deps)
    except BaseException:
        shutil.rmtree(layout.folder, ignore_errors=True)
        raise


def add_points(
    layout: SweepLayout, trials: Sequence[PlannedTrial], *, console: Console, deps: Dependencies = REAL
) -> None:
    """Add planned trials to a sweep, which goes on where it had ended or was stopped."""
    add_trials(layout, trials)
    if not SweepRecord.load(layout.request).is_array:
        if not has_supervisor(layout):
            resume_sweep(layout)
        return
    numbers = [trial.number for trial in trials]
    try:
        if SweepState.load(layout.state).phase == "running":
            job_array.submit_trials(layout, numbers, console=console, deps=deps)
        else:
            resume_sweep(layout, console=console)
    except BaseException:
        for number in numbers:
            shutil.rmtree(layout.trial(number), ignore_errors=True)
        raise


def spawn_supervisor(layout: SweepLayout) -> None:
    """Start a supervisor of the sweep in the background, with the variables of this shell. Raises RunFailed."""
    save_state(layout, SweepState.load(layout.state), phase="running", supervisor=None)
    words = our_python("gangline.sweep", str(layout.folder), "--detach")
    result = subprocess.run(words, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while result.returncode == 0 and time.monotonic() < deadline:
        state = SweepState.load(layout.state)
        if state.supervisor is not None or state.phase != "running":
            return
        time.sleep(0.05)
    raise RunFailed(
        f"the supervisor of {layout.sweep_id} did not start",
        seen=result.stderr[-2000:].strip() or f"it printed nothing; its log is {layout.log}",
        fix=f"once that is put right: gangline sweep resume {layout.sweep_id}",
    )


def stop_sweep(layout: SweepLayout, *, now: bool = False, console: Console = SILENT) -> bool:
    """Order the sweep to end: trials that run save and stop, none starts. False where it has ended already.

    One whose supervisor was killed gets another one, which ends the trials. On Slurm, returns once no task is left.
    """
    if SweepRecord.load(layout.request).is_array:
        return job_array.stop_array(layout, now=now, console=console)
    state = SweepState.load(layout.state)
    if state.phase not in {"running", "stopping"}:
        return False
    order: Literal["kill", "stop"] = "kill" if now else "stop"
    write_record(layout.order, {"order": order})
    if not has_supervisor(layout):
        spawn_supervisor(layout)
    return True


def resume_sweep(layout: SweepLayout, again: Sequence[int] = (), *, console: Console = SILENT) -> None:
    """Go on with a sweep that was stopped, or whose supervisor died; again: failed or stopped trials that start once
    more. Raises UsageError where nothing is left to do.
    """
    is_array = SweepRecord.load(layout.request).is_array
    holders = job_array.require_answer(layout) if is_array else has_supervisor(layout)
    if holders:
        raise UsageError(
            f"{layout.sweep_id} is running",
            seen=f"Slurm has {len(holders)} of its tasks" if isinstance(holders, dict) else "it has a supervisor",
            fix=f"look at it: gangline sweep show {layout.sweep_id}",
        )
    trials = {trial.number: trial for trial in load_trials(layout)}
    for number in again:
        trial = trials.get(number)
        if trial is None or trial.phase not in {"failed", "stopped"}:
            raise UsageError(
                f"trial {number} cannot start again",
                seen=f"it is {trial.phase}; expected failed or stopped" if trial else "there is no such trial",
                fix=f"see them: gangline sweep show {layout.sweep_id}",
            )
        trials[number] = dataclasses.replace(trial, phase="waiting", starts=0, error=None)
        save_trial(layout, trials[number])
    sampler = SweepRecord.load(layout.request).sampler
    has_more = sampler is not None and len(trials) < sampler.num_trials
    if all(trial.ended for trial in trials.values()) and not has_more:
        ended = " ".join(str(number) for number, trial in trials.items() if trial.phase in {"failed", "stopped"})
        named = f"start trials again: gangline sweep resume {layout.sweep_id} {ended}; or " if ended else ""
        raise UsageError(
            f"nothing is left to do in {layout.sweep_id}",
            seen="all its trials have ended",
            fix=f"{named}add points: gangline sweep add {layout.sweep_id} KEY=A,B",
        )
    layout.order.unlink(missing_ok=True)
    if is_array:
        job_array.resume_array(layout, console=console)
    else:
        spawn_supervisor(layout)
