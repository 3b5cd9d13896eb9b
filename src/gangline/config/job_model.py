"""The words of `job.yaml`: every key, its type, its default and what it is for."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model

from gangline.callbacks import CALLBACKS
from gangline.config.fields import (
    ADDRESS_PLACE,
    DURATION,
    INIT,
    Count,
    LayerRange,
    ModuleName,
    Name,
    NotNegative,
    OneOrMore,
    OrNone,
    OrSeveral,
    OrWord,
    Positive,
    RowOf,
    Section,
    Shorthand,
    Target,
    Text,
)
from gangline.config.mistakes import listed, nearest, quote
from gangline.config.validate import Checked, expected_words, fragment_at, seen_words
from gangline.exporters import EXPORTERS, Exporter
from gangline.formats import FORMATS
from gangline.kernel_table import KernelWord
from gangline.optimizers import OptimizerKind
from gangline.plugins import GROUPS, Table
from gangline.runs.job import MESSAGE_KINDS, MessageKind, ReportJob, ScheduleKind
from gangline.strategies.base import AUTO as CHOOSE
from gangline.strategies.table import ALONE, STRATEGIES

# The words below `report`: every exporter of metrics by its name, checked by its own dataclass of options.


@functools.cache
def section_of(options: type) -> type[Section]:
    """The words for a dataclass of options: its fields, with what their metadata says."""
    hints = typing.get_type_hints(options)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(options):
        default = ... if each.default is dataclasses.MISSING else each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        words = Field(
            default,
            description=each.metadata.get("help"),
            pattern=each.metadata.get("pattern"),
            ge=each.metadata.get("least"),
            le=each.metadata.get("most"),
            examples=each.metadata.get("examples"),
        )
        fields[each.name] = (hints[each.name], words)
    return create_model(options.__name__, __base__=Section, __doc__=options.__doc__, **fields)


def _words(exporter: Exporter) -> tuple[Any, Any]:
    """The type and the default of a built-in exporter's key: a switch, or its options and `none`."""
    fields = dataclasses.fields(exporter.options)
    if not fields:
        return bool, Field(exporter.default, description=exporter.help)
    section: Any = section_of(exporter.options)
    options = Annotated[section, Shorthand(fields[0].name)]
    examples = fields[0].metadata.get("examples")
    return Annotated[options | None, OrNone(), Field(examples=examples)], Field(None, description=exporter.help)


class _ReportWords(Section):
    """Exporters of figures beside metrics.jsonl. A plug-in's exporter is a key, too: `true`, or its options."""

    model_config = ConfigDict(extra="allow")


if TYPE_CHECKING:
    ReportWords = _ReportWords
else:
    ReportWords = create_model(
        "ReportWords",
        __base__=_ReportWords,
        __doc__=_ReportWords.__doc__,
        **{name: _words(exporter) for name, exporter in EXPORTERS.built_in.items()},
    )


def resolve_report(checked: Checked[Any]) -> ReportJob:
    """The exporters of a job with their options. Mistakes in a plug-in's options are recorded; raises PluginError."""
    words: Section = checked.words.report
    found: dict[str, dict[str, Any]] = {}
    for name in EXPORTERS.built_in:
        value = getattr(words, name)
        if value not in (None, False):
            found[name] = {} if value is True else value.model_dump()
    for name, value in (words.model_extra or {}).items():
        if name not in EXPORTERS:
            _report_unknown(checked, ("report", name), EXPORTERS)
        elif value not in (None, False, "none"):
            found[name] = _options(checked, ("report", name), value, EXPORTERS[name].options)
    return ReportJob(exporters=found)


class CallbackWords(Section):
    """Code of plug-ins in the loop: it sees every step and evaluation, and may save or finish the run."""

    model_config = ConfigDict(extra="allow")


