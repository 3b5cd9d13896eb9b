"""The section `method`: which keys go together, and what they mean: the weights that train."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gangline.config.job_model import JobWords
from gangline.config.mistakes import KeyPath, absolute, quote, what_is_there, what_was_meant
from gangline.config.validate import Checked
from gangline.runs.decode import build
from gangline.runs.job import REGEX, MethodJob, TokensJob

ALL_LINEAR = "all-linear"
ADDED = "added"
"""In `train_tokens`: those of `tokens`."""
ADAPTER_KEYS = (
    *("rank", "alpha", "dropout", "targets", "exclude", "layers", "rank_pattern", "alpha_pattern"),
    *("rslora", "dora", "init", "adapter", "modules_to_save", "train_tokens", "target_parameters"),
)
"""Keys of the section that say how adapters are."""


def resolve_method(checked: Checked[JobWords], *, folder: Path) -> MethodJob:
    """What the words mean; what is off is recorded in `checked`. folder: where relative paths of the file begin."""
    _check_kind(checked)
    _check_targets(checked)
    _check_expressions(checked)
    words = checked.words.method
    if words.init == "orthogonal" and (
        odd := [rank for rank in (words.rank, *words.rank_pattern.values()) if rank % 2]
    ):
        checked.report(
            ("method", "init"),
            seen=f"orthogonal with rank {odd[0]}",
            expected="even ranks: A and B get half of the directions each",
            fix=f"write rank: {odd[0] + 1}, or init: default",
            reads=(("method", "rank"), ("method", "rank_pattern")),
        )
    layers = tuple(sorted(set(_numbers(checked, words.layers))))
    targets = words.targets
    if words.target_parameters and "targets" not in words.model_fields_set:
        targets = []
    method = build(MethodJob, words.model_dump() | {"layers": layers, "targets": targets})
    return method if words.adapter is None or words.kind == "full" else _continued(checked, method, folder=folder)


# `method.adapter`: what an adapter's own configuration says of it, in our words.

CONFIG = "adapter_config.json"
SPLITTING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` of adapters that fit no base model but one from which they were subtracted."""
PLAIN = ("lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication", "megatron_config")
"""Keys that have to be empty: gangline does none of these. Others that peft has are for other kinds of adapters."""


def _continued(checked: Checked[JobWords], method: MethodJob, *, folder: Path) -> MethodJob:
    """The method with the shape of the adapter that it goes on with."""
    key: KeyPath = ("method", "adapter")
    words, text = checked.words.method, str(checked.words.method.adapter)
    for other in ADAPTER_KEYS:
        if other in words.model_fields_set - {"adapter", "dropout"}:
            checked.report(
                ("method", other),
                seen=f"{other} beside an adapter that is trained on",
                expected=f"the {other} of that adapter",
                fix=f"delete {other}, or adapter",
                reads=(key,),
            )
    base = Path.cwd() if checked.document.from_command_line(key) else folder
    path = absolute(text, base)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        seen = f"{quote(text)} has no {CONFIG}" if path.is_dir() else what_is_there(text, base)
        fix = what_was_meant(text, base, folders=True)
        checked.report(key, seen=seen, expected="a folder with an adapter that peft or gangline wrote", fix=fix)
        return method
    except ValueError as error:
        checked.report(key, seen=f"{CONFIG}: {error}", expected="a file of JSON", fix="copy the adapter's folder again")
        return method
    if strange := _strange(config):
        checked.report(
            key,
            seen=strange,
            expected="an adapter of LoRA over a base model as it is",
            fix="merge it into its base model with peft, and name that model as model.path",
        )
        return method
    return build(MethodJob, dataclasses.asdict(method) | _shape(config) | {"adapter": str(path)})


def _strange(config: Any) -> str:
    """What of an adapter's configuration gangline does not do; "" for nothing."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return f"peft_type: {config.get('peft_type') if isinstance(config, dict) else 'none'}"
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(SPLITTING):
        return f"init_lora_weights: {begun}, which changed the base model"
    if config.get("bias", "none") != "none":
        return f"bias: {config['bias']}"
    if isinstance(config.get("trainable_token_indices"), dict):
        return "trainable_token_indices of named tables"
    return next((f"{key}: {config[key]}" for key in PLAIN if config.get(key)), "")


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    """An adapter's configuration in the words of `MethodJob`."""

    def names(key: str) -> list[str]:
        value = config.get(key) or []
        return [REGEX + value] if isinstance(value, str) else sorted(value)

    layers = config.get("layers_to_transform")
    return {
        "rank": config["r"],
        "alpha": float(config["lora_alpha"]),
        "targets": names("target_modules"),
        "exclude": names("exclude_modules"),
        "layers": [] if layers is None else [layers] if isinstance(layers, int) else list(layers),
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha_pattern": config.get("alpha_pattern") or {},
        "rslora": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
        "modules_to_save": names("modules_to_save"),
        "train_tokens": list(config.get("trainable_token_indices") or []),
        "target_parameters": names("target_parameters"),
    }


