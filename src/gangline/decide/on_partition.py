"""The plan of a run that waits for Slurm: for nodes such as its partition has, which nobody can ask yet."""

from __future__ import annotations

import math
from collections import Counter

from gangline.errors import UsageError
from gangline.inventory.partitions import SlurmPartition, as_time, partition_named, read_partitions, seconds_of
from gangline.planner.candidate import Candidate
from gangline.planner.machines import card
from gangline.planner.report import Length, run_cost
from gangline.runs.cluster import SlurmRequest
from gangline.units import format_duration

SPARE = 1.25
"""A limit that is proposed is so much longer than the plan says: plans are not exact, and starts take time."""


def partition_of(asked: SlurmRequest) -> SlurmPartition:
    """The partition that a cluster file asks for, of several kinds of nodes that of the first; raises UsageError where
    one has too few nodes.
    """
    found = read_partitions()
    first, *_ = [_checked(partition_named(found, kind.partition), kind) for kind in asked.kinds]
    return first


def _checked(partition: SlurmPartition, asked: SlurmRequest) -> SlurmPartition:
    fitting = [node for node in partition.nodes if node.is_usable and node.num_gpus >= _wanted(asked)[1]]
    if len(fitting) < asked.nodes:
        gpus = f" with {_wanted(asked)[1]} GPUs" if asked.gpus_per_node else ""
        raise UsageError(
            f"partition {partition.name} has too few nodes for this",
            seen=f"expected {asked.nodes}{gpus}, found {len(fitting)}: {'; '.join(partition.lines())}",
            fix="ask for less in the section `slurm`, or for another partition: sinfo -s",
        )
    return partition


def machines_of(asked: SlurmRequest, partition: SlurmPartition) -> str:
    """The nodes of one run in the words of `plan --hosts`; raises UsageError where nobody knows their cards."""
    others = {kind.partition for kind in asked.kinds} - {None, partition.name}
    known = {each.name: each for each in read_partitions()} if others else {}
    cards = [
        machine
        for kind in asked.kinds
        for machine in [_machine(kind, known.get(kind.partition or "", partition))] * kind.nodes
    ]
    return ",".join(f"node{number}={machine}" for number, machine in enumerate(cards, start=1))


def _machine(asked: SlurmRequest, partition: SlurmPartition) -> str:
    """One node, such as 4xa100."""
    kind, count = _wanted(asked)
    if not count:
        raise UsageError(
            "the plan of a run without GPUs needs the nodes themselves",
            seen=f"`slurm` asks for no GPUs, and the processors of partition {partition.name} are not known here",
            fix="gangline plan inside an allocation (salloc), or train: its first node plans before anything starts",
        )
    name = asked.gpu or kind or _usual_type(partition)
    try:
        card(name)
    except UsageError as error:
        raise UsageError(
            f"the plan does not know which card {name!r} of partition {partition.name} is",
            seen=error.seen if name else "Slurm does not say the type of its GPUs",
            fix=f"write it as `slurm.gpu`, such as a100-80gb. {error.fix}",
        ) from error
    return f"{count}x{name}"


def _wanted(asked: SlurmRequest) -> tuple[str, int]:
    """Type and number of the GPUs of a node; "" for any type."""
    kind, _, count = (asked.gpus_per_node or "0").rpartition(":")
    return kind, int(count)


def _usual_type(partition: SlurmPartition) -> str:
    types = Counter(kind for node in partition.nodes for kind, count in node.gpus if kind and count)
    return types.most_common(1)[0][0] if types else ""


def lines_on(
    asked: SlurmRequest, partition: SlurmPartition, best: Candidate | None, length: Length
) -> list[tuple[str, str]]:
    """What the plan says of the partition, and of the allocations that the run takes."""
    rows = [("partition", f"{partition.name}: {line}") for line in partition.lines()]
    limit_s = seconds_of(asked.time) if asked.time else partition.limit_s
    cost = run_cost(best, length) if best is not None else None
    if cost is None:
        return rows
    needed_s = cost.seconds[1]
    if limit_s is None:
        proposal = as_time(needed_s * SPARE)
        return [*rows, ("allocation", f"one, without a limit; `time: {proposal}` would let Slurm start it sooner")]
    if partition.limit_s is not None and limit_s > partition.limit_s:
        over = (
            f"`time: {asked.time}` is more than partition {partition.name} gives ({partition.limit}): Slurm refuses it"
        )
        return [*rows, ("allocation", over)]
    usable_s = limit_s - asked.notice_s
    if usable_s <= 0:
        return [*rows, ("allocation", f"its limit of {format_duration(limit_s)} leaves no time before `save_before`")]
    number = math.ceil(needed_s * SPARE / usable_s)
    each = f"of {format_duration(limit_s)}, the last {format_duration(asked.notice_s)} for saving"
    words = f"{number} {each}" if number > 1 else f"one {each}"
    if number > 1 and (partition.limit_s is None or needed_s * SPARE < partition.limit_s):
        words += f"; `time: {as_time(needed_s * SPARE)}` would do it in one"
    elif number == 1 and limit_s > 2 * needed_s * SPARE:
        words += f"; `time: {as_time(needed_s * SPARE)}` would let Slurm start it sooner"
    return [*rows, ("allocation", words)]
