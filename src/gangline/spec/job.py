"""From the words of `job.yaml` to the resolved job: paths, defaults, and the rules between keys."""

from __future__ import annotations

import re
from pathlib import Path

from gangline.exporters import EXPORTERS
from gangline.formats import FORMATS
from gangline.runs.deal import nearby, whole_counts
from gangline.runs.job import (
    CheckpointJob,
    DataJob,
    EvaluationJob,
    Job,
    MethodJob,
    ModelJob,
    OptimizerJob,
    ReportJob,
    ScheduleJob,
    SourceJob,
)
from gangline.spec.failures import resolve_failures
from gangline.spec.job_words import JobWords, OptimizerWords
from gangline.spec.mistakes import KeyPath, listed, nearest, quote
from gangline.spec.paths import absolute, what_was_meant
from gangline.spec.precision import check_precision
from gangline.spec.report import resolve_report
from gangline.spec.sources import HUB_NAME, REVISION, resolve_evaluation, resolve_source
from gangline.spec.strategy import check_strategy, resolve_strategy
from gangline.spec.validate import Checked
from gangline.spec.zero import resolve_deepspeed
from gangline.strategies.base import AUTO
from gangline.strategies.table import STRATEGIES

_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_job(checked: Checked[JobWords], *, folder: Path, default_name: str) -> Job:
    """The job that the words mean. Raises SpecError with all mistakes of the file.

    folder: where relative paths of the file begin.
    """
    words = checked.words
    _check_batch(checked)
    _check_lengths(checked)
    _check_method(checked)
    check_strategy(checked)
    check_precision(checked)
    _check_exchange(checked)
    _check_schedule(checked)
    _check_evaluation(checked)
    model = _model(checked, folder=folder)
    data = _data(checked, folder=folder)
    optimizer = _optimizer(checked)
    failures = resolve_failures(checked)
    report = resolve_report(checked)
    strategy = resolve_strategy(words.strategy, deepspeed=resolve_deepspeed(checked, folder=folder))
    checked.document.mistakes.raise_if_any()
    return Job(
        name=words.name or default_name,
        model=model,
        data=data,
        batch=words.batch.exact or words.batch.about or 1,
        micro_batch=words.micro_batch or 1,
        method=MethodJob(
            kind=words.method.kind,
            bits=words.method.bits,
            rank=words.method.rank,
            alpha=float(words.method.alpha),
            dropout=float(words.method.dropout),
            targets=tuple(words.method.targets),
        ),
        epochs=None if words.steps else float(words.epochs or 1),
        steps=words.steps,
        seed=words.seed,
        precision=words.precision.compute,
        parameters=words.precision.parameters,
        activation_checkpointing=words.activation_checkpointing or False,
        activation_offloading=words.activation_offloading,
        strategy=strategy,
        exchange="fp32" if words.exchange == "auto" else words.exchange,
        optimizer=optimizer,
        schedule=ScheduleJob(
            kind=words.schedule.kind,
            warmup_steps=words.schedule.warmup_steps,
            final_ratio=float(words.schedule.final_ratio),
        ),
        evaluation=EvaluationJob(**words.evaluation.model_dump()),
        checkpoint=CheckpointJob(**words.checkpoint.model_dump()),
        failures=failures,
        report=report,
        max_skipped_steps=words.max_skipped_steps,
        open=_open(words),
        plugins=_plugins(data, report, strategy.kind),
    )


def _plugins(data: DataJob, report: ReportJob, kind: str) -> dict[str, str]:
    """The packages of all plug-ins that a job names, with their versions."""
    strategy = None if kind == AUTO else STRATEGIES.plugin(kind)
    named = [FORMATS.plugin(data.format), *map(EXPORTERS.plugin, report.exporters), strategy]
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
    if words.steps is not None and words.schedule.warmup_steps > words.steps:
        checked.report(
            ("schedule", "warmup_steps"),
            seen=f"a warm-up of {words.schedule.warmup_steps} steps in a run of {words.steps}",
            expected=f"{words.steps} at the most",
            fix=f"write a shorter warm-up, such as {max(1, words.steps // 10)}, or more steps",
            reads=(("steps",),),
        )