def resolve_tokens(checked: Checked[JobWords], trained: MethodJob) -> TokensJob:
    """Tokens beside those of the model; what is off is recorded in `checked`. trained: `resolve_method`'s."""
    words, method = checked.words.tokens, checked.words.method
    if ADDED in method.train_tokens and len(method.train_tokens) > 1:
        checked.report(
            ("method", "train_tokens"),
            seen="added beside other tokens",
            expected="added alone, or tokens",
            fix="write `train_tokens: added`, or name all tokens",
        )
    if ADDED in method.train_tokens and words == type(words)():
        checked.report(
            ("method", "train_tokens"),
            seen="added, but the job adds no tokens",
            expected="tokens.add beside it",
            fix="write, for example, `tokens: [<tool>]`, or name tokens that the model has",
            reads=(("tokens",),),
        )
    if words.add and method.kind != "full" and not _has_rows(trained):
        checked.report(
            ("tokens", "add"),
            seen=f"tokens whose rows nobody trains (method: {method.kind})",
            expected="train_tokens: added, or the tables in modules_to_save",
            fix="add `train_tokens: added` below method: the rows of these tokens alone, in a few megabytes",
            reads=(("method", "kind"), ("method", "train_tokens"), ("method", "modules_to_save")),
        )
    special = {role: text for role, text in words.special.model_dump().items() if text is not None}
    return TokensJob(add=tuple(words.add), special=special)


def _has_rows(trained: MethodJob) -> bool:
    """Whether rows of added tokens may be trained; ranks look at the numbers of an adapter that is gone on with."""
    named = trained.train_tokens if trained.adapter else ADDED in trained.train_tokens
    return bool(named or trained.modules_to_save)


def _check_kind(checked: Checked[JobWords]) -> None:
    method = checked.words.method
    if method.kind == "full":
        kind_fix = "write `kind: full` as `kind: lora`" if checked.wrote("method", "kind") else "add `kind: lora`"
        for key in ADAPTER_KEYS:
            if key in method.model_fields_set:
                checked.report(
                    ("method", key),
                    seen=f"{key}, but every weight is trained (kind: full)",
                    expected=f"{key} with kind: lora or kind: qlora only",
                    fix=f"{kind_fix}, or delete {key}",
                    reads=(("method", "kind"),),
                )
    for key, seen in (("bits", "bits"), ("quantise_experts", "true")):
        if method.kind != "qlora" and key in method.model_fields_set and getattr(method, key):
            checked.report(
                ("method", key),
                seen=f"{seen}, but frozen weights are as they are (kind: {method.kind})"
                if method.kind == "lora"
                else f"{seen}, but every weight is trained (kind: full)",
                expected=f"{key} with kind: qlora only",
                fix=f"write `kind: qlora`, or delete {key}",
                reads=(("method", "kind"),),
            )
    if method.quantise_experts and method.kind == "qlora" and not checked.words.activation_checkpointing:
        checked.report(
            ("method", "quantise_experts"),
            seen="true, without activation_checkpointing",
            expected="recomputation: backward would keep the unpacked experts of all layers",
            fix="set `activation_checkpointing: true`, or delete quantise_experts",
            reads=(("activation_checkpointing",),),
        )


def _check_targets(checked: Checked[JobWords]) -> None:
    method = checked.words.method
    for word, others in ((ALL_LINEAR, "names"), (REGEX, "names; one expression may have alternatives: (a|b)")):
        if len(method.targets) > 1 and any(each.startswith(word) for each in method.targets):
            checked.report(
                ("method", "targets"),
                seen=f"{word} beside other {'names' if word == ALL_LINEAR else 'targets'}",
                expected=f"{word} alone, or {others}",
                fix=f"write `targets: {word}`, or delete {word} from the list"
                if word == ALL_LINEAR
                else "write one expression, or names alone",
            )
    if len(method.exclude) > 1 and any(each.startswith(REGEX) for each in method.exclude):
        checked.report(
            ("method", "exclude"),
            seen="an expression beside other names",
            expected="one `regex:...` alone, or names",
            fix="write one expression, which may have alternatives: (a|b)",
        )
    if method.layers and method.targets and method.targets[0].startswith(REGEX):
        checked.report(
            ("method", "layers"),
            seen="layers beside an expression for whole names",
            expected="the layers in the expression, such as regex:model\\.layers\\.(8|9)\\..*",
            fix="delete layers, or write names as targets",
            reads=(("method", "targets"),),
        )


def _check_expressions(checked: Checked[JobWords]) -> None:
    """Regular expressions that Python does not read."""
    for path, text in _expressions(checked):
        try:
            re.compile(text)
        except re.error as error:
            checked.report(
                path, seen=quote(text), expected=f"a regular expression; {error}", fix="put it right at that place"
            )


def _expressions(checked: Checked[JobWords]) -> Iterator[tuple[KeyPath, str]]:
    method = checked.words.method
    for key in ("targets", "exclude"):
        for index, text in enumerate(getattr(method, key)):
            if text.startswith(REGEX):
                yield ("method", key, index), text.removeprefix(REGEX)
    for key in ("rank_pattern", "alpha_pattern"):
        for text in getattr(method, key):
            yield ("method", key, text), text


def _numbers(checked: Checked[JobWords], layers: Iterable[int | str]) -> Iterator[int]:
    for index, each in enumerate(layers):
        if isinstance(each, int):
            yield each
            continue
        first, last = map(int, each.split("-"))
        if first > last:
            checked.report(
                ("method", "layers", index),
                seen=f"the range {each}",
                expected="its first layer before its last",
                fix=f"write {last}-{first}",
            )
        yield from range(first, last + 1)