def resolve_callbacks(checked: Checked[Any]) -> dict[str, dict[str, Any]]:
    """The callbacks of a job with their options. Mistakes are recorded; raises PluginError."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in (checked.words.callbacks.model_extra or {}).items():
        if name not in CALLBACKS:
            _report_unknown(checked, ("callbacks", name), CALLBACKS)
        elif value not in (None, False, "none"):
            found[name] = _options(checked, ("callbacks", name), value, CALLBACKS[name].options)
    return found


def _report_unknown(checked: Checked[Any], key: tuple[str, str], table: Table[Any]) -> None:
    near, known = nearest(key[1], table), list(table)
    fix = f"did you mean {quote(near)}?" if near else "delete it, or install the package that brings it"
    expected = f"one of {listed(known)}" if known else "the name of an installed plug-in; there is none"
    checked.report(key, seen=f"there is no such {GROUPS[table.group]}", expected=expected, fix=fix)


def _options(checked: Checked[Any], key: tuple[str, str], value: Any, options: type) -> dict[str, Any]:
    name = key[1]
    kind, names = section_of(options), [each.name for each in dataclasses.fields(options)]
    given = {} if value is True else value if isinstance(value, dict) else {(names or ["value"])[0]: value}
    try:
        return kind.model_validate(given).model_dump()
    except ValidationError as error:
        schema = kind.model_json_schema()
        for detail in error.errors(include_url=False):
            path, fragment = detail["loc"], fragment_at(schema, detail["loc"]) or {}
            seen, expected = seen_words(detail["input"]), expected_words(schema, fragment, value=detail["input"])
            fix = f"write a value of that kind; `gangline plugins` names the package that brings {name}"
            if detail["type"] == "missing":
                seen, fix = "this key is missing", f"add it: `{path[-1]}: ...` below {name}"
                expected = expected_words(schema, fragment)
            elif detail["type"] == "extra_forbidden":
                near = nearest(str(path[-1]), names)
                seen, expected = "there is no such key", f"an option of {name}: {listed(names) or 'it has none'}"
                fix = f"did you mean {quote(near)}?" if near else "delete it"
            checked.report((*key, *path), seen=seen, expected=expected, fix=fix)
        return {}


Probability = Annotated[float, Field(ge=0, lt=1)]
PrecisionName = Literal["auto", "bf16", "fp16", "fp32", "fp64"]
NONE = OrNone()
AUTO = OrNone("auto")
WAIT_FIX = "write a number and its unit, such as `wait: 30s` or `wait: 5m`"


class ModelWords(Section):
    """Which model, and how it may be loaded. `model: ./path` is short for `model: {path: ./path}`."""

    path: Annotated[Text, Field(examples=["./llama"])]
    """A folder, or the name of a model on the Hugging Face hub (`owner/name`)."""
    revision: Annotated[Text | None, NONE] = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. A hub model then needs `revision` to be a full commit."""
    start: Literal["pretrained", "random"] = "pretrained"
    """`random` takes the configuration and the tokenizer of the model and fresh weights, seeded by `seed`."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """How attention is computed; `auto` leaves it to transformers, which takes sdpa where the model has it."""


class MethodWords(Section):
    """The weights that train. `method: lora` is short for `method: {kind: lora}`."""

    kind: Literal["full", "lora", "qlora"] = "full"
    """Every weight, or low-rank adapters (LoRA) over frozen weights, or over frozen weights of 4 or 8 bits (`qlora`,
    for a model whose weights alone would fill the card)."""
    bits: Literal[4, 8] = 4
    """Of the frozen weights (qlora). 4: NF4 with scales that are quantised in their turn, by bitsandbytes; 8: whole
    numbers with one scale for each row, twice the memory and a tenth of the rounding."""
    quantise_experts: bool = False
    """Whether experts that lie in tensors of three dimensions are quantised, too (qlora, with
    `activation_checkpointing`, without which autograd would keep the unpacked ones of all layers)."""
    rank: Count = 16
    """Rank of the adapters (lora, qlora)."""
    alpha: Positive = 32.0
    """The output of an adapter is scaled by alpha / rank (lora, qlora)."""
    dropout: Probability = 0.0
    """Dropout before an adapter (lora, qlora)."""
    targets: Annotated[Annotated[list[Target], Field(min_length=1)], OneOrMore()] = Field(default=["all-linear"])
    """Names of the modules that get an adapter (lora, qlora); `all-linear`: every linear layer but the output head;
    `regex:EXPRESSION`: where it matches a whole name (model.layers.0.mlp.up_proj)."""
    exclude: Annotated[list[Target], OneOrMore()] = Field(default=[], examples=[["lm_head"]])
    """Names of modules that get no adapter, or one `regex:EXPRESSION` (lora, qlora)."""
    layers: Annotated[list[LayerRange], OneOrMore(numbers=True)] = Field(default=[], examples=[["0-7", 15]])
    """Layers that get adapters (lora, qlora), counted from 0: numbers, and ranges such as `8-15`; left out: all."""
    rank_pattern: Annotated[dict[Text, Count], Field(examples=[{"down_proj": 32}])] = Field(default={})
    """Other ranks for some modules (lora, qlora): the end of a module's name, or a regular expression for it, and its
    rank."""
    alpha_pattern: Annotated[dict[Text, Positive], Field(examples=[{"down_proj": 64}])] = Field(default={})
    """Other values of alpha for some modules, written like `rank_pattern` (lora, qlora)."""
    rslora: bool = False
    """Scale the output of an adapter by alpha / sqrt(rank), so that high ranks learn as fast as low ones (lora,
    qlora)."""
    dora: bool = False
    """Train the length of each row of a weight by itself, beside the adapter that turns it (lora)."""
    init: Annotated[str, Field(pattern=INIT)] = "default"
    """How adapters begin: `default`, `gaussian`, `orthogonal` (lora, qlora), or as a part of the weight: `pissa`, for
    instance `pissa_niter_16` to find it faster, and `olora` (lora)."""
    adapter: Annotated[Text | None, NONE, Field(examples=["./my-adapter"])] = None
    """A folder with an adapter in peft's format, which is trained on (lora, qlora). It says all that other keys say of
    adapters, but `dropout`."""
    modules_to_save: Annotated[list[ModuleName], OneOrMore()] = Field(default=[], examples=[["lm_head"]])
    """Names of modules that are trained whole beside the adapters, such as embed_tokens and lm_head (lora, qlora);
    where the head is the embedding table, one stands for both."""
    train_tokens: Annotated[list[Annotated[int, Field(ge=0)] | Text], OneOrMore(numbers=True)] = Field(
        default=[], examples=["added"]
    )
    """Tokens whose rows of the embedding table (and of a head that is the same) are trained beside the adapters (lora,
    qlora): numbers or texts; `added`: those of `tokens`, in a head of its own, too."""
    target_parameters: Annotated[list[ModuleName], OneOrMore()] = Field(
        default=[], examples=[["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]]
    )
    """Ends of names of weights that get an adapter though they are no linear's, such as tensors of experts (lora, and
    qlora with `quantise_experts`). Where `targets` is left out, nothing else gets one."""


class SpecialTokenWords(Section):
    """Texts for the roles that tokens have in a tokenizer."""

    bos_token: Text | None = None
    """Begins a text."""
    eos_token: Text | None = None
    """Ends a text, and an answer."""
    unk_token: Text | None = None
    """Stands for what the tokenizer does not know."""
    pad_token: Text | None = None
    """Fills up short rows; gangline needs none."""


class TokensWords(Section):
    """Tokens beside those of the model. `tokens: [<tool>]` is short for `tokens: {add: [<tool>]}`."""

    add: Annotated[list[Text], OneOrMore()] = Field(default=[], examples=[["<tool>", "</tool>"]])
    """Texts that become tokens of their own. Where the embedding table and the head have no row left for one they get
    one more: the mean of their rows, the same on every rank."""
    special: SpecialTokenWords = SpecialTokenWords()
    """Other tokens for the roles of the tokenizer; a text that is no token yet is added."""


class PartWords(Section):
    """One of several sources. A bare path or list of paths stands for `files`."""

    files: Annotated[Annotated[list[Text], Field(min_length=1)], OneOrMore()] | None = None
    """Paths and globs (`data/*.jsonl`), also in a store (`s3://bucket/*.jsonl`) or on a host (`pc1:/data/*.jsonl`).
    `hub:owner/name[/config][@revision][#split]` is short for the keys below."""
    hub: Annotated[Text | None, NONE] = None
    """Name of a data set on the Hugging Face hub (`owner/name`)."""
    config: Annotated[Text | None, NONE] = None
    """Configuration of the hub data set."""
    split: Annotated[Text | None, NONE] = None
    """Split of the hub data set (`train` for training rows, to be named for evaluation rows), or a part of it:
    `train[:1%]`, `train[100:200]`; of files `[:1%]`."""
    revision: Annotated[Text | None, NONE] = None
    """Branch, tag or commit of the hub data set."""
    max_samples: Annotated[Count | None, NONE] = None
    """Rows of this source at the most: the first ones, or with `shuffle` random ones."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each row occurs in an epoch; see [rows](data.md#several-sources)."""
    format: Annotated[str, RowOf(FORMATS)] | None = None
    """Format of these rows, if not `data.format`."""
    fields: Annotated[dict[Text, Text], Field(examples=[{"prompt": "question"}])] | None = None
    """As `data.fields`, for these rows."""
    roles: Annotated[dict[Text, Text], Field(examples=[{"gpt": "assistant"}])] | None = None
    """As `data.roles`, for these rows."""


