"""`bench scaling`: how much of the sum of their own speeds the hosts reach together, by the trainer's own steps.

The sum is that of every host training alone with the job's whole batch, as it would without the others: the same model,
method, precision and micro-batch, and the update once per batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.bench.collective import MARGIN_S, START_S, Gang, worker_argv
from gangline.bench.network import Hosts, busy_cards, versions
from gangline.bench.scaled import HostSpeed, Scaling, Turn, batch_s, others_note
from gangline.errors import GanglineError, RunFailed
from gangline.inventory.probe import now
from gangline.launch.port import free_port
from gangline.launch.render import rank_env
from gangline.remote.said import understood
from gangline.runs.gang import Gang as Ranks
from gangline.runs.job import Job

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


def measure_scaling(hosts: Hosts, task: Task, *, seconds: float, tell: Callable[[str], None]) -> Scaling:
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
    gang = Gang(transports=hosts.transports, timeout_s=deadline_s + MARGIN_S / 4)
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


def _scaling(hosts: Hosts, task: Task, heard: _Heard) -> Scaling:
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
                slowdown=cluster.host(host).slowdown,
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
