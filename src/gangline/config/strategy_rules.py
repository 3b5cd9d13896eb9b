"""The rules between the strategy that a job asks for and the rest of the job: those of its capabilities, and what a
configuration file of DeepSpeed says beside the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gangline.config.job_model import JobWords, OptimizerWords
from gangline.config.mistakes import KeyPath, absolute, quote, what_is_there, what_was_meant
from gangline.config.validate import Checked
from gangline.optimizers import OPTIMIZERS
from gangline.runs.decode import build
from gangline.runs.job import MethodJob, OptimizerJob, StrategyJob
from gangline.runs.step_schedule import part_of
from gangline.strategies.base import AUTO, METHOD_EXTRAS, Asked, extras_of, listed, violations
from gangline.strategies.table import plan_half, strategy_keys

DISK = "offload_to"


def check_strategy(checked: Checked[JobWords], method: MethodJob) -> None:
    """Report everything that the job asks for and its strategy does not train. method: what the words of it mean."""
    words = checked.words
    half = None if words.strategy.kind == AUTO else plan_half(words.strategy.kind)
    _check_keys(checked, keys_of(words.strategy.kind))
    for each in violations(half, asked_of_words(words, method)):
        key = each.key if words.method.adapter is None or each.key not in METHOD_EXTRAS else "method.adapter"
        checked.report(
            _path(key), seen=each.seen, expected=each.expected, fix=each.fix, reads=tuple(map(_path, each.reads))
        )
    if words.strategy.offload_to is not None:
        _check_disk(checked, words.strategy.offload_to)
    if words.activation_offloading and words.activation_checkpointing is False:
        checked.report(
            ("activation_offloading",),
            seen="activation_offloading, but layers keep all that backward needs",
            expected="activation_checkpointing: true beside it: the input of each layer is moved",
            fix="write `activation_checkpointing: true`, or delete it or activation_offloading",
            reads=(("activation_checkpointing",),),
        )


def asked_of_words(words: JobWords, method: MethodJob) -> Asked:
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
        extras=extras_of(method, compiles=words.compile),
    )


def resolved_optimizer(words: OptimizerWords) -> dict[str, Any]:
    """The section `optimizer` with the defaults of its kind."""
    given = words.model_dump(exclude={"betas"}, exclude_none=True)
    betas = dict(zip(("beta1", "beta2"), words.betas or (), strict=False))
    return {**OPTIMIZERS[words.kind].keys, **given, **betas, "clip_norm": words.clip_norm}


def resolve_strategy(checked: Checked[JobWords], *, folder: Path) -> StrategyJob:
    """The section `strategy` as the run has it. folder: where relative paths of the file begin."""
    return build(StrategyJob, checked.words.strategy.model_dump() | {"deepspeed": _deepspeed(checked, folder=folder)})


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


# `strategy.deepspeed`: gangline sets what its job says. A key of the file that says the same, or `auto` as transformers
# writes it, is fine; one that says something else is refused by its name, and so is what gangline does in another way.
# The rest is passed on.


KEY = ("strategy", "deepspeed")
STAGES = {"states": 1, "gradients": 2, "weights": 3}
"""What lies in parts -> DeepSpeed's number for it."""
FILLED = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Of `zero_optimization`: `auto` is filled in by ranks, who know the model."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FIXED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
ELSEWHERE: dict[str, str] = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))
"""Keys of DeepSpeed's file whose work gangline does in another way, or not at all: the instruction for the user."""


def _deepspeed(checked: Checked[JobWords], *, folder: Path) -> dict[str, Any]:
    """What of the file is passed on to DeepSpeed; {}, with mistakes recorded, where it cannot be read."""
    text = checked.words.strategy.deepspeed
    if text is None or KEY[1] not in keys_of(checked.words.strategy.kind):
        return {}
    base = Path.cwd() if checked.document.from_command_line(KEY) else folder
    path = absolute(text, base)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        seen, fix = what_is_there(text, base), what_was_meant(text, base)
        checked.report(KEY, seen=seen, expected="a configuration file of DeepSpeed", fix=fix)
        return {}
    except ValueError as error:
        checked.report(KEY, seen=f"{quote(text)}: {error}", expected="a file of JSON", fix="look at that place in it")
        return {}
    if not isinstance(found, dict):
        checked.report(
            KEY, seen=f"{quote(text)} holds no mapping", expected="keys of DeepSpeed", fix="look at the file"
        )
        return {}
    reader = _Reader(checked, text)
    return reader.passed_on(found)


