"""The rules between the strategy that a job asks for and the rest of the job: those of its capabilities.

What a configuration file of DeepSpeed may say is in `config/zero.py`.
"""

from __future__ import annotations

from typing import Any

from gangline.config.job_model import JobWords, StrategyWords
from gangline.config.mistakes import KeyPath, quote
from gangline.config.validate import Checked
from gangline.runs.decode import build
from gangline.runs.job import StrategyJob
from gangline.strategies.base import AUTO, Asked, listed, violations
from gangline.strategies.table import plan_half, strategy_keys

DISK = "offload_to"


def check_strategy(checked: Checked[JobWords]) -> None:
    """Report everything that the job asks for and its strategy does not train."""
    words = checked.words
    half = None if words.strategy.kind == AUTO else plan_half(words.strategy.kind)
    _check_keys(checked, keys_of(words.strategy.kind))
    for each in violations(half, asked_of_words(words)):
        checked.report(
            _path(each.key), seen=each.seen, expected=each.expected, fix=each.fix, reads=tuple(map(_path, each.reads))
        )
    if words.strategy.offload_to is not None:
        _check_disk(checked, words.strategy.offload_to)
    if words.activation_offloading and words.activation_checkpointing is not True:
        checked.report(
            ("activation_offloading",),
            seen="activation_offloading, but layers keep all that backward needs",
            expected="activation_checkpointing: true beside it: the input of each layer is moved",
            fix="add `activation_checkpointing: true`, or delete activation_offloading",
            reads=(("activation_checkpointing",),),
        )


def asked_of_words(words: JobWords) -> Asked:
    """The part of a job that strategies limit. Formats that are left to the plan are not known here."""
    narrow = words.precision.parameters == "compute" and words.precision.compute != "fp32"
    return Asked(
        method=words.method.kind,
        precision=words.precision.compute,
        parameters="compute" if narrow else "fp32",
        optimizer=words.optimizer.kind,
        exchange=words.exchange,
        activation_offloading=words.activation_offloading,
        offload=tuple(words.strategy.offload) if "offload" in keys_of(words.strategy.kind) else (),
        replicas=words.strategy.replicas,
    )


def resolve_strategy(words: StrategyWords, *, deepspeed: dict[str, Any]) -> StrategyJob:
    """The section `strategy` as the run has it."""
    return build(StrategyJob, words.model_dump() | {"deepspeed": deepspeed})


def _check_keys(checked: Checked[JobWords], own: tuple[str, ...]) -> None:
    """Keys of the section that are for other strategies."""
    strategy = checked.words.strategy
    wrong = sorted(strategy.model_fields_set - {"kind", *own})
    kinds = strategy_keys() if wrong else {}
    for key in wrong:
        checked.report(
            ("strategy", key),
            seen=f"{key} with strategy: {strategy.kind}",
            expected=f"{key} with kind: {listed(kinds[key])} only",
            fix=f"write `kind: {kinds[key][-1]}`, or delete {key}",
            reads=(("strategy", "kind"),),
        )


def _check_disk(checked: Checked[JobWords], folder: str) -> None:
    strategy = checked.words.strategy
    if strategy.offload != ["optimizer"] and DISK in keys_of(strategy.kind):
        checked.report(
            ("strategy", DISK),
            seen=f"offload: [{', '.join(strategy.offload)}]",
            expected="offload: optimizer, whose states alone can lie on a disk",
            fix="write `offload: optimizer`, or delete offload_to",
            reads=(("strategy", "kind"), ("strategy", "offload")),
        )
    if not folder.startswith("/"):
        checked.report(
            ("strategy", DISK),
            seen=quote(folder),
            expected="a folder that begins with /: it is looked for on every host",
            fix="write its whole path",
        )


def keys_of(kind: str) -> tuple[str, ...]:
    """Keys of the section that are for that strategy."""
    return () if kind == AUTO else plan_half(kind).capabilities.keys


def _path(key: str) -> KeyPath:
    return tuple(key.split("."))
