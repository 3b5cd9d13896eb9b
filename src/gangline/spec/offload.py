"""The rules of what lies in the machine's memory, not on the card, where that is not DeepSpeed's."""

from __future__ import annotations

from gangline.spec.job_words import JobWords
from gangline.spec.validate import Checked

IN_PARTS = ("fsdp", "hsdp")
MOVES_INPUTS = ("auto", "ddp", "fsdp", "hsdp", "local-sgd")


def check_offload(checked: Checked[JobWords]) -> None:
    """`strategy.offload` of fsdp and hsdp, and `activation_offloading`."""
    words = checked.words
    kind, offload = words.strategy.kind, set(words.strategy.offload)
    full = words.method.kind == "full"
    wanted = {"optimizer", "parameters"} if full else {"parameters"}
    if kind in IN_PARTS and offload and offload != wanted:
        what = "weights and the states that move them lie together" if full else "adapters and their states stay whole"
        named = "[optimizer, parameters]" if full else "parameters"
        checked.report(
            ("strategy", "offload"),
            seen=f"{' and '.join(sorted(offload))} with kind: {kind} and method: {words.method.kind}",
            expected=f"{named}: {what} on every device",
            fix=f"write `offload: {named}`",
            reads=(("strategy", "kind"), ("method", "kind")),
        )
    if not words.activation_offloading:
        return
    if words.activation_checkpointing is not True:
        checked.report(
            ("activation_offloading",),
            seen="activation_offloading, but layers keep all that backward needs",
            expected="activation_checkpointing: true beside it: what is moved is the input of each layer",
            fix="add `activation_checkpointing: true`, or delete activation_offloading",
            reads=(("activation_checkpointing",),),
        )
    if kind not in MOVES_INPUTS:
        checked.report(
            ("activation_offloading",),
            seen=f"activation_offloading with strategy: {kind}",
            expected="ddp, fsdp, hsdp or local-sgd, under which every rank computes whole layers, one after the other",
            fix="delete it, or write `strategy: fsdp`",
            reads=(("strategy", "kind"),),
        )
