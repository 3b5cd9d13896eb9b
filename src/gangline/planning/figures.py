"""The decision as plain data, for programs. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from gangline.planning.decision import Verdict
from gangline.planning.instead import Way
from gangline.planning.memory import Memory
from gangline.planning.option import Option
from gangline.planning.traffic import wire_bytes


def verdict_json(verdict: Verdict, ways: list[Way]) -> dict[str, Any]:
    """Everything that was weighed; bytes and seconds."""
    return {
        "model": {
            "type": verdict.question.architecture.model_type,
            "parameters": verdict.question.architecture.num_parameters,
            "layers": verdict.question.architecture.num_layers,
        },
        "batch": _batch_json(verdict),
        "best": verdict.best and option_json(verdict.best),
        "runnable": verdict.runnable and option_json(verdict.runnable),
        "strategies": [option_json(option) for option in verdict.by_kind],
        "today": verdict.today and option_json(verdict.today),
        "by_hosts": [
            {"num_hosts": few.count, **option_json(few.best)} for few in verdict.by_hosts if few.best is not None
        ],
        "instead": [{"changes": list(way.words), **option_json(way.option)} for way in ways],
    }


def _batch_json(verdict: Verdict) -> dict[str, Any] | None:
    """What divides how well: `ceiling` is the part of the sum of the speeds that it can reach at most."""
    return None if verdict.dividing is None else dataclasses.asdict(verdict.dividing)


def option_json(option: Option) -> dict[str, Any]:
    """One way to run the job."""
    slots = [len(option.world.seats_of(host)) for host in option.world.hosts]
    wire = wire_bytes(option.traffic, slots)
    # ranks that do the same share one
    memories = {id(need.memory): need.memory for need in option.needs}
    told = {number: memory_json(memory) for number, memory in memories.items()}
    return {
        "strategy": dataclasses.asdict(option.strategy),
        "method": option.training.method,
        "micro_batch": option.training.micro_batch,
        "activation_checkpointing": option.training.checkpointing,
        "chance": round(option.chance, 4),
        "fits": option.fits,
        "built": option.is_built,
        "exact": option.is_exact,
        "hosts": list(option.world.hosts),
        "sent_bytes": {"inside": list(wire.inside), "between": list(wire.between), "out": list(wire.out)},
        "step": None if option.time is None else dataclasses.asdict(option.time),
        "source": option.source,
        "network": option.world.wire.source,
        "ranks": [
            {
                "host": need.seat.host,
                "device": need.seat.device,
                "gpu": need.seat.gpu,
                "share": share,
                "free_bytes": need.seat.free_bytes,
                "memory_from": need.seat.memory_from,
                "chance": need.chance,
                "memory": told[id(need.memory)],
            }
            for need, share in zip(option.needs, option.shares, strict=True)
        ],
    }


def memory_json(memory: Memory) -> dict[str, Any]:
    """What a rank needs, term by term."""
    return {**dataclasses.asdict(memory), "allocated_bytes": memory.allocated_bytes}
