"""The gang of one attempt: which rank runs where, with which share. Written by the controller, read by every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import UsageError
from gangline.runs.job import Job
from gangline.runs.record_versions import Record
from gangline.strategies.base import PlanHalf
from gangline.strategies.table import DEFAULT, plan_half

# How the ranks of a gang share the work: decided once by the plan, and the same in every attempt that follows it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What a plan and a gang both say. Their records have its fields among their own."""

    strategy: str = DEFAULT
    """A row of `strategies.table.STRATEGIES`."""
    stages: tuple[int, ...] = ()
    """Layers of each rank, in order, where ranks are stages of pipelines; those of each pipeline sum to the model's
    depth. None where the model's shape is not known: such a plan starts nothing."""
    replicas: int = 1
    """Pipelines side by side, one after the other in the order of ranks; see `runs.rows`."""
    reshard: bool = True
    """fsdp: weights of other ranks are given up after forward, and travel again for backward."""
    eager: bool = False
    """Pipelines: see `runs.schedule.ahead`."""
    moving_shares: bool = False
    """Shares follow the measured speeds of ranks, at the start and in every step; otherwise they stay as they are."""
    shares_gpus: bool = False
    """More ranks than GPUs on a machine: NCCL refuses that, so gradients go over gloo."""

    @property
    def half(self) -> PlanHalf:
        """The plan half of the strategy."""
        return plan_half(self.strategy)

    def division(self) -> dict[str, Any]:
        """These fields alone, to make another record from."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Division)}


# Splitting whole micro-batches among ranks: the arithmetic that controller and ranks must do alike.


def split_whole(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut `total` indivisible items in proportion to `weights` (largest remainder; ties go to the lower index).

    The parts sum to `total`; a weight of 0 gets 0. Raises ValueError when no weight is positive.
    """
    weight_sum = math.fsum(weights)
    if weight_sum <= 0 or min(weights) < 0:
        raise ValueError(f"weights must not be negative, and one must be positive: {list(weights)}")
    exact = [total * weight / weight_sum for weight in weights]
    parts = [math.floor(value) for value in exact]
    by_remainder = sorted(
        (index for index, weight in enumerate(weights) if weight > 0),
        key=lambda index: (parts[index] - exact[index], index),
    )
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def shares_by_time(seconds: Sequence[float], total: int, *, least: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut `total` equal pieces of work so that the last rank to finish finishes as early as possible.

    seconds: of one piece, by rank; least: pieces that a rank gets in any case, none if they are more than there are.
    Each further piece goes to the rank that would have done it first, which gives the smallest possible maximum of
    pieces * seconds. Ties go to the faster rank, then to the lower number. Raises ValueError for times that are not
    positive numbers.
    """
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise ValueError(f"seconds of a micro-batch must be positive: {list(seconds)}")
    held = list(least) if least is not None and sum(least) <= total else [0] * len(seconds)
    # what would be done in this time if pieces could be cut: every rank has all of its whole ones in any case
    time_s = (total - sum(held)) / math.fsum(1 / each for each in seconds)
    shares = [max(count, math.floor(time_s / each)) for count, each in zip(held, seconds, strict=True)]
    queue = [((shares[rank] + 1) * each, each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(total - sum(shares)):
        _, each, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * each, each, rank))
    return tuple(shares)


def split_layers(seconds: Sequence[float], num_layers: int, *, most: Sequence[int]) -> tuple[int, ...] | None:
    """Consecutive layers of every pipeline stage, so that the slowest stage is as fast as possible.

    seconds: of one layer, by rank; most: layers that a rank has memory for. Each rank gets one layer at least. None
    where the layers do not fit.
    """
    if len(seconds) > num_layers or min(most, default=0) < 1 or sum(most) < num_layers:
        return None
    stages = [1] * len(seconds)
    queue = [(2 * each, rank) for rank, each in enumerate(seconds) if most[rank] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - len(seconds)):
        rank = queue[0][1]
        stages[rank] += 1
        if stages[rank] < most[rank]:
            heapq.heapreplace(queue, ((stages[rank] + 1) * seconds[rank], rank))
        else:
            heapq.heappop(queue)
    return tuple(stages)


def nearby(wish: int) -> tuple[int, int]:
    """The least and the most samples that are about `wish`: from 3/4 to 4/3 of it."""
    return -(-3 * wish // 4), 4 * wish // 3


def whole_counts(wish: int, micro_batch: int) -> range:
    """Numbers of micro-batches whose samples are about `wish`; empty where there are none."""
    low, high = nearby(wish)
    return range(-(-low // micro_batch), high // micro_batch + 1)


def whole_count(wish: int, micro_batch: int) -> int:
    """The number of micro-batches that is nearest to `wish` samples, one at least; of two, the smaller."""
    below, counts = wish // micro_batch, whole_counts(wish, micro_batch)
    nearest = max(1, below + (2 * (wish - below * micro_batch) > micro_batch))
    return min(max(nearest, counts[0]), counts[-1]) if counts else nearest


def steps_per_epoch(num_samples: int, batch: int) -> int:
    """Optimizer steps in one pass over the data; the last one may be short."""
    return -(-num_samples // batch)


def total_steps(num_samples: int, batch: int, *, epochs: float | None, steps: int | None) -> int:
    """Optimizer steps of a whole run: `steps` as given, or enough for `epochs`."""
    if steps is not None:
        return steps
    return max(1, math.ceil((epochs or 1.0) * steps_per_epoch(num_samples, batch) - 1e-9))


# Pipelines side by side: which ranks are one, and what becomes of them where some are gone. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRows:
    """All pipelines of a gang, by the ranks that take part."""

    ranks: tuple[int, ...]
    """As they were numbered before."""
    stages: tuple[int, ...]
    """Layers of each of them."""
    shares: tuple[int, ...]
    """Micro-batches of each of them, which are those of its pipeline."""
    replicas: int


def rows_of(stages: Sequence[int], *, replicas: int) -> tuple[range, ...]:
    """Ranks of every pipeline; stages: layers of each rank, of all pipelines one after the other."""
    depth, begin, held = sum(stages) // replicas, 0, 0
    rows = []
    for rank, layers in enumerate(stages):
        held += layers
        if held == depth:
            rows.append(range(begin, rank + 1))
            begin, held = rank + 1, 0
    return tuple(rows)


def rows_left(stages: Sequence[int], shares: Sequence[int], left: Sequence[int], *, replicas: int) -> PipelineRows:
    """The pipelines of the ranks that are left, in their order.

    As many as possible in which nobody has more layers than before, for that is what memory is known to suffice for;
    where there is not one such, all of them are one, in proportion to the layers that they had. Ranks that are more
    than layers take no part.
    """
    depth = sum(stages) // replicas
    total = sum(shares[row[0]] for row in rows_of(stages, replicas=replicas))
    rows: list[list[int]] = [[]]
    for rank in left:
        if sum(stages[each] for each in rows[-1]) >= depth:
            rows.append([])
        rows[-1].append(rank)
    if len(rows) > 1 and sum(stages[each] for each in rows[-1]) < depth:
        rows[-2:] = [[*rows[-2], *rows[-1]][:depth]]
    cut = [_cut(depth, [stages[rank] for rank in row]) for row in rows]
    # before, ranks of a pipeline took about as long for their layers, and pipelines for their shares
    paces = [
        min(stages[rank] * shares[rank] / layers for rank, layers in zip(row, new, strict=True))
        for row, new in zip(rows, cut, strict=True)
    ]
    work_split = split_whole(total, paces if any(paces) else [1.0] * len(rows))
    return PipelineRows(
        ranks=tuple(rank for row in rows for rank in row),
        stages=tuple(layers for row in cut for layers in row),
        shares=tuple(share for row, share in zip(rows, work_split, strict=True) for _ in row),
        replicas=len(rows),
    )


def _cut(depth: int, before: Sequence[int]) -> tuple[int, ...]:
    """All layers, in proportion to what ranks had before; one for each at least."""
    if sum(before) <= depth:
        return split_whole(depth, before)
    more = split_whole(depth - len(before), [layers - 1 for layers in before])
    return tuple(1 + layers for layers in more)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRank:
    """One process of the gang."""

    host: str
    share: int
    """Micro-batches of every full step that this rank does; the shares of all ranks sum to batch / micro_batch. All
    ranks of a pipeline, and under tp all of a host, do the same ones: each has the share of its pipeline or host."""
    device: int = 0
    """Index of this rank's GPU on its machine, where there is any."""
    peak_flops: float | None = None
    """Dense half-precision peak of the device in FLOP/s; None: unknown, and then there is no MFU."""
    planned_bytes: int | None = None
    """Of tensors on its GPU at the most, according to the plan; None: not known, or it has no GPU."""
    micro_batch_size: int | None = None
    """Samples of a forward pass of this rank at the most, a multiple of the run's micro-batch, of which a pass joins
    several; None, as in older records: the run's micro-batch."""
    activation_checkpointing: bool | None = None
    """Whether this rank computes activations again during backward; None, as in older records: as the job says."""
    activation_offloading: bool | None = None
    """Whether the inputs of the layers that it computes again lie in the machine's memory; None: as the job says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """The smaller settings with which a rank goes on that ran out of memory; None: as before."""

    rank: int
    micro_batch_size: int | None = None
    activation_checkpointing: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang(Division, Record):
    """All ranks of one attempt, by global rank; ranks of one host are adjacent."""

    run_id: str
    attempt: int
    ranks: tuple[GangRank, ...]
    resume_step: int | None = None
    """Optimizer step of the committed checkpoint to start from; None: from the beginning."""
    lacking: tuple[str, ...] = ()
    """Hosts that do not have that checkpoint: their ranks get the state from one whose host has it."""
    init_timeout_s: float = 60.0
    """How long a rank waits for the others to join."""
    collective_timeout_s: float = 1800.0
    """How long a rank waits in an exchange: others may load or save. Who hangs is found earlier, by the supervisor."""
    micro_batch: int | None = None
    """Samples of the run's micro-batch, in which shares count, where it is another one than the job says: ranks have
    sizes of their own, or memory did not suffice; None: as the job says."""
    token: str = ""
    """A secret of the run: its ranks show each other a digest before they join; "": none, as in old records."""

    @property
    def meeting(self) -> str:
        """The digest of the token for this attempt; "" without a token. Anybody may see it: it tells nothing."""
        words = f"{self.token} {self.run_id} {self.attempt}".encode()
        return hashlib.sha256(words).hexdigest() if self.token else ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def settings_of(self, rank: int, job: Job) -> Job:
        """The job as one rank does it: with its own recomputation, and the run's micro-batch, in which all count."""
        own, moves = self.ranks[rank].activation_checkpointing, self.ranks[rank].activation_offloading
        return dataclasses.replace(
            job,
            micro_batch=self.micro_batch or job.micro_batch,
            activation_checkpointing=job.activation_checkpointing if own is None else own,
            activation_offloading=job.activation_offloading if moves is None else moves,
        )

    def pass_lengths(self, micro_batch: int) -> tuple[int, ...]:
        """Micro-batches that a forward pass joins at the most, by rank. micro_batch: samples of the run's.

        Raises ValueError for a size that is no multiple of it.
        """
        sizes = [rank.micro_batch_size or micro_batch for rank in self.ranks]
        if any(size < micro_batch or size % micro_batch for size in sizes):
            raise ValueError(f"expected sizes that are multiples of micro_batch {micro_batch}, found {sizes}")
        return tuple(size // micro_batch for size in sizes)

    def require_settings(self, job: Job) -> None:
        """Raises UsageError where ranks have settings of their own that the strategy, or the run, does not take.

        job: the run's, as all ranks have it.
        """
        micro_batch = self.micro_batch or job.micro_batch
        sizes = sorted({rank.micro_batch_size or micro_batch for rank in self.ranks})
        recomputing = {rank.activation_checkpointing for rank in self.ranks} - {None, job.activation_checkpointing}
        if any(size < micro_batch or size % micro_batch for size in sizes):
            raise UsageError(
                f"micro_batch: ranks count their work in micro-batches of {micro_batch}",
                seen=f"expected multiples of {micro_batch}, found {', '.join(map(str, sizes))}",
                fix="plan again: gangline plan, then gangline train",
            )
        if self.world_size == 1:
            return
        able = self.half.rank_settings
        if (sizes != [micro_batch] and able != "all") or (recomputing and not able):
            both = "" if able else " and one activation_checkpointing"
            raise UsageError(
                f"strategy: {self.strategy} trains with one micro-batch{both} for all ranks",
                seen=f"sizes {', '.join(map(str, sizes))} over micro-batches of {micro_batch}"
                + ("; activation_checkpointing on some ranks" if recomputing and not able else ""),
                fix="write strategy: ddp, or give all ranks the settings of the job",
            )
        self._require_offloading(job)
        self._require_groups(job)

    def _require_offloading(self, job: Job) -> None:
        """What is moved are inputs of layers that are computed again, where the strategy knows of that."""
        if self.half.capabilities.supports("activation_offloading", value=True, given={}):
            return
        moving = [number for number, rank in enumerate(self.ranks) if rank.activation_offloading]
        if moving and not job.activation_offloading:
            raise UsageError(
                f"strategy: {self.strategy} does not offload activations",
                seen=f"activation_offloading on rank {', '.join(map(str, moving[:8]))}",
                fix="plan again: gangline plan, then gangline train",
            )

    def _require_groups(self, job: Job) -> None:
        """Ranks that compute every layer together do so twice, or none of them does."""
        if self.half.layers != "sliced":
            return
        for host in self.hosts:
            found = {self.settings_of(rank, job).activation_checkpointing for rank in self.ranks_on(host)}
            if len(found) > 1:
                raise UsageError(
                    f"strategy: {self.strategy} computes every layer with all ranks of {host} together",
                    seen="activation_checkpointing on some of them alone",
                    fix="give all ranks of a host one activation_checkpointing",
                )

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, head first."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    def ranks_on(self, host: str) -> list[int]:
        """Global ranks of one host."""
        return [rank for rank, each in enumerate(self.ranks) if each.host == host]

    def num_ranks(self, host: str) -> int:
        """Ranks of one host."""
        return len(self.ranks_on(host))

    @property
    def replica_groups(self) -> tuple[int, ...]:
        """By rank: equal numbers for those that do the same micro-batches: a pipeline, or under tp a host."""
        layers = self.half.layers
        if layers == "staged":
            return tuple(number for number, row in enumerate(self.rows) for _ in row)
        if layers == "sliced":
            return tuple(self.hosts.index(rank.host) for rank in self.ranks)
        return tuple(range(self.world_size))

    @property
    def rows(self) -> tuple[range, ...]:
        """Ranks of every pipeline."""
        return rows_of(self.stages, replicas=self.replicas) if self.replicas > 1 else (range(self.world_size),)

    def row_of(self, rank: int) -> range:
        """Ranks of the pipeline that this one is in."""
        return next(row for row in self.rows if rank in row)

    def on(
        self, hosts: Collection[str], *, attempt: int, resume_step: int | None, lacking: tuple[str, ...] = ()
    ) -> Gang:
        """The gang of a later attempt on some of these hosts, who share the others' work in proportion to their own.

        In a pipeline that are layers: whoever is left takes part in as many micro-batches as before. Of several
        pipelines those that are broken become parts of others: see `rows_left`.
        """
        left = [number for number, rank in enumerate(self.ranks) if rank.host in hosts]
        stages, replicas = self.stages, 1
        if self.half.layers == "staged":
            rows = rows_left(stages, [rank.share for rank in self.ranks], left, replicas=self.replicas)
            left, own, stages, replicas = list(rows.ranks), rows.shares, rows.stages, rows.replicas
        else:
            own = self._divided_by_replica_group(left)
        ranks = [self.ranks[number] for number in left]
        same = len(ranks) == len(self.ranks)  # else what a rank needs may be other than was planned
        work_split = tuple(
            dataclasses.replace(rank, share=share, planned_bytes=rank.planned_bytes if same else None)
            for rank, share in zip(ranks, own, strict=True)
        )
        return dataclasses.replace(
            self,
            attempt=attempt,
            ranks=work_split,
            stages=stages,
            replicas=replicas,
            eager=self.eager and same,  # with more layers each there is less room for micro-batches
            resume_step=resume_step,
            lacking=lacking,
        )

    def _divided_by_replica_group(self, left: Sequence[int]) -> tuple[int, ...]:
        """Shares of the ranks that are left; replica groups are left whole."""
        replica_groups = self.replica_groups
        shares = {replica_group: rank.share for replica_group, rank in zip(replica_groups, self.ranks, strict=True)}
        own = {replica_groups[number] for number in left}
        work_split = _divided(
            list(shares.values()), [place for place, replica_group in enumerate(shares) if replica_group in own]
        )
        by_replica_group = dict(
            zip([replica_group for replica_group in shares if replica_group in own], work_split, strict=True)
        )
        return tuple(by_replica_group[replica_groups[number]] for number in left)

    def with_settings(self, own: OwnSettings, job: Job) -> Gang:
        """The same work, of which one rank does its part with smaller settings and the others do theirs as before.

        Shares count the largest micro-batches of which all sizes are multiples. Ranks that compute every layer
        together all get the settings. job: the run's, as all ranks have it.
        """
        before = self.micro_batch or job.micro_batch
        unit = before if own.micro_batch_size is None else math.gcd(before, own.micro_batch_size)
        ranks = [
            dataclasses.replace(
                rank, share=rank.share * (before // unit), micro_batch_size=rank.micro_batch_size or before
            )
            for rank in self.ranks
        ]
        again = own.activation_checkpointing
        sliced = self.half.layers == "sliced"
        for number in self.ranks_on(ranks[own.rank].host) if sliced else [own.rank]:
            named = ranks[number]
            ranks[number] = dataclasses.replace(
                named,
                planned_bytes=None,
                micro_batch_size=own.micro_batch_size or named.micro_batch_size,
                activation_checkpointing=named.activation_checkpointing if again is None else again,
            )
        return dataclasses.replace(self, ranks=tuple(ranks), micro_batch=unit)

    def in_smaller(self, micro_batch: int, *, before: int) -> Gang:
        """The same work in smaller micro-batches, of which every rank does more. before: their size, a multiple."""
        times = before // micro_batch
        ranks = [
            dataclasses.replace(rank, share=rank.share * times, planned_bytes=None, micro_batch_size=None)
            for rank in self.ranks
        ]
        return dataclasses.replace(self, ranks=tuple(ranks), micro_batch=micro_batch, eager=False)


def _divided(parts: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
    """What all ranks had, among those that are left, in proportion to their own: nobody has less than before."""
    own = [parts[number] for number in left]
    return split_whole(sum(parts), own if any(own) else [1] * len(own))


# Which part of the trained state the ranks of every host hold, in words: of one gang, and of a checkpoint in parts.


def held_by(gang: Gang) -> dict[str, str]:
    """Host -> what its ranks hold of state that lies in parts; {} where every host has all of it.

    Whether adapters are trained under fsdp, which are whole on every rank, is not known here.
    """
    hosts = gang.hosts
    half = gang.half
    if len(hosts) == 1 or not half.parts_of_tensors:
        return {}
    if half.shards_per_host and len({gang.num_ranks(host) for host in hosts}) == 1 and gang.num_ranks(hosts[0]) > 1:
        return {}
    if half.layers == "staged":
        found = layers_on([rank.host for rank in gang.ranks], gang.stages, replicas=gang.replicas)
        depth = sum(gang.stages) // gang.replicas
        if all(len(layers) == depth for layers in found.values()):
            return {}
        return {host: f"layers {_ranges(layers)} of {depth}" for host, layers in found.items()}
    numbers = {host: gang.ranks_on(host) for host in hosts}
    return {host: _words(gang, numbers[host][0], numbers[host][-1]) for host in hosts}


def layers_on(hosts: Sequence[str], stages: Sequence[int], *, replicas: int) -> dict[str, list[int]]:
    """Host -> layers that its ranks have in pipelines, each once, from 1 on. hosts, stages: by rank."""
    found: dict[str, set[int]] = {host: set() for host in hosts}
    for row in rows_of(stages, replicas=replicas):
        before = 0
        for rank in row:
            found[hosts[rank]] |= set(range(before + 1, before + stages[rank] + 1))
            before += stages[rank]
    return {host: sorted(layers) for host, layers in found.items()}


def _ranges(layers: Sequence[int]) -> str:
    """For instance: 1 to 3 and 7 to 9."""
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return " and ".join(f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True))


def _words(gang: Gang, first: int, last: int) -> str:
    """Of adjacent ranks."""
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"the rows of {ranks} of {gang.world_size}"
