"""`gangline sweep JOB KEY=A,B ...`: one run per point, and which is the best."""

from __future__ import annotations

import math
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.options import AsJson, ClusterFile, Detach, Force, argument, option
from gangline.cli.output import Terminal, print_answer, print_data, print_json
from gangline.cli.signals import exit_code_of
from gangline.context import cluster_file, default_home
from gangline.errors import RunFailed, UsageError
from gangline.report.commands import joined, quoted
from gangline.report.live import terminal_width
from gangline.report.text_table import age, table

if TYPE_CHECKING:
    from gangline.control.user_command import CommandRecord
    from gangline.runs.layout import SweepLayout
    from gangline.sweep.begin import PlannedSweep, SweepOptions
    from gangline.sweep.records import MetricRecord, SamplerRecord, SweepState, TrialRecord

OF_SWEEP = ("ls", "show", "stop", "resume", "add")


What = Annotated[Path, argument("JOB|run|ls|show|stop|resume|add", "job.yaml, or what is done to a sweep")]
Words = Annotated[
    list[str] | None,
    argument(
        "KEY=A,B",
        "values of a key, or LOW..HIGH[:log] with --random; run: then -- CMD with a place {KEY} for each; after show "
        "and the like: the sweep",
    ),
]
Halving = Annotated[
    bool, typer.Option("--halving", help="train all a little, then the best of them further, until one is left")
]
Eta = Annotated[int, option("--halving: one of ETA trials goes on at each rung; by default 3", "ETA")]
Metric = Annotated[
    str | None, option("run: the figure that ranks trials, as CMD prints it; by default eval_loss", "NAME")
]
Folder = Annotated[
    Path | None, typer.Option("--dir", metavar="DIR", help="run: folder to copy to every host; CMD runs there")
]
ResumeFlag = Annotated[str | None, option("run: append this to CMD when a trial goes on, such as --resume", "WORDS")]
Sampler = Annotated[
    str | None, option("choose each point by the trials before: tpe, gp, cmaes; needs gangline[optuna]", "NAME")
]
Pruner = Annotated[
    str | None, option("--sampler: drop trials that fall behind: halving, hyperband, median; by default none", "NAME")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the command of every point and start nothing")]


def command(  # noqa: PLR0913  (options of a command line)
    what: What,
    words: Words = None,
    cluster: ClusterFile = None,
    random: Annotated[int | None, option("draw N points instead of the whole grid", "N")] = None,
    seed: Annotated[int, option("the same seed draws the same points", "S")] = 0,
    halving: Halving = False,
    eta: Eta = 3,
    at_once: Annotated[int | None, option("trials at the same time at the most", "K")] = None,
    sampler: Sampler = None,
    trials: Annotated[int | None, option("--sampler: how many trials", "N")] = None,
    pruner: Pruner = None,
    metric: Metric = None,
    highest: Annotated[bool, typer.Option("--highest", help="run: the highest metric is the best")] = False,
    folder: Folder = None,
    resume_flag: ResumeFlag = None,
    now: Annotated[bool, typer.Option("--now", help="stop: end the trials without saving")] = False,
    detach: Detach = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Start one run for each combination of values, each on a free host that holds it; rank them by evaluation loss.

    All points are planned before the first one starts. The sweep continues when you leave. gangline sweep run tries
    values in a command of your own. gangline sweep ls lists sweeps, show ID prints the ranking, stop ID saves and ends,
    resume ID [TRIAL ...] goes on, add ID KEY=A,B adds points.
    """
    verb, rest = str(what), tuple(words or ())
    own = {"--metric": metric, "--highest": highest, "--dir": folder, "--resume-flag": resume_flag}
    _require_own(verb, rest, [name for name, value in own.items() if value])
    if verb == "ls":
        _list(as_json=as_json)
        return
    if verb in OF_SWEEP:
        _of_sweep(verb, rest, now=now, detach=detach, dry_run=dry_run, as_json=as_json)
        return
    from gangline.sweep.begin import SweepOptions

    template, ranked_by = None, None
    if verb == "run":
        rest, template, ranked_by = _own_command(rest, metric, folder, resume_flag, highest=highest)
    options = SweepOptions(
        home=default_home(),
        job=what,
        words=rest,
        template=template,
        metric=ranked_by,
        sampler=_sampler(sampler, trials, pruner, seed=seed),
        cluster=cluster_file(cluster),
        random=random,
        seed=seed,
        halving=halving,
        eta=eta,
        at_once=at_once,
        force=force,
    )
    _begin(options, detach=detach, dry_run=dry_run, as_json=as_json)


def _sampler(name: str | None, trials: int | None, pruner: str | None, *, seed: int) -> SamplerRecord | None:
    from gangline.sweep.records import SamplerRecord

    if name is None:
        if trials is not None or pruner is not None:
            raise UsageError(
                f"{'--pruner' if trials is None else '--trials'} does nothing without --sampler",
                fix="--sampler tpe --trials 20; without a sampler, --random N draws points",
            )
        return None
    return SamplerRecord(sampler=name, num_trials=trials or 0, pruner=pruner, seed=seed)


def _require_own(verb: str, rest: tuple[str, ...], given: list[str]) -> None:
    if given and verb != "run":
        raise UsageError(
            f"{given[0]} is for commands of your own",
            seen=joined(("gangline", "sweep", verb, *rest)),
            fix="gangline sweep run lr=1e-5,1e-4 -- train.py --lr {lr}",
        )


def _own_command(
    words: tuple[str, ...], metric: str | None, folder: Path | None, resume_flag: str | None, *, highest: bool
) -> tuple[tuple[str, ...], CommandRecord, MetricRecord]:
    """The keys, the command with its places, and the metric of `sweep run KEY=A,B -- CMD`."""
    from gangline.control.user_command import draft
    from gangline.sweep.command_template import split_command
    from gangline.sweep.records import MetricRecord

    keys, command = split_command(words)
    template = draft(command, folder=folder or Path(), resume_flag=resume_flag)
    return keys, template, MetricRecord(name=metric or "eval_loss", highest=highest)


def _begin(options: SweepOptions, *, detach: bool, dry_run: bool, as_json: bool) -> None:
    from gangline.sweep.begin import commands, create_sweep, plan_sweep
    from gangline.sweep.lifecycle import start_sweep

    console = Terminal()
    planned = plan_sweep(options, console=console)
    console.clear()
    if dry_run:
        lines = [*_script(planned, options.home), *commands(planned, cluster=options.cluster, quote=quoted)]
        points = [{"trial": each.number, "point": each.point, "fits": list(each.fits)} for each in planned.trials]
        print_answer({"points": points}, lines, as_json=as_json)
        return
    layout = create_sweep(planned, home=options.home)
    start_sweep(layout, console=console)
    sampler = planned.request.sampler
    console.report(f"{sampler.num_trials if sampler else len(planned.trials)} trials {_where(layout)}")
    print_data([layout.sweep_id])
    if not detach:
        _follow(layout)


def _script(planned: PlannedSweep, home: Path) -> list[str]:
    """The batch script that would be handed to Slurm; without Slurm, none."""
    from gangline.runs.layout import SweepLayout
    from gangline.sweep.job_array import array_script

    if not planned.request.is_array:
        return []
    layout = SweepLayout(home, "sweep-NAME")
    return array_script(layout, planned.request, [trial.number for trial in planned.trials]).splitlines()


def _where(layout: SweepLayout) -> str:
    from gangline.sweep.records import SweepRecord, SweepState

    request, arrays = SweepRecord.load(layout.request), SweepState.load(layout.state).arrays
    if arrays:
        at_once = f", {request.at_once} tasks at a time" if request.at_once else ""
        return f"are array {arrays[-1]} of Slurm{at_once}; you can turn this computer off"
    stays = "this computer starts them, and must stay on until the last one has started"
    return f"on {len(request.cluster.hosts)} hosts; {stays}"


def _refreshed(layout: SweepLayout) -> list[str]:
    """Ask Slurm about a sweep that it has; what is told of its queue."""
    from gangline.sweep.records import SweepRecord, SweepState

    if not SweepRecord.load(layout.request).is_array or SweepState.load(layout.state).phase != "running":
        return []
    from gangline.sweep.job_array import look_at_queue

    return look_at_queue(layout).lines


def _list(*, as_json: bool) -> None:
    from gangline.runs.layout import SweepLayout
    from gangline.sweep.records import sweep_ids
    from gangline.sweep.standings import sweep_rows

    for sweep_id in sweep_ids(default_home()):
        if (layout := SweepLayout(default_home(), sweep_id)).state.exists():
            _refreshed(layout)
    rows, now = sweep_rows(default_home()), datetime.now(timezone.utc)
    if not rows and not as_json:
        print_data([f"no sweeps in {default_home()}; start one: gangline sweep job.yaml KEY=A,B"])
        return
    cells = [
        [
            str(row["id"]),
            str(row["job"]),
            str(row["phase"]),
            f"{row['ended']}/{row['trials']}",
            str(row["failed"]),
            "-" if row["best_loss"] is None else f"{row['best_loss']:.4f} (trial {row['best_trial']})",
            age(str(row["created"]), now=now),
        ]
        for row in rows
    ]
    header = ("sweep", "job", "phase", "ended", "failed", "best loss", "created")
    print_answer({"sweeps": rows}, table(header, cells), as_json=as_json)


def _of_sweep(verb: str, rest: tuple[str, ...], *, now: bool, detach: bool, dry_run: bool, as_json: bool) -> None:
    from gangline.sweep.lifecycle import resume_sweep, stop_sweep
    from gangline.sweep.records import SweepState, find_sweep

    if not rest:
        raise UsageError(f"sweep {verb} needs the id of a sweep", seen="none", fix="gangline sweep ls lists them")
    layout, words = find_sweep(default_home(), rest[0]), rest[1:]
    if words and verb not in {"resume", "add"}:
        raise UsageError(f"sweep {verb} takes one id", seen=joined(rest), fix=f"gangline sweep {verb} {rest[0]}")
    if verb == "show":
        _show(layout, as_json=as_json)
    elif verb == "stop":
        if stop_sweep(layout, now=now, console=Terminal()):
            _wait_for_end(layout)
        print_data([f"{layout.sweep_id} {SweepState.load(layout.state).shown}"])
    elif verb == "resume":
        resume_sweep(layout, [_number(word) for word in words], console=Terminal())
        print_data([layout.sweep_id])
        if not detach:
            _follow(layout)
    else:
        _add(layout, words, dry_run=dry_run)


def _add(layout: SweepLayout, words: tuple[str, ...], *, dry_run: bool) -> None:
    from gangline.sweep.begin import plan_more
    from gangline.sweep.lifecycle import add_points
    from gangline.sweep.points import shown

    trials = plan_more(layout, words, console=Terminal())
    Terminal.clear_all()
    print_data([f"trial {trial.number}: {shown(trial.point)}" for trial in trials])
    if not dry_run:
        add_points(layout, trials, console=Terminal())


def _number(word: str) -> int:
    if not word.isdecimal():
        raise UsageError(f"{word!r} is no trial", seen="expected its number", fix="gangline sweep resume ID 3 5")
    return int(word)


def _show(layout: SweepLayout, *, as_json: bool) -> None:
    from gangline.sweep.records import SweepRecord, SweepState, load_trials
    from gangline.sweep.standings import failure_lines, summary_line, sweep_document, trial_table

    queue = _refreshed(layout)
    jobs = _jobs_of(layout)
    if as_json:
        print_json(sweep_document(layout, jobs=jobs))
        return
    state, trials = SweepState.load(layout.state), load_trials(layout)
    rows = trial_table(trials, metric=SweepRecord.load(layout.request).metric, jobs=jobs)
    print_data([*rows, *failure_lines(trials), *queue, summary_line(layout, state, trials)])
    _say_next(layout)


def _jobs_of(layout: SweepLayout) -> dict[int, str]:
    """Trial -> its job of Slurm, such as 4711_3."""
    from gangline.sweep.records import SweepRecord, load_trials

    if not SweepRecord.load(layout.request).is_array:
        return {}
    from gangline.sweep.job_array import job_ids

    return job_ids(layout, load_trials(layout))


def _say_next(layout: SweepLayout) -> None:
    """The commands that make sense now."""
    from gangline.sweep.records import SweepRecord, SweepState, load_trials
    from gangline.sweep.schedule import best_trial
    from gangline.sweep.standings import export_words

    console, trials = Terminal(), load_trials(layout)
    state = SweepState.load(layout.state)
    if state.shown in {"lost", "stopped", "failed"}:
        console.commands("go on:", f"gangline sweep resume {layout.sweep_id}")
    is_command = SweepRecord.load(layout.request).template is not None
    if not is_command and (best := best_trial(trials)) is not None:
        console.commands(f"export trial {best.number}, the best so far:", joined(export_words(best)))
    if layout.tensorboard.is_dir():
        console.commands("curves and hyper-parameters:", f"tensorboard --logdir {quoted(str(layout.tensorboard))}")


def _wait_for_end(layout: SweepLayout) -> None:
    from gangline.sweep.standings import follow_sweep, summary_line

    console = Terminal()
    state = follow_sweep(
        layout,
        lambda state, trials: console.progress(f"waiting: {summary_line(layout, state, trials)}"),
        wait=time.sleep,
        poll_s=0.2,
    )
    console.clear()
    if state.shown == "lost":
        raise RunFailed(
            f"{layout.sweep_id} lost its supervisor",
            seen=f"its log is {layout.log}",
            fix=f"gangline sweep stop {layout.sweep_id} once more",
        )


def _follow(layout: SweepLayout) -> None:
    """Tell what becomes of the trials until all have ended; Ctrl-C leaves, and the sweep goes on."""
    from gangline.errors import GanglineError
    from gangline.sweep.records import SweepRecord
    from gangline.sweep.standings import follow_sweep, summary_line

    console, told = Terminal(), dict[int, str]()
    asked = SweepRecord.load(layout.request).cluster.slurm
    poll_s = 0 if asked is None else asked.poll_s
    console.report(
        f"safe to leave. Look: gangline sweep show {layout.sweep_id}. End it: gangline sweep stop {layout.sweep_id}"
    )

    def show(state: SweepState, trials: list[TrialRecord]) -> None:
        for trial in trials:
            line = _news(trial)
            if line is not None and told.get(trial.number) != line:
                told[trial.number] = line
                console.report(line)
        console.progress(summary_line(layout, state, trials)[: terminal_width() - 1])

    asked_at = -math.inf

    def refresh() -> None:
        nonlocal asked_at
        if time.monotonic() - asked_at > poll_s:
            _refreshed(layout)
            asked_at = time.monotonic()

    try:
        state = follow_sweep(layout, show, wait=time.sleep, refresh=refresh)
    except KeyboardInterrupt as interrupt:
        console.clear()
        console.report(f"left {layout.sweep_id}; it continues")
        raise SystemExit(exit_code_of(interrupt)) from None
    console.clear()
    _show(layout, as_json=False)
    if state.error is not None:
        raise GanglineError.from_json(state.error)


def _news(trial: TrialRecord) -> str | None:
    """What is told of a trial when it changes."""
    from gangline.sweep.points import shown

    if trial.phase == "waiting" or (trial.phase == "running" and trial.run is None):
        return None
    where = f" on {' '.join(trial.hosts)}" if trial.phase == "running" else ""
    loss = "" if trial.loss is None or trial.phase == "running" else f", loss {trial.loss:.4f} at step {trial.step}"
    return f"trial {trial.number} ({shown(trial.point)}) {trial.phase}{where}: {trial.run or 'no run'}{loss}"
