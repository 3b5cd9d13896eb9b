"""Runs of a sweep's trials that are computed: a landscape gives the losses, a clock of its own the time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.control.user_command import CommandRecord
from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.runs.layout import SweepLayout
from gangline.sweep.drive import Driver, TrialSight
from gangline.sweep.points import Point
from gangline.sweep.records import (
    HalvingRecord,
    SweepRecord,
    SweepState,
    TrialRecord,
    create_trial,
    load_trials,
    save_state,
)

Landscape = Callable[[Mapping[str, str], int], float]
"""Loss of a point after a step."""


@dataclass
class PlayedRun:
    """One run: it has done `done` steps, and goes on since `since` on a host."""

    point: Mapping[str, str]
    host: str
    steps: int
    pause_at: int | None
    since: float
    done: float = 0.0
    phase: str = "running"
    error: dict[str, Any] | None = None


@dataclass
class PlayedRuns:
    """See `TrialRuns`. Hosts take `step_s` per step; every start and move takes no time."""

    points: Mapping[int, Point]
    landscape: Landscape
    steps: int
    every: int = 10
    """Steps between evaluations."""
    step_s: Mapping[str, float] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    """Hosts that do not answer."""
    fails: Mapping[int, GanglineError] = field(default_factory=dict)
    """Trials whose run fails after its first evaluation."""
    taken: dict[str, int] = field(default_factory=dict)
    """Host -> how many starts find its slots held by another run."""
    now: float = 0.0
    runs: dict[str, PlayedRun] = field(default_factory=dict)
    starts: list[tuple[str, str]] = field(default_factory=list)
    """(trial's number or run, host) of every start and resume."""
    prepared: list[int] = field(default_factory=list)
    """Trials that were prepared while their host was still busy."""
    driver: Driver | None = None
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        if self.driver is not None:
            futures.wait(self.driver._starts.values(), timeout=10)  # a start takes no time of this clock
        self.now += 10 * seconds  # fewer turns, each of which writes files

    def start(
        self,
        work: Job | CommandRecord,
        cluster: Cluster,
        *,
        trial: Mapping[str, Any],
        turn: Callable[[], None] | None = None,
    ) -> str:
        number, host = int(trial["number"]), cluster.head.name
        if turn is not None:
            self.prepared.append(number)
            turn()
        with self.lock:
            if host in self.dead:
                raise HostUnreachable(f"{host} does not answer")
            if self.taken.get(host):
                self.taken[host] -= 1
                raise RunFailed("its slot is taken", details={"taken": True})
            self.starts.append((str(number), host))
            run = f"played-run-{len(self.runs) + 1}"
            pause_at = work.pause_at if isinstance(work, Job) else None
            self.runs[run] = PlayedRun(self.points[number], host, self.steps, pause_at, self.now)
            self._count()
            return run

    def resume(self, run: str, cluster: Cluster, *, pause_at: int | None) -> None:
        with self.lock:
            played = self.runs[run]
            if cluster.head.name in self.dead:
                raise HostUnreachable(f"{cluster.head.name} does not answer")
            assert played.phase == "stopped", played.phase
            self.starts.append((run, cluster.head.name))
            played.host, played.pause_at = cluster.head.name, pause_at
            played.phase, played.since = "running", self.now
            self._count()

    def look(self, run: str) -> TrialSight:
        with self.lock:
            played = self.runs[run]
            if played.host in self.dead:
                return TrialSight(phase="running", silent=f"{played.host} does not answer")
            step = self._move(played)
            number = next(number for number, point in self.points.items() if point is played.point)
            if number in self.fails and step >= self.every and played.phase == "running":
                played.phase, played.error = "failed", self.fails[number].to_json()
            last = step - step % self.every if step < played.steps else step
            losses = {str(each): self.landscape(played.point, each) for each in [*range(0, last, self.every), last]}
            if step == played.pause_at:
                losses[str(step)] = self.landscape(played.point, step)
            step_s = self.step_s.get(played.host, 1.0)
            return TrialSight(
                phase=played.phase, step=step, steps=played.steps, step_s=step_s, losses=losses, error=played.error
            )

    def end(self, run: str, *, now: bool) -> None:
        with self.lock:
            played = self.runs[run]
            if played.host in self.dead:
                raise HostUnreachable(f"{played.host} does not answer")
            self._move(played)
            if played.phase == "running":
                played.phase = "stopped"

    def _move(self, played: PlayedRun) -> int:
        if played.phase == "running":
            played.done += (self.now - played.since) / self.step_s.get(played.host, 1.0)
            played.since = self.now
            goal = min(played.steps, played.pause_at or played.steps)
            if played.done >= goal:
                played.done, played.phase = goal, "finished" if goal == played.steps else "stopped"
        return math.floor(played.done)

    def _count(self) -> None:
        self.most_at_once = max(self.most_at_once, sum(run.phase == "running" for run in self.runs.values()))

    @property
    def steps_done(self) -> float:
        """Of all runs together."""
        return sum(run.done for run in self.runs.values())


def small_job(steps: int = 100) -> Job:
    source = SourceJob(files=("/rows.jsonl",))
    return Job(
        name="tiny", model=ModelJob(path="/model"), data=DataJob(train=source), batch=4, micro_batch=2, steps=steps
    )


def played_sweep(
    home: Path,
    points: Sequence[Point],
    *,
    hosts: Sequence[str] = ("a", "b", "c"),
    fits: Mapping[int, tuple[str, ...]] | None = None,
    at_once: int | None = None,
    halving: HalvingRecord | None = None,
    template: CommandRecord | None = None,
) -> SweepLayout:
    """The records of a sweep that nobody drives yet. template: of a command in place of a job."""
    layout = SweepLayout(home, "sweep-otter-1")
    layout.folder.mkdir(parents=True)
    cluster = Cluster(name="lab", hosts=tuple(Host(name=name, workdir="/w", python="", address=name) for name in hosts))
    request = SweepRecord(
        name="tiny",
        job_file="/job.yaml",
        words=(),
        cluster=cluster,
        at_once=at_once,
        halving=halving,
        template=template,
    )
    request.save(layout.request)
    save_state(layout, SweepState())
    for number, point in enumerate(points, start=1):
        trial = TrialRecord(number=number, point=point, fits=(fits or {}).get(number, tuple(hosts)))
        create_trial(layout, trial, template or small_job())
    return layout


def drive_to_the_end(
    layout: SweepLayout, runs: PlayedRuns, *, wait: Callable[[float], None] | None = None
) -> list[TrialRecord]:
    """Drive the sweep in this process; its trials then. wait: called in place of `runs.wait`."""
    runs.driver = Driver(layout, runs, clock=runs.clock, wait=wait or runs.wait)
    runs.driver.run()
    return load_trials(layout)
