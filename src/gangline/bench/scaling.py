"""`bench scaling`: how much of the sum of their own speeds the hosts reach together, by the trainer's own steps.

The sum is that of every host training alone with the job's whole batch, as it would without the others: the same model,
method, precision and micro-batch, and the update once per batch.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.bench.cluster_network import BenchHosts, busy_cards, versions
from gangline.bench.collective import MARGIN_S, START_S, CommandGang, worker_argv
from gangline.errors import GanglineError, RunFailed
from gangline.inventory.probe import now
from gangline.launch.poll import free_port
from gangline.launch.render import rank_env
from gangline.runs.gang import Gang as Ranks
from gangline.runs.gang import shares_by_time
from gangline.runs.job import Job
from gangline.transport.ssh_options import understood

# What `bench scaling` found, and the arithmetic of it. Pure.


SCATTER = 0.05
"""Of (most - least) over the median: more than that is told."""
FEW = 3
"""Turns: fewer say little of how steady the figures are."""
OTHERS_SHARE, OTHERS_CPUS = 0.1, 0.25
"""Of a machine's processors, and processors: what other programs may have without being named."""
METHOD = (
    "every host alone with the whole batch, all at the same time without a word between them, then all together; steps "
    "of the trainer itself on random weights and random full-length samples; warmed up, in turns, the slowest rank's "
    "clock, medians"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps of all hosts together."""

    tokens_per_s: float
    steps: int
    step_s: float
    exposed_s: float
    """Seconds of a step in which the last rank to have computed everything still waited for the exchange."""
    shares: tuple[int, ...]
    """Micro-batches of a step, by rank, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """One host alone."""

    host: str
    device: str
    ranks: tuple[int, ...]
    alone_tokens_per_s: tuple[float, ...]
    """Of the whole batch, in each turn."""
    alone_micro_batches: int
    """Of the steps that were timed; fewer than those of the batch where the time was short."""

    @property
    def tokens_per_s(self) -> float:
        """Alone: the median."""
        return statistics.median(self.alone_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Speeds of hosts alone and together."""

    job: str
    method: str
    """What is trained: full or lora."""
    dtype: str
    trained_numbers: int
    """Weights that are trained, whose gradients travel."""
    batch: int
    micro_batch: int
    sequence_length: int
    moving: bool
    """Whether shares followed the measured speeds; else the cluster file says who does how much."""
    one_machine: bool
    """All hosts are this one computer, and share its processors: alone means beside each other."""
    hosts: tuple[HostSpeed, ...]
    together: tuple[Turn, ...]
    even: tuple[Turn, ...]
    measured: str
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    """What else kept the machines busy."""

    @property
    def num_micro_batches(self) -> int:
        """Of a step of the whole batch."""
        return self.batch // self.micro_batch

    @property
    def sum_tokens_per_s(self) -> float:
        """Of all hosts alone."""
        return sum(host.tokens_per_s for host in self.hosts)

    @property
    def ratio(self) -> float:
        """Together over the sum: medians."""
        return statistics.median(turn.tokens_per_s for turn in self.together) / self.sum_tokens_per_s

    @property
    def worst(self) -> float:
        """The same of the slowest turn."""
        return min(turn.tokens_per_s for turn in self.together) / self.sum_tokens_per_s

    @property
    def even_ratio(self) -> float:
        """With equal shares."""
        return statistics.median(turn.tokens_per_s for turn in self.even) / self.sum_tokens_per_s

    @property
    def ceiling(self) -> float:
        """What the best split into whole micro-batches allows, if exchanging cost nothing.

        The ranks of a host are taken to be equally fast.
        """
        seconds = [len(host.ranks) / host.tokens_per_s for host in self.hosts for _ in host.ranks]
        shares = shares_by_time(seconds, self.num_micro_batches)
        last = max(share * each for share, each in zip(shares, seconds, strict=True))
        return self.num_micro_batches / last / self.sum_tokens_per_s

    @property
    def middle(self) -> Turn:
        """The turn together that was neither fast nor slow."""
        return sorted(self.together, key=lambda turn: turn.tokens_per_s)[len(self.together) // 2]

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why one may not trust the figures."""
        series = {f"{host.host} alone": host.alone_tokens_per_s for host in self.hosts}
        series["all together"] = tuple(turn.tokens_per_s for turn in self.together)
        wide = [f"{name} {scatter(rates):.0%}" for name, rates in series.items() if scatter(rates) > SCATTER]
        num_turns = len(self.together)
        return (
            *self.warnings,
            *([f"turns differ by more than {SCATTER:.0%}: {', '.join(wide)}"] if wide else []),
            *([f"{num_turns} of 5 turns had time; --seconds gives more"] if num_turns < FEW else []),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data with the ratios."""
        hosts = [{**dataclasses.asdict(host), "tokens_per_s": host.tokens_per_s} for host in self.hosts]
        return {
            **dataclasses.asdict(self),
            "hosts": hosts,
            "warnings": list(self.doubts),
            "sum_tokens_per_s": self.sum_tokens_per_s,
            "together_tokens_per_s": self.ratio * self.sum_tokens_per_s,
            "even_tokens_per_s": self.even_ratio * self.sum_tokens_per_s,
            "ratio": self.ratio,
            "worst_ratio": self.worst,
            "even_ratio": self.even_ratio,
            "ceiling_ratio": self.ceiling,
            "exposed_s": self.middle.exposed_s,
            "step_s": self.middle.step_s,
            "how": METHOD,
        }


def batch_s(step_s: float, update_s: float, *, measured: int, whole: int) -> float:
    """Seconds of a step of `whole` micro-batches, by one of `measured`; either has one update.

    Micro-batches are equal here, so that their time grows with their number.
    """
    update_s = min(update_s, step_s)
    return (step_s - update_s) * whole / measured + update_s


def scatter(rates: Sequence[float]) -> float:
    """(most - least) over the median."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def others_note(hosts: Sequence[str], num_busy: float, *, num_cpus: int) -> str | None:
    """In words what other programs had of a machine's processors; None where that is little."""
    if num_busy <= max(OTHERS_CPUS, OTHERS_SHARE * num_cpus):
        return None
    return f"{', '.join(hosts)}: other programs had {num_busy:.1f} of {num_cpus} processors meanwhile"


BUILD_S = 300
"""How long it may take to draw the model."""
OVERRUN = 1.5
"""Of the time: the last steps may be slower than it was foreseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is measured."""

    job: Job
    config: Mapping[str, Any]
    """What config.json says of the model."""
    ranks: Ranks
    """As a run of the job would have them."""


@dataclass(slots=True, kw_only=True)
class _Heard:
    """What ranks said."""

    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    busy: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)


def measure_scaling(hosts: BenchHosts, task: Task, *, seconds: float, tell: Callable[[str], None]) -> Scaling:
    """Measure it, in about `seconds` after the start. Nothing runs on when it returns.

    Raises the error that a rank ended with, RunFailed where ranks ended without one.
    """
    cluster = hosts.cluster
    tell("starting ranks, which import torch; then every host trains alone, and all together")
    port = free_port(cluster, hosts.transports[cluster.head.name])
    deadline_s = START_S + BUILD_S + seconds * OVERRUN + MARGIN_S / 2
    order = {
        "job": task.job.to_json(),
        "config": task.config,
        "gang": task.ranks.to_json(),
        "seconds": seconds,
        "deadline_s": deadline_s,
    }
    gang = CommandGang(transports=hosts.transports, timeout_s=deadline_s + MARGIN_S / 4)
    head = hosts.inventory.of(cluster.head.name)
    num_cpus = head.num_cpus if head is not None and cluster.is_one_machine else None
    gang.run(
        {
            host.name: (
                worker_argv(cluster, host, "bench-scaling", json.dumps(order), port=port),
                rank_env(cluster, host, network=hosts.networks.get(host.name), num_cpus=num_cpus),
            )
            for host in cluster.hosts
        }
    )
    heard = _Heard()
    for host, lines in gang.lines.items():
        with understood(host, "what its ranks measured"):
            _hear(heard, lines)
    _require_whole(heard, gang.failures, num_ranks=task.ranks.world_size)
    with understood(cluster.head.name, "what its ranks measured"):
        return _scaling(hosts, task, heard)


def _hear(heard: _Heard, lines: Sequence[str]) -> None:
    for line in lines:
        record = json.loads(line)
        kind, rank = record.pop("kind"), record.pop("rank", -1)
        if kind == "device":
            heard.devices[rank] = record
        elif kind == "turn":
            heard.turns.append(record)
        elif kind == "busy":
            heard.busy[rank] = record
        elif kind == "error":
            heard.errors.append(record)


def _require_whole(heard: _Heard, failures: Mapping[str, str], *, num_ranks: int) -> None:
    if heard.errors:
        error = heard.errors[0]
        raise GanglineError.from_json({**error, "kind": error.get("error_kind", "")})
    if (
        failures
        or len(heard.devices) < num_ranks
        or {turn["way"] for turn in heard.turns} < {"alone", "together", "even"}
    ):
        host, why = next(iter(failures.items()), ("the ranks", "they ended before anything was measured"))
        raise RunFailed(
            f"{host}: the measurement broke off",
            seen=why,
            fix="gangline check looks at the hosts and what lies between them; then try again",
        )


def _scaling(hosts: BenchHosts, task: Task, heard: _Heard) -> Scaling:
    job, cluster = task.job, hosts.cluster
    whole = job.batch // job.micro_batch
    tokens = job.batch * job.data.sequence_length
    by_way: dict[str, list[dict[str, Any]]] = {}
    for turn in heard.turns:
        by_way.setdefault(turn["way"], []).append(turn)
    common = {way: tuple(_turn(each, tokens) for each in by_way[way]) for way in ("together", "even")}
    speeds = []
    for host in task.ranks.hosts:
        numbers = [rank for rank, each in enumerate(task.ranks.ranks) if each.host == host]
        speeds.append(
            HostSpeed(
                host=host,
                device=heard.devices[numbers[0]]["device"],
                ranks=tuple(numbers),
                alone_tokens_per_s=tuple(tokens / _alone_s(each["ranks"], numbers, whole) for each in by_way["alone"]),
                alone_micro_batches=int(by_way["alone"][0]["ranks"]["micro_batches"][numbers[0]]),
            )
        )
    device = heard.devices[0]
    return Scaling(
        job=job.name,
        method=job.method.kind,
        dtype=device["dtype"],
        trained_numbers=device["trained"],
        batch=job.batch,
        micro_batch=job.micro_batch,
        sequence_length=job.data.sequence_length,
        moving=task.ranks.moving_shares,
        one_machine=cluster.is_one_machine,
        hosts=tuple(speeds),
        together=common["together"],
        even=common["even"],
        measured=now(),
        versions=versions(hosts.inventory) | {"torch": device["torch"]},
        warnings=(*busy_cards(hosts.inventory), *_others(task.ranks, heard)),
    )


def _turn(record: Mapping[str, Any], tokens: int) -> Turn:
    ranks = record["ranks"]
    seconds, steps = max(ranks["seconds"]), int(ranks["steps"][0])
    return Turn(
        tokens_per_s=steps * tokens / seconds,
        steps=steps,
        step_s=seconds / steps,
        exposed_s=ranks["exposed_s"][0],
        shares=tuple(record["shares"]),
    )


def _alone_s(ranks: Mapping[str, Sequence[float]], numbers: Sequence[int], whole: int) -> float:
    """Seconds of a step of the whole batch on one host, by its slowest rank."""
    first = numbers[0]
    step_s = max(ranks["seconds"][rank] for rank in numbers) / ranks["steps"][first]
    update_s = max(ranks["update_s"][rank] for rank in numbers)
    return batch_s(step_s, update_s, measured=int(ranks["micro_batches"][first]), whole=whole)


def _others(ranks: Ranks, heard: _Heard) -> Iterator[str]:
    """What other programs computed meanwhile, by machine: hosts of one machine have the same processors."""
    machines: dict[str, list[int]] = {}
    for rank, said in sorted(heard.busy.items()):
        machines.setdefault(said["machine"] or ranks.ranks[rank].host, []).append(rank)
    for numbers in machines.values():
        known = [heard.busy[rank]["machine_cpus"] for rank in numbers]
        own = sum(heard.busy[rank]["own_cpus"] for rank in numbers)
        names = list(dict.fromkeys(ranks.ranks[rank].host for rank in numbers))
        if None not in known:
            note = others_note(names, max(known) - own, num_cpus=heard.busy[numbers[0]]["num_cpus"])
            if note:
                yield note
