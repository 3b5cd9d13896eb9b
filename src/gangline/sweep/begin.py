"""A new sweep, and more points for one: every point is read and planned before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gangline.checks.judge import require
from gangline.context import REAL, Context, Dependencies, StartOptions, load_cluster, load_job, starting
from gangline.control.equip import claim
from gangline.control.slurm_job import must_submit
from gangline.control.user_command import CommandRecord, preview_project_of
from gangline.decide.decide import decide, sized
from gangline.decide.forecast import require_startable
from gangline.decide.inspect import OWN_PROGRAM, START, InspectOptions, InspectResult, inspect
from gangline.decide.on_partition import partition_of
from gangline.decide.row_report import RowsReport, look_at_rows, settled_length, with_lengths
from gangline.decide.what_if import WhatIf, predict, refusal
from gangline.errors import CheckFailed, GanglineError, HostUnreachable, UsageError
from gangline.launch.program import require_runnable
from gangline.provision.console import SILENT, Console, Ticks
from gangline.runs.cluster import Cluster, SlurmRequest
from gangline.runs.job import DataJob, Job
from gangline.runs.layout import SweepLayout
from gangline.sweep.command_template import filled, require_places
from gangline.sweep.learned_points import LearnedPoints, corners, require_sampler
from gangline.sweep.points import MOST_POINTS, Axis, Point, axes_of, draw_points, grid, shown, varying
from gangline.sweep.records import (
    HalvingRecord,
    MetricRecord,
    SamplerRecord,
    SweepRecord,
    SweepState,
    TrialRecord,
    create_trial,
    load_trials,
    new_sweep,
    save_state,
)
from gangline.sweep.schedule import make_halving


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the user asks for."""

    home: Path
    job: Path
    words: tuple[str, ...]
    cluster: Path | None = None
    random: int | None = None
    """Points that are drawn; None: the grid."""
    seed: int = 0
    halving: bool = False
    eta: int = 3
    at_once: int | None = None
    force: bool = False
    template: CommandRecord | None = None
    """The user's own command with places for values, in place of a job."""
    metric: MetricRecord | None = None
    """Of the command."""
    sampler: SamplerRecord | None = None
    """Chooses the points as the sweep goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A point that can be started."""

    number: int
    point: Point
    work: Job | CommandRecord
    fits: tuple[str, ...]
    """The hosts that hold it alone; (): it takes all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSweep:
    """What would be started."""

    request: SweepRecord
    trials: tuple[PlannedTrial, ...]


def plan_sweep(options: SweepOptions, *, console: Console, deps: Dependencies = REAL) -> PlannedSweep:
    """Read every point, look at every host, and plan each point on them. Changes nothing.

    Raises the error of the first point that cannot be started, with its number and its values.
    """
    if options.at_once is not None and options.at_once < 1:
        raise UsageError("--at-once needs a number above 0", seen=str(options.at_once), fix="--at-once 2")
    axes = axes_of(options.words)
    if options.sampler is not None:
        points = _corners_of(options, options.sampler, axes)
    else:
        points = grid(axes) if options.random is None else draw_points(axes, options.random, seed=options.seed)
    planner = SweepPlanner(home=options.home, force=options.force, console=console, deps=deps)
    if options.template is not None:
        return _plan_commands(options, options.template, points, planner)
    jobs = read_jobs(options.home, options.job, points)
    halving = _halving(jobs, eta=options.eta) if options.halving else None
    usable, trials = planner.plan(jobs, points, load_cluster(options.cluster, options.home))
    request = SweepRecord(
        name=jobs[0].name.rpartition("-")[0],
        job_file=str(options.job.absolute()),
        words=options.words,
        cluster=usable,
        at_once=options.at_once,
        halving=halving,
        force=options.force,
    )
    return _sampled(PlannedSweep(request=request, trials=tuple(trials)), options.sampler)


def _corners_of(options: SweepOptions, sampler: SamplerRecord, axes: Sequence[Axis]) -> list[Point]:
    """The points that are planned in place of those that a sampler will choose; raises UsageError."""
    if options.random is not None or options.halving:
        raise UsageError(
            f"--sampler and {'--halving' if options.halving else '--random'} exclude each other",
            seen="both say which points are tried",
            fix="leave one of them out; --pruner halving drops trials that fall behind a sampler's others",
        )
    if not 1 <= sampler.num_trials <= MOST_POINTS:
        raise UsageError(
            "--sampler needs the number of trials", seen=f"--trials {sampler.num_trials}", fix="--trials 20"
        )
    require_sampler(sampler)
    found = corners(axes)
    if found[0] == found[1]:
        raise UsageError(
            "a sampler needs a key with several values",
            seen="each key has one value",
            fix="optimizer.learning_rate=1e-5..1e-3:log, or values with commas between them",
        )
    if must_submit(load_cluster(options.cluster, options.home), REAL.variables):
        raise UsageError(
            "--sampler chooses a point after the trials before have ended, and an array has all its points at once",
            seen="a cluster of Slurm",
            fix="--random N or --halving; or salloc, and the same command inside the allocation",
        )
    return found


def _sampled(planned: PlannedSweep, sampler: SamplerRecord | None) -> PlannedSweep:
    """The sweep without the corners that were planned for its sampler: trials go where all of them fit."""
    if sampler is None:
        return planned
    fits = [trial.fits for trial in planned.trials]
    everywhere = tuple(name for name in fits[0] if all(name in each for each in fits))
    request = dataclasses.replace(planned.request, sampler=dataclasses.replace(sampler, fits=everywhere))
    return PlannedSweep(request=request, trials=())


def _plan_commands(
    options: SweepOptions, template: CommandRecord, points: Sequence[Point], planner: SweepPlanner
) -> PlannedSweep:
    if options.halving:
        raise UsageError(
            "--halving needs a job of gangline's own",
            seen="a command of your own knows no rung at which it could pause",
            fix="leave --halving out, or describe the training in a job.yaml",
        )
    require_places(axes_of(options.words), template.words)
    preview_project_of(template, console=planner.console)  # a folder that cannot be copied is told now
    usable, fits = planner.hosts_for_commands(load_cluster(options.cluster, options.home))
    request = SweepRecord(
        name=template.name,
        job_file="",
        words=options.words,
        cluster=usable,
        at_once=options.at_once,
        template=template,
        metric=options.metric,
    )
    planned = PlannedSweep(request=request, trials=tuple(_commands_of(template, points, fits)))
    return _sampled(planned, options.sampler)


def _commands_of(
    template: CommandRecord, points: Sequence[Point], fits: tuple[str, ...], *, first: int = 1
) -> list[PlannedTrial]:
    found = []
    for number, point in enumerate(points, start=first):
        words = filled(template.words, point)
        with naming(number, point):
            require_runnable(words)
        work = dataclasses.replace(template, words=words)
        found.append(PlannedTrial(number=number, point=point, work=work, fits=fits))
    return found


def create_sweep(planned: PlannedSweep, *, home: Path) -> SweepLayout:
    """Write the records of a sweep; nothing runs yet."""
    layout = new_sweep(home, Random())
    planned.request.save(layout.request)
    for trial in planned.trials:
        _create(layout, trial)
    save_state(layout, SweepState())
    return layout


def plan_more(
    layout: SweepLayout, words: Sequence[str], *, console: Console, deps: Dependencies = REAL
) -> list[PlannedTrial]:
    """The points of more words (a grid) that the sweep does not have yet, planned as those before. Changes nothing."""
    request, known = SweepRecord.load(layout.request), load_trials(layout)
    if request.sampler is not None:
        raise UsageError(
            f"the points of {layout.sweep_id} are chosen by a sampler",
            seen=f"--sampler {request.sampler.sampler} --trials {request.sampler.num_trials}",
            fix="start another sweep with these points",
        )
    axes = axes_of(words)
    fixed = {axis.key: axis.values[0] for axis in axes_of(request.words) if len(axis.values) == 1}
    points = [{**fixed, **point} for point in grid(axes, least=1)]
    fresh = [point for point in points if point not in [trial.point for trial in known]]
    if not fresh:
        raise UsageError(
            f"{layout.sweep_id} has these points already",
            seen=", ".join(shown(point) for point in points[:3]),
            fix=f"see them: gangline sweep show {layout.sweep_id}",
        )
    first = max((trial.number for trial in known), default=0) + 1
    if request.template is not None:
        require_places(axes, request.template.words)
        fits = tuple(host.name for host in request.cluster.hosts)
        return _commands_of(request.template, fresh, fits, first=first)
    jobs = read_jobs(layout.home, Path(request.job_file), fresh, first=first)
    if request.halving is not None and any(job.steps != request.halving.rungs[-1] for job in jobs):
        raise UsageError(
            "a point with another number of steps cannot join halving",
            seen=f"expected steps={request.halving.rungs[-1]}",
            fix="leave steps and epochs as they are",
        )
    planner = SweepPlanner(home=layout.home, force=request.force, console=console, deps=deps)
    return planner.plan(jobs, fresh, request.cluster, first=first)[1]


def add_trials(layout: SweepLayout, trials: Sequence[PlannedTrial]) -> None:
    """Write the records of more trials; the supervisor, or the next one, takes them in."""
    for trial in trials:
        _create(layout, trial)


def _create(layout: SweepLayout, trial: PlannedTrial) -> None:
    record = TrialRecord(number=trial.number, point=trial.point, fits=trial.fits)
    create_trial(layout, record, trial.work)


class SampledTrials:
    """See `PointSource`: trials whose points a sampler chooses."""

    def __init__(self, layout: SweepLayout, request: SweepRecord, deps: Dependencies = REAL) -> None:
        assert request.sampler is not None, "a sweep with a sampler"
        self._layout, self._request, self._sampler, self._deps = layout, request, request.sampler, deps
        self._points = LearnedPoints(request, load_trials(layout))

    def ask(self, trials: Sequence[TrialRecord]) -> TrialRecord | None:
        """See `PointSource.ask`."""
        number = max((trial.number for trial in trials), default=0) + 1
        if number > self._sampler.num_trials or (point := self._points.ask(number, trials)) is None:
            return None
        if (template := self._request.template) is not None:
            work: Job | CommandRecord = _commands_of(template, [point], (), first=number)[0].work
        else:
            (job,) = read_jobs(self._layout.home, Path(self._request.job_file), [point], first=number)
            context = Context(transports={}, home=self._layout.home, console=SILENT, deps=self._deps)
            read = sized(job, context)[0]
            work = dataclasses.replace(read, open=tuple(key for key in job.open if key != "sequence_length"))
        trial = TrialRecord(number=number, point=point, fits=self._sampler.fits)
        create_trial(self._layout, trial, work)
        return trial

    def take_in(self, trial: TrialRecord) -> bool:
        """See `PointSource.take_in`."""
        return self._points.take_in(trial)


# Reading and planning the points.


def read_jobs(home: Path, file: Path, points: Sequence[Point], *, first: int = 1) -> list[Job]:
    """The job of every point. Raises UsageError for a job without evaluation, which nothing could rank."""
    jobs = []
    for number, point in enumerate(points, start=first):
        with naming(number, point):
            job = load_job(StartOptions(home=home, job=file, overrides=_overrides(point)))
            if job.data.evaluation is None and not job.data.evaluation_fraction:
                raise UsageError(
                    f"{file}: a sweep ranks its trials by evaluation loss, and this job evaluates nothing",
                    seen="no data.eval",
                    fix="data.eval=0.05 sets rows apart; it can stand behind the job file",
                )
            jobs.append(dataclasses.replace(job, name=f"{job.name[:58]}-{number}"))
    return jobs


def _overrides(point: Point) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in point.items())


def _halving(jobs: Sequence[Job], *, eta: int) -> HalvingRecord:
    steps = {job.steps for job in jobs}
    if eta < 2:
        raise UsageError("--eta needs a number above 1", seen=str(eta), fix="--eta 3 keeps one of three trials")
    if len(steps) > 1 or None in steps:
        raise UsageError(
            "--halving compares trials after the same number of steps",
            seen="the points differ in `steps`" if len(steps) > 1 else "the job has `epochs`, not `steps`",
            fix="give the job one number of steps: steps=600",
        )
    return make_halving(num_points=len(jobs), steps=int(next(iter(steps)) or 0), eta=eta)


@contextlib.contextmanager
def naming(number: int, point: Mapping[str, str]) -> Any:
    """An error within says which point it is about."""
    try:
        yield
    except GanglineError as error:
        named = type(error)(f"point {number} ({shown(point)}): {error.what}", seen=error.seen, fix=error.fix)
        raise named from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlanner:
    """Plans the points of a sweep on the hosts of a cluster."""

    home: Path
    force: bool
    console: Console
    deps: Dependencies

    def plan(
        self, jobs: Sequence[Job], points: Sequence[Point], cluster: Cluster, *, first: int = 1
    ) -> tuple[Cluster, list[PlannedTrial]]:
        """The hosts that can be used, and every point planned on them; its error names the first that cannot start."""
        console, trials = self.console, list[PlannedTrial]()
        if must_submit(cluster, self.deps.variables):
            return cluster, self._for_queue(jobs, points, cluster, first=first)
        given = self.deps.backend(cluster.backend).hosts(cluster, self.deps.variables)
        with starting(cluster, home=self.home, console=console, deps=self.deps) as (found, context):
            quiet = dataclasses.replace(context, console=Ticks(console))
            claim(found, quiet)
            looks = _look(found, quiet, console)
            planner = _PointPlanner(found, looks, quiet, force=self.force)
            for number, (job, point) in enumerate(zip(jobs, points, strict=True), start=first):
                console.progress(f"planning point {number - first + 1} of {len(jobs)}")
                with naming(number, point):
                    sized, fits = planner.plan(job)
                trials.append(PlannedTrial(number=number, point=point, work=sized, fits=fits))
        hosts = tuple(host for host in given.hosts if host.name in looks)
        return dataclasses.replace(given, hosts=hosts), trials

    def _for_queue(
        self, jobs: Sequence[Job], points: Sequence[Point], cluster: Cluster, *, first: int
    ) -> list[PlannedTrial]:
        """For Slurm, which finds the nodes: the rows, and a plan for nodes such as the partition has. Without GPUs, the
        first node of each trial plans, for nobody knows the processors of a partition.
        """
        context = Context(transports={}, home=self.home, console=Ticks(self.console), deps=self.deps)
        asked = _require_queue(cluster)
        found: list[PlannedTrial] = []
        sized_data: list[tuple[DataJob, DataJob]] = []
        for number, (job, point) in enumerate(zip(jobs, points, strict=True), start=first):
            same = next((known for asked, known in sized_data if asked == job.data), None)
            with naming(number, point):
                read = sized(job, context)[0] if same is None else dataclasses.replace(job, data=same)
                left = tuple(key for key in job.open if key != "sequence_length")
                read = dataclasses.replace(read, open=left)
                if asked.gpus_per_node:
                    self.console.progress(f"planning point {number - first + 1} of {len(jobs)}")
                    start = StartOptions(home=self.home, job=read, cluster=cluster, force=self.force)
                    refused = refusal(predict(start, WhatIf(), console=context.console, deps=self.deps))
                    if refused is not None and not self.force:
                        raise refused
            sized_data.append((job.data, read.data))
            found.append(PlannedTrial(number=number, point=point, work=read, fits=()))
        return found

    def hosts_for_commands(self, cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
        """The hosts that can run a command of the user's own, and their names; on Slurm, none are known yet."""
        if must_submit(cluster, self.deps.variables):
            _require_queue(cluster)
            return cluster, ()
        given = self.deps.backend(cluster.backend).hosts(cluster, self.deps.variables)
        with starting(cluster, home=self.home, console=self.console, deps=self.deps) as (found, context):
            quiet = dataclasses.replace(context, console=Ticks(self.console))
            claim(found, quiet)
            looks = _look(found, quiet, self.console, OWN_PROGRAM)
        hosts = tuple(host for host in given.hosts if host.name in looks)
        return dataclasses.replace(given, hosts=hosts), tuple(looks)


