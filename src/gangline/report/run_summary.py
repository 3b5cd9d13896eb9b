"""What `gangline summary` says of a run: job, machines, curves, speed against the plan, times, faults, commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from gangline import __version__
from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.inventory.facts import HostFacts, Inventory
from gangline.planner.outcome import Comparison, Figure, RankTime
from gangline.planner.plan import Plan
from gangline.report.commands import joined
from gangline.report.explanation import what_followed
from gangline.report.follow import View
from gangline.report.host_samples import (
    CARD_HEADER,
    HOST_HEADER,
    HostSamples,
    card_events,
    card_rows,
    host_rows,
    read_samples,
    reason_at,
    seconds_of,
)
from gangline.report.redaction import Redaction
from gangline.report.run_figures import RunFigures, figures_of
from gangline.report.run_history import (
    Attempt,
    EventRecord,
    RunHistory,
    attempt_rows,
    next_step,
    read_history,
    records_of,
)
from gangline.report.summary_page import Block, Page, PageCurve, PageShares, PageTable, PageText
from gangline.report.text_table import clean, event_line
from gangline.runs.job import Job, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.typed_command import TypedCommand
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import Transport
from gangline.units import fold_names, format_bytes, format_count, format_duration

T = TypeVar("T")
MOST_RANKS, MOST_FAULTS, SEEN_LINES = 128, 200, 6
FAULTS = frozenset(
    {
        *("straggler", "straggler-over", "memory-off", "save-failed", "step-skipped", "spike", "replicas-differ"),
        *("host-left-out", "unreachable", "reachable", "hanging", "standing", "going on", "leaving", "failing"),
        *("restarting", "returned", "trouble", "trouble-over", "doubted", "failed", "preparing", "not-ready"),
    }
)
"""Events that tell of a fault, or of what was done about one."""
ENDS = frozenset({"failing", "failed"})
"""Those of them that repeat the cause with which an attempt ended."""
PARTS = ("computes", "data", "waits for slower ranks", "network", "rest")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Everything that is recorded of a run."""

    history: RunHistory
    figures: RunFigures
    layout: RunLayout
    own: Sequence[str] | None = None
    """The words of the user's own command; None: it is a job."""
    can_resume: bool = True
    job: Job | None = None
    plan: Plan | None = None
    inventory: Inventory | None = None
    inputs: dict[str, Any] | None = None
    comparison: Comparison | None = None
    typed: TypedCommand | None = None
    samples: tuple[HostSamples, ...] = ()
    """What the hosts did meanwhile."""
    gaps: tuple[str, ...] = ()
    """What could not be read."""


def with_samples(run: RunRecords, hosts: Sequence[tuple[str, Transport, RunLayout]]) -> RunRecords:
    """The same with what its hosts did meanwhile; a silent host leaves a gap. Raises HostKeyRefused."""
    found, gaps = [], dict.fromkeys(run.gaps)
    for name, transport, layout in hosts:
        try:
            found.append(read_samples(name, transport, layout.samples(name)))
        except HostKeyRefused:
            raise
        except (HostUnreachable, OSError) as error:
            gaps[f"the samples of {name}: {str(error).splitlines()[0]}"] = None
    return replace(run, samples=tuple(found), gaps=tuple(gaps))


def read_records(
    view: View, *, records: RunLayout, remote: Transport | None, own: Sequence[str] | None, can_resume: bool
) -> RunRecords:
    """Read a run; see `read_history`. own, can_resume: see `RunRecords`. Raises HostKeyRefused."""
    history = read_history(view, records=records, remote=remote)
    gaps = dict.fromkeys(history.gaps)
    figures = figures_of(records_of(view.tails_of_head()[:1], gaps))
    history = replace(history, gaps=tuple(gaps))
    return with_documents(view.layout, history, figures, own=own, can_resume=can_resume)


