"""Optimizers by name: the keys of `optimizer` in job.yaml that are for each, and what a plan and a checkpoint ask.

    adamw                              AdamW, moments in the format of the trained weights
    adamw-8bit, paged-adamw-8bit       AdamW, moments of 8 bits
    sgd                                gradient descent, with momentum where the job says so
    lion                               the sign of a mean of gradients
    adafactor                          means of squared gradients by rows and columns
    muon                               matrices: the nearest orthogonal matrix of a mean of gradients; the rest AdamW

An optimizer is one row of `OPTIMIZERS`, and its arithmetic in `worker/optimizer.py`. job.yaml, the planner and the
capabilities of strategies read the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OptimizerKind = Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "sgd", "lion", "adafactor", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One kind of optimizer."""

    keys: Mapping[str, Any]
    """Keys of the section besides the learning rate, weight decay and clipping, with their defaults."""
    state: str
    """The name of a state of a weight that no other kind has; "" where there is none."""
    moved: float
    """Numbers read and written per trained number in an update, in numbers of its format."""
    needs_whole: bool = False
    """Whether it computes with whole matrices, so that a part of one says too little."""
    smooth: bool = True
    """Whether numbers that differ by a rounding stay about as near after an update."""


_ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(keys=_ADAM, state="exp_avg", moved=7.0),
    "adamw-8bit": OptimizerRow(keys=_ADAM, state="state1", moved=4.0, smooth=False),
    "paged-adamw-8bit": OptimizerRow(keys=_ADAM, state="state1", moved=4.0, smooth=False),
    "sgd": OptimizerRow(keys={"momentum": 0.0, "nesterov": False}, state="momentum_buffer", moved=5.0),
    "lion": OptimizerRow(keys={"beta1": 0.9, "beta2": 0.99}, state="lion_mean", moved=5.0, smooth=False),
    "adafactor": OptimizerRow(keys={"epsilon": 1e-30}, state="row_mean", moved=8.0, needs_whole=True),
    "muon": OptimizerRow(
        keys={"momentum": 0.95, "nesterov": True, "scale": "match-adamw", **_ADAM},
        state="muon_mean",
        moved=8.0,
        needs_whole=True,
        smooth=False,
    ),
}
"""Every optimizer by its name in job.yaml."""
EIGHT_BITS = ("adamw-8bit", "paged-adamw-8bit")
WHOLE = tuple(kind for kind, row in OPTIMIZERS.items() if row.needs_whole)


def kind_of_states(names: frozenset[str]) -> str:
    """The kind that keeps states of these names, in the words of a job; "" where none is known.

    Muon comes before the kind that moves the rest of its weights.
    """
    for kind in reversed(list(OPTIMIZERS)):
        if (state := OPTIMIZERS[kind].state) in names:
            return " or ".join(each for each, row in OPTIMIZERS.items() if row.state == state)
    return ""