def _require_queue(cluster: Cluster) -> SlurmRequest:
    """What an array asks of Slurm; raises UsageError where its partition does not have it."""
    assert cluster.slurm is not None, "a cluster that is submitted to"
    if found := [option for option in cluster.slurm.options if option.startswith(("--array", "-a"))]:
        raise UsageError(
            "slurm.options: a sweep has an array of its own",
            seen=found[0],
            fix="take it out; --at-once K says its limit",
        )
    if not cluster.slurm.shared_home:
        raise UsageError(
            "a sweep needs a folder that login host and nodes share",
            seen="slurm.shared_home: false",
            fix="set GANGLINE_HOME to such a folder and leave the key out; or start the points one by one",
        )
    partition_of(cluster.slurm)
    return cluster.slurm


def _look(
    cluster: Cluster, context: Context, console: Console, options: InspectOptions = START
) -> dict[str, InspectResult]:
    """What was seen of every host by itself, of those that can train; raises the first error where none can."""
    console.progress(f"looking at {len(cluster.hosts)} hosts")
    with ThreadPoolExecutor(max_workers=16) as pool:
        looks = {host.name: pool.submit(_look_at, cluster, host.name, context, options) for host in cluster.hosts}
    found, errors = {}, []
    for name, look in looks.items():
        try:
            found[name] = look.result()
        except (CheckFailed, HostUnreachable) as error:
            errors.append(error)
            console.report(f"without    {name}: {error.what.splitlines()[0]}")
    if not found:
        raise errors[0]
    return found