def with_documents(
    layout: RunLayout, history: RunHistory, figures: RunFigures, *, own: Sequence[str] | None, can_resume: bool = True
) -> RunRecords:
    """A run whose figures are known, with what was asked, seen and decided; own, can_resume: see `RunRecords`."""
    gaps = dict.fromkeys(history.gaps)
    return RunRecords(
        history=history,
        figures=figures,
        layout=layout,
        own=own,
        can_resume=can_resume,
        job=_read(layout.job, Job, gaps) if own is None else None,
        plan=_read(layout.plan, Plan, gaps),
        inventory=_read(layout.inventory, Inventory, gaps),
        inputs=_read(layout.inputs, dict, gaps),
        comparison=_read(layout.comparison, Comparison, gaps),
        typed=_read(layout.typed, TypedCommand, gaps),
        gaps=tuple(gaps),
    )


def _read(path: Path, kind: type[T], gaps: dict[str, None]) -> T | None:
    try:
        return load_if_there(path, kind)
    except (OSError, *NONSENSE) as error:
        gaps[str(error).splitlines()[0]] = None
        return None


def summary_page(run: RunRecords, *, secrets: Iterable[str] = ()) -> Page:
    """The page of a run. secrets: values that must not stand in it, beside those that look like one."""
    sections: dict[str, Sequence[Block]] = {
        "The run": _overview(run),
        "Job": _job(run),
        "Machines": _machines(run),
        "Curves": _curves(run),
        "Speed against the plan": _speed(run),
        "Where the time went": _times(run),
        "What the machines did": _samples_of(run),
        "Faults, and what was done": _faults(run),
        "To repeat it": _repeat(run),
    }
    state = run.history.run.state
    title = f"{run.history.id}{f' ({state.name})' if state else ''}: {run.history.run.phase}"
    redaction = Redaction(secrets=secrets)
    shown = {name: [_redacted(block, redaction) for block in blocks] for name, blocks in sections.items() if blocks}
    return Page(title=title, sections=shown)


def _redacted(block: Block, redaction: Redaction) -> Block:
    if isinstance(block, PageText):
        return PageText(lines=redaction.secrets("\n".join(block.lines)).split("\n"), verbatim=block.verbatim)
    if isinstance(block, PageTable):
        return PageTable(header=block.header, rows=[[redaction.secrets(cell) for cell in row] for row in block.rows])
    return block


def _pairs(rows: Iterable[tuple[str, str | None]]) -> PageTable:
    """Names and values; values that are not known are left out."""
    return PageTable(header=("", ""), rows=[(name, value) for name, value in rows if value])


def _overview(run: RunRecords) -> list[Block]:
    history, figures = run.history, run.figures
    began, ended = history.run.created, _ended(history)
    reached = next((each.to_step for each in reversed(history.attempts) if each.to_step is not None), None)
    rate = figures.tokens_per_s
    error = (history.attempts[-1].error or {}) if history.attempts else {}
    rows = [
        ("state", f"{history.run.phase}, as last heard" if history.run.silent_host else history.run.phase),
        ("cause", str(error.get("what", "")) if history.run.phase == "failed" else None),
        ("ended early", history.early or None),
        ("began", began[:19].replace("T", " ") + " UTC" if began else None),
        ("took", _between(began, ended)),
        ("steps", f"{reached:,} of {history.steps:,}" if reached is not None and history.steps else None),
        ("attempts", f"{len(history.attempts)}"),
        ("tokens", f"{format_count(figures.tokens)}, {rate:,.0f} per second of training" if rate else None),
        ("loss", _first_to_last(figures.curves["loss"])),
        ("evaluation loss", _first_to_last(figures.evaluations)),
    ]
    blocks: list[Block] = [_pairs(rows)]
    if run.gaps:
        blocks.append(PageText(lines=[f"Missing: {gap}." for gap in run.gaps]))
    return blocks


def _ended(history: RunHistory) -> str:
    """When the last attempt ended; while it runs, when its state was written last."""
    outcome = history.attempts[-1].outcome if history.attempts else None
    return outcome.ended if outcome else history.run.state.updated if history.run.state else ""


