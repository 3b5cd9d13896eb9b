"""Number formats that do not go together, whatever the machines are."""

from __future__ import annotations

from gangline.spec.job_words import JobWords
from gangline.spec.validate import Checked


def check_precision(checked: Checked[JobWords]) -> None:
    """`precision.parameters` beside `precision.compute`; where that is `auto`, the plan finds out what it is."""
    compute, parameters = checked.words.precision.compute, checked.words.precision.parameters
    if (compute, parameters) == ("fp64", "fp32"):
        checked.report(
            ("precision", "parameters"),
            seen="fp32 for trained weights (compute: fp64)",
            expected="fp64, as `auto` takes it: products in fp64 of weights that are rounded to fp32 are pointless",
            fix="delete it, or write `compute: fp32`",
            reads=(("precision", "compute"),),
        )
    if (compute, parameters) == ("fp16", "compute"):
        checked.report(
            ("precision", "parameters"),
            seen="fp16 for trained weights (compute: fp16)",
            expected="fp32, as `auto` takes it: in fp16 updates smaller than 6e-8 vanish",
            fix="delete it, or write `compute: bf16`",
            reads=(("precision", "compute"),),
        )