def _look_at(cluster: Cluster, name: str, context: Context, options: InspectOptions) -> InspectResult:
    inspection = inspect(alone(cluster, name), options, context, silent=True)
    require(inspection.findings)
    return inspection


def alone(cluster: Cluster, *names: str) -> Cluster:
    """The cluster with these hosts only."""
    return dataclasses.replace(cluster, hosts=tuple(host for host in cluster.hosts if host.name in names))


class _PointPlanner:
    """Plans one point after the other on hosts that were looked at once."""

    def __init__(self, cluster: Cluster, looks: Mapping[str, InspectResult], context: Context, *, force: bool) -> None:
        self._cluster, self._looks, self._context, self._force = alone(cluster, *looks), looks, context, force
        self._rows: list[tuple[Any, RowsReport]] = []
        self._whole: InspectResult | None = None

    def plan(self, job: Job) -> tuple[Job, tuple[str, ...]]:
        """The job with the length of its samples, and the hosts that hold it alone; (): all together do.

        Raises what stops its start on the whole cluster, or on the only host.
        """
        job = self._sized(job)
        errors = {name: self._error(job, alone(self._cluster, name), look) for name, look in self._looks.items()}
        fits = tuple(name for name, error in errors.items() if error is None)
        if fits:
            return job, fits
        if len(errors) == 1:
            raise next(error for error in errors.values() if error is not None)
        self._whole = self._whole or inspect(self._cluster, START, self._context, silent=True)
        if (error := self._error(job, self._cluster, self._whole)) is not None:
            raise error
        return job, ()

    def _sized(self, job: Job) -> Job:
        """Rows are read once for all points with the same data and tokenizer."""
        deps, hosts = self._context.deps, self._cluster.hosts
        key = (job.data, job.model, job.tokens)
        rows = next((rows for known, rows in self._rows if known == key), None)
        if rows is None:
            rows = look_at_rows(job, hosts, deps)
            rows.require(job)
            rows = with_lengths(rows, job, hosts, deps)
            self._rows.append((key, rows))
        job, rows = settled_length(job, rows, deps.variables, self._context.home)
        rows.require(job)
        return job

    def _error(self, job: Job, cluster: Cluster, look: InspectResult) -> GanglineError | None:
        """What stops the start on these hosts."""
        try:
            decision = decide(job, cluster, self._context, look=False, inspection=look)
            require(decision.findings)
            decision.needs.require()
            require_startable(decision.job, decision.job_forecast, force=self._force)
        except GanglineError as error:
            return error
        return None