def _between(first: str, last: str) -> str | None:
    try:
        began, ended = (datetime.fromisoformat(time.replace("Z", "+00:00")) for time in (first, last))
    except ValueError:
        return None
    return format_duration(max(0.0, (ended - began).total_seconds()))


def _first_to_last(curve: dict[int, float]) -> str | None:
    if not curve:
        return None
    first, last = min(curve), max(curve)
    least = min(curve, key=curve.__getitem__)
    lowest = f"; lowest {curve[least]:.4g} at step {least:,}" if least != last else ""
    return f"{curve[first]:.4g} at step {first:,}, {curve[last]:.4g} at step {last:,}{lowest}"


def _job(run: RunRecords) -> list[Block]:
    if run.own is not None:
        return [_pairs([("command", joined(run.own))])]
    job, plan = run.job, run.plan
    if job is None:
        return []
    epochs = f"{job.epochs:g} epochs" if job.epochs is not None else None
    rows = [
        ("model", f"{job.model.path}{f' at {job.model.revision}' if job.model.revision else ''}, {job.model.start}"),
        ("method", plan.method if plan else job.method.kind),
        ("training rows", _source(job.data.train)),
        ("samples", _samples(plan, job)),
        ("evaluation rows", _evaluation(job)),
        ("batch", f"{job.batch} samples, in micro-batches of {job.micro_batch}"),
        ("length", epochs or (f"{job.steps:,} steps" if job.steps is not None else None)),
        ("optimizer", f"{job.optimizer.kind}, learning rate {job.optimizer.learning_rate:g}"),
        ("precision", job.precision),
        ("seed", str(job.seed)),
        ("strategy", f"{plan.strategy}{f': {plan.reason}' if plan.reason else ''}" if plan else None),
    ]
    inputs = run.inputs or {}
    prints = [(f"fingerprint of {name}", inputs.get(key)) for name, key in _INPUTS]
    return [_pairs([*rows, *((name, str(value)) for name, value in prints if value)])]


_INPUTS = (("the model", "model"), ("the training set", "train"), ("the evaluation set", "evaluation"))


def _source(source: SourceJob) -> str:
    parts = [*(f"hub:{each.hub}#{each.split}" for each in source.parts if each.hub)]
    return ", ".join([*parts, *(path for each in source.parts for path in each.files)])


def _evaluation(job: Job) -> str | None:
    if job.data.evaluation is not None:
        return _source(job.data.evaluation)
    part = job.data.evaluation_fraction
    return f"{100 * part:g} % of the training rows, set apart" if part else None


def _samples(plan: Plan | None, job: Job) -> str | None:
    if plan is None or plan.data is None:
        return None
    tokens = f", {format_count(plan.data.num_tokens)} tokens" if plan.data.num_tokens else ""
    return f"{plan.data.num_samples:,} of at most {job.data.sequence_length:,} tokens{tokens}"


def _machines(run: RunRecords) -> list[Block]:
    hosts = run.inventory.hosts if run.inventory else ()
    if not hosts:
        return []
    header = ("host", "part of the batch", "GPUs", "driver", "processors", "memory", "system", "software")
    table = PageTable(header=header, rows=[_machine(facts, run.plan) for facts in hosts])
    simulated = [facts.host for facts in hosts if facts.gpu_driver.simulated]
    note = PageText(lines=[f"The GPUs of {fold_names(simulated)} are simulated: their figures are of no real card."])
    return [table, note] if simulated else [table]


