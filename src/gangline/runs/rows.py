"""Pipelines side by side: which ranks are one, and what becomes of them where some are gone. Pure.

Ranks of a pipeline are adjacent, in the order of their layers. Each pipeline has all layers, cut as its own machines
are able to, and does other micro-batches than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gangline.runs.deal import split_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
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


def rows_left(stages: Sequence[int], shares: Sequence[int], left: Sequence[int], *, replicas: int) -> Rows:
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
    dealt = split_whole(total, paces if any(paces) else [1.0] * len(rows))
    return Rows(
        ranks=tuple(rank for row in rows for rank in row),
        stages=tuple(layers for row in cut for layers in row),
        shares=tuple(share for row, share in zip(rows, dealt, strict=True) for _ in row),
        replicas=len(rows),
    )


def _cut(depth: int, before: Sequence[int]) -> tuple[int, ...]:
    """All layers, in proportion to what ranks had before; one for each at least."""
    if sum(before) <= depth:
        return split_whole(depth, before)
    more = split_whole(depth - len(before), [layers - 1 for layers in before])
    return tuple(1 + layers for layers in more)