def commands(planned: PlannedSweep, *, cluster: Path | None, quote: Callable[[str], str]) -> list[str]:
    """The command that starts each point by hand, and where it fits: what `--dry-run` prints."""
    keys = varying([trial.point for trial in planned.trials])
    if (sampler := planned.request.sampler) is not None:
        axes = ", ".join(axis.key for axis in axes_of(planned.request.words))
        where = f"one of {' '.join(sampler.fits)}" if sampler.fits else "all hosts together"
        return [f"# {sampler.num_trials} points over {axes}, chosen one after the other by {sampler.sampler}: {where}"]
    lines = [f"# {len(planned.trials)} points over {', '.join(keys)}"]
    if (halving := planned.request.halving) is not None:
        lines.append(f"# the best 1/{halving.eta} go on after steps {', '.join(map(str, halving.rungs[:-1]))}")
    for trial in planned.trials:
        words = _start_words(planned.request, trial, cluster)
        everywhere = "all hosts together" if planned.request.cluster.hosts else "a task of the array"
        where = f"one of {' '.join(trial.fits)}" if trial.fits else everywhere
        lines.append(f"{' '.join(map(quote, words))}  # {trial.number}: {where}")
    return lines


def _start_words(request: SweepRecord, trial: PlannedTrial, cluster: Path | None) -> list[str]:
    """The command that starts one point by itself."""
    named = [] if cluster is None else ["--cluster", str(cluster)]
    if isinstance(trial.work, CommandRecord):
        return ["gangline", "run", "--dir", trial.work.folder, *named, "--", *trial.work.words]
    return ["gangline", "train", request.job_file, *_overrides(trial.point), *named]
