"""`bench compute`: how fast every rank computes a job's model, all at the same time; kept for the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.bench.torchrun import BenchHosts
from gangline.inventory.measured import save_profile
from gangline.inventory.pairs import Skipped
from gangline.inventory.probe import now
from gangline.planner.architecture import Architecture
from gangline.planner.calibration import (
    Profile,
    ProfileKey,
    TimedBatch,
    architecture_digest,
    fit_compute,
    kernel_words,
    method_words,
    with_optimizer,
)
from gangline.planner.shares import rank_hosts
from gangline.planner.traffic import trained_weights
from gangline.planner.training import Training
from gangline.runs.decode import known_part
from gangline.runs.job import Job
from gangline.strategies.base import AUTO
from gangline.strategies.table import plan_half

SHORT = 4
"""The smallest point is so much shorter than a sample: it shows the floor."""
LEAST_TOKENS = 16
BUILD_S = 120
"""How long it may take to draw the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job's model and method, which are measured."""

    job: Job
    training: Training
    whole: Architecture
    copy: Architecture
    copy_config: Mapping[str, Any]
    """The contents of config.json of the copy."""
    by_module: bool = False
    """See `weights_by_module`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """One rank's part of the measurement."""

    host: str
    rank: int
    profile: Profile
    fused_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """The speeds of all ranks that were measured, and what was left out."""

    training: Training
    ranks: tuple[RankSpeed, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds are those of the job's own micro-batch."""
        tokens, length = self.training.tokens, self.training.sequence_length
        rows = [
            {**dataclasses.asdict(each), "micro_batch_s": each.profile.compute.micro_batch_s(tokens, length)}
            for each in self.ranks
        ]
        return {
            "training": dataclasses.asdict(self.training),
            "ranks": [{**row, "tokens_per_s": tokens / row["micro_batch_s"]} for row in rows],
            "skipped": [dataclasses.asdict(each) for each in self.skipped],
        }


def measure_compute(
    hosts: BenchHosts, work: Work, *, home: Path, seconds: float, report: Callable[[str], None]
) -> MeasuredSpeeds:
    """Measure, keep and return it. Measurements that are not possible are listed with the reason."""
    report("starting ranks, which import torch")
    order = {
        "job": work.job.to_json(),
        "config": work.copy_config,
        "layers": work.copy.num_layers,
        "points": points_of(work.training),
        "by_module": work.by_module,
        "seconds": seconds,
    }
    gang = hosts.run_ranks("calibrate", order, work_s=BUILD_S + seconds)
    records = gang.records()
    found = tuple(_speeds(hosts, work, records))
    tokens, length = work.training.tokens, work.training.sequence_length
    # cards of one kind in one host share a profile; a step waits for the slowest of them
    for speed in sorted(found, key=lambda each: each.profile.compute.micro_batch_s(tokens, length)):
        save_profile(home, speed.profile)
    skipped = [
        Skipped(what=record["what"], why=record.get("why", record.get("seen", "")))
        for record in records
        if record["kind"] in {"skipped", "error"}
    ]
    if gang.first_failure:
        host, why = gang.first_failure
        skipped.append(Skipped(what=host, why=why))
    if not found and not skipped:
        skipped.append(Skipped(what="all ranks", why="none said anything"))
    return MeasuredSpeeds(training=work.training, ranks=found, skipped=tuple(skipped))


def weights_by_module(strategy: str, *, num_ranks: int) -> bool:
    """Whether ranks of a strategy have weights by module, without which a kernel may do; AUTO: it is not known."""
    return num_ranks > 1 and strategy != AUTO and plan_half(strategy).capabilities.weights_by_module


def points_of(training: Training) -> list[tuple[int, int]]:
    """(samples, tokens of each) to be timed: a part of a sample, the job's micro-batch, and twice that."""
    short = max(LEAST_TOKENS, training.sequence_length // SHORT)
    count = training.micro_batch
    return [(1, short), (count, training.sequence_length), (2 * count, training.sequence_length)]


def timed_batches(records: Sequence[Mapping[str, Any]]) -> tuple[TimedBatch, ...]:
    """The micro-batches that a rank timed, from its records."""
    return tuple(TimedBatch(**known_part(TimedBatch, record)) for record in records if record["kind"] == "point")


def _speeds(hosts: BenchHosts, work: Work, records: Sequence[Mapping[str, Any]]) -> Iterator[RankSpeed]:
    trained = trained_weights(work.whole, work.training)
    when = now()
    for rank, host in enumerate(rank_hosts(hosts.cluster)):
        own = [record for record in records if record.get("rank") == rank]
        points, device = timed_batches(own), _of_kind(own, "device")
        if not points or not device:
            continue
        facts = hosts.inventory.of(host.name)
        model = fit_compute(
            points, work.copy, work.whole, work.training, source=f"calibrated {when[:10]} on {host.name}"
        )
        update = _of_kind(own, "optimizer")
        optimizer_s, numbers = update.get("seconds", 0.0), update.get("numbers", 0)
        key = ProfileKey(
            gpu=device["gpu"],
            driver=facts.gpus[0].driver if facts is not None and facts.gpus else "",
            torch=device["torch"],
            kernels=kernel_words(work.training, attention=device["kernels"]),
            method=method_words(work.training),
            dtype=device["dtype"],
            architecture=architecture_digest(work.whole),
        )
        profile = Profile(
            key=key,
            measured=when,
            host=host.name,
            compute=with_optimizer(model, seconds=optimizer_s, numbers=numbers, trained=trained),
            points=points,
            optimizer_numbers=numbers,
            optimizer_s=optimizer_s,
        )
        yield RankSpeed(host=host.name, rank=rank, profile=profile, fused_loss=device["fused_loss"])


def _of_kind(records: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """The last record of a kind; {} where there is none."""
    return next((record for record in reversed(records) if record["kind"] == kind), {})
