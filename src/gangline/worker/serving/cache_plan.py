"""Does the cache of all answers fit? It is planned, and taken from the device, before the first request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gangline.errors import UsageError
from gangline.units import format_bytes
from gangline.worker.checkpoint import available_bytes

DEFAULT_PART = 0.5
"""Of the free memory that the cache takes at most, where no context was asked for."""
PART = 0.9
"""Of the free memory that the cache may take; the rest is for the passes themselves."""
UNKNOWN_CONTEXT = 4096
"""Tokens, of a model that does not say for how many it was made."""
SHORTEST = 256
"""A default context shorter than this, and than the model's own, is refused: it would be a surprise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The memory of an endpoint."""

    device: str
    weight_bytes: int
    cache_bytes: int | None
    """None: the layers keep other states than keys and values, and their size is not planned."""
    free_bytes: int | None
    """Free before the cache was taken; None where the system does not say."""
    context: int
    num_parallel: int

    def to_json(self) -> dict[str, Any]:
        """As the endpoint says it at its start."""
        return asdict(self)


def plan_cache(
    model: Any, *, token_bytes: int | None, limit: int | None, context: int | None, num_parallel: int
) -> CachePlan:
    """The context for which the caches of all answers fit.

    token_bytes: of all layers, for one token of one answer. limit: the tokens for which the model was made. context:
    the tokens asked for. Raises UsageError where that is too much.
    """
    if context is not None and limit is not None and context > limit:
        raise UsageError(
            f"--context {context} is longer than this model takes", seen=f"expected {limit} or less", fix="lower it"
        )
    free = free_bytes(model.device)
    wanted = context or limit or UNKNOWN_CONTEXT
    taken = wanted
    if token_bytes is not None and free < math.inf:
        most = int(free * (DEFAULT_PART if context is None else PART)) // (token_bytes * num_parallel) - 1
        taken = min(wanted, most)
        if taken < (min(wanted, SHORTEST) if context is None else wanted):
            raise _too_large(wanted, num_parallel=num_parallel, token_bytes=token_bytes, free=free, most=most)
    return CachePlan(
        device=str(model.device),
        weight_bytes=sum(each.nbytes for each in (*model.parameters(), *model.buffers())),
        cache_bytes=None if token_bytes is None else token_bytes * (taken + 1) * num_parallel,
        free_bytes=int(free) if free < math.inf else None,
        context=taken,
        num_parallel=num_parallel,
    )


def free_bytes(device: torch.device) -> float:
    """Memory that is free on a device; of this computer's, what the control groups of this process let it have."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return min([available_bytes(), *group_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def group_rooms(root: Path, own: Path) -> list[float]:
    """What each control group above this process leaves free; files in the page cache make room."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
    found: list[float] = []
    for number, controllers, group in lines:
        if number == "0":
            found += _rooms_of(root, group, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _rooms_of(root / "memory", group, old)
    return found


def _rooms_of(root: Path, group: str, names: tuple[str, str, str]) -> Iterator[float]:
    """What a group and those above it leave. names: the limit, what is used, and the row of what can be given up."""
    folder = root / group.strip("/")
    for each in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # the top has no limit, and another version has other files
            limit, used = ((each / name).read_text().strip() for name in names[:2])
            rows = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            if limit != "max":
                yield float(max(0, int(limit) - int(used) + int(rows.get(names[2], 0))))
        if each == root:
            return


def _too_large(wanted: int, *, num_parallel: int, token_bytes: int, free: float, most: int) -> UsageError:
    answers = f"{num_parallel} answer{'s' if num_parallel > 1 else ''}"
    needed = format_bytes(token_bytes * (wanted + 1) * num_parallel)
    return UsageError(
        f"the cache of {answers} of {wanted} tokens does not fit",
        seen=f"it takes {needed}, {format_bytes(token_bytes)} per token; {format_bytes(free)} are free",
        fix=f"--context {most}, or fewer answers at a time: --parallel"
        if most >= SHORTEST
        else "fewer answers at a time (--parallel), a shorter --context, or end what else runs there",
    )
