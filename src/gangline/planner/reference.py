"""docs/software.md, from the table of software stacks: python -m gangline.planner.reference FILE."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from gangline.planner.software import STACKS
from gangline.planner.training import SoftwareStack

HEAD = """\
# Software stacks

How much memory a training takes depends on the software as much as on the model: on the form of the loss
and of attention, on number formats, on what a library keeps. `gangline plan job.yaml --stack NAME` plans
for another trainer than gangline's; the job's keys say the rest (method, lengths, precision, strategy,
offload).

This page is written by `python -m gangline.planner.reference docs/software.md` from the data that the plan
reads. *Measured* stacks were compared with peaks that others published; `python -m
benchmarks.plan_gpu_memory` asks the plan for 120 such runs and shows every difference. *Reasoned* ones are
put together from the software's source and documentation, and nobody's figures were at hand: take them as
rough.

"""


def page() -> str:
    """The whole page."""
    lines = ["| `--stack` | software | known | loss | adapters |", "|---|---|---|---|---|"]
    lines += [f"| `{each.name}` | {each.about} | {each.known} | {_loss(each)} | {_adapters(each)} |" for each in _all()]
    lines += ["", "## Sources", ""]
    for each in _all():
        lines += textwrap.wrap(f"- `{each.name}`: {'; '.join(each.sources)}.", 106, subsequent_indent="  ")
    return HEAD + "\n".join(lines) + "\n"


def _all() -> list[SoftwareStack]:
    return list(STACKS.values())


def _loss(stack: SoftwareStack) -> str:
    bytes_each = f"{stack.logit_bytes + stack.kept_logits_bytes} bytes per logit"
    return {
        "fused": "with the head, a chunk of logits at a time",
        "chunked": f"in chunks of {stack.chunk_positions} positions",
        "plain": f"all logits at once, {bytes_each}",
        "inplace": f"all logits at once, {bytes_each}",
    }[stack.loss]


def _adapters(stack: SoftwareStack) -> str:
    return {None: "as the job says", "fp32": "fp32", "compute": "as products"}[stack.adapters]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