def _machine(facts: HostFacts, plan: Plan | None) -> tuple[str, ...]:
    ranks = [rank for rank in plan.ranks if rank.host == facts.host] if plan else []
    share = f"{sum(rank.percent for rank in ranks):.0f} %, {len(ranks)} rank{'s' * (len(ranks) != 1)}" if ranks else "-"
    cards: dict[str, int] = {}
    for gpu in facts.gpus:
        name = f"{gpu.name}, {format_bytes(gpu.memory_total_bytes)}"
        cards[name] = cards.get(name, 0) + 1
    versions = [f"{name} {version}" for name in PACKAGES if (version := facts.packages.get(name))]
    return (
        facts.host,
        share,
        "; ".join(f"{count} x {name}" for name, count in cards.items()) or "none",
        next((gpu.driver for gpu in facts.gpus), "-"),
        str(facts.num_cpus),
        format_bytes(facts.memory_total_bytes) if facts.memory_total_bytes else "-",
        ", ".join(part for part in (facts.system.os, facts.system.kernel) if part) or "-",
        ", ".join([f"Python {facts.python}", *versions]) if facts.python else "-",
    )


_CURVES = {
    "loss": "loss per trained token",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
    "tokens_per_s": "tokens per second",
}


def _curves(run: RunRecords) -> list[Block]:
    later = [float(attempt.from_step) for attempt in run.history.attempts[1:] if attempt.from_step is not None]
    blocks: list[Block] = [
        PageCurve(
            title=title,
            points=_points(run.figures.curves[name]),
            marks=_points(run.figures.evaluations) if name == "loss" else (),
            marks_name="evaluation",
            breaks=later,
        )
        for name, title in _CURVES.items()
        if run.figures.curves[name]
    ]
    if blocks and later:
        blocks.append(
            PageText(lines=[f"Later attempts began with the steps {', '.join(f'{at:,.0f}' for at in later)}."])
        )
    return blocks


def _points(curve: dict[int, float]) -> list[tuple[float, float]]:
    return [(float(step), curve[step]) for step in sorted(curve)]


def _speed(run: RunRecords) -> list[Block]:
    if (compared := run.comparison) is None:
        return []
    header = ("", "planned", "measured", "error of the plan")
    rows = [
        _against("step", compared.step_s, _seconds),
        _against("exchange that is not hidden", compared.exposed_s, _seconds),
        *(
            _against(f"computing, rank {n} on {each.host}", each.compute_s, _seconds)
            for n, each in _few(compared.ranks)
        ),
        *(_against(f"memory, rank {n} on {each.host}", each.memory, format_bytes) for n, each in _few(compared.ranks)),
    ]
    source = f" The plan's times: {compared.source}." if compared.source else ""
    said = f"Medians of {compared.num_steps} steps of attempt {compared.attempt}.{source}"
    return [PageTable(header=header, rows=rows), PageText(lines=[said])]


def _few(ranks: Sequence[T]) -> list[tuple[int, T]]:
    return list(enumerate(ranks))[:MOST_RANKS]


def _against(name: str, figure: Figure, shown: Any) -> tuple[str, ...]:
    planned = "not known" if figure.planned is None else shown(figure.planned)
    error = "-" if figure.error is None else f"{100 * figure.error:+.0f} %"
    return name, planned, shown(figure.measured), error


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _times(run: RunRecords) -> list[Block]:
    figures = run.figures
    if not figures.num_steps:
        return []
    blocks: list[Block] = [PageTable(header=("activity", "time", ""), rows=_activities(run))]
    ranks = sorted(figures.ranks.values(), key=lambda each: each.rank)[:MOST_RANKS]
    if ranks:
        rows = [(f"{each.host}, rank {each.rank}", _parts(each)) for each in ranks]
        said = f"Of the time of the {figures.num_steps:,} steps, by rank."
        if len(figures.ranks) > 1 and not any(each.waits_s or each.network_s for each in ranks):
            said += " Under this strategy exchanges alternate with computing, and are part of it."
        blocks += [PageText(lines=[said]), PageShares(names=PARTS, rows=rows)]
    if figures.memory_bytes:
        most = [(host, str(rank), format_bytes(size)) for (host, rank), size in sorted(figures.memory_bytes.items())]
        blocks.append(PageTable(header=("host", "rank", "most memory"), rows=most[:MOST_RANKS]))
    if len(figures.ranks) > MOST_RANKS:
        blocks.append(PageText(lines=[f"{len(figures.ranks) - MOST_RANKS} more ranks are not shown."]))
    return blocks


