"""The plan: what will be done, by whom, and why. It says only what was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gangline.catalog.gpus import peak_flops
from gangline.planning.option import IN_STEP, Option
from gangline.planning.shares import host_shares, rank_hosts, rank_shares, rows_named
from gangline.runs.cluster import Cluster
from gangline.runs.deal import total_steps
from gangline.runs.decode import build
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import ZERO, Job, MethodJob, StrategyJob

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """What one rank does in every full step."""

    host: str
    share: int
    """Micro-batches; see `GangRank.share`."""
    percent: float
    """Part of the batch."""
    slowdown: float = 1.0
    """Trials only: see `Host.slowdown`."""
    device: int = 0
    """Index of its GPU on the machine, where it has any."""
    peak_flops: float | None = None
    """See `GangRank.peak_flops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCount:
    """How much there is to read, known once the data is tokenised."""

    num_samples: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """What was foreseen for one rank."""

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
class Plan:
    """The decision about one job on one cluster."""

    job: str
    strategy: Literal["ddp", "fsdp", "hsdp", "zero-1", "zero-2", "zero-3", "tp", "pipeline", "local-sgd"]
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
    reshard: bool = True
    """See `Gang.reshard`."""
    stages: tuple[int, ...] = ()
    """See `Gang.stages`; none where layers cannot be cut, for the model's shape is not known: such a plan starts
    nothing."""
    replicas: int = 1
    """See `Gang.replicas`."""
    eager: bool = False
    """See `Gang.eager`."""
    moving_shares: bool = False
    """Shares follow the measured speeds; otherwise the cluster file says who does how much."""
    shares_gpus: bool = False
    """More ranks than GPUs on a machine: see `Gang.shares_gpus`."""
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

    def gang(self, run_id: str, attempt: int, *, resume_step: int | None = None) -> Gang:
        """The gang of one attempt under this plan."""
        foreseen = self.forecast.ranks if self.forecast is not None else [None] * len(self.ranks)
        ranks = tuple(
            GangRank(
                host=rank.host,
                share=rank.share,
                slowdown=rank.slowdown,
                device=rank.device,
                peak_flops=rank.peak_flops,
                foreseen_bytes=None if each is None or each.gpu is None else each.allocated_bytes,
            )
            for rank, each in zip(self.ranks, foreseen, strict=True)
        )
        return Gang(
            run_id=run_id,
            attempt=attempt,
            ranks=ranks,
            resume_step=resume_step,
            strategy=self.strategy,
            reshard=self.reshard,
            stages=self.stages,
            replicas=self.replicas,
            eager=self.eager,
            moving_shares=self.moving_shares,
            shares_gpus=self.shares_gpus,
        )

    def with_data(self, job: Job, data: DataCount) -> Plan:
        """The same plan once the samples are counted."""
        steps = total_steps(data.num_samples, job.batch, epochs=job.epochs, steps=job.steps)
        return dataclasses.replace(self, data=data, steps=steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        return build(Plan, data)


def make_plan(
    job: Job,
    cluster: Cluster,
    gpus: Mapping[str, Sequence[str]] | None = None,
    *,
    option: Option | None = None,
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
    slots = max(host.slots for host in cluster.hosts)
    strategy, count = _strategy(job, option, num_ranks=len(devices), slots=slots), job.batch // job.micro_batch
    shares = rank_shares(cluster, count) if option is None else option.shares
    if strategy == "pipeline" and option is None:
        shares = (count,) * len(devices)
    elif strategy == "tp" and option is None:
        shares = host_shares(cluster, count)
    ranks = _planned_ranks(job, cluster, devices, gpus, shares=shares)
    weighed = option.strategy if option is not None and strategy == "pipeline" else None
    several = len(cluster.hosts) > 1 if strategy == "tp" else len(ranks) > 1
    moving = several and strategy not in (*IN_STEP, *ZERO, "pipeline")
    return Plan(
        job=job.name,
        strategy=strategy,
        reshard=option is None or option.strategy.reshard,
        stages=weighed.stages if weighed is not None else (),
        replicas=weighed.replicas if weighed is not None else 1,
        eager=weighed is not None and weighed.eager,
        reason=_reason(job, strategy, ranks, rows=weighed.rows if weighed is not None else ()),
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
        moving_shares=moving and all(host.share is None for host in cluster.hosts),
        shares_gpus=_shares_gpus(cluster, devices, gpus),
        forecast=None if option is None else _forecast(option),
        divides=divides,
        notes=(*_notes(ranks, shares_gpus=_shares_gpus(cluster, devices, gpus)), *notes),
    )


Gpus = Mapping[str, Sequence[str]]


def _forecast(option: Option) -> Forecast:
    time = option.time
    compute: Sequence[float | None] = [None] * len(option.needs)
    if time is not None:
        most = max(1, *option.shares)
        shares = zip(time.compute_s, option.shares, strict=True)
        compute = [each + time.inside_s * share / most for each, share in shares]  # as ranks will tell it
    ranks = tuple(
        RankForecast(
            allocated_bytes=need.memory.allocated_bytes,
            process_bytes=need.memory.process.likely,
            free_bytes=need.seat.free_bytes,
            chance=need.chance,
            compute_s=compute_s,
            gpu=need.seat.gpu,
            profile=profile,
            persistent_bytes=need.memory.persistent_bytes,
        )
        for need, compute_s, profile in zip(option.needs, compute, option.profiles, strict=True)
    )
    return Forecast(
        ranks=ranks,
        step_s=None if time is None else time.total_s,
        step_low_s=None if time is None else time.low_s,
        step_high_s=None if time is None else time.high_s,
        communication_s=None if time is None else time.communication_s,
        exposed_s=None if time is None else time.exposed_s - time.inside_s,
        sent_bytes=option.traffic.sent_bytes,
        tokens_per_sample=option.tokens_per_sample,
        source=option.source,
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
            slowdown=host.slowdown,
            device=device,
            peak_flops=peak_flops(gpus[host.name][device]) if gpus.get(host.name) else None,
        )
        for host, share, device in zip(rank_hosts(cluster), shares, devices, strict=True)
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


Kind = Literal["ddp", "fsdp", "hsdp", "zero-1", "zero-2", "zero-3", "tp", "pipeline", "local-sgd"]


def _strategy(job: Job, option: Option | None, *, num_ranks: int, slots: int) -> Kind:
    """What was weighed, or what the job asks for; with one rank all are one. slots: ranks of a host, at the most."""
    weighed = job.strategy.kind if option is None else option.strategy.kind
    kinds: dict[str, Kind] = {"fsdp": "fsdp", "hsdp": "hsdp"}
    if slots > 1:
        kinds["tp"] = "tp"
    if num_ranks > 1:
        kinds |= {"pipeline": "pipeline", "zero-1": "zero-1", "zero-2": "zero-2", "zero-3": "zero-3"}
    return "local-sgd" if job.strategy.kind == "local-sgd" else kinds.get(weighed, "ddp")


def _method(method: MethodJob) -> str:
    if method.kind == "full":
        return method.kind
    bits = " over 8 bits" if method.kind == "qlora" and method.bits == 8 else ""
    return f"{method.kind}{bits}, rank {method.rank}"


def _offloaded(job: StrategyJob) -> str:
    if job.offload_to is not None:
        return f", and of it optimizer on the machines' disks, in {job.offload_to}"
    return f", and of it {' and '.join(job.offload)} in the machines' memory" if job.offload else ""


def _reason(job: Job, strategy: Kind, ranks: Sequence[PlannedRank], *, rows: Sequence[Sequence[int]]) -> str:
    num_ranks, asked = len(ranks), job.strategy
    if asked.kind == "local-sgd":
        hosts = len({rank.host for rank in ranks})
        apart = f"each of the {hosts} hosts trains apart" if hosts > 1 else "the one host trains by itself"
        return (
            f"{apart} for {asked.inner_steps} steps, then changes of weights are averaged ({asked.payload}); "
            "NOT the same numbers as one big machine"
        )
    if num_ranks == 1:
        return "one rank holds the model and does the whole batch"
    if strategy in ZERO:
        held = {"zero-1": "optimizer states", "zero-2": "gradients and optimizer states", "zero-3": "all state"}
        return f"DeepSpeed has {held[strategy]} in parts over the {num_ranks} ranks{_offloaded(asked)}"
    if strategy in IN_STEP:
        among = "the ranks of every host have" if strategy == "hsdp" else f"the {num_ranks} ranks have"
        off = ", from the machines' memory" if asked.offload else ""
        return f"{among} one copy of the model between them; its layers travel for every micro-batch{off}"
    if strategy in ("tp", "pipeline"):
        return _layers_reason(strategy, ranks, rows=rows)
    return f"each of the {num_ranks} ranks holds the whole model; only the gradients of trained weights travel"


def _layers_reason(strategy: Kind, ranks: Sequence[PlannedRank], *, rows: Sequence[Sequence[int]]) -> str:
    """Where layers are cut, or dealt."""
    if strategy == "pipeline":
        named = f" ({rows_named(rows)})" if rows else ""
        several = f"; gradients travel between the {len(rows)} pipelines" if len(rows) > 1 else ""
        return f"every rank holds some of the layers{named}; activations travel from one to the next{several}"
    across = "; gradients travel between hosts" if len({rank.host for rank in ranks}) > 1 else ""
    return f"the ranks of every host compute each layer together, some columns and rows of it each{across}"


def _notes(ranks: tuple[PlannedRank, ...], *, shares_gpus: bool) -> tuple[str, ...]:
    notes = []
    if idle := [str(number) for number, rank in enumerate(ranks) if rank.share == 0]:
        notes.append(
            f"no work for rank {', '.join(idle)}: raise batch / micro_batch above {len(ranks)}, or use fewer slots"
        )
    if shares_gpus:
        notes.append("ranks share a GPU, so gradients travel over gloo: for trials only; one slot per GPU is faster")
    return tuple(notes)