class SourceWords(PartWords):
    """Where rows come from: `files`, for which a bare path stands, a data set of the hub, or a list of `sources`."""

    sources: list[Annotated[PartWords, Shorthand("files")]] | None = None
    """Several sources, each with keys of its own."""


class EvaluationSourceWords(SourceWords):
    """Rows set apart for evaluation. A bare number stands for `fraction`."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """This part of the training rows, chosen by content, is evaluated on and never trained on."""


class LearnWords(Section):
    """The tokens that are learned, beyond what the format says."""

    roles: Annotated[Annotated[list[Text], Field(min_length=1)], OneOrMore()] = Field(default=["assistant"])
    """Roles whose messages are learned. Of the `assistant` all that the template writes for an answer; of others
    (`user`, `tool`) their words."""
    thinking: Literal["all", "last", "none"] = "all"
    """Thinking that is learned, out of what the template writes: `all`; `last`: after the last message of the user;
    `none`."""
    end_token: bool = True
    """Learn what ends an answer: the end of the turn in a conversation, the end of the text elsewhere."""
    weight_field: Annotated[Text | None, NONE] = "weight"
    """Key of a message that says whether it is learned: 1, or 0. A message without the key is."""


class DataWords(Section):
    """What the model reads, and on which tokens it is trained."""

    train: Annotated[SourceWords, OrSeveral("files"), Field(examples=["train.jsonl"])]
    """Rows to train on: a path, paths and globs, `hub:owner/name[/config][@revision][#split]`, or a list of such
    sources."""
    eval: Annotated[
        Annotated[EvaluationSourceWords, OrSeveral("files", number_key="fraction")] | None,
        NONE,
        Field(examples=[0.05]),
    ] = None
    """Rows to evaluate on, written like `train`; a fraction of the training rows, such as 0.05; or `none`."""
    format: Annotated[str, RowOf(FORMATS)] = "text"
    """`text`: loss on every token. `instruction` and `alpaca` (instruction, output), `completion` (prompt, completion)
    and `chat` (messages): loss on the answers only. See [data](data.md)."""
    fields: Annotated[dict[Text, Text], Field(examples=[{"prompt": "question"}])] = Field(default={})
    """Names of the columns, where they are not called like the format's roles: `{prompt: question}`; names in messages,
    too: `{messages: conversations, role: from, content: value}` for ShareGPT."""
    roles: Annotated[dict[Text, Text], Field(examples=[{"gpt": "assistant"}])] = Field(default={})
    """Roles of messages, where rows call them otherwise than the chat template: `{human: user, gpt: assistant}`.
    `tool_calls` stands for an assistant whose content is the JSON of calls."""
    sequence_length: Annotated[Annotated[int, Field(ge=2, le=10**9)] | None, AUTO] = None
    """Tokens in a sample at the most. `auto`: 99 % of the rows fit in, up to 4096 or what the model reads, and the plan
    shows why; 1024 for text, which is split, and where nothing is known."""
    packing: bool = True
    """Fill a sample with several rows, which cannot see each other."""
    overlong: Literal["split", "truncate", "drop", "fail"] | None = None
    """What to do with a row that is longer than a sample; `split` is for text only; `drop`: leave the row out.
    Left out: `split` for text, `truncate` for the other formats."""
    max_samples: Annotated[Count | None, NONE] = None
    """Rows to train on at the most, of all sources together."""
    shuffle: bool = False
    """Choose the rows of `max_samples` at random, by `seed`, not the first ones. Samples are read in a random order in
    any case."""
    deduplicate: bool = False
    """Leave out rows whose values are those of a row before, in any source of the set."""
    skip_bad_rows: bool = False
    """Go on without rows that cannot be read (they are counted) instead of stopping."""
    chat_template: Annotated[Text | None, NONE, Field(examples=["chatml"])] = None
    """In place of the tokenizer's own: a file, or `alpaca`, `chatml`, `gemma`, `llama2`, `llama3`, `mistral`, `phi3`,
    `vicuna`, `zephyr`. Kept with the run and written into the export."""
    learn: LearnWords = LearnWords()
    """The tokens that are learned, beyond what the format says."""


class BatchWords(Section):
    """Samples in one optimizer step, over all machines together. `batch: 32` is short for `batch: {exact: 32}`."""

    exact: Annotated[Count | None, Field(examples=[32])] = None
    """So many, whatever the machines are."""
    about: Annotated[Count | None, Field(examples=[32])] = None
    """Between 3/4 and 4/3 of so many: the batch that the machines compute at the most samples per second, and of those
    that are less than 1 % apart the one that is nearest. It stays that of the run."""


class OuterWords(Section):
    """What moves all hosts together at the end of a round of local SGD: SGD with Nesterov momentum."""

    learning_rate: Positive = 1.0
    """1 with a momentum of 0 is the plain mean of hosts."""
    momentum: Probability = 0.6
    """Decay of the mean of changes: 0.9 for hundreds of rounds, less for fewer."""


class StrategyWords(Section):
    """How machines train together. `strategy: local-sgd` is short for `strategy: {kind: local-sgd}`."""

    kind: Annotated[str, RowOf(STRATEGIES, words=(CHOOSE,), without=(ALONE,))] = CHOOSE
    """How the devices share the work: see [strategies](strategies.md). `auto`: what the plan finds best of those that
    compute what one big machine would."""
    replicas: Annotated[Count | None, AUTO] = None
    """How many pipelines the devices make side by side, each with all layers, for its part of the batch; `auto`: what
    is fastest of that for which memory suffices (pipeline)."""
    inner_steps: Count = 50
    """Optimizer steps between two exchanges (local-sgd)."""
    payload: Literal["int8", "bf16", "fp32"] = "int8"
    """What changes of weights are rounded to on the wire (local-sgd)."""
    outer: OuterWords = OuterWords()
    """What becomes of the mean change of all hosts (local-sgd)."""
    offload: Annotated[list[Literal["optimizer", "parameters"]], OneOrMore()] = Field(default=[])
    """What lies in the machine's memory, not on the card: the `optimizer`'s states, which are then updated by the
    processor, or the `parameters`, or both. What can be moved depends on the [strategy](strategies.md)."""
    offload_to: Annotated[Text | None, NONE, Field(examples=["/scratch"])] = None
    """A folder on a fast disk of every host, such as an NVMe, for the `optimizer`'s states in place of memory (zero-3).
    Every step reads and writes them. It needs libaio and a compiler on every host."""
    deepspeed: Annotated[Text | None, NONE, Field(examples=["ds_config.json"])] = None
    """A configuration file of DeepSpeed. What it says of batch, precision, optimizer and schedule has to be what the
    job says, or `auto`; other keys are passed on (zero-1, zero-2, zero-3)."""


class OptimizerWords(Section):
    """What moves the weights. `optimizer: adamw-8bit` is short for `optimizer: {kind: adamw-8bit}`."""

    kind: OptimizerKind = "adamw"
    """See [training](training.md); `adamw-8bit` is less exact, and moments of `paged-adamw-8bit` leave a GPU that is
    short of memory. Not every strategy trains with every kind: [strategies](strategies.md)."""
    learning_rate: Positive = 2e-4
    """The full learning rate, after the warm-up."""
    betas: Annotated[
        Annotated[list[Probability], Field(min_length=2, max_length=2)] | None, Field(examples=[[0.9, 0.999]])
    ] = None
    """`[0.9, 0.999]` is short for `beta1: 0.9` and `beta2: 0.999`."""
    beta1: Probability | None = None
    """Decay of the mean of gradients; left out: 0.9 (the kinds of adamw, muon). The part of the mean in an update; left
    out: 0.9 (lion)."""
    beta2: Probability | None = None
    """Decay of the mean of squared gradients; left out: 0.999 (the kinds of adamw, muon). Decay of the mean of
    gradients; left out: 0.99 (lion)."""
    epsilon: Positive | None = None
    """Added to the denominator of the update; left out: 1e-8 (the kinds of adamw, muon). Added to squared gradients;
    left out: 1e-30 (adafactor)."""
    momentum: Probability | None = None
    """Decay of the sum of gradients; left out: 0 (sgd). Of the mean of gradients; left out: 0.95 (muon)."""
    nesterov: bool | None = None
    """Whether an update looks ahead by the momentum; left out: false (sgd), true (muon)."""
    scale: Literal["match-adamw", "original"] | None = None
    """What an update is multiplied by besides the rate: 0.2 * sqrt(the longer side), so that rates of AdamW fit
    (match-adamw, the default), or sqrt(rows / columns), 1 at the least (muon)."""
    weight_decay: NotNegative = 0.0
    """Weight decay of matrices, decoupled from the gradient, but for sgd."""
    clip_norm: Annotated[Positive | None, NONE] = 1.0
    """Norm of the whole gradient at the most; `none`: no clipping."""


class ScheduleWords(Section):
    """The learning rate over optimizer steps. `schedule: linear` is short for `schedule: {kind: linear}`."""

    kind: ScheduleKind = "cosine"
    """How the rate falls after the warm-up: `wsd` stays at the full rate and falls at the end, `cosine-restarts` falls
    several times; see [training](training.md)."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Optimizer steps from 0 to the full rate."""
    warmup_ratio: Annotated[Annotated[float, Field(ge=0, le=1)] | None, NONE] = None
    """The same as a part of all steps, rounded up to whole steps, in place of `warmup_steps`."""
    warmup_from_zero: bool = False
    """Begin the warm-up with a step at a rate of 0, as transformers does, and reach the full rate one step later."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the rate falls to, over the full rate (all kinds but constant and inverse-sqrt)."""
    decay_steps: Annotated[Count | None, NONE] = None
    """The last optimizer steps, in which the rate falls (wsd)."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The same as a part of all steps, rounded up to whole steps, where `decay_steps` is left out (wsd)."""
    decay: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """How the rate falls in the last steps (wsd)."""
    cycles: Count = 1
    """How often the rate falls from the full one; once is `cosine` (cosine-restarts)."""
    power: Positive = 1.0
    """The rate falls as this power of the part of the steps that is left (polynomial)."""
    timescale: Annotated[Count | None, NONE] = None
    """The rate falls as the square root of this over the steps so far; left out: the warm-up's steps, or 10,000 without
    one (inverse-sqrt)."""