def _activities(run: RunRecords) -> list[tuple[str, str, str]]:
    """Where the wall clock went."""
    figures, history = run.figures, run.history
    told = [("training steps", figures.steps_s), ("evaluations", figures.evaluations_s)]
    try:
        times = (history.run.created, _ended(history))
        began, ended = (datetime.fromisoformat(time.replace("Z", "+00:00")) for time in times)
        whole_s = max((ended - began).total_seconds(), figures.steps_s + figures.evaluations_s)
    except ValueError:
        whole_s = figures.steps_s + figures.evaluations_s
    told.append(
        ("everything else: starts, loading, saves, restarts", whole_s - figures.steps_s - figures.evaluations_s)
    )
    return [(name, format_duration(seconds), f"{100 * seconds / (whole_s or 1.0):.0f} %") for name, seconds in told]


def _parts(rank: RankTime) -> list[float]:
    seconds = (rank.compute_s, rank.data_s, rank.waits_s, rank.network_s, rank.rest_s)
    whole_s = sum(seconds) or 1.0
    return [each / whole_s for each in seconds]


def _samples_of(run: RunRecords) -> list[Block]:
    """Means over all samples of the attempts, and the most."""
    blocks: list[Block] = []
    for header, rows in ((HOST_HEADER, host_rows(run.samples)), (CARD_HEADER, card_rows(run.samples))):
        if rows:
            blocks.append(PageTable(header=header, rows=rows))
    told = [sentence for _, sentence in card_events(run.samples, run.figures.written)]
    simulated = [each.host for each in run.samples if each.is_simulated]
    if simulated:
        told.append(f"The GPUs of {fold_names(simulated)} are simulated: these figures are of no real card.")
    return [*blocks, *([PageText(lines=told)] if told else [])]


def _faults(run: RunRecords) -> list[Block]:
    history = run.history
    followers = [*history.attempts, None][1:]
    blocks: list[Block] = []
    causes = {_cause(attempt) for attempt in history.attempts if attempt.error is not None}
    told_above = {_cause(history.attempts[-1])} if history.run.phase == "failed" and history.attempts else set()
    if len(history.attempts) > 1:
        header = ("attempt", "hosts", "from step", "to step", "end", "cause, or why another followed")
        rows = [
            tuple(
                str("-" if value is None else value)
                for value in (
                    row["attempt"],
                    fold_names(row["hosts"]) or "-",
                    row["from_step"],
                    row["to_step"],
                    row["result"],
                    row["what"] or "-",
                )
            )
            for row in attempt_rows(history)
        ]
        told_above |= {str(row["what"]) for row in attempt_rows(history)}
        blocks.append(PageTable(header=header, rows=rows))
    for attempt, after in zip(history.attempts, followers, strict=True):
        if attempt.error is not None:
            seen = " / ".join(str(attempt.error.get("seen", "")).splitlines()[:SEEN_LINES])
            what = str(attempt.error.get("what", ""))
            rows_of: list[tuple[str, str | None]] = [("cause", None if what in told_above else what), ("seen", seen)]
            rows_of += [("fix", str(attempt.error.get("fix", ""))), ("then", "; ".join(what_followed(attempt, after)))]
            blocks += [PageText(lines=[f"Attempt {attempt.number}:"]), _pairs(rows_of)]
    every = [event for attempt in history.attempts for event in (*attempt.events, *attempt.told)]
    events = [
        _event(event, run) for event in every if event.get("event") not in ENDS or event.get("what") not in causes
    ]
    told = [event for event in events if event is not None]
    if told:
        blocks.append(PageTable(header=("time (UTC)", "attempt", "event"), rows=told[:MOST_FAULTS]))
    if len(told) > MOST_FAULTS:
        blocks.append(PageText(lines=[f"{len(told) - MOST_FAULTS} more events are in {run.layout.events.name}."]))
    return blocks or [PageText(lines=["No fault is recorded."])]


