"""What `gangline plan` answers: for the machines as they are, or as somebody thinks of having them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.checks.judge import require
from gangline.context import REAL, Context, Dependencies, StartOptions, load, load_cluster, reached
from gangline.decide.decide import Decision, decide, sized
from gangline.decide.forecast import JobForecast, ask_trace, forecast_job, ways_of
from gangline.decide.hosts import disk_rate
from gangline.decide.on_partition import lines_on, machines_of, partition_of
from gangline.decide.row_report import RowsReport
from gangline.errors import DoesNotFit, GanglineError, ModelError, UsageError
from gangline.inventory.measured import load_network, network_line
from gangline.planner.candidate import Candidate, builds_method
from gangline.planner.decision import Choice
from gangline.planner.machines import PlannedCluster, assumed_link, bus_of, imagine, link, with_hosts, without_hosts
from gangline.planner.memory import rank_memory
from gangline.planner.memory_fit import device_of
from gangline.planner.report import (
    TITLE,
    Length,
    aligned,
    change_line,
    choice_json,
    explain,
    name,
    report,
    run_json,
    terms,
    ways_lines,
)
from gangline.planner.saves import Saving, save_cost
from gangline.planner.software import STACKS, without_kernels
from gangline.planner.training import GANGLINE, SoftwareStack
from gangline.planner.ways_out import Suggestion
from gangline.provision.console import Console
from gangline.runs.cluster import IN_ALLOCATION, SlurmRequest
from gangline.runs.gang import total_steps
from gangline.runs.job import Job
from gangline.units import format_bytes

# How long a run will be before its data is tokenised: a guess from the size of its files.


BYTES_PER_TOKEN = 4.0
"""Of English text and today's vocabularies of 32,000 to 256,000 tokens; code and other languages have fewer."""


def estimated_steps(job: Job) -> tuple[int, str] | None:
    """Optimizer steps, and in words where the number is from; None where nothing can be said.

    Samples are taken to be full, as packing makes them; without it there are as many as rows, and rows are not counted.
    """
    if job.steps is not None:
        return job.steps, f"{job.steps} steps"
    source = job.data.train
    if not job.data.packing or not all(part.files for part in source.parts) or _is_cut(job):
        return None
    try:
        num_bytes = sum(Path(file).stat().st_size * part.weight for part in source.parts for file in part.files)
    except OSError:
        return None
    tokens = num_bytes * (1 - job.data.evaluation_fraction) / BYTES_PER_TOKEN
    samples = max(1, round(tokens / job.data.sequence_length))
    steps = total_steps(samples, job.batch, epochs=job.epochs, steps=None)
    return steps, f"about {steps} steps = {job.epochs or 1:g} x {samples} samples, guessed from the size of the files"


def length_unknown(job: Job) -> str:
    """Why `estimated_steps` says nothing of a job, for people."""
    source = job.data.train
    gone = [Path(file).name for file in source.all_files if not Path(file).exists()]
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        return f"{gone[0]}{more} of data.train is not on this computer, so the number of samples is unknown"
    if not all(part.files for part in source.parts):
        return "data.train is on the hub; the number of samples is known once it is downloaded"
    if _is_cut(job):
        return "only some rows of data.train are read, and rows are counted when the data is prepared"
    return "samples are not packed: one per row, and rows are counted when the data is prepared"


