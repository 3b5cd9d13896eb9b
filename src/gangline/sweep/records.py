"""The records of a sweep (`SweepLayout` says where they lie).

trial.json has one writer at a time: the supervisor while there is one, else the command that adds or resumes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gangline.control.user_command import CommandRecord
from gangline.errors import RecordError, RunFailed, UsageError
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.runs.layout import NOUNS, RunLayout, SweepLayout
from gangline.runs.record_versions import Record, load_if_there
from gangline.runs.registry import run_ids
from gangline.runs.state import ProcessId, now_iso
from gangline.units import listed

TrialPhase = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "dropped"]
"""paused: at a rung of halving, until the others are there. dropped: others were better at a rung."""
SweepPhase = Literal["running", "stopping", "stopped", "finished", "failed"]
PATTERN = re.compile(r"sweep-[a-z]+-[1-9][0-9]*")
"""What the id of a sweep looks like: nobody takes it for a run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvingRecord:
    """Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all trials train up to the first rung, the best
    1/eta of them go on to the next one.
    """

    eta: int
    rungs: tuple[int, ...]
    """Optimizer steps after which trials are compared; the last one is the end of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """The figure that ranks trials of the user's own script: rank 0 prints it."""

    name: str
    highest: bool = False
    """The highest value is the best; else the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampler of optuna that chooses each point after those before (gangline.sweep.learned_points)."""

    sampler: str
    num_trials: int
    """Trials in all."""
    pruner: str | None = None
    """What ends trials that fall behind; None: nothing does."""
    seed: int = 0
    fits: tuple[str, ...] = ()
    """The hosts that hold every corner of the ranges; (): each trial takes all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord(Record):
    """sweep.json: what was asked."""

    name: str
    job_file: str
    """"" for commands of the user's own."""
    words: tuple[str, ...]
    """The keys and values as they were typed."""
    cluster: Cluster
    """The hosts that may hold a trial."""
    at_once: int | None = None
    """Trials at the same time at the most; None: as many as there are free hosts."""
    halving: HalvingRecord | None = None
    force: bool = False
    template: CommandRecord | None = None
    """The user's own command, with the places for values, and all else that its runs have in common."""
    metric: MetricRecord | None = None
    """Of a command; None: the evaluation loss of a job."""
    sampler: SamplerRecord | None = None
    """None: the points are known from the beginning."""

    @property
    def highest(self) -> bool:
        """Whether the highest figure is the best."""
        return self.metric is not None and self.metric.highest

    @property
    def can_continue(self) -> bool:
        """Whether a trial that was stopped goes on from where it was; else it begins anew."""
        return self.template is None or self.template.resume_words is not None

    @property
    def is_array(self) -> bool:
        """Whether its trials are tasks of job arrays of Slurm."""
        return self.cluster.slurm is not None and not self.cluster.hosts

    def to_json(self) -> dict[str, Any]:
        """Plain data for the file."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState(Record):
    """state.json: where the sweep stands, and the process that drives it."""

    phase: SweepPhase = "running"
    created: str = field(default_factory=now_iso)
    updated: str = field(default_factory=now_iso)
    supervisor: ProcessId | None = None
    error: dict[str, Any] | None = None
    arrays: tuple[str, ...] = ()
    """The job arrays of Slurm that it was handed to, in order; they need no supervisor."""

    @property
    def shown(self) -> str:
        """The phase; `lost` where it should be driven and is not."""
        if self.arrays or self.phase not in {"running", "stopping"}:
            return self.phase
        return self.phase if self.supervisor is not None and self.supervisor.is_alive else "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(Record):
    """trial.json: one point and its run."""

    number: int
    point: dict[str, str]
    fits: tuple[str, ...]
    """The hosts that hold it alone; (): it takes the whole cluster."""
    phase: TrialPhase = "waiting"
    run: str | None = None
    """None: nothing of it is there to go on from."""
    hosts: tuple[str, ...] = ()
    """Where it runs, or ran last."""
    places: tuple[str, ...] = ()
    """The head of every start, in order."""
    rung: int = 0
    """The rung that it trains up to, or waits at; counted from 0."""
    starts: int = 0
    """Since it last got anywhere."""
    step: int = 0
    steps: int | None = None
    losses: dict[str, float | None] = field(default_factory=dict)
    """Step -> evaluation loss; None: it was not finite."""
    error: dict[str, Any] | None = None
    given_up: dict[str, str] = field(default_factory=dict)
    """Run -> the host that fell silent with it; it is ended there before the host gets another trial."""

    @property
    def ended(self) -> bool:
        """Whether nothing more is done for it."""
        return self.phase in {"finished", "failed", "stopped", "dropped"}

    @property
    def loss(self) -> float | None:
        """The evaluation loss that was measured last."""
        return self.losses[max(self.losses, key=int)] if self.losses else None

    def loss_at(self, step: int) -> float | None:
        """The evaluation loss after this step."""
        return self.losses.get(str(step))


def anew(trial: TrialRecord) -> TrialRecord:
    """The trial without its run, which nothing can continue."""
    return dataclasses.replace(trial, run=None, step=0, losses={})


def save_trial(layout: SweepLayout, trial: TrialRecord) -> None:
    """Write trial.json."""
    trial.save(layout.trial_record(trial.number))


def create_trial(layout: SweepLayout, trial: TrialRecord, work: Job | CommandRecord) -> None:
    """Write the two files of a new trial; trial.json makes it count."""
    layout.trial(trial.number).mkdir(mode=0o700, parents=True, exist_ok=True)
    path = layout.trial_job if isinstance(work, Job) else layout.trial_command
    work.save(path(trial.number))
    save_trial(layout, trial)


def load_trial(layout: SweepLayout, number: int) -> TrialRecord:
    """One trial; raises FileNotFoundError, RecordError."""
    return TrialRecord.load(layout.trial_record(number))


def load_trials(layout: SweepLayout) -> list[TrialRecord]:
    """All trials, by number."""
    return [load_trial(layout, number) for number in layout.numbers()]


def load_trial_work(layout: SweepLayout, number: int) -> Job | CommandRecord:
    """The resolved job of a trial, or its command."""
    return load_if_there(layout.trial_command(number), CommandRecord) or Job.load(layout.trial_job(number))


def save_state(layout: SweepLayout, state: SweepState, **changes: Any) -> SweepState:
    """Write state.json, with the time of now; the state as it is then."""
    state = dataclasses.replace(state, updated=now_iso(), **changes)
    state.save(layout.state)
    return state


def read_order(layout: SweepLayout) -> str | None:
    """`stop`, `kill`, or None."""
    said = load_if_there(layout.order, dict)
    return said.get("order") if said else None


def sweep_ids(home: Path) -> list[str]:
    """Ids of all sweeps, sorted."""
    folder = home / "sweeps"
    return sorted(path.name for path in folder.iterdir() if PATTERN.fullmatch(path.name)) if folder.is_dir() else []


def new_sweep(home: Path, dice: Any) -> SweepLayout:
    """The folder of a new sweep, with an id that no other has, no run either."""
    (home / "sweeps").mkdir(mode=0o700, parents=True, exist_ok=True)
    taken, highest = {*sweep_ids(home), *run_ids(home)}, 9
    while True:
        layout = SweepLayout(home, f"sweep-{dice.choice(NOUNS)}-{dice.randint(1, highest)}")
        highest += 1
        if layout.sweep_id not in taken:
            with contextlib.suppress(FileExistsError):
                layout.folder.mkdir(mode=0o700)
                return layout


def find_sweep(home: Path, prefix: str) -> SweepLayout:
    """The sweep that `prefix` means, with or without `sweep-`; raises UsageError."""
    known = sweep_ids(home)
    full = prefix if prefix.startswith("sweep-") else f"sweep-{prefix}"
    matches = [full] if full in known else [each for each in known if prefix and each.startswith(full)]
    if len(matches) == 1:
        return SweepLayout(home, matches[0])
    raise UsageError(
        f"ambiguous prefix {prefix!r}" if matches else f"no such sweep: {prefix!r}",
        seen=f"it fits {listed(matches)}" if matches else f"in {home}: {listed(known) or 'no sweep yet'}",
        fix="gangline sweep ls lists all sweeps" if known else "start one: gangline sweep job.yaml KEY=A,B",
    )


@contextlib.contextmanager
def sweep_lock(layout: SweepLayout, *, timeout_s: float = 5.0) -> Iterator[None]:
    """Hold the lock of a sweep's supervisor; raises RunFailed while another process holds it."""
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{layout.sweep_id} has a supervisor already",
                    seen=f"another process holds {layout.lock}",
                    fix=f"look at it: gangline sweep show {layout.sweep_id}",
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def has_supervisor(layout: SweepLayout) -> bool:
    """Whether a supervisor drives the sweep now."""
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)  # shared: several commands may ask at once
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def runs_of(home: Path, sweep_id: str) -> dict[int, list[str]]:
    """Number of a trial -> the runs that say they are it, as a supervisor that was killed may not have noted them."""
    found: dict[int, list[str]] = {}
    for run_id in run_ids(home):
        with contextlib.suppress(RecordError):
            said: Mapping[str, Any] = load_if_there(RunLayout(home, run_id).trial, dict) or {}
            if said.get("sweep") == sweep_id and isinstance(said.get("number"), int):
                found.setdefault(said["number"], []).append(run_id)
    return found