def _check_method(checked: Checked[JobWords]) -> None:
    method = checked.words.method
    if method.kind == "full":
        kind_fix = "write `kind: full` as `kind: lora`" if checked.wrote("method", "kind") else "add `kind: lora`"
        for key in ("rank", "alpha", "dropout", "targets"):
            if key in method.model_fields_set:
                checked.report(
                    ("method", key),
                    seen=f"{key}, but every weight is trained (kind: full)",
                    expected=f"{key} with kind: lora or kind: qlora only",
                    fix=f"{kind_fix}, or delete {key}",
                    reads=(("method", "kind"),),
                )
    if "bits" in method.model_fields_set and method.kind != "qlora":
        checked.report(
            ("method", "bits"),
            seen=f"bits, but frozen weights are as they are (kind: {method.kind})"
            if method.kind == "lora"
            else "bits, but every weight is trained (kind: full)",
            expected="bits with kind: qlora only",
            fix="write `kind: qlora`, or delete bits",
            reads=(("method", "kind"),),
        )
    if "all-linear" in method.targets and len(method.targets) > 1:
        checked.report(
            ("method", "targets"),
            seen="all-linear beside other names",
            expected="all-linear alone, or names",
            fix="write `targets: all-linear`, or delete all-linear from the list",
        )


def _open(words: JobWords) -> tuple[str, ...]:
    found = ["batch"] if words.batch.about is not None else []
    found += [key for key in ("micro_batch", "activation_checkpointing") if getattr(words, key) is None]
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


def _check_schedule(checked: Checked[JobWords]) -> None:
    schedule = checked.words.schedule
    if schedule.kind == "constant" and "final_ratio" in schedule.model_fields_set:
        checked.report(
            ("schedule", "final_ratio"),
            seen="a final rate in a constant schedule",
            expected="final_ratio with kind: linear or kind: cosine",
            fix="delete it, or choose another kind",
            reads=(("schedule", "kind"),),
        )


def _check_evaluation(checked: Checked[JobWords]) -> None:
    if checked.words.data.eval is not None:
        return
    for key in ("every_steps", "max_samples"):
        if getattr(checked.words.evaluation, key) is not None:
            checked.report(
                ("evaluation", key),
                seen="a rule for evaluation, but there are no rows to evaluate on",
                expected="data.eval beside it",
                fix="add `eval: 0.05` (or a file) under `data`, or delete this key",
                reads=(("data", "eval"),),
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
    return ModelJob(
        path=name,
        revision=words.revision,
        trust_remote_code=words.trust_remote_code,
        start=words.start,
        attention=words.attention,
    )


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
    _check_fields(checked)
    whole = FORMATS[words.format].whole
    if not whole and words.overlong == "split":
        checked.report(
            ("data", "overlong"),
            seen=f"split with format: {words.format}",
            expected="truncate or fail: half an answer without its question teaches nothing",
            fix="write `overlong: truncate` or `overlong: fail`",
            reads=(("data", "format"),),
        )
    return DataJob(
        train=train or SourceJob(),
        evaluation=evaluation,
        evaluation_fraction=float(fraction),
        format=words.format,
        fields=dict(words.fields),
        sequence_length=words.sequence_length,
        packing=words.packing,
        overlong=words.overlong or ("split" if whole else "truncate"),
        skip_bad_rows=words.skip_bad_rows,
    )


def _check_fields(checked: Checked[JobWords]) -> None:
    words = checked.words.data
    roles = FORMATS[words.format].roles
    for role in words.fields:
        if role in roles:
            continue
        owners = [name for name, known in FORMATS.built_in.items() if role in known.roles]
        meant = nearest(role, roles)
        fix = f"did you mean {quote(meant)}?" if meant else "write role: column, such as {" + roles[0] + ": my_column}"
        if owners:
            fix = f"{role} is a role of format: {owners[0]}; choose that format, or rename the role"
        elif words.fields[role] in roles:
            fix = f"turn it round: {words.fields[role]}: {role} (role: column)"
        checked.report(
            ("data", "fields", role),
            seen=f"{quote(role)} is no role of format: {words.format}",
            expected=f"roles out of {listed(roles)}" if len(roles) > 1 else f"the role {roles[0]}",
            fix=fix,
            reads=(("data", "format"),),
        )


def _optimizer(checked: Checked[JobWords]) -> OptimizerJob:
    words: OptimizerWords = checked.words.optimizer
    beta1, beta2 = words.betas or (words.beta1, words.beta2)
    for key in ("beta1", "beta2"):
        if words.betas and key in words.model_fields_set:
            checked.report(
                ("optimizer", key),
                seen=f"both betas and {key}",
                expected="betas, or beta1 and beta2",
                fix=f"delete {key}",
                reads=(("optimizer", "betas"),),
            )
    return OptimizerJob(
        kind=words.kind,
        learning_rate=float(words.learning_rate),
        beta1=float(beta1),
        beta2=float(beta2),
        epsilon=float(words.epsilon),
        weight_decay=float(words.weight_decay),
        clip_norm=None if words.clip_norm is None else float(words.clip_norm),
    )
