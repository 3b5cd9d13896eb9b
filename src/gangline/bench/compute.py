"""`bench compute`: how fast every rank computes a job's model, all at the same time; kept for the planner."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.bench.cluster_network import BenchHosts
from gangline.bench.collective import MARGIN_S, START_S, CommandGang, worker_argv
from gangline.inventory.measured import save_profile
from gangline.inventory.pairs import Skipped
from gangline.inventory.probe import now
from gangline.launch.poll import free_port
from gangline.launch.render import rank_env
from gangline.planner.architecture import Architecture
from gangline.planner.calibration import (
    Profile,
    ProfileKey,
    TimedBatch,
    architecture_digest,
    fit_compute,
    method_words,
    with_optimizer,
)
from gangline.planner.shares import rank_hosts
from gangline.planner.traffic import trained_weights
from gangline.planner.training import Training
from gangline.runs.job import Job

SHORT = 4
"""The smallest point is so much shorter than a sample: it shows the floor."""
LEAST_TOKENS = 16
BUILD_S = 120
"""How long it may take to draw the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured: a job's model and method."""

    job: Job
    training: Training
    whole: Architecture
    copy: Architecture
    copy_config: Mapping[str, Any]
    """What config.json says of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """One rank's part of the measurement."""

    host: str
    rank: int
    profile: Profile
    fused_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """What was measured, and what was not."""

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


@dataclass(slots=True, kw_only=True)
class _Heard:
    """The lines of one rank."""

    device: dict[str, Any] = field(default_factory=dict)
    points: list[TimedBatch] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def measure_compute(
    hosts: BenchHosts, work: Work, *, home: Path, seconds: float, tell: Callable[[str], None]
) -> MeasuredSpeeds:
    """Measure, keep and return it. What cannot be measured is listed with the reason."""
    cluster = hosts.cluster
    tell("starting ranks, which import torch")
    port = free_port(cluster, hosts.transports[cluster.head.name])
    order = _order(work, seconds=seconds)
    gang = CommandGang(transports=hosts.transports, timeout_s=order["deadline_s"] + MARGIN_S / 4)
    head = hosts.inventory.of(cluster.head.name)
    num_cpus = head.num_cpus if head is not None and cluster.is_one_machine else None
    gang.run(
        {
            host.name: (
                worker_argv(cluster, host, "calibrate", json.dumps(order), port=port),
                rank_env(cluster, host, network=hosts.networks.get(host.name), num_cpus=num_cpus),
            )
            for host in cluster.hosts
        }
    )
    heard = listen([line for lines in gang.lines.values() for line in lines])
    found = tuple(_speeds(hosts, work, heard))
    # cards of one kind in one host share a profile; a step waits for the slowest of them
    for speed in sorted(found, key=lambda each: each.profile.compute.micro_batch_s(*_typical(work))):
        save_profile(home, speed.profile)
    skipped = [each for rank in sorted(heard) for each in heard[rank].skipped]
    skipped += [Skipped(what=host, why=words) for host, words in list(gang.failures.items())[:1]]
    if not found and not skipped:
        skipped.append(Skipped(what="all ranks", why="none said anything"))
    return MeasuredSpeeds(training=work.training, ranks=found, skipped=tuple(skipped))


def points_of(training: Training) -> list[tuple[int, int]]:
    """(samples, tokens of each) to be timed: a part of a sample, the job's micro-batch, and twice that."""
    short = max(LEAST_TOKENS, training.sequence_length // SHORT)
    count = training.micro_batch
    return [(1, short), (count, training.sequence_length), (2 * count, training.sequence_length)]


def listen(lines: Sequence[str]) -> dict[int, _Heard]:
    """What each rank said."""
    heard: dict[int, _Heard] = {}
    for line in lines:
        record = json.loads(line)
        rank = heard.setdefault(record.pop("rank", -1), _Heard())
        kind = record.pop("kind")
        if kind == "device":
            rank.device = record
        elif kind == "point":
            record.pop("repeats", None)
            rank.points.append(TimedBatch(**record))
        elif kind == "optimizer":
            rank.optimizer = record
        elif kind == "skipped":
            rank.skipped.append(Skipped(what=record["what"], why=record["why"]))
        elif kind == "error":
            rank.skipped.append(Skipped(what=record["what"], why=record.get("seen", "")))
    return heard


def _typical(work: Work) -> tuple[int, int]:
    return work.training.tokens, work.training.sequence_length


def _order(work: Work, *, seconds: float) -> dict[str, Any]:
    return {
        "job": work.job.to_json(),
        "config": work.copy_config,
        "layers": work.copy.num_layers,
        "points": points_of(work.training),
        "seconds": seconds,
        "start_s": START_S,
        "deadline_s": START_S + BUILD_S + seconds + MARGIN_S / 2,
    }


def _speeds(hosts: BenchHosts, work: Work, heard: Mapping[int, _Heard]) -> Iterator[RankSpeed]:
    trained = trained_weights(work.whole, work.training)
    when = now()
    for rank, host in enumerate(rank_hosts(hosts.cluster)):
        said = heard.get(rank)
        if said is None or not said.points or not said.device:
            continue
        facts = hosts.inventory.of(host.name)
        model = fit_compute(
            said.points, work.copy, work.whole, work.training, source=f"calibrated {when[:10]} on {host.name}"
        )
        optimizer_s, numbers = said.optimizer.get("seconds", 0.0), said.optimizer.get("numbers", 0)
        key = ProfileKey(
            gpu=said.device["gpu"],
            driver=facts.gpus[0].driver if facts is not None and facts.gpus else "",
            torch=said.device["torch"],
            kernels=said.device["kernels"],
            method=method_words(work.training),
            dtype=said.device["dtype"],
            architecture=architecture_digest(work.whole),
        )
        profile = Profile(
            key=key,
            measured=when,
            host=host.name,
            compute=with_optimizer(model, seconds=optimizer_s, numbers=numbers, trained=trained),
            points=tuple(said.points),
            optimizer_numbers=numbers,
            optimizer_s=optimizer_s,
        )
        yield RankSpeed(
            host=host.name,
            rank=rank,
            profile=profile,
            fused_loss=said.device["fused_loss"],
        )