def _cause(attempt: Attempt) -> str:
    """The first line of the cause with which an attempt ended."""
    return next(iter(str((attempt.error or {}).get("what", "")).splitlines()), "")


def _event(event: EventRecord, run: RunRecords) -> tuple[str, str, str] | None:
    if event.get("event") not in FAULTS:
        return None
    said = event_line(dict(event)) or clean(f"{event.get('event')}: {event.get('what') or event.get('why') or ''}")
    if event.get("event") == "straggler" and event.get("cause") == "compute":
        host = next((each for each in run.samples if each.host == event.get("host")), None)
        time = seconds_of(event.get("time"))
        reason = None if host is None or time is None else reason_at(host, time)
        said += f"; at that time {reason}" if reason else ""
    return str(event.get("time", ""))[:19].replace("T", " "), str(event.get("attempt", "")), said


def _repeat(run: RunRecords) -> list[Block]:
    blocks: list[Block] = []
    if run.typed is not None:
        typed = run.typed
        blocks += [
            PageText(lines=[f"Typed with gangline {typed.gangline}, in {typed.folder}:"]),
            PageText(lines=[joined(typed.words)], verbatim=True),
            PageText(lines=[f"{typed.job_file}, as it was then:"]),
            PageText(lines=typed.job_text.rstrip("\n").split("\n"), verbatim=True),
        ]
    elif run.own is not None:
        words = joined(["gangline", "run", "--", *run.own])
        blocks += [
            PageText(
                lines=["The same command on the hosts of a cluster file, in the folder that was brought to them:"]
            ),
            PageText(lines=[words], verbatim=True),
        ]
    else:
        said = f"The command that started it is not recorded; {run.layout.job} has every value that it ran with."
        blocks.append(PageText(lines=[said]))
    ahead = next_step(run.history, is_job=run.own is None, can_resume=run.can_resume)
    if ahead.command:
        blocks += [
            PageText(lines=[f"To go on ({ahead.why}):"]),
            PageText(lines=[ahead.command], verbatim=True),
        ]
    blocks.append(PageText(lines=[f"Written by gangline summary {run.history.id}, version {__version__}."]))
    return blocks


def summary_json(run: RunRecords) -> dict[str, Any]:
    """The figures of the page, for programs."""
    figures, history = run.figures, run.history
    return {
        "run": history.id,
        "phase": history.run.phase,
        "began": history.run.created,
        "ended": _ended(history) if history.run.ended else None,
        "attempts": attempt_rows(history),
        "steps": history.steps,
        "num_steps": figures.num_steps,
        "tokens": figures.tokens,
        "steps_s": round(figures.steps_s, 3),
        "evaluations_s": round(figures.evaluations_s, 3),
        "tokens_per_s": figures.tokens_per_s,
        "evaluations": [{"step": step, "loss": loss} for step, loss in sorted(figures.evaluations.items())],
        "last_loss": figures.curves["loss"][max(figures.curves["loss"])] if figures.curves["loss"] else None,
        "ranks": [_rank_json(each) for each in sorted(figures.ranks.values(), key=lambda each: each.rank)],
        "hosts": {each.host: _sampled_json(each) for each in run.samples if each.rows},
        "comparison": run.comparison.to_json() if run.comparison else None,
        "missing": list(run.gaps),
    }


def _rank_json(rank: RankTime) -> dict[str, Any]:
    names = ("compute_s", "data_s", "waits_s", "network_s", "rest_s")
    return {"host": rank.host, "rank": rank.rank, **{name: round(getattr(rank, name), 3) for name in names}}


def _sampled_json(host: HostSamples) -> dict[str, Any]:
    names = host.names("")
    return {
        "samples": sum(count for _, count, *_ in host.rows),
        "simulated": host.is_simulated,
        "mean": {name: host.mean(name) for name in names},
        "most": {name: host.most(name) for name in names},
        "events": list(host.events),
    }
