"""`bench scaling`: how much of the sum of their own speeds the hosts reach together, by the trainer's own steps.

The sum is that of every host training alone with the job's whole batch, as it would without the others: the same model,
method, precision and micro-batch, and the update once per batch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.bench.cluster_network import busy_cards, versions
from gangline.bench.torchrun import BenchHosts
from gangline.errors import GanglineError, RunFailed
from gangline.inventory.probe import now
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
    def missing(self) -> tuple[float, float, float]:
        """Parts of the sum that are missing: for whole micro-batches, for exchange that nothing hides, and the rest.

        All are parts of a step's time: with a ratio r of the sum and a ceiling c, computing alone, perfectly divided,
        would take r of it, and in whole micro-batches r / c. The rest is what computing takes longer than alone, and
        what ranks wait for each other; below 0 where it takes less, as turns differ.
        """
        whole, exposed = self.ratio * (1 / self.ceiling - 1), self.middle.exposed_s / self.middle.step_s
        return whole, exposed, 1 - self.ratio - whole - exposed

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
            "missing": dict(zip(("whole_micro_batches", "exposed", "rest"), self.missing, strict=True)),
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
"""Of the time: the last steps may be slower than planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is measured."""

    job: Job
    config: Mapping[str, Any]
    """What config.json says of the model."""
    ranks: Ranks
    """As a run of the job would have them."""


def measure_scaling(hosts: BenchHosts, task: Task, *, seconds: float, report: Callable[[str], None]) -> Scaling:
    """Measure it, in about `seconds` after the start. Nothing runs on when it returns.

    Raises the error that a rank ended with, RunFailed where ranks ended without one.
    """
    report("starting ranks, which import torch; then every host trains alone, and all together")
    order = {"job": task.job.to_json(), "config": task.config, "gang": task.ranks.to_json(), "seconds": seconds}
    gang = hosts.run_ranks("bench-scaling", order, work_s=BUILD_S + seconds * OVERRUN)
    by_kind: dict[str, list[dict[str, Any]]] = {"device": [], "turn": [], "busy": [], "error": []}
    for record in gang.records():
        by_kind.setdefault(record["kind"], []).append(record)
    if by_kind["error"]:
        error = by_kind["error"][0]
        raise GanglineError.from_json({**error, "kind": error.get("error_kind", "")})
    measured = {turn["way"] for turn in by_kind["turn"]}
    if gang.failures or len(by_kind["device"]) < task.ranks.world_size or measured < {"alone", "together", "even"}:
        host, why = gang.first_failure or ("the ranks", "they ended before anything was measured")
        raise RunFailed(
            f"{host}: the measurement broke off",
            seen=why,
            fix="gangline check looks at the hosts and what lies between them; then try again",
        )
    with understood(hosts.cluster.head.name, "what its ranks measured"):
        return _scaling(hosts, task, by_kind)


def _scaling(hosts: BenchHosts, task: Task, records: Mapping[str, Sequence[dict[str, Any]]]) -> Scaling:
    job = task.job
    whole = job.batch // job.micro_batch
    tokens = job.batch * job.data.sequence_length
    devices = {record["rank"]: record for record in records["device"]}
    by_way: dict[str, list[dict[str, Any]]] = {}
    for turn in records["turn"]:
        by_way.setdefault(turn["way"], []).append(turn)
    speeds = []
    for host in task.ranks.hosts:
        numbers = task.ranks.ranks_on(host)
        speeds.append(
            HostSpeed(
                host=host,
                device=devices[numbers[0]]["device"],
                ranks=tuple(numbers),
                alone_tokens_per_s=tuple(tokens / _alone_s(each["ranks"], numbers, whole) for each in by_way["alone"]),
                alone_micro_batches=int(by_way["alone"][0]["ranks"]["micro_batches"][numbers[0]]),
            )
        )
    device = devices[0]
    return Scaling(
        job=job.name,
        method=job.method.kind,
        dtype=device["dtype"],
        trained_numbers=device["trained"],
        batch=job.batch,
        micro_batch=job.micro_batch,
        sequence_length=job.data.sequence_length,
        moving=task.ranks.moving_shares,
        one_machine=hosts.cluster.is_one_machine,
        hosts=tuple(speeds),
        together=tuple(_turn(each, tokens) for each in by_way["together"]),
        even=tuple(_turn(each, tokens) for each in by_way["even"]),
        measured=now(),
        versions=versions(hosts.inventory) | {"torch": device["torch"]},
        warnings=(*busy_cards(hosts.inventory), *_others(task.ranks, records["busy"])),
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


def _others(ranks: Ranks, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In words, how busy other programs were, by machine: hosts of one machine have the same processors."""
    machines: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        machines.setdefault(record["machine"] or ranks.ranks[record["rank"]].host, []).append(record)
    for own in machines.values():
        busy = [record["machine_cpus"] for record in own]
        names = list(dict.fromkeys(ranks.ranks[record["rank"]].host for record in own))
        if None not in busy:
            num_others = max(busy) - sum(record["own_cpus"] for record in own)
            if note := others_note(names, num_others, num_cpus=own[0]["num_cpus"]):
                yield note