class PrecisionWords(Section):
    """Number formats. `precision: bf16` is short for `precision: {compute: bf16}`."""

    compute: PrecisionName = "auto"
    """Number format of the computation in the whole run; `auto` is what every device of the run can do well."""
    parameters: Literal["auto", "compute", "fp32"] = "auto"
    """Number format of the trained weights and of the optimizer's states. `auto` is fp32;
    `compute` takes the one of the computation: less memory, less exact."""


class EvaluationWords(Section):
    """When the evaluation rows are read."""

    every_steps: Annotated[Count | None, NONE] = None
    """Evaluate every so many optimizer steps; `none`: at the start and at the end only."""
    every_epochs: Annotated[Positive | None, NONE] = None
    """Evaluate every so many epochs, which need not be whole (0.25), in place of `every_steps`: after the first step
    that has read so much."""
    at_start: bool = True
    """Evaluate before the first step, too."""
    max_samples: Annotated[Count | None, NONE] = None
    """Samples to evaluate at the most; `none`: all."""


class EarlyStoppingWords(Section):
    """End the run when the evaluation loss does not fall any more. `early_stopping: 3` is short for `{patience: 3}`."""

    patience: Annotated[Count, Field(examples=[3])]
    """Evaluations in a row without an improvement, after which the run has finished."""
    min_improvement: NotNegative = 0.0
    """An evaluation improves if its loss is lower than the lowest before it by more than this."""