class _Reader:
    """Compares one file with the job."""

    def __init__(self, checked: Checked[JobWords], name: str) -> None:
        self._checked = checked
        self._words = checked.words
        self._name = name

    def passed_on(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What is neither the job's nor refused."""
        ours = {
            "train_batch_size": (self._words.batch.exact, "batch"),
            "train_micro_batch_size_per_gpu": (self._words.micro_batch, "micro_batch"),
            "gradient_clipping": (self._words.optimizer.clip_norm or 0, "optimizer.clip_norm"),
            "communication_data_type": (self._words.exchange, "exchange"),
        }
        sections: dict[str, Callable[[Any], None]] = {
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "fp16": self._fp16,
            "bf16": self._bf16,
            "bfloat16": self._bf16,
        }
        passed: dict[str, Any] = {}
        for key, value in found.items():
            if key in ours:
                self._agree(key, 0 if value is None else value, *ours[key])
            elif key in sections:
                sections[key](value)
            elif key == "aio" and self._words.strategy.offload_to is None:
                self._refuse(key, value, "nothing there", "delete it, or write `offload_to` in the job")
            elif key in ELSEWHERE:
                if value != AUTO or key != "gradient_accumulation_steps":
                    self._refuse(key, value, "nothing there", ELSEWHERE[key])
            elif key in FIXED and value != FIXED[key]:
                self._refuse(key, value, "the update is torch's AdamW, wherever the states lie", "delete it")
            elif key == "zero_optimization" and isinstance(value, dict):
                passed[key] = self._zero(value)
            elif value == AUTO:
                self._refuse(key, value, "a value: the job says nothing of it", "write a value, or delete it")
            else:
                passed[key] = value
        return {key: value for key, value in passed.items() if key not in FIXED}

    def _zero(self, found: Mapping[str, Any]) -> dict[str, Any]:
        passed: dict[str, Any] = {}
        stage = STAGES[plan_half(self._words.strategy.kind).parts]
        for key, value in found.items():
            name = f"zero_optimization.{key}"
            if key == "stage":
                self._agree(name, value, stage, "strategy.kind")
            elif key in ("offload_optimizer", "offload_param") and isinstance(value, dict):
                passed[key] = self._offload(name, value, "optimizer" if key == "offload_optimizer" else "parameters")
            elif key in ("zenflow", "cpu_offload", "cpu_offload_param"):
                self._refuse(name, value, "strategy.offload", "delete it, and write `offload: optimizer` in the job")
            elif value == AUTO and key not in FILLED:
                self._refuse(name, value, "a value: the job says nothing of it", "write a value, or delete it")
            else:
                passed[key] = value
        return {key: value for key, value in passed.items() if value != {}}

    def _offload(self, name: str, found: Mapping[str, Any], what: str) -> dict[str, Any]:
        device = found.get("device", "none") or "none"
        folder = self._words.strategy.offload_to
        lies = "none" if what not in self._words.strategy.offload else "cpu" if folder is None else "nvme"
        if device not in (AUTO, lies):
            fixes = {
                "cpu": f"add {what} to `offload` in the job",
                "nvme": "write `offload: optimizer` and `offload_to`, with its folder, in the job"
                if what == "optimizer"
                else 'write "cpu": weights on NVMe are not done',
            }
            fix = fixes.get(device, f"delete {what} from `offload` in the job")
            self._refuse(f"{name}.device", device, f"{quote(lies)}, as strategy.offload says", fix)
        if lies == "none":
            return {}
        for key in ("super_offload", "ratio", "cpuadam_cores_perc"):
            if key in found:
                self._refuse(f"{name}.{key}", found[key], "nothing there", "delete it: the update is torch's AdamW")
        if lies == "nvme":
            self._on_disk(name, found)
        if found.get("nvme_path") is not None:
            self._agree(f"{name}.nvme_path", found["nvme_path"], folder, "strategy.offload_to")
        kept = (
            "pin_memory",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "pipeline_read",
            "pipeline_write",
            "fast_init",
        )
        return {key: value for key, value in found.items() if key in kept and value != AUTO}

    def _on_disk(self, name: str, found: Mapping[str, Any]) -> None:
        for key in ("pipeline_read", "pipeline_write", "fast_init"):
            if found.get(key):
                self._refuse(f"{name}.{key}", found[key], "nothing there", "delete it: states come and go in turn")
        count = found.get("buffer_count", 4)
        if count != AUTO and count < 4:
            self._refuse(f"{name}.buffer_count", count, "4: a weight, its gradient, two moments", "delete it")

    def _optimizer(self, found: Any) -> None:
        kind, numbers = self._typed("optimizer", found)
        if kind not in ("AdamW", "Adam"):
            self._refuse("optimizer.type", kind, "AdamW, which is what gangline trains with", 'write "AdamW"')
            return
        words = OptimizerJob(**resolved_optimizer(self._words.optimizer))
        ours = {
            "lr": (words.learning_rate, "optimizer.learning_rate"),
            "betas": ([words.beta1, words.beta2], "optimizer.betas"),
            "eps": (words.epsilon, "optimizer.epsilon"),
            "weight_decay": (words.weight_decay, "optimizer.weight_decay"),
            "torch_adam": (True, "torch's AdamW"),
            "adam_w_mode": (True, "AdamW"),
        }
        self._agree_all("optimizer.params", numbers, ours)

    def _scheduler(self, found: Any) -> None:
        kind, numbers = self._typed("scheduler", found)
        words = self._words.schedule
        if SCHEDULES.get(kind) != words.kind:
            known = [name for name, meaning in SCHEDULES.items() if meaning == words.kind]
            fix = "delete it" + (f", or write {quote(known[0])}" if known else "")
            fix += f", or `schedule: {SCHEDULES[kind]}` in the job" if kind in SCHEDULES else ""
            expected = f"{known[0]}, as schedule.kind: {words.kind} is called there" if known else "nothing there"
            self._refuse("scheduler.type", kind, expected, fix)
            return
        ours: dict[str, tuple[Any, str]] = {
            "warmup_min_lr": (0, "0, where every warm-up begins"),
            "warmup_max_lr": (self._words.optimizer.learning_rate, "optimizer.learning_rate"),
            "warmup_num_steps": self._warmup(),
            "warmup_type": ("linear", "linear"),
            "total_num_steps": (self._words.steps, "steps"),
            "cos_min_ratio": (words.final_ratio, "schedule.final_ratio"),
        }
        self._agree_all("scheduler.params", numbers, ours)

    def _warmup(self) -> tuple[int | None, str]:
        """Of the job, in steps; None where it is a part of steps that are not known."""
        words, steps = self._words.schedule, self._words.steps
        if words.warmup_ratio is None:
            return words.warmup_steps, "schedule.warmup_steps"
        return None if steps is None else part_of(steps, words.warmup_ratio), "schedule.warmup_ratio"

    def _typed(self, name: str, found: Any) -> tuple[str, Mapping[str, Any]]:
        found = found if isinstance(found, dict) else {}
        numbers = found.get("params") or {}
        return str(found.get("type", "")), numbers if isinstance(numbers, dict) else {name: numbers}

    def _agree_all(self, name: str, found: Mapping[str, Any], ours: Mapping[str, tuple[Any, str]]) -> None:
        for key, value in found.items():
            if key not in ours:
                self._refuse(f"{name}.{key}", value, "nothing there", "delete it")
            else:
                self._agree(f"{name}.{key}", value, *ours[key])

    def _fp16(self, found: Any) -> None:
        enabled = found.get("enabled") if isinstance(found, dict) else found
        if enabled not in (False, None, AUTO):
            self._refuse("fp16.enabled", enabled, "false: products are in fp32 or bf16", 'write false, or "auto"')

    def _bf16(self, found: Any) -> None:
        enabled = found.get("enabled", False) if isinstance(found, dict) else found
        self._agree("bf16.enabled", enabled, self._words.precision.compute == "bf16", "precision")
        for key, value in (found if isinstance(found, dict) else {}).items():
            if key != "enabled":
                self._refuse(f"bf16.{key}", value, "nothing there", "delete it")

    def _agree(self, name: str, value: Any, wanted: Any, key: str) -> None:
        if value in (AUTO, wanted):
            return
        shown = ("auto" if key == "micro_batch" else "none") if wanted is None else json.dumps(wanted)
        self._refuse(name, value, f"{shown}, as the job says ({key})", 'write "auto", or change one of the two')

    def _refuse(self, name: str, value: Any, expected: str, fix: str) -> None:
        seen = f"{name} is {json.dumps(value)[:80]} in {quote(self._name)}"
        self._checked.report(KEY, seen=seen, expected=expected, fix=fix, reads=(("strategy", "kind"),))
