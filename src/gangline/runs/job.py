"""The resolved job: what `job.yaml` means, as plain data that a host can read without controller packages.

`spec` checks the user's words and builds a `Job`; the worker reads it back from `job.json`. Every default is
already filled in here, so that the file alone says what ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gangline.optimizers import OptimizerKind
from gangline.runs.record_versions import Record
from gangline.strategies.base import AUTO

SCHEMA_VERSION = 1
DEFAULT_LENGTH = 1024
"""Tokens in a sample at the most, where nothing can be said of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """Which model, and how it may be loaded."""

    path: str
    """A folder (absolute once resolved) or a hub name."""
    revision: str | None = None
    """Hub revision; a commit is needed when remote code is allowed."""
    trust_remote_code: bool = False
    start: Literal["pretrained", "random"] = "pretrained"
    """`random`: the folder's config.json and tokenizer with fresh weights seeded by `Job.seed`."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"


REGEX = "regex:"
"""Begins a target that is a regular expression for the whole name of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodJob:
    """What is trained: every weight, or low-rank adapters over frozen ones (LoRA), which may have few bits (QLoRA)."""

    kind: Literal["full", "lora", "qlora"] = "full"
    bits: Literal[4, 8] = 4
    """Of a number of a frozen linear (qlora)."""
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    """Names of modules that get an adapter, or one `regex:...` for whole names; ("all-linear",) means every linear
    layer but the output head."""
    exclude: tuple[str, ...] = ()
    """Names of modules that get none, or one `regex:...`."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that get adapters; (): all."""
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    """The end of a module's name, or a regular expression for it -> its rank, where that is another one."""
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    rslora: bool = False
    """The scale of an adapter is alpha / sqrt(rank)."""
    dora: bool = False
    """The length of each row of a weight is trained by itself."""
    init: str = "default"
    """How adapters begin, in peft's words; default: A at random and B zero."""
    adapter: str | None = None
    """A folder (absolute once resolved) of an adapter in peft's format, with whose values this one begins."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules of which a copy is trained whole."""
    train_tokens: tuple[int | str, ...] = ()
    """Tokens whose rows of the embedding table are trained, by number or text; a head that is the same table follows.
    ("added",): those of `Job.tokens`, in a head of its own, too."""
    quantise_experts: bool = False
    """Whether experts in tensors of three dimensions get few bits, too (qlora)."""
    target_parameters: tuple[str, ...] = ()
    """Ends of names of weights that are no module's own, such as tensors of experts, which get an adapter."""

    @property
    def splits(self) -> bool:
        """Whether adapters begin as a part of the weights under them."""
        return self.kind != "full" and self.init.startswith(("pissa", "olora"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensJob:
    """What is put into the model's vocabulary before anything else."""

    add: tuple[str, ...] = ()
    """Texts that become tokens of their own."""
    special: dict[str, str] = dataclasses.field(default_factory=dict)
    """Role (pad_token, eos_token, ...) -> its text."""


NO_TOKENS = TokensJob()


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceJob:
    """Rows of a source by their place, as a Python slice has them: from `start` on, up to `stop`, which is left out."""

    start: float | None = None
    stop: float | None = None
    """Negative ones count from the end."""
    percent: bool = False
    """Whether both are hundredths of the rows, rounded to the nearest row (as in `datasets`)."""

    @property
    def counts(self) -> bool:
        """Whether the rows have to be counted before it is known which ones these are."""
        return self.percent or min(self.start or 0, self.stop or 0) < 0

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """The first row, counted from 0, and the one after the last, of a source with so many rows."""
        start, stop = (self._row(edge, num_rows) for edge in (self.start, self.stop))
        return slice(start, stop).indices(num_rows)[:2]

    def _row(self, edge: float | None, num_rows: int) -> int | None:
        return None if edge is None else round(edge * num_rows / 100) if self.percent else int(edge)


def row_edges(rows: SliceJob | None, limit: int | None, count: Callable[[], int]) -> tuple[int, int | None]:
    """The first row, from 0, and the one after the last (None: to the end) of the first `limit` rows of a slice.

    count: how many rows the source has; it is called where that matters.
    """
    start, stop = 0, None
    if rows is not None and rows.counts:
        start, stop = rows.bounds(count())
    elif rows is not None:
        start, stop = int(rows.start or 0), None if rows.stop is None else int(rows.stop)
    return start, min(
        (end for end in (stop, None if limit is None else start + limit) if end is not None), default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceJob:
    """One set of rows: local files, or a data set of the hub; or several such sets, one after the other."""

    files: tuple[str, ...] = ()
    """Absolute paths, in order; empty for a hub data set."""
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None
    rows: SliceJob | None = None
    """None: all rows."""
    max_samples: int | None = None
    """Rows at the most, the first ones or random ones (`DataJob.shuffle`)."""
    weight: float = 1.0
    """How often a row occurs in an epoch: 2.5 is twice, and once more for half of the rows, which are chosen by the
    seed."""
    format: str | None = None
    """None: that of the job, whose `fields` and `roles` hold then, too, where this source has none of its own."""
    fields: dict[str, str] | None = None
    roles: dict[str, str] | None = None
    mix: tuple[SourceJob, ...] = ()
    """Several sources, each with files or a hub data set; nothing else is set here then."""

    @property
    def parts(self) -> tuple[SourceJob, ...]:
        """The sources with files or a hub data set, in order."""
        return self.mix or (self,)

    @property
    def all_files(self) -> tuple[str, ...]:
        """The files of all parts, in order."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def is_whole(self) -> bool:
        """Whether every row occurs once, as far as this source decides."""
        return all(part.rows is None and part.max_samples is None and part.weight == 1 for part in self.parts)

    def moved(self, files: Mapping[str, str]) -> SourceJob:
        """The source with its files where `files` says that they lie."""
        found = tuple(files.get(file, file) for file in self.files)
        return dataclasses.replace(self, files=found, mix=tuple(part.moved(files) for part in self.mix))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateJob:
    """A chat template in place of the tokenizer's own; its text stays with the run and goes into the export."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnJob:
    """Which tokens of a row are learned, beyond what its format says."""

    roles: tuple[str, ...] = ("assistant",)
    """Whose messages are learned."""
    thinking: Literal["all", "last", "none"] = "all"
    """Thinking that is learned, of what the template writes: all, after the last message of the user, none."""
    end_token: bool = True
    """Learn what ends an answer: the end of the turn, or the end of the text."""
    weight_field: str | None = "weight"
    """Key of a message that says whether it is learned, 1 or 0; a message without is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataJob:
    """What the model reads, and on which tokens it is trained."""

    train: SourceJob
    evaluation: SourceJob | None = None
    """None: no evaluation set, unless `evaluation_fraction` cuts one off the training rows."""
    evaluation_fraction: float = 0.0
    """This part of the training rows, chosen by a hash of (seed, row content), is set apart for evaluation."""
    format: str = "text"
    """A row of `gangline.formats.FORMATS`, or a plug-in's."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Renames: role of the format, or key of a message -> its name in the rows, such as {"prompt": "question"}."""
    roles: dict[str, str] = dataclasses.field(default_factory=dict)
    """Renames of those who speak in messages: name in the rows -> role of the chat template, or "tool_calls"."""
    sequence_length: int = DEFAULT_LENGTH
    """Tokens in a sample at the most."""
    packing: bool = True
    """Fill a sample with several documents that cannot see each other."""
    overlong: Literal["split", "truncate", "drop", "fail"] = "split"
    """A text row longer than a sample is split; other formats know `truncate`, `drop` and `fail`."""
    skip_bad_rows: bool = False
    chat_template: ChatTemplateJob | None = None
    """None: the tokenizer's own."""
    learn: LearnJob = LearnJob()
    max_samples: int | None = None
    """Rows to train on at the most, of all sources; see `SourceJob.max_samples`. They are counted before a part of them
    is set apart for evaluation."""
    shuffle: bool = False
    """Whether `max_samples` keeps rows that the seed chooses at random, not the first ones."""
    deduplicate: bool = False
    """Whether a row is left out where one with the same values came before, in this or another source of the set."""

    def of(self, source: SourceJob) -> DataJob:
        """These words with format, fields and roles of one source."""
        if source.format is None:
            fields, roles = source.fields or self.fields, source.roles or self.roles
            return dataclasses.replace(self, fields=fields, roles=roles)
        fields, roles = source.fields or {}, source.roles or {}
        return dataclasses.replace(self, format=source.format, fields=fields, roles=roles)

    def moved(self, files: Mapping[str, str]) -> DataJob:
        """The data with its files where `files` says that they lie."""
        evaluation = self.evaluation and self.evaluation.moved(files)
        return dataclasses.replace(self, train=self.train.moved(files), evaluation=evaluation)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of all rows that are trained or evaluated on, each once."""
        sources = (*self.train.parts, *(self.evaluation.parts if self.evaluation else ()))
        return tuple(dict.fromkeys(self.of(source).format for source in sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerJob:
    """What moves the trained weights. Which keys are for which kind: `optimizers.OPTIMIZERS`."""

    kind: OptimizerKind = "adamw"
    """adamw-8bit: moments of 8 bits, by bitsandbytes; paged: they leave the GPU while it has no room for them."""
    learning_rate: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    scale: Literal["match-adamw", "original"] = "match-adamw"
    """muon: what the update of a matrix is multiplied by besides the rate; see `worker.optimizer.Muon`."""
    weight_decay: float = 0.0
    """Of matrices; decoupled from the gradient, but for sgd."""
    clip_norm: float | None = 1.0
    """Global gradient norm at the most; None: no clipping."""


ScheduleKind = Literal["constant", "linear", "cosine", "cosine-restarts", "polynomial", "inverse-sqrt", "wsd"]
SCHEDULE_KEYS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("final_ratio",),
    "cosine": ("final_ratio",),
    "cosine-restarts": ("final_ratio", "cycles"),
    "polynomial": ("final_ratio", "power"),
    "inverse-sqrt": ("timescale",),
    "wsd": ("final_ratio", "decay_steps", "decay_ratio", "decay"),
}
"""Keys of `ScheduleJob` that are for each kind, besides those of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleJob:
    """The learning rate over optimizer steps."""

    kind: ScheduleKind = "cosine"
    warmup_steps: int = 0
    """Optimizer steps from 0 to the full rate."""
    warmup_ratio: float | None = None
    """The same as a part of all steps, in place of `warmup_steps`; see `step_schedule.warmup_steps`."""
    warmup_from_zero: bool = False
    """Whether the first step of a warm-up has a rate of 0, as in transformers."""
    final_ratio: float = 0.0
    """Where the rate falls to, over the full rate; it would be reached at the step after the last."""
    decay_steps: int | None = None
    """wsd: the last steps, in which the rate falls; None: see `decay_ratio`."""
    decay_ratio: float = 0.1
    """wsd: the same as a part of all steps."""
    decay: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """wsd: how the rate falls then."""
    cycles: int = 1
    """cosine-restarts: how often the rate falls from the full one."""
    power: float = 1.0
    """polynomial: of the part of the steps that is left."""
    timescale: int | None = None
    """inverse-sqrt: after so many steps behind the warm-up the rate is 1 / sqrt(2); None: see `step_schedule`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """When the evaluation set is read."""

    every_steps: int | None = None
    """None, as `every_epochs`: only at the start (if `at_start`) and at the end."""
    every_epochs: float | None = None
    """In place of `every_steps`; see `step_schedule.cadence`."""
    at_start: bool = True
    max_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingJob:
    """When a run ends before its last step: the evaluation loss does not fall any more."""

    patience: int
    """Evaluations in a row that do not improve."""
    min_improvement: float = 0.0
    """An evaluation improves if its loss is lower than the lowest before it by more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJob:
    """When state is saved and how much is kept."""

    every_steps: int | None = None
    every_epochs: float | None = None
    """In place of `every_steps`; see `step_schedule.cadence`."""
    every_minutes: float | Literal["auto"] | None = "auto"
    """auto: see gangline.runs.checkpoints."""
    keep_last: int = 2
    keep_best: bool = True
    """Keep the one with the lowest evaluation loss, too."""
    asynchronous: bool = True
    each_host: Literal["whole", "part"] = "whole"
    """What every host writes: the whole trained state, or what its ranks hold of it, where no host holds all."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What a save that fails (a full disk) does to the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureJob:
    """What is done when a part of the gang fails, without anybody being asked."""

    restarts: int = 5
    """Next attempts in a row that do not get beyond the step they went on from, but for those after which a rank takes
    smaller settings for lack of memory; 0: the first failure ends the run."""
    wait_s: float = 30.0
    """How long a host that does not answer is waited for, before the run goes on without it."""
    without: bool = True
    """Go on without a host that stays away; else the run ends then."""
    take_back: bool = True
    """A host that was lost and answers again joins once more, as soon as the others have saved."""
    smaller_micro_batch: bool = True
    """Where memory does not suffice, go on with a smaller micro-batch, or with recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportJob:
    """Where figures go besides metrics.jsonl."""

    exporters: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: {"tensorboard": {}})
    """Rows of `gangline.exporters.EXPORTERS`, or a plug-in's, each with its options."""


MessageKind = Literal["finished", "failed", "lost", "back", "straggler", "stalled"]
MESSAGE_KINDS: tuple[MessageKind, ...] = ("finished", "failed", "lost", "back", "straggler", "stalled")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyJob:
    """Who is told what of a run, by its supervisor; without `to` and `command` nobody. Nothing secret stands here."""

    to: tuple[str, ...] = ()
    """Where addresses stand, on the computer that starts the run: `env:NAME`, or `file:PATH`, absolute."""
    command: tuple[str, ...] = ()
    """A program for each message, on the host of the supervisor; (): none."""
    events: tuple[MessageKind, ...] = MESSAGE_KINDS

    @property
    def has_receiver(self) -> bool:
        """Whether anybody is told anything."""
        return bool(self.to or self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterJob:
    """local-sgd: what moves all hosts together, at the end of a round: SGD with Nesterov momentum."""

    learning_rate: float = 1.0
    momentum: float = 0.6
    """Both as published for DiLoCo (arXiv 2311.08105)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyJob:
    """How ranks train together."""

    kind: str = AUTO
    """A row of `strategies.table.STRATEGIES`; auto: what the plan finds best of those that compute what one big machine
    would."""
    replicas: int | None = None
    """pipeline: how many of them there are side by side; None: what the plan finds best."""
    inner_steps: int = 50
    """local-sgd: optimizer steps of the run between two exchanges."""
    payload: Literal["int8", "bf16", "fp32"] = "int8"
    """local-sgd: what changes are rounded to on the wire; fp32: not at all (in an fp64 run they stay fp64)."""
    outer: OuterJob = OuterJob()
    offload: tuple[Literal["optimizer", "parameters"], ...] = ()
    """What lies in the machine's memory. zero: the optimizer's states; under zero-3 weights, too. fsdp, hsdp: all that
    is in parts, which is both under full fine-tuning and frozen weights with adapters."""
    offload_to: str | None = None
    """zero-3: a folder of every host where the optimizer's states lie instead."""
    deepspeed: dict[str, Any] = dataclasses.field(default_factory=dict)
    """zero: what DeepSpeed is told besides, in the words of its own configuration file."""


REPLANNED = ("micro_batch", "activation_checkpointing", "activation_offloading")
"""Keys on which a plan decides again when its run is resumed, on what machines and memory there are then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Record):
    """One training job, fully resolved."""

    name: str
    model: ModelJob
    data: DataJob
    batch: int
    """Samples in one optimizer step over all machines; where that is open, about how many."""
    micro_batch: int
    """Samples in one forward-backward on one rank; divides `batch`, unless that is open."""
    method: MethodJob = MethodJob()
    tokens: TokensJob = NO_TOKENS
    epochs: float | None = 1.0
    steps: int | None = None
    """Optimizer steps in all; exactly one of `epochs` and `steps` is set."""
    seed: int = 0
    draws: Literal["micro_batch", "sample"] = "micro_batch"
    """What dropout masks belong to: each sample, whatever others share its pass; or, in runs of before, each
    micro-batch."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Compute dtype of the whole run; auto: what every device of the gang can do."""
    parameters: Literal["auto", "compute", "fp32"] = "auto"
    """Dtype of trainable weights and optimizer states; auto: fp32. `compute`: pure bf16 training."""
    kernels: tuple[str, ...] = ("torch",)
    """Rows of `gangline.kernel_table.KERNELS`; ("auto",): all that work; ("torch",), as in older records: none."""
    activation_checkpointing: bool = False
    activation_offloading: bool = False
    """Whether the layers' inputs, which is what recomputation keeps, lie in the machine's memory until backward."""
    compile: bool = False
    """Whether every decoder layer is compiled before the first step of an attempt."""
    strategy: StrategyJob = StrategyJob()
    exchange: Literal["fp32", "bf16"] = "fp32"
    """What gradients travel as between ranks (fp32: as they are)."""
    optimizer: OptimizerJob = OptimizerJob()
    schedule: ScheduleJob = ScheduleJob()
    evaluation: EvaluationJob = EvaluationJob()
    early_stopping: EarlyStoppingJob | None = None
    """None: the run takes all its steps."""
    checkpoint: CheckpointJob = CheckpointJob()
    failures: FailureJob = FailureJob()
    report: ReportJob = ReportJob()
    callbacks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Rows of `gangline.callbacks.CALLBACKS`, each with its options."""
    notify: NotifyJob | None = None
    """None: the job does not say; with nothing in the user's settings either, nobody is told anything."""
    pause_at: int | None = None
    """After this step the run evaluates, saves and stops, and `resume` goes on; a sweep sets it."""
    max_skipped_steps: int = 3
    """Steps in a row whose loss or gradient is not finite and that are skipped, before the run stops."""
    open: tuple[str, ...] = ()
    """Keys that the plan decides on, among `batch`, `micro_batch`, `activation_checkpointing`, `activation_offloading`,
    `exchange` and `sequence_length` (of `data`); none is left in a run."""
    chosen: tuple[str, ...] = ()
    """Keys of `REPLANNED` on which the plan of a run decided for every rank by itself; (), as in older records and with
    one setting for all: none is decided anew."""
    plugins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Package -> version, of the plug-ins that the job names; they are brought to every host."""
    schema_version: int = SCHEMA_VERSION

    def reopened(self) -> Job:
        """The job of a run that is planned again: what its plan chose is open once more.

        With settings of each rank's own the job has the unit in which shares count, and no rank's micro-batch.
        """
        return dataclasses.replace(self, open=self.chosen)