class CheckpointWords(Section):
    """When the state is saved, and how much is kept."""

    every_steps: Annotated[Count | None, NONE] = None
    """Save every so many optimizer steps."""
    every_epochs: Annotated[Positive | None, NONE] = None
    """Save every so many epochs, which need not be whole (0.25), in place of `every_steps`."""
    every_minutes: Annotated[Positive | Literal["auto"] | None, NONE] = "auto"
    """Save after so many minutes; `auto`: 1 to 30, by what a save is seen to cost; `none`: by steps only, or at the end
    only."""
    keep_last: Count = 2
    """Checkpoints that are kept, newest first."""
    keep_best: bool = True
    """Keep the one with the lowest evaluation loss, too."""
    asynchronous: bool = True
    """Go on training while a checkpoint is written."""
    each_host: Literal["whole", "part"] = "whole"
    """`whole`: every host writes the whole trained state; one disk is enough to resume. `part`: it writes the part of
    its ranks (full fsdp, pipeline): less memory, disk, network; resuming needs all disks."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What the run does when a save fails, on a full disk for instance."""


class FailureWords(Section):
    """What the run does by itself when a rank, host or link fails. `failures: stop` means `failures: {restarts: 0}`."""

    restarts: Annotated[int, Field(ge=0, le=10**9), OrWord("stop", 0)] = 5
    """Failed attempts in a row without a new step before the run ends; the same cause twice in a row without a step
    ends it, too. `stop` or 0: the first failure ends it."""
    wait: Annotated[str, Field(pattern=DURATION, json_schema_extra={"x-fix": WAIT_FIX})] = "30s"
    """How long the run waits for a host that does not answer: from `0s` to `24h`."""
    without: bool = True
    """Then go on without that host: the others share its work, and batch, samples and their order stay the same.
    `false`: the run ends then."""
    take_back: bool = True
    """A host that was lost and answers again joins once more, as soon as the others have saved."""
    smaller_micro_batch: bool = True
    """Where memory does not suffice, go on with a smaller `micro_batch` by itself: under `ddp` the rank that ran out,
    else all. The batch and the order of samples stay the same."""


