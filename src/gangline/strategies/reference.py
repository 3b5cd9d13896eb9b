"""docs/strategies.md, from the capabilities of all strategies: python -m gangline.strategies.reference FILE."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gangline.optimizers import OPTIMIZERS
from gangline.strategies.base import EXTRAS, METHODS, PRECISIONS, PlanHalf, listed
from gangline.strategies.table import ALONE, STRATEGIES, plan_half

HEAD = """\
# Strategies

A strategy is how devices share the work of a step. `strategy: KIND` in [job.yaml](job.md) chooses one;
`auto`, the default, takes the one that the [plan](planning.md) finds best. [Training](training.md) says how
each one works.

This page is written by `python -m gangline.strategies.reference docs/strategies.md` from the data that the
checks of a job and the plan read.

"""
FOOT = """
Under every strategy rows can share a sample (packing), evaluation works, and a checkpoint can be resumed
under every other strategy and on other machines. A start refuses a job that its strategy cannot train.
"""


def page() -> str:
    """The whole page."""
    halves = [plan_half(kind) for kind in STRATEGIES.built_in if kind != ALONE]
    tables = (
        ("What each is for", ("strategy", "for"), [(each.guide,) for each in halves]),
        ("What each trains", ("strategy", *_TRAINS), [tuple(_trains(each)) for each in halves]),
        ("Where each runs", ("strategy", *_RUNS), [tuple(_runs(each)) for each in halves]),
    )
    return HEAD + "\n".join(_table(title, heads, halves, rows) for title, heads, rows in tables) + FOOT


_TRAINS = ("method", "precision", "optimizer", "activation offloading", "offload", "not with", "keys of its own")
_RUNS = ("ranks", "GPUs", "who gets more of the batch", "`auto` takes it", "numbers", "package")


def _trains(half: PlanHalf) -> Iterator[str]:
    own = half.capabilities
    yield _values(half, "method.kind", METHODS)
    yield _values(half, "precision.compute", PRECISIONS)
    yield _values(half, "optimizer.kind", tuple(OPTIMIZERS))
    yield "yes" if own.supports("activation_offloading", value=True, given={}) else "no"
    ways = [f"{' with '.join(parts)} ({_methods(methods)})" for methods, parts in own.offload]
    yield "; ".join(ways) or "none"
    given = {"method.kind": "lora"}
    yield ", ".join(f"`{key}`" for key in EXTRAS if not own.supports(key, value=True, given=given)) or "none"
    yield ", ".join(f"`{key}`" for key in own.keys) or "none"


def _values(half: PlanHalf, key: str, values: Sequence[Any]) -> str:
    """Values that it trains; those that only some methods can have with these."""
    found = []
    for value in values:
        methods = [
            each for each in METHODS if half.capabilities.supports(key, value=value, given={"method.kind": each})
        ]
        able = [each for each in METHODS if half.capabilities.supports("method.kind", value=each, given={})]
        methods = [each for each in methods if each in able]
        if key == "method.kind":
            methods = able if value in able else []
        if methods:
            found.append(str(value) + ("" if methods == able else f" ({_methods(methods)})"))
    return ", ".join(found)


def _methods(methods: Sequence[str]) -> str:
    return "every method" if tuple(methods) == METHODS else listed(methods)


def _runs(half: PlanHalf) -> Iterator[str]:
    own = half.capabilities
    hosts = f"; {own.min_ranks_on_host} or more on a host" if own.min_ranks_on_host > 1 else ""
    yield f"{max(2, own.min_ranks)} or more{hosts}{', as many on every host' if own.equal_hosts else ''}"
    yield "one for each rank" if own.own_gpu else "ranks may share one (for trials)"
    yield _faster(half)
    yields = f", where neither {listed(own.yields_to).replace(' or ', ' nor ')} fits" if own.yields_to else ""
    yield f"no: {own.asked_only}" if own.asked_only else f"yes{yields}"
    yield "those of one big machine" if own.exact else "others than one big machine's"
    yield f"`{own.package}`" if own.package else "none"


def _faster(half: PlanHalf) -> str:
    if half.layers == "staged":
        return "faster devices get more layers"
    if half.lockstep:
        return "nobody: all wait for the slowest"
    who = "hosts" if half.layers == "sliced" else "ranks"
    return f"faster {who}, {'measured in every step' if half.moves_shares else 'according to the plan'}"


def _table(title: str, heads: Sequence[str], halves: Sequence[PlanHalf], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join((f'`{half.kind}`', *row))} |" for half, row in zip(halves, rows, strict=True)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