def _is_cut(job: Job) -> bool:
    data = job.data
    parts = data.train.parts
    return data.max_samples is not None or any(part.rows or part.max_samples is not None for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """In what the machines of the question differ from those that are there."""

    hosts: str | None = None
    """These machines, and nobody is asked; see `planning.world.imagine`."""
    add: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    link: str | None = None
    stack: str = GANGLINE.name

    @property
    def changes_machines(self) -> bool:
        """Whether the answer is for machines that are not there."""
        return bool(self.hosts or self.add or self.without or self.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The answer."""

    job: Job
    world: PlannedCluster
    job_forecast: JobForecast
    decision: Decision | None
    """What `train` would decide; None where nobody was asked."""
    before: Choice | None = None
    """What it would be without the change that somebody thinks of."""
    ways: tuple[Suggestion, ...] = field(default=())
    """What would make it fit, where it does not."""
    rows: RowsReport = field(default_factory=RowsReport)
    """What was seen of the rows."""
    queue: tuple[tuple[str, str], ...] = ()
    """Of a run that waits for Slurm: its partition and its allocations, as titles and texts."""

    @property
    def can_start(self) -> bool:
        """Whether `train` would get as far as starting something."""
        if self.decision is None or self.decision.needs.missing:
            return False
        if any(each.severity == "fail" for each in self.decision.findings):
            return False
        return self.job_forecast.choice is None or self.job_forecast.runnable is not None

    @property
    def length(self) -> Length:
        """How long the run is, as far as that is known or can be guessed, and how it saves."""
        known, words = estimated_steps(self.job), self.job.checkpoint
        inventory = None if self.decision is None else self.decision.inventory
        saving = Saving(
            every_steps=self._save_steps(None if known is None else known[0]),
            every_minutes=words.every_minutes,
            waits=not words.asynchronous,
            disk=disk_rate(self.world, inventory),
            by_host=words.each_host == "part",
        )
        return Length(known=known, saving=saving, unknown="" if known else length_unknown(self.job))

    def _save_steps(self, total: int | None) -> float | None:
        """Between two saves; None where none are asked for, or the steps of an epoch are not known."""
        words, epochs = self.job.checkpoint, self.job.epochs
        if words.every_epochs is None or epochs is None or total is None:
            return words.every_steps
        return words.every_epochs * total / epochs


def predict(start: StartOptions, what_if: WhatIf, *, console: Console, deps: Dependencies = REAL) -> Prediction:
    """Look, unless the machines are thought of, and weigh. Starts nothing, and writes nothing to a host."""
    stack = _stack(what_if.stack)
    if what_if.hosts is None and (asked := _asked_of_slurm(start, deps)) is not None:
        partition = partition_of(asked)
        there = dataclasses.replace(what_if, hosts=machines_of(asked, partition))
        found = predict(start, there, console=console, deps=deps)
        choice = found.job_forecast.choice
        best = None if choice is None else choice.best
        return dataclasses.replace(found, queue=tuple(lines_on(asked, partition, best, found.length)))
    if what_if.hosts is not None:
        context = Context(transports={}, home=start.home, console=console, deps=deps)
        job, rows = sized(_job_without_data(start), context)
        placements = imagine(what_if.hosts)
        imagined = PlannedCluster(placements=placements, wire=assumed_link(), inside=bus_of(placements), asked=False)
        before = changed(imagined, WhatIf(link=what_if.link))
        world = changed(before, what_if)  # the link again: of one host nothing is kept
        return dataclasses.replace(_predict(job, world, None, context, stack=stack, before=before), rows=rows)
    job, cluster = load(start)
    with reached(cluster, home=start.home, console=console, deps=deps) as (cluster, context):
        decision = decide(job, cluster, context)
        stopped = any(each.severity == "fail" for each in decision.findings)
        if decision.job_forecast.error is not None and not stopped:  # else what stops the start is said first
            raise decision.job_forecast.error
        world = changed(decision.world, what_if)
        if world == decision.world and stack == GANGLINE:
            ways = tuple(ways_of(decision.job_forecast))
            return Prediction(
                job=decision.job,
                world=world,
                job_forecast=decision.job_forecast,
                decision=decision,
                ways=ways,
                rows=decision.rows,
            )
        found = _predict(decision.asked, world, decision, context, stack=stack, before=decision.world)
        return dataclasses.replace(found, rows=decision.rows)


def _asked_of_slurm(start: StartOptions, deps: Dependencies) -> SlurmRequest | None:
    """What the cluster file asks of Slurm; None where its hosts can be asked themselves."""
    if start.cluster is None or IN_ALLOCATION in deps.variables:
        return None
    return load_cluster(start.cluster, start.home).slurm


def changed(world: PlannedCluster, what_if: WhatIf) -> PlannedCluster:
    """The world with what somebody thinks of changing."""
    for text in what_if.add:
        world = with_hosts(world, text)
    if what_if.without:
        world = without_hosts(world, what_if.without)
    if what_if.link is not None:
        world = dataclasses.replace(world, wire=link(what_if.link))
    return world


def _predict(
    job: Job,
    world: PlannedCluster,
    decision: Decision | None,
    context: Context,
    *,
    stack: SoftwareStack,
    before: PlannedCluster,
) -> Prediction:
    job_forecast = forecast_job(job, world, context, stack=stack)
    if job_forecast.error is not None:
        raise job_forecast.error
    if job_forecast.choice is None and decision is None:
        raise ModelError(
            "no forecast is possible",
            seen=job_forecast.unknown,
            fix="name a model whose config.json is on this computer",
        )
    same = job_forecast.with_batch(job)
    earlier = None if before == world else forecast_job(same, before, context, stack=stack).choice
    ways = tuple(ways_of(job_forecast))
    return Prediction(
        job=job_forecast.settled(job),
        world=world,
        job_forecast=job_forecast,
        decision=decision,
        before=earlier,
        ways=ways,
    )


def _job_without_data(start: StartOptions) -> Job:
    """The job; on machines that nobody has, what it trains on need not be there either."""
    from gangline.config.load import load_job

    return start.job if isinstance(start.job, Job) else load_job(start.job, start.overrides, needs_data=False)


def _stack(name: str) -> SoftwareStack:
    found = STACKS.get(name.lower().replace("_", "-"))
    if found is None:
        raise UsageError(f"there is no stack {name!r}", seen=f"expected one of {', '.join(STACKS)}", fix="name one")
    return found


# `plan --trace`: the trainer's own code on tensors without data, for the ways that are left at the end.


BUILT_STACK = "gangline"
ON_A_PROCESSOR = {"attention_kernel": "cpu", "rounding_bytes": 1}
"""Where a rank computes without a GPU: its own kernels and exact bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What one way of running the job really allocates, as far as a computer without the card can say."""

    candidate: Candidate
    answer: dict[str, Any]
    """See `worker.trace.line.trace`."""

    @property
    def peak_bytes(self) -> int:
        """At the worst instant, for the model's full depth."""
        return int(self.answer["peak_bytes"])

    @property
    def line(self) -> str:
        """For people."""
        training = self.candidate.rank_trainings[0]
        placement, own = self.candidate.needs[0].placement, without_kernels(training.stack)
        formula = rank_memory(
            self.candidate.architecture,
            dataclasses.replace(training, stack=own),
            self.candidate.strategy,
            device=device_of(placement),
        ).allocated_bytes
        kernels = "" if own == training.stack else " with torch's own operators"
        text = f"{self.candidate.strategy.kind}, micro-batch {training.micro_batch}"
        text += ", with activation checkpointing" if training.checkpointing else ""
        return (
            f"{text}: {format_bytes(self.peak_bytes)} of tensors traced{kernels}, {format_bytes(formula)} by formula "
            f"({100 * (formula / self.peak_bytes - 1):+.1f} %); {self.answer['seconds']:.0f} s, torch "
            f"{self.answer['versions']['torch']}" + "".join(f"; {note}" for note in self.answer["notes"])
        )


def trace(prediction: Prediction, context: Context) -> list[Traced]:
    """Trace what our trainer would run. Raises ModelError where it has no code for the job, or torch is not here."""
    choice, config = prediction.job_forecast.choice, prediction.job_forecast.config
    if choice is None or config is None:
        raise ModelError(
            "nothing can be traced",
            seen=prediction.job_forecast.unknown,
            fix="name a model whose config.json is on this computer",
        )
    built = [candidate for candidate in choice.by_kind if candidate.is_built]
    finalists = [choice.runnable] if choice.runnable is not None else built[:1]  # else what came nearest to fitting
    ours = choice.query.training.stack.name.startswith(BUILT_STACK)
    query = choice.query
    if not builds_method(query.training, query.architecture) or not ours:
        raise ModelError(
            "gangline's own trainer has no code for this job, so there is nothing to trace",
            seen=f"method {prediction.job.method.kind}, stack {choice.query.training.stack.name}",
            fix="trace it with method=lora or method=full and --stack gangline",
        )
    if query.training.offloading or any(each.rank_trainings[0].offloading for each in finalists):
        raise ModelError(
            "what lies in the machine's memory cannot be traced",
            seen="activation_offloading, of the job or of rank 0; a trace has no cards to move anything from",
            fix="trace it with activation_offloading=false, or plan without --trace",
        )
    if any(candidate.strategy.half.layers != "all" for candidate in finalists):
        raise ModelError(
            f"a rank of {finalists[0].strategy.kind} cannot be traced",
            seen=f"{name(finalists[0].strategy)}; a trace is of a rank with all layers, and all of each",
            fix="trace it with strategy=ddp, or plan without --trace",
        )
    context.console.progress("running the trainer's code on tensors without data")
    answers = ask_trace([order_of(prediction.job, candidate, config) for candidate in finalists], context=context)
    return [Traced(candidate=candidate, answer=answer) for candidate, answer in zip(finalists, answers, strict=True)]


def order_of(job: Job, candidate: Candidate, config: dict[str, Any]) -> dict[str, Any]:
    """See `worker.trace.order.TraceOrder`."""
    training, settings = candidate.rank_trainings[0], candidate.scenario.settings
    passes = settings[0].passes if settings else None
    return {
        "config": config,
        "method": dataclasses.asdict(job.method),
        "precision": training.compute,
        "parameters": job.parameters,
        "micro_batch": training.micro_batch,
        "micro_batches": max(1, passes) if passes is not None else max(candidate.shares),
        "sequence_length": training.sequence_length,
        "packing": job.data.packing,
        "activation_checkpointing": training.checkpointing,
        "optimizer": dataclasses.asdict(job.optimizer),
        "attention": job.model.attention,
        "ranks": len(candidate.needs),
        **({} if all(need.placement.gpu is not None for need in candidate.needs) else ON_A_PROCESSOR),
    }


# The answer of `gangline plan` as lines and as plain data.


SAID = ("strategy", "shares", "divides", "memory", "step", "saves")
"""Titles of the plan's lines that the report says better."""


def plan_lines(prediction: Prediction, traced: Sequence[Traced], *, home: Path, why: bool, width: int) -> list[str]:
    """What people read, on a screen of that many columns."""
    lines: list[str] = []
    decision, choice = prediction.decision, prediction.job_forecast.choice
    if choice is None:
        lines.append(f"note       {prediction.job_forecast.unknown}")
    else:
        lines += report(choice, prediction.length, why=why, width=width)
        lines += terms(choice, width) if why else []
        lines += aligned([("shape", shape.source)], width) if (shape := prediction.job_forecast.shape) else []
        lines += change_line(prediction.before, choice, width) if prediction.before is not None else []
    lines += aligned(prediction.queue, width)
    said = [(line[:TITLE].strip(), line[TITLE:].strip()) for line in prediction.rows.lines(prediction.job)]
    lines += aligned(said, width)
    lines += [f"traced     {each.line}" for each in traced]
    if choice is not None and choice.best is None:
        lines += ways_lines(prediction.ways, width)
    if decision is not None and prediction.world != decision.world:
        lines += [f"note       {note}" for note in prediction.job_forecast.dated(decision.inventory)]
    if decision is not None and prediction.world == decision.world:
        lines += explain(decision.plan, without=SAID if choice is not None else ())
        if (network := load_network(home, decision.inspection.cluster)) is not None:
            lines.append(network_line(network))
    if decision is not None:
        lines += [*decision.needs.lines, *(line for finding in decision.findings for line in finding.lines())]
    return lines


def plan_json(
    prediction: Prediction | None, traced: Sequence[Traced], error: GanglineError | None = None
) -> dict[str, Any]:
    """What programs read (docs/schemas/plan.schema.json). None: there is no prediction, because of `error`."""
    told: dict[str, Any] = dict.fromkeys(("plan", "verdict", "shape", "run", "saves", "change"))
    told |= {"findings": [], "queue": [], "traced": [], "unknown": ""}
    told["error"] = None if error is None else error.to_json()
    if prediction is None:
        return told
    told["queue"] = [{"about": about, "says": says} for about, says in prediction.queue]
    decision, job_forecast = prediction.decision, prediction.job_forecast
    choice, shape = job_forecast.choice, job_forecast.shape
    if decision is not None:
        told["plan"] = decision.plan.to_json()
        told["findings"] = [finding.to_json() for finding in decision.findings]
    if shape is not None:
        told["shape"] = {"from": shape.kind, "source": shape.source}
    if choice is not None:
        told["verdict"] = choice_json(choice, list(prediction.ways))
    if choice is not None and choice.best is not None:
        cost = save_cost(choice.best, prediction.length.saving)  # seconds are the least, what is likely, and the most
        told["saves"] = {**dataclasses.asdict(cost), "share": cost.share}
        told["run"] = run_json(choice.best, prediction.length)
    if choice is not None and prediction.before is not None:
        steps = [each.best and each.best.time and each.best.time.total_s for each in (prediction.before, choice)]
        told["change"] = {"before_s": steps[0], "after_s": steps[1]}
    traces = [{"strategy": each.candidate.strategy.kind, **each.answer} for each in traced]
    return {**told, "unknown": job_forecast.unknown, "traced": traces}


def refusal(prediction: Prediction) -> GanglineError | None:
    """The error with which `plan` ends although it has an answer; None where a start could go on."""
    try:
        require_fit(prediction)
        if prediction.decision is not None:
            require(prediction.decision.findings)
            prediction.decision.needs.require()
    except GanglineError as error:
        return error
    return None


def require_fit(prediction: Prediction) -> None:
    """Raise DoesNotFit, with exit code 6, where nothing that was weighed fits."""
    choice = prediction.job_forecast.choice
    if choice is None or choice.best is not None:
        return
    nearest = max(choice.by_kind, key=lambda candidate: (candidate.chance, -candidate.tightest.shortage_bytes))
    need = nearest.tightest
    raise DoesNotFit(
        f"the job does not fit on {need.placement.host}",
        seen=f"the closest option is {nearest.strategy.kind}, which needs about "
        f"{need.memory.process.likely / 2**30:.1f} GiB there; "
        f"{(need.placement.free_bytes or 0) / 2**30:.1f} GiB are free",
        fix="see `instead` above" if prediction.ways else "use a smaller model or more hosts",
    )
