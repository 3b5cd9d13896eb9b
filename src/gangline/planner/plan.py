"""The plan: what will be done, by whom, and why. It says only what was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gangline.catalog.gpu_specs import peak_flops
from gangline.planner.candidate import Candidate
from gangline.planner.shares import host_shares, rank_hosts, rank_shares
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Division, Gang, GangRank, rows_of, steps_per_epoch, total_steps
from gangline.runs.job import Job, MethodJob
from gangline.runs.record_versions import Record
from gangline.runs.step_schedule import Cadence, cadence
from gangline.strategies.base import AUTO, PlanHalf
from gangline.strategies.table import ALONE, DEFAULT, plan_half

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """What one rank does in every full step."""

    host: str
    share: int
    """Micro-batches; see `GangRank.share`."""
    percent: float
    """Part of the batch."""
    device: int = 0
    """Index of its GPU on the machine, where it has any."""
    peak_flops: float | None = None
    """See `GangRank.peak_flops`."""
    micro_batch_size: int | None = None
    """Samples of its forward passes at the most; None: the run's micro-batch, as all ranks have it."""
    activation_checkpointing: bool | None = None
    """Whether it recomputes activations; None: as the job says, as all ranks do."""
    activation_offloading: bool | None = None
    """Whether the inputs of layers that it recomputes lie in the machine's memory; None: as the job says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCount:
    """How much there is to read, known once the data is tokenised."""

    num_samples: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """The forecast for one rank."""

    allocated_bytes: int
    """Of tensors, at the worst instant."""
    process_bytes: int
    """Of the whole process: with the allocator's gaps, and what the libraries take."""
    free_bytes: int | None
    """What there was when it was looked at."""
    chance: float | None
    """That it fits."""
    compute_s: float | None
    """Of its micro-batches of a full step."""
    gpu: str | None = None
    """As NVML names it; None: it computes on the processor."""
    profile: str | None = None
    """`Profile.name` of the measurement behind `compute_s`; None: it is an estimate."""
    persistent_bytes: int | None = None
    """Of `allocated_bytes`, what lies there between steps: weights, gradients, optimizer. None: the plan is older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the plan says will happen; compared at the end with what did."""

    ranks: tuple[RankForecast, ...]
    step_s: float | None
    """None where the speed of a rank is not known."""
    step_low_s: float | None
    step_high_s: float | None
    communication_s: float | None
    exposed_s: float | None
    sent_bytes: float
    """In one step, by the rank that sends most."""
    tokens_per_sample: float
    """With which the step was reckoned."""
    source: str
    """Where the times are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Division, Record):
    """The decision about one job on one cluster."""

    job: str
    reason: str
    """Why this strategy."""
    method: str
    precision: str
    batch: int
    micro_batch: int
    ranks: tuple[PlannedRank, ...]
    """By global rank."""
    epochs: float | None
    steps: int | None
    """Optimizer steps in all; None until the samples are counted."""
    data: DataCount | None
    """None until the data is tokenised."""
    checkpoint_every_steps: int | None
    checkpoint_every_minutes: float | Literal["auto"] | None
    evaluates: bool
    """Whether there is anything to evaluate on."""
    evaluation_at_start: bool
    evaluation_every_steps: int | None
    checkpoint_every_epochs: float | None = None
    evaluation_every_epochs: float | None = None
    warmup_ratio: float | None = None
    """Where the job gives the warm-up as a part of all steps."""
    forecast: Forecast | None = None
    """None where the model's shape is not known."""
    divides: str = ""
    """Why this batch was chosen near the job's, or what is bad about the job's own; see `Dividing.words`."""
    notes: tuple[str, ...] = ()
    """What the user may want to know or change."""
    schema_version: int = SCHEMA_VERSION

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a full step, over all ranks."""
        return self.batch // self.micro_batch

    @property
    def has_own_settings(self) -> bool:
        """Whether ranks have a micro-batch and a recomputation of their own."""
        return any(rank.micro_batch_size is not None for rank in self.ranks)

    @property
    def saves(self) -> Cadence | None:
        """Steps after which it saves, minutes apart; None until samples are counted, where it counts in epochs."""
        return self._marks(self.checkpoint_every_steps, self.checkpoint_every_epochs)

    @property
    def evaluations(self) -> Cadence | None:
        """Steps after which it evaluates; None as for `saves`."""
        return self._marks(self.evaluation_every_steps, self.evaluation_every_epochs)

    def _marks(self, every_steps: int | None, every_epochs: float | None) -> Cadence | None:
        if every_epochs is None:
            return cadence(every_steps, None, steps_per_epoch=1)
        if self.data is None:
            return None
        return cadence(None, every_epochs, steps_per_epoch=steps_per_epoch(self.data.num_samples, self.batch))

    def gang(self, run_id: str, attempt: int, *, resume_step: int | None = None) -> Gang:
        """The gang of one attempt under this plan."""
        forecasts = self.forecast.ranks if self.forecast is not None else [None] * len(self.ranks)
        ranks = tuple(
            GangRank(
                host=rank.host,
                share=rank.share,
                device=rank.device,
                peak_flops=rank.peak_flops,
                planned_bytes=None if each is None or each.gpu is None else each.allocated_bytes,
                micro_batch_size=rank.micro_batch_size,
                activation_checkpointing=rank.activation_checkpointing,
                activation_offloading=rank.activation_offloading,
            )
            for rank, each in zip(self.ranks, forecasts, strict=True)
        )
        return Gang(
            run_id=run_id,
            attempt=attempt,
            ranks=ranks,
            resume_step=resume_step,
            **self.division(),
        )

    def with_data(self, job: Job, data: DataCount) -> Plan:
        """The same plan once the samples are counted."""
        steps = total_steps(data.num_samples, job.batch, epochs=job.epochs, steps=job.steps)
        return dataclasses.replace(self, data=data, steps=steps)


def make_plan(
    job: Job,
    cluster: Cluster,
    gpus: Mapping[str, Sequence[str]] | None = None,
    *,
    candidate: Candidate | None = None,
    divides: str = "",
    notes: Sequence[str] = (),
) -> Plan:
    """Decide how `job` runs on `cluster`. `steps` stays open where it needs the number of samples.

    gpus: the names of every host's GPUs, by host and index; the ranks of a machine take them in order. option: what was
    weighed for just these ranks, whose shares are taken; else they follow the words of the cluster file. divides: see
    `Plan`. notes: what else the user may want to know.
    """
    gpus = gpus or {}
    devices = devices_of(cluster, gpus)
    division = _division(job, candidate, cluster, shares_gpus=_shares_gpus(cluster, devices, gpus))
    shares = _told_shares(job, cluster, division.half) if candidate is None else candidate.shares
    ranks = _planned_ranks(job, cluster, devices, gpus, shares=shares)
    if candidate is not None and candidate.scenario.settings:
        ranks = tuple(_with_own(*each) for each in zip(ranks, candidate.rank_trainings, strict=True))
    return Plan(
        **division.division(),
        job=job.name,
        reason=_reason(job, division, ranks),
        method=_method(job.method),
        precision=job.precision,
        batch=job.batch,
        micro_batch=job.micro_batch,
        ranks=ranks,
        epochs=job.epochs,
        steps=job.steps,
        data=None,
        checkpoint_every_steps=job.checkpoint.every_steps,
        checkpoint_every_minutes=job.checkpoint.every_minutes,
        evaluates=job.data.evaluation is not None or job.data.evaluation_fraction > 0,
        evaluation_at_start=job.evaluation.at_start,
        evaluation_every_steps=job.evaluation.every_steps,
        checkpoint_every_epochs=job.checkpoint.every_epochs,
        evaluation_every_epochs=job.evaluation.every_epochs,
        warmup_ratio=job.schedule.warmup_ratio,
        forecast=None if candidate is None else _forecast(candidate),
        divides=divides,
        notes=(*_notes(ranks, shares_gpus=division.shares_gpus), *notes),
    )


Gpus = Mapping[str, Sequence[str]]


def _told_shares(job: Job, cluster: Cluster, half: PlanHalf) -> tuple[int, ...]:
    """As the cluster file says, where nothing was weighed."""
    count = job.batch // job.micro_batch
    if half.layers == "staged":
        return (count,) * sum(host.slots for host in cluster.hosts)
    return (host_shares if half.layers == "sliced" else rank_shares)(cluster, count)


def _forecast(candidate: Candidate) -> Forecast:
    time = candidate.time
    compute: Sequence[float | None] = [None] * len(candidate.needs)
    if time is not None:
        most = max(1, *candidate.shares)
        shares = zip(time.compute_s, candidate.shares, strict=True)
        compute = [each + time.inside_s * share / most for each, share in shares]  # as ranks will tell it
    ranks = tuple(
        RankForecast(
            allocated_bytes=need.memory.allocated_bytes,
            process_bytes=need.memory.process.likely,
            free_bytes=need.placement.free_bytes,
            chance=need.chance,
            compute_s=compute_s,
            gpu=need.placement.gpu,
            profile=None if model is None else model.profile,
            persistent_bytes=need.memory.persistent_bytes,
        )
        for need, compute_s, model in zip(candidate.needs, compute, candidate.scenario.models, strict=True)
    )
    return Forecast(
        ranks=ranks,
        step_s=None if time is None else time.total_s,
        step_low_s=None if time is None else time.low_s,
        step_high_s=None if time is None else time.high_s,
        communication_s=None if time is None else time.communication_s,
        exposed_s=None if time is None else time.exposed_s - time.inside_s,
        sent_bytes=candidate.traffic.sent_bytes,
        tokens_per_sample=candidate.query.tokens_per_sample,
        source=candidate.source,
    )


def _planned_ranks(
    job: Job, cluster: Cluster, devices: Sequence[int], gpus: Gpus, *, shares: Sequence[int]
) -> tuple[PlannedRank, ...]:
    count = job.batch // job.micro_batch
    return tuple(
        PlannedRank(
            host=host.name,
            share=share,
            percent=round(100 * share / count, 1),
            device=device,
            peak_flops=peak_flops(gpus[host.name][device]) if gpus.get(host.name) else None,
        )
        for host, share, device in zip(rank_hosts(cluster), shares, devices, strict=True)
    )


def _with_own(rank: PlannedRank, training: Training) -> PlannedRank:
    """With the settings that it alone has."""
    return dataclasses.replace(
        rank,
        micro_batch_size=training.micro_batch,
        activation_checkpointing=training.checkpointing,
        activation_offloading=training.offloading,
    )


def devices_of(cluster: Cluster, gpus: Gpus) -> list[int]:
    """The GPU of every rank. Hosts with one address are one machine, whose GPUs their ranks take in order."""
    taken: dict[str, int] = {}
    devices = []
    for host in rank_hosts(cluster):
        position = taken.get(host.address, 0)
        taken[host.address] = position + 1
        devices.append(position % (len(gpus.get(host.name, ())) or 1))
    return devices


def _shares_gpus(cluster: Cluster, devices: Sequence[int], gpus: Gpus) -> bool:
    places = [
        (host.address, device) for host, device in zip(rank_hosts(cluster), devices, strict=True) if gpus.get(host.name)
    ]
    return len(set(places)) < len(places)


def _division(job: Job, candidate: Candidate | None, cluster: Cluster, *, shares_gpus: bool) -> Division:
    """Of the weighed option, or the one that the job asks for."""
    num_ranks = sum(host.slots for host in cluster.hosts)
    half = plan_half(_kind(job, candidate, cluster, num_ranks=num_ranks))
    way = PlannedStrategy(kind=half.kind, world_size=num_ranks) if candidate is None else candidate.strategy
    several = len(cluster.hosts) > 1 if half.layers == "sliced" else num_ranks > 1
    return Division(
        strategy=half.kind,
        stages=way.stages,
        replicas=way.replicas,
        reshard=way.reshard,
        eager=way.eager,
        moving_shares=several and half.moves_shares and all(host.share is None for host in cluster.hosts),
        shares_gpus=shares_gpus,
    )


def _kind(job: Job, candidate: Candidate | None, cluster: Cluster, *, num_ranks: int) -> str:
    """The strategy of the weighed option, or the one that the job asks for; too few ranks for it have the default."""
    asked = job.strategy.kind
    if asked != AUTO and plan_half(asked).in_rounds:
        return asked  # one host alone has rounds as well, and others may join it
    weighed = asked if candidate is None else candidate.strategy.kind
    if weighed == AUTO:
        return DEFAULT
    half = plan_half(plan_half(weighed).runs_as or weighed)
    on_host = max(host.slots for host in cluster.hosts)
    enough = num_ranks >= half.capabilities.min_ranks and on_host >= half.capabilities.min_ranks_on_host
    return half.kind if enough else DEFAULT


def _method(method: MethodJob) -> str:
    if method.kind == "full":
        return method.kind
    bits = " over 8 bits" if method.kind == "qlora" and method.bits == 8 else ""
    return f"{method.kind}{bits}, rank {method.rank}"


def _reason(job: Job, division: Division, ranks: Sequence[PlannedRank]) -> str:
    half = division.half
    if len(ranks) == 1 and not half.in_rounds:
        return plan_half(ALONE).meaning
    rows = [division.stages[row.start : row.stop] for row in rows_of(division.stages, replicas=division.replicas)]
    num_hosts = len({rank.host for rank in ranks})
    return half.reason(job.strategy, num_ranks=len(ranks), num_hosts=num_hosts, rows=rows)


def _notes(ranks: tuple[PlannedRank, ...], *, shares_gpus: bool) -> tuple[str, ...]:
    notes = []
    if idle := [str(number) for number, rank in enumerate(ranks) if rank.share == 0]:
        notes.append(
            f"no work for rank {', '.join(idle)}: raise batch / micro_batch above {len(ranks)}, or use fewer slots"
        )
    if shares_gpus:
        notes.append(
            "ranks share a GPU, so gradients travel over gloo: use this for trials only; one slot per GPU is faster"
        )
    return tuple(notes)
