"""From the words of `job.yaml` to the resolved job: paths, defaults, and the rules between keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gangline.callbacks import CALLBACKS
from gangline.chat_templates import CHAT_TEMPLATES
from gangline.config.job_model import (
    DataWords,
    EvaluationSourceWords,
    JobWords,
    NotifyWords,
    OptimizerWords,
    PartWords,
    SourceWords,
    resolve_callbacks,
    resolve_report,
)
from gangline.config.method_rules import resolve_method, resolve_tokens
from gangline.config.mistakes import (
    KeyPath,
    absolute,
    find_files,
    listed,
    nearest,
    quote,
    what_is_there,
    what_was_meant,
)
from gangline.config.strategy_rules import check_strategy, resolve_strategy, resolved_optimizer
from gangline.config.validate import Checked
from gangline.exporters import EXPORTERS
from gangline.formats import FORMATS, ROLES, fields_of, has_conversations
from gangline.optimizers import OPTIMIZERS
from gangline.row_files import is_remote, on_host
from gangline.runs.decode import build
from gangline.runs.gang import nearby, whole_counts
from gangline.runs.job import (
    DEFAULT_LENGTH,
    SCHEDULE_KEYS,
    ChatTemplateJob,
    CheckpointJob,
    DataJob,
    EarlyStoppingJob,
    EvaluationJob,
    FailureJob,
    Job,
    LearnJob,
    ModelJob,
    NotifyJob,
    OptimizerJob,
    ReportJob,
    ScheduleJob,
    SliceJob,
    SourceJob,
)
from gangline.strategies.base import AUTO
from gangline.strategies.table import STRATEGIES
from gangline.units import format_duration, parse_duration

# From the words of `failures:` to what is done when a part of the gang fails.


LONGEST_WAIT_S = 86400.0


def resolve_failures(checked: Checked[JobWords]) -> FailureJob:
    """What the words mean; what is off is recorded in `checked`."""
    words = checked.words.failures
    wait_s = parse_duration(words.wait)
    if wait_s > LONGEST_WAIT_S:
        checked.report(
            ("failures", "wait"),
            seen=f"a wait of {format_duration(wait_s)}",
            expected="24h at the most",
            fix="write a shorter time, such as 10m: with take_back, a host that answers later joins again",
        )
    _check_restarts(checked)
    if words.take_back and not words.without and "take_back" in words.model_fields_set:
        checked.report(
            ("failures", "take_back"),
            seen="take_back, but the run never goes on without a host (without: false)",
            expected="take_back with without: true only",
            fix="delete it, or write `without: true`",
            reads=(("failures", "without"),),
        )
    return FailureJob(**words.model_dump(exclude={"wait"}), wait_s=wait_s)


def _check_restarts(checked: Checked[JobWords]) -> None:
    """Without restarts the other keys say nothing."""
    words = checked.words.failures
    for key in ("wait", "without", "take_back", "smaller_micro_batch"):
        if words.restarts == 0 and key in words.model_fields_set:
            checked.report(
                ("failures", key),
                seen=f"{key}, but the first failure ends the run (restarts: 0)",
                expected=f"{key} with restarts of 1 or more",
                fix=f"delete {key}, or write more restarts",
                reads=(("failures", "restarts"),),
            )


# `data.train` and `data.eval`: from the user's words to files and hub data sets.


HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_HUB = "hub:"
_HUB_SHORT = re.compile(
    r"hub:(?P<hub>[^/@#\s]+(/[^/@#\s]+)?)(/(?P<config>[^/@#\s]+))?(@(?P<revision>[^@#\s]+))?(#(?P<split>[^@#\s]+))?"
)


def resolve_source(checked: Checked[JobWords], key: KeyPath, source: SourceWords, *, folder: Path) -> SourceJob | None:
    """Files found, or the hub data set taken apart; None, with mistakes recorded, where that cannot be done."""
    if source.sources is None:
        return resolve_part(checked, key, source, folder=folder)
    beside = sorted(source.model_fields_set - {"sources", "fraction"})
    for name in beside:
        checked.report(
            (*key, name), seen=f"{name} beside sources", expected="sources alone", fix="write it into each source"
        )
    parts = [
        resolve_part(checked, (*key, "sources", number), part, folder=folder)
        for number, part in enumerate(source.sources)
    ]
    if beside or not parts or None in parts:
        return None
    return SourceJob(mix=tuple(part for part in parts if part is not None))


def resolve_part(checked: Checked[JobWords], key: KeyPath, source: PartWords, *, folder: Path) -> SourceJob | None:
    """As `resolve_source`, of one source."""
    if source.files is None and source.hub is None:
        checked.report(
            key,
            seen="neither files nor a hub data set",
            expected="one of the two",
            fix="write, for example, `files: rows.jsonl` or `hub: owner/name`"
            if "sources" in key
            else f"write, for example, `{key[-1]}: rows.jsonl` or `{key[-1]}: hub:owner/name`",
        )
        return None
    if source.files is not None and source.hub is not None:
        checked.report(
            (*key, "hub"), seen="files and a hub data set", expected="one of the two", fix="delete one of the keys"
        )
        return None
    rows = _sliced(checked, key, source)
    files = source.files or []
    if len(files) == 1 and files[0].startswith(_HUB):
        short = _taken_apart(checked, key, files[0], source)
        rows = _sliced(checked, key, short) if short and short.split else rows
        found = _hub(checked, key, short) if short else None
    else:
        found = _hub(checked, key, source) if source.hub else _files(checked, key, source, folder=folder)
    own = {name: getattr(source, name) for name in ("max_samples", "weight", "format", "fields", "roles")}
    return found and dataclasses.replace(found, rows=rows, **own)


_SLICE = re.compile(r"(?P<split>[^\[\]]*)\[\s*(?P<start>-?[\d.]+%?)?\s*:\s*(?P<stop>-?[\d.]+%?)?\s*\]")


def _sliced(checked: Checked[JobWords], key: KeyPath, source: PartWords) -> SliceJob | None:
    """The rows that `split` means, such as those of `train[:1%]`; None: all."""
    if source.split is None or "[" not in source.split:
        return None
    match = _SLICE.fullmatch(source.split)
    edges = [edge for edge in (match["start"], match["stop"]) if edge] if match else []
    percent = [edge.endswith("%") for edge in edges]
    try:
        start, stop = (float(match[name].rstrip("%")) if match[name] else None for name in ("start", "stop"))  # type: ignore[index]
        good = bool(edges) and len(set(percent)) == 1 and _is_within(start, stop, percent=percent[0])
    except (TypeError, ValueError):
        good = False
    if not good:
        checked.report(
            (*key, "split"),
            seen=quote(source.split),
            expected="rows as in train[100:200] (whole numbers) or train[10%:20%], the first before the last",
            fix="write, for example, `split: train[:1000]`; several parts are several sources",
        )
        return None
    return SliceJob(start=start, stop=stop, percent=percent[0])


def _is_within(start: float | None, stop: float | None, *, percent: bool) -> bool:
    edges = [edge for edge in (start, stop) if edge is not None]
    if percent and not all(-100 <= edge <= 100 for edge in edges):
        return False
    if not percent and not all(edge.is_integer() for edge in edges):
        return False
    return start is None or stop is None or (start < 0) != (stop < 0) or start < stop


def _taken_apart(checked: Checked[JobWords], key: KeyPath, text: str, source: PartWords) -> PartWords | None:
    match = _HUB_SHORT.fullmatch(text)
    if match:
        beside = {name: getattr(source, name) for name in ("config", "split", "revision")}
        return PartWords.model_validate({**match.groupdict(), **{key: word for key, word in beside.items() if word}})
    checked.report(
        (*key, "files"),
        seen=quote(text),
        expected="hub:owner/name[/config][@revision][#split]",
        fix="write, for example, hub:openai/gsm8k/main@v1#train",
    )
    return None


def _hub(checked: Checked[JobWords], key: KeyPath, source: PartWords) -> SourceJob | None:
    name = source.hub or ""
    split = source.split.partition("[")[0].strip() if source.split else None
    words = {"hub": name, "config": source.config, "split": split or None, "revision": source.revision}
    good = True
    for part, value in words.items():
        pattern = HUB_NAME if part == "hub" else REVISION
        if value is not None and not pattern.fullmatch(value):
            good = False
            checked.report(
                (*key, part),
                seen=quote(value),
                expected="letters, digits, `.`, `_` and `-`, beginning with a letter or a digit",
                fix="copy the name from the data set's page on the hub",
            )
    if "eval" in key and not split:
        good = False
        checked.report(
            key,
            seen="a hub data set without its split",
            expected="the split to evaluate on, so that it is not the one that is trained on",
            fix="add the split, such as `hub:owner/name#test` or `split: test`",
        )
    if not good:
        return None
    return SourceJob(hub=name, hub_config=source.config, split=split or "train", revision=source.revision, files=())


def _files(checked: Checked[JobWords], key: KeyPath, source: PartWords, *, folder: Path) -> SourceJob | None:
    beside = [part for part in ("config", "split", "revision") if getattr(source, part) is not None]
    if "[" in (source.split or ""):
        beside.remove("split")  # files have no splits, but rows
    for part in beside:
        checked.report(
            (*key, part), seen="a key for a hub data set beside files", expected="files alone", fix="delete it"
        )
    good = not beside
    found: list[str] = []
    if len({on_host(text)[0] for text in source.files or ()}) > 1:
        good = False
        checked.report(
            key,
            seen="files on different computers",
            expected="the files of one source on one computer",
            fix="make them sources of their own: a list with one entry for each computer",
        )
    for index, text in enumerate(source.files or ()):
        place = checked.document.located((*key, "files", index))
        base = Path.cwd() if checked.document.from_command_line(place) else folder
        host, _ = on_host(text)
        if (host and not absolute(text, base).exists()) or (is_remote(text) and not text.startswith("file:")):
            found.append(text)
            continue
        files = find_files(text, base) if not text.startswith(_HUB) else []
        found += map(str, files)
        if files:
            continue
        path = absolute(text, base)
        if not (checked.needs_data or text.startswith(_HUB) or path.exists()):
            found.append(str(path))
            continue
        good = False
        if text.startswith(_HUB):
            seen, fix = "a hub data set among files", "make it a source of its own: - hub:owner/name"
        else:
            seen, fix = what_is_there(text, base), what_was_meant(text, base)
        checked.report(place, seen=seen, expected="files to read", fix=fix)
    return SourceJob(files=tuple(dict.fromkeys(found))) if good else None


def resolve_evaluation(
    checked: Checked[JobWords], source: EvaluationSourceWords | None, *, folder: Path
) -> tuple[SourceJob | None, float]:
    """The evaluation rows: a source of their own, or a fraction of the training rows."""
    key: KeyPath = ("data", "eval")
    if source is None:
        return None, 0.0
    if source.fraction is None:
        return resolve_source(checked, key, source, folder=folder), 0.0
    if source.files or source.hub or source.sources:
        checked.report(
            (*key, "fraction"), seen="a fraction and a source", expected="one of the two", fix="delete one of the keys"
        )
    return None, source.fraction


# Number formats that do not go together, whatever the machines are.


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


_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_job(checked: Checked[JobWords], *, folder: Path, default_name: str) -> Job:
    """The job that the words mean. Raises SpecError with all mistakes of the file.

    folder: where relative paths of the file begin.
    """
    words = checked.words
    _check_batch(checked)
    _check_lengths(checked)
    method = resolve_method(checked, folder=folder)
    tokens = resolve_tokens(checked, method)
    check_strategy(checked, method)
    check_precision(checked)
    _check_exchange(checked)
    _check_kernels(checked)
    _check_compile(checked)
    _check_schedule(checked)
    _check_evaluation(checked)
    _check_early_stopping(checked)
    model = _model(checked, folder=folder)
    data = _data(checked, folder=folder)
    optimizer = _optimizer(checked)
    failures = resolve_failures(checked)
    report, callbacks = resolve_report(checked), resolve_callbacks(checked)
    strategy = resolve_strategy(checked, folder=folder)
    notify = resolve_notify(checked, words.notify, folder=folder)
    checked.document.mistakes.raise_if_any()
    early = words.early_stopping
    return Job(
        name=words.name or default_name,
        model=model,
        data=data,
        batch=words.batch.exact or words.batch.about or 1,
        micro_batch=words.micro_batch or 1,
        method=method,
        tokens=tokens,
        epochs=None if words.steps else words.epochs or 1.0,
        steps=words.steps,
        seed=words.seed,
        draws="sample",
        precision=words.precision.compute,
        parameters=words.precision.parameters,
        kernels=tuple(dict.fromkeys(words.kernels)),
        activation_checkpointing=words.activation_checkpointing or words.activation_offloading,
        activation_offloading=words.activation_offloading,
        compile=words.compile,
        strategy=strategy,
        exchange="fp32" if words.exchange == "auto" else words.exchange,
        optimizer=optimizer,
        schedule=build(ScheduleJob, words.schedule.model_dump()),
        evaluation=build(EvaluationJob, words.evaluation.model_dump()),
        early_stopping=build(EarlyStoppingJob, early.model_dump()) if early is not None else None,
        checkpoint=build(CheckpointJob, words.checkpoint.model_dump()),
        failures=failures,
        report=report,
        callbacks=callbacks,
        notify=notify,
        max_skipped_steps=words.max_skipped_steps,
        open=_open(words),
        plugins=_plugins(data, report, callbacks, strategy.kind),
    )


def resolve_notify(checked: Checked[Any], words: NotifyWords | None, *, folder: Path) -> NotifyJob | None:
    """Who is told what; None: the file does not say, and an empty one: it says nobody. Paths begin at `folder`."""
    if words is None:
        return NotifyJob() if checked.wrote("notify") else None
    if not words.to and not words.command:
        checked.report(
            ("notify",),
            seen="messages, and nobody to tell",
            expected="to or command",
            fix="write, for example, `to: file:~/.config/ntfy`, or delete it",
        )
    places = (place.partition(":")[::2] for place in words.to)
    named = [f"{kind}:{name if kind == 'env' else folder / Path(name).expanduser()}" for kind, name in places]
    return NotifyJob(to=tuple(named), command=tuple(words.command), events=tuple(words.events))


def _plugins(data: DataJob, report: ReportJob, callbacks: Iterable[str], kind: str) -> dict[str, str]:
    """The packages of all plug-ins that a job names, with their versions."""
    strategy = None if kind == AUTO else STRATEGIES.plugin(kind)
    loop = [*map(EXPORTERS.plugin, report.exporters), *map(CALLBACKS.plugin, callbacks)]
    named = [*map(FORMATS.plugin, data.formats), *loop, strategy]
    return {plugin.package: plugin.version for plugin in named if plugin is not None}


def _check_batch(checked: Checked[JobWords]) -> None:
    batch, micro_batch = checked.words.batch, checked.words.micro_batch or 1
    low, high = nearby(batch.about or 1)
    if batch.exact is not None and batch.about is not None:
        checked.report(("batch",), seen="both exact and about", expected="one of them", fix="delete one")
    elif batch.exact is not None:
        _check_whole(checked, batch.exact, micro_batch)
    elif batch.about is None:
        checked.report(
            ("batch",),
            seen="neither exact nor about",
            expected="one of them",
            fix="write `batch: 32`, or `batch: {about: 32}`",
        )
    elif not whole_counts(batch.about, micro_batch):
        checked.report(
            ("batch", "about"),
            seen=f"about {batch.about}, which is {low} to {high} samples",
            expected=f"a whole number of micro-batches of {micro_batch} among these",
            fix=f"write about: {micro_batch} or more, or a smaller micro_batch, or micro_batch: auto",
            reads=(("micro_batch",),),
        )


def _check_whole(checked: Checked[JobWords], batch: int, micro_batch: int) -> None:
    if remainder := batch % micro_batch:
        below, above = batch - remainder, batch - remainder + micro_batch
        near = f"{below} or {above}" if below else str(above)
        checked.report(
            ("batch", "exact"),
            seen=f"{batch} samples, which is {batch / micro_batch:.3g} micro-batches",
            expected=f"a whole number of micro-batches of {micro_batch}",
            fix=f"write batch: {near}, or choose a micro_batch that divides {batch}, or micro_batch: auto",
            reads=(("micro_batch",),),
        )


def _check_lengths(checked: Checked[JobWords]) -> None:
    words = checked.words
    if words.epochs is not None and words.steps is not None:
        checked.report(
            ("steps",), seen="both epochs and steps", expected="one of them", fix="delete one", reads=(("epochs",),)
        )
    _check_one_of(checked, "schedule", "warmup_steps", "warmup_ratio")
    _check_one_of(checked, "evaluation", "every_steps", "every_epochs")
    _check_one_of(checked, "checkpoint", "every_steps", "every_epochs")
    if words.steps is not None and words.schedule.warmup_steps > words.steps:
        checked.report(
            ("schedule", "warmup_steps"),
            seen=f"a warm-up of {words.schedule.warmup_steps} steps in a run of {words.steps}",
            expected=f"{words.steps} at the most",
            fix=f"write a shorter warm-up, such as {max(1, words.steps // 10)}, or more steps",
            reads=(("steps",),),
        )


def _check_one_of(checked: Checked[JobWords], section: str, first: str, second: str) -> None:
    """Two words of a section for the same thing: in steps, and as a part of the run or of an epoch."""
    given = getattr(checked.words, section)
    if all(key in given.model_fields_set and getattr(given, key) is not None for key in (first, second)):
        checked.report(
            (section, second),
            seen=f"both {first} and {second}",
            expected="one of them",
            fix="delete one",
            reads=((section, first),),
        )


def _open(words: JobWords) -> tuple[str, ...]:
    found = ["batch"] if words.batch.about is not None else []
    found += ["micro_batch"] if words.micro_batch is None else []
    # what is moved to the machine's memory is what checkpointing keeps
    leaves = words.activation_checkpointing is None and not words.activation_offloading
    found += ["activation_checkpointing"] if leaves else []
    found += ["activation_offloading"] if leaves and "activation_offloading" not in words.model_fields_set else []
    found += ["sequence_length"] if words.data.sequence_length is None else []
    return (*found, "exchange") if words.exchange == "auto" else tuple(found)


def _check_exchange(checked: Checked[JobWords]) -> None:
    """`auto` is never wrong: the plan then finds that there is nothing to gain."""
    words = checked.words
    if words.exchange != "bf16":
        return
    seen, expected, read = "", "", ("precision", "compute")
    if words.precision.compute == "fp64":
        seen, expected = "gradients in bf16 in a run in fp64", "gradients as they are, or less exact weights"
    elif words.precision.parameters == "compute" and words.precision.compute != "fp32":
        seen, expected = "bf16 for gradients that are no wider", "bf16 with trained weights in fp32"
        read = ("precision", "parameters")
    if seen:
        checked.report(("exchange",), seen=seen, expected=expected, fix="delete it", reads=(read,))


def _check_kernels(checked: Checked[JobWords]) -> None:
    names = checked.words.kernels
    alone = [name for name in names if name in ("auto", "torch")]
    if alone and len(names) > 1:
        checked.report(
            ("kernels",),
            seen=f"{quote(alone[0])} beside other words",
            expected="auto, torch, or names of kernels",
            fix="delete the one or the others",
        )
    words = checked.words
    if "packed-attention" in names and not words.data.packing:
        checked.report(
            ("kernels",),
            seen="packed-attention with data.packing: false",
            expected="rows that are packed",
            fix="delete it, or set data.packing: true",
            reads=(("data", "packing"),),
        )
    if "lora" in names and words.method.kind == "full":
        checked.report(
            ("kernels",),
            seen="lora with method: full",
            expected="a method with adapters",
            fix="delete it, or set method: lora",
            reads=(("method", "kind"),),
        )
    elif "lora" in names and words.method.dora:
        checked.report(
            ("kernels",),
            seen="lora with method.dora: true",
            expected="adapters that are added; DoRA scales the sum by rows",
            fix="delete it, or write kernels: auto, which takes what works",
            reads=(("method", "dora"),),
        )


def _check_compile(checked: Checked[JobWords]) -> None:
    dropout = checked.words.method.dropout
    if checked.words.compile and dropout and checked.words.method.kind != "full":
        checked.report(
            ("compile",),
            seen=f"compile with method.dropout: {dropout:g}",
            expected="no dropout: masks that belong to samples are drawn by functions that are not compiled",
            fix="write `dropout: 0`, or delete compile",
            reads=(("method", "dropout"),),
        )


def _check_schedule(checked: Checked[JobWords]) -> None:
    schedule = checked.words.schedule
    for key in sorted(schedule.model_fields_set - {"kind", *SCHEDULE_KEYS[schedule.kind]}):
        kinds = [kind for kind, keys in SCHEDULE_KEYS.items() if key in keys]
        if kinds:  # else it is for every kind
            checked.report(
                ("schedule", key),
                seen=f"{key} with kind: {schedule.kind}",
                expected=f"{key} with kind: {listed(kinds)} only",
                fix="delete it, or choose another kind",
                reads=(("schedule", "kind"),),
            )
    warmup = schedule.warmup_steps
    if checked.words.steps and schedule.decay_steps and warmup + schedule.decay_steps > checked.words.steps >= warmup:
        checked.report(
            ("schedule", "decay_steps"),
            seen=f"a warm-up of {warmup} steps and a decay of {schedule.decay_steps} in {checked.words.steps}",
            expected=f"{checked.words.steps} at the most, together",
            fix="write a shorter decay, or more steps",
            reads=(("steps",), ("schedule", "warmup_steps")),
        )
    _check_one_of(checked, "schedule", "decay_steps", "decay_ratio")


def _check_evaluation(checked: Checked[JobWords]) -> None:
    if checked.words.data.eval is not None:
        return
    for key in ("every_steps", "every_epochs", "max_samples"):
        if getattr(checked.words.evaluation, key) is not None:
            checked.report(
                ("evaluation", key),
                seen="a rule for evaluation, but there are no rows to evaluate on",
                expected="data.eval beside it",
                fix="add `eval: 0.05` (or a file) under `data`, or delete this key",
                reads=(("data", "eval"),),
            )


def _check_early_stopping(checked: Checked[JobWords]) -> None:
    """It needs losses to compare: rows to evaluate on, and more evaluations than the one at the end."""
    words = checked.words
    if words.early_stopping is None:
        return
    if words.data.eval is None:
        checked.report(
            ("early_stopping",),
            seen="a rule for the evaluation loss, but there are no rows to evaluate on",
            expected="data.eval beside it",
            fix="add `eval: 0.05` (or a file) under `data`, or delete this key",
            reads=(("data", "eval"),),
        )
    elif words.evaluation.every_steps is None and words.evaluation.every_epochs is None:
        checked.report(
            ("early_stopping",),
            seen="a rule for the evaluation loss, which is known at the end of the run only",
            expected="evaluation.every_steps or evaluation.every_epochs beside it",
            fix="add, for example, `evaluation: {every_epochs: 0.25}`, or delete this key",
            reads=(("evaluation",),),
        )


def _model(checked: Checked[JobWords], *, folder: Path) -> ModelJob:
    words = checked.words.model
    key: KeyPath = ("model", "path")
    base = Path.cwd() if checked.document.from_command_line(key) else folder
    path = absolute(words.path, base)
    name = words.path
    if path.is_dir():
        name = str(path)
        _check_folder_model(checked)
    elif words.path.startswith((".", "/", "~")) or path.exists() or words.path.count("/") > 1:
        is_file = path.exists()
        checked.report(
            key,
            seen=f"{quote(words.path)} is a file" if is_file else f"there is no folder {quote(words.path)}",
            expected="a folder with a model",
            fix="name the folder that holds the model's config.json"
            if is_file
            else what_was_meant(words.path, base, folders=True),
        )
    else:
        _check_hub_model(checked)
    return build(ModelJob, words.model_dump() | {"path": name})


def _check_folder_model(checked: Checked[JobWords]) -> None:
    if checked.words.model.revision is not None:
        checked.report(
            ("model", "revision"),
            seen="a revision of a folder",
            expected="a revision for a model of the hub only",
            fix="delete it",
            reads=(("model", "path"),),
        )


def _check_hub_model(checked: Checked[JobWords]) -> None:
    words = checked.words.model
    if not HUB_NAME.fullmatch(words.path):
        checked.report(
            ("model", "path"),
            seen=quote(words.path),
            expected="a folder, or owner/name of a model on the hub",
            fix="write a path that begins with ./ for a folder, or copy the name from the model's page",
        )
    revision = words.revision
    if revision is not None and not REVISION.fullmatch(revision):
        checked.report(
            ("model", "revision"),
            seen=quote(revision),
            expected="a branch, a tag or a commit",
            fix="copy it from the model's page, under Files and versions",
        )
    elif words.trust_remote_code and not (revision and _COMMIT.fullmatch(revision)):
        checked.report(
            ("model", "trust_remote_code"),
            seen=f"the revision {quote(revision)}" if revision else "no revision",
            expected="a full commit (40 hexadecimal digits): code that you have not read may come with any other",
            fix="read the model's code on the hub and write its commit as `revision`, or delete trust_remote_code",
            reads=(("model", "path"), ("model", "revision")),
        )


def _data(checked: Checked[JobWords], *, folder: Path) -> DataJob:
    words = checked.words.data
    train = resolve_source(checked, ("data", "train"), words.train, folder=folder)
    evaluation, fraction = resolve_evaluation(checked, words.eval, folder=folder)
    data = DataJob(
        **words.model_dump(
            exclude={"train", "eval", "overlong", "sequence_length", "chat_template", "learn"},
        ),
        sequence_length=words.sequence_length or DEFAULT_LENGTH,
        train=train or SourceJob(),
        evaluation=evaluation,
        evaluation_fraction=fraction,
    )
    _check_names(checked, ("data",), data.format, words)
    _check_parts(checked, data)
    _check_cuts(checked, data)
    _check_learn(checked, data.formats)
    template = resolve_chat_template(checked, formats=data.formats, folder=folder)
    learn = build(LearnJob, words.learn.model_dump())
    whole = any(FORMATS[name].whole for name in data.formats)
    if not whole and words.overlong == "split":
        checked.report(
            ("data", "overlong"),
            seen=f"split with format: {words.format}",
            expected="truncate or fail: half an answer without its question teaches nothing",
            fix="write `overlong: truncate` or `overlong: fail`",
            reads=(("data", "format"),),
        )
    overlong = words.overlong or ("split" if whole else "truncate")
    return dataclasses.replace(data, overlong=overlong, chat_template=template, learn=learn)


def resolve_chat_template(
    checked: Checked[JobWords], *, formats: Sequence[str], folder: Path
) -> ChatTemplateJob | None:
    """The text of the template that `data.chat_template` names; a mistake is recorded in `checked`."""
    words, key = checked.words.data, ("data", "chat_template")
    if words.chat_template is None:
        return None
    if not any(map(has_conversations, formats)):
        checked.report(
            key,
            seen=f"a chat template with format: {listed(formats)}",
            expected="a format whose rows are messages, such as chat",
            fix="delete it, or write `format: chat`",
            reads=(("data", "format"),),
        )
    base = Path.cwd() if checked.document.from_command_line(key) else folder
    path = absolute(words.chat_template, base)
    if path.is_file():
        try:
            return ChatTemplateJob(name=path.name, text=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            checked.report(key, seen=str(error), expected="a file of UTF-8 text", fix="name the template's file")
            return None
    if (text := CHAT_TEMPLATES.get(words.chat_template)) is not None:
        return ChatTemplateJob(name=words.chat_template, text=text)
    near = nearest(words.chat_template, CHAT_TEMPLATES)
    checked.report(
        key,
        seen=f"neither a file nor a known template: {quote(words.chat_template)}",
        expected=f"a file such as chat.jinja, or {listed(list(CHAT_TEMPLATES), limit=20)}",
        fix=f"did you mean {quote(near)}?" if near else what_was_meant(words.chat_template, base),
    )
    return None


def _check_learn(checked: Checked[JobWords], formats: Sequence[str]) -> None:
    chat, given = any(map(has_conversations, formats)), checked.words.data.learn.model_fields_set
    for name in ("roles", "thinking", "weight_field"):
        if name in given and not chat:
            checked.report(
                ("data", "learn", name),
                seen=f"{name} with format: {listed(formats)}",
                expected="a format whose rows are messages, such as chat",
                fix="delete it, or write `format: chat`",
                reads=(("data", "format"),),
            )
    if "end_token" in given and all(FORMATS[name].whole for name in formats):
        checked.report(
            ("data", "learn", "end_token"),
            seen=f"end_token with format: {listed(formats)}, of which every token is learned",
            expected="a format of which answers are learned",
            fix="delete it",
            reads=(("data", "format"),),
        )


def _check_parts(checked: Checked[JobWords], data: DataJob) -> None:
    """Fields and roles of sources that have their own."""
    for name, words in (("train", checked.words.data.train), ("eval", checked.words.data.eval)):
        for number, part in enumerate(words.sources or () if words else ()):
            _check_names(checked, ("data", name, "sources", number), part.format or data.format, part)
        if words is not None:
            _check_names(checked, ("data", name), words.format or data.format, words)


def _check_cuts(checked: Checked[JobWords], data: DataJob) -> None:
    parts = (*data.train.parts, *(data.evaluation.parts if data.evaluation else ()))
    if data.shuffle and data.max_samples is None and all(part.max_samples is None for part in parts):
        checked.report(
            ("data", "shuffle"),
            seen="shuffle without max_samples",
            expected="max_samples of the data or of a source, whose rows are then chosen at random",
            fix="delete it: samples are read in a random order in any case",
        )


def _check_names(checked: Checked[JobWords], key: KeyPath, name: str, words: DataWords | PartWords) -> None:
    """Fields and roles of the data, or of one source, whose rows have the format `name`."""
    known = fields_of(name, {})
    for role, column in (words.fields or {}).items():
        if role not in known:
            _report_field(checked, (*key, "fields", role), column, name)
    if words.roles and not FORMATS[name].conversations:
        checked.report(
            (*key, "roles"),
            seen=f"roles with format: {name}, whose rows are no messages",
            expected="roles with messages only",
            fix="write `format: chat`, or delete roles (names of columns belong into `fields`)",
            reads=(("data", "format"),),
        )
    for speaker, role in (words.roles or {}).items():
        if role not in ROLES and speaker in ROLES:
            checked.report(
                (*key, "roles", speaker),
                seen=f"{quote(speaker)} becomes {quote(role)}",
                expected=f"a role of chat templates: {listed(ROLES)}",
                fix=f"turn it round: {role}: {speaker} (name in the rows: role)",
            )


def _report_field(checked: Checked[JobWords], key: KeyPath, column: str, name: str) -> None:
    role, roles = str(key[-1]), list(fields_of(name, {}))
    owners = [other for other in FORMATS.built_in if role in fields_of(other, {})]
    meant = nearest(role, roles)
    fix = f"did you mean {quote(meant)}?" if meant else "write role: column, such as {" + roles[0] + ": my_column}"
    if owners:
        fix = f"{role} is a role of format: {owners[0]}; choose that format, or rename the role"
    elif column in roles:
        fix = f"turn it round: {column}: {role} (role: column)"
    checked.report(
        key,
        seen=f"{quote(role)} is no role of format: {name}",
        expected=f"roles out of {listed(roles, limit=9)}" if len(roles) > 1 else f"the role {roles[0]}",
        fix=fix,
        reads=(("data", "format"),),
    )


def _optimizer(checked: Checked[JobWords]) -> OptimizerJob:
    words: OptimizerWords = checked.words.optimizer
    own = OPTIMIZERS[words.kind].keys
    for key in ("beta1", "beta2"):
        if words.betas and key in words.model_fields_set:
            checked.report(
                ("optimizer", key),
                seen=f"both betas and {key}",
                expected="betas, or beta1 and beta2",
                fix=f"delete {key}",
                reads=(("optimizer", "betas"),),
            )
    everywhere = {key for row in OPTIMIZERS.values() for key in row.keys}
    for key in sorted(words.model_fields_set & {*everywhere, "betas"}):
        if ("beta1" if key == "betas" else key) not in own:
            kinds = [kind for kind, row in OPTIMIZERS.items() if ("beta1" if key == "betas" else key) in row.keys]
            checked.report(
                ("optimizer", key),
                seen=f"{key} with kind: {words.kind}",
                expected=f"{key} with kind: {listed(kinds)} only",
                fix=f"delete it, or write `kind: {kinds[0]}`",
                reads=(("optimizer", "kind"),),
            )
    if words.nesterov and words.kind == "sgd" and not words.momentum:
        checked.report(
            ("optimizer", "nesterov"),
            seen="nesterov without a momentum",
            expected="momentum above 0 beside it",
            fix="add, for example, `momentum: 0.9`, or delete nesterov",
            reads=(("optimizer", "momentum"),),
        )
    return build(OptimizerJob, resolved_optimizer(words))