class NotifyWords(Section):
    """Messages about the run, sent by its supervisor. `notify: env:NTFY` is short for `notify: {to: env:NTFY}`."""

    to: Annotated[list[Annotated[str, Field(pattern=ADDRESS_PLACE, examples=["file:~/.config/ntfy"])]], OneOrMore()] = (
        Field(default=[], examples=[["file:~/.config/ntfy"]])
    )
    """Where an address stands: `env:NAME`, a variable of your shell, or `file:PATH`, its first line; see
    [messages](training.md#messages)."""
    command: Annotated[list[Text], OneOrMore()] = Field(default=[], examples=[["notify-send", "gangline"]])
    """A program on the supervisor's host: each message is its standard input, and JSON in `GANGLINE_MESSAGE`."""
    events: Annotated[list[MessageKind], OneOrMore()] = Field(default=list(MESSAGE_KINDS))
    """Which events make a message: the run `finished` or `failed`, a host is `lost` or `back`, a `straggler` slows the
    others, ranks have `stalled`."""


class SettingsWords(Section):
    """What holds for every run of a user whose job does not say otherwise."""

    notify: Annotated[Annotated[NotifyWords, Shorthand("to")] | None, NONE] = None
    """Who gets messages about a run whose job has no `notify`."""


class JobWords(Section):
    """A training job. Only `model`, `data.train` and `batch` are required."""

    name: Name | None = None
    """What the job is called; left out: the name of the file."""
    model: Annotated[ModelWords, Shorthand("path"), Field(examples=["./llama"])]
    """The model: a folder, a hub name, or the keys below."""
    method: Annotated[MethodWords, Shorthand("kind")] = MethodWords()
    """The weights that train: `full` (all), `lora` or `qlora` (adapters), or the keys below."""
    tokens: Annotated[TokensWords, Shorthand("add")] = TokensWords()
    """Tokens beside those of the model: texts, or the keys below."""
    data: Annotated[DataWords, Field(examples=[{"train": "train.jsonl"}])]
    """What the model reads."""
    batch: Annotated[BatchWords, Shorthand("exact"), Field(examples=[32])]
    """Samples in one optimizer step, over all machines together: a number, or `{about: 32}` for one near it among
    which the machines divide the work best."""
    micro_batch: Annotated[Count | None, AUTO] = None
    """Samples that one device computes at once; divides `batch`. More is faster and takes more memory. `auto`: what
    the plan finds fastest among those that fit, mostly for each rank by itself."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How often the training rows are read; 1 where neither `epochs` nor `steps` is given."""
    steps: Count | None = None
    """Optimizer steps in all, in place of `epochs`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the order of samples, dropout and fresh weights."""
    precision: Annotated[PrecisionWords, Shorthand("compute")] = PrecisionWords()
    """Number formats: `bf16` and the like, or the keys below."""
    kernels: Annotated[Annotated[list[KernelWord], Field(min_length=1)], OneOrMore()] = Field(default=["auto"])
    """What computes parts of a step in place of torch's own operators: `auto` (what works with the device, the number
    format and the model), `torch` (none), or names of kernels that may not be missing."""
    activation_checkpointing: Annotated[bool | None, AUTO] = None
    """Compute activations twice instead of keeping them: less memory, about a third more time. `auto`: where the
    plan finds it faster, or nothing fits without; each rank for itself, but under ZeRO."""
    activation_offloading: bool = False
    """Have the inputs of recomputed layers in the machine's memory: more fits on a card, and each step copies more. Not
    written: where the plan chooses recomputation, it may do so for single ranks."""
    compile: bool = False
    """Compile every decoder layer with torch.compile: the first start on a host takes a minute longer, the gain on a
    GPU is not measured yet. Not with dropout, nor under every [strategy](strategies.md)."""
    strategy: Annotated[StrategyWords, Shorthand("kind")] = StrategyWords()
    """How machines train together: `ddp`, `fsdp`, `hsdp`, `zero-1` to `zero-3`, `tp`, `pipeline`, `local-sgd`, or the
    keys below."""
    exchange: Literal["fp32", "bf16", "auto"] = "fp32"
    """Number format of gradients between machines. `fp32`: exact. `bf16`: half the bytes, sums rounded to 8 bits.
    `auto`: bf16 where the plan expects steps that are more than 2 % shorter."""
    optimizer: Annotated[OptimizerWords, Shorthand("kind")] = OptimizerWords()
    """What moves the weights: `adamw` and the like, or the keys below."""
    schedule: Annotated[ScheduleWords, Shorthand("kind")] = ScheduleWords()
    """The learning rate over optimizer steps: `cosine` and the like, or the keys below."""
    evaluation: EvaluationWords = EvaluationWords()
    """When the evaluation rows are read."""
    early_stopping: Annotated[
        Annotated[EarlyStoppingWords, Shorthand("patience")] | None, NONE, Field(examples=[3])
    ] = None
    """End the run when the evaluation loss does not fall any more: a number of evaluations, or the keys below."""
    checkpoint: CheckpointWords = CheckpointWords()
    """When the state is saved, and how much is kept."""
    failures: Annotated[FailureWords, Shorthand("restarts")] = FailureWords()
    """What the run does when something fails: `stop`, a number of restarts, or the keys below."""
    report: ReportWords = ReportWords()
    """Where figures go."""
    callbacks: CallbackWords = CallbackWords()
    """Code of your own in the loop."""
    notify: Annotated[Annotated[NotifyWords, Shorthand("to")] | None, NONE] = None
    """Who gets messages about the run."""
    max_skipped_steps: Annotated[int, Field(ge=0, le=10**9)] = 3
    """Steps in a row whose loss or gradient is not a finite number and that are skipped, before the run stops."""


def _listed_beside(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


FOREIGN: dict[str, str] = dict.fromkeys(_listed_beside("foreign_names.json"), "") | _listed_beside("foreign_keys.json")
"""Keys of other trainers: the key of a job that means the same, a sentence that says what to write, or "" for one that
means nothing here. `python -m gangline.convert.reference .` writes the names."""
