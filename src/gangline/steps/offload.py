"""Whether there is what a job wants to move off its cards, and room for it in the machines' memory."""

from __future__ import annotations

from gangline.errors import UsageError
from gangline.planning.option import Option
from gangline.planning.world import World
from gangline.runs.job import Job
from gangline.strategies.base import AUTO
from gangline.strategies.table import plan_half
from gangline.units import format_bytes

MOST = 0.9
"""Of what programs can get of a machine's memory: the rest is for the processes themselves."""


def require_cards(job: Job, world: World) -> None:
    """Raise UsageError where an offload would move nothing: there is no card (fsdp, hsdp)."""
    asked = bool(job.strategy.offload) and job.strategy.kind != AUTO
    parts = asked and plan_half(job.strategy.kind).sharded_by == "fsdp2"
    if not parts and not job.activation_offloading:
        return
    key = "strategy.offload" if parts else "activation_offloading"
    if all(seat.gpu is None for seat in world.seats):
        raise UsageError(
            f"{key}: there is nothing to move to the machines' memory",
            seen="no rank has a GPU, so all of it is there already",
            fix=f"delete {key}",
        )


def require_ram(option: Option | None) -> None:
    """Raise UsageError where what is moved does not fit into the memory of a machine."""
    if option is None:
        return
    wanted: dict[str, int] = {}
    free = {need.seat.host: need.seat.ram_bytes for need in option.needs}
    for need in option.needs:
        wanted[need.seat.host] = wanted.get(need.seat.host, 0) + need.memory.offloaded_bytes
    for host, num_bytes in wanted.items():
        room = free[host]
        if num_bytes and room is not None and num_bytes > MOST * room:
            raise UsageError(
                f"{host} has no memory for what is moved off its cards",
                seen=f"{format_bytes(num_bytes)} of weights, states and activations; {format_bytes(room)} available",
                fix="move less (strategy.offload, activation_offloading), or let more hosts share the model",
            )
