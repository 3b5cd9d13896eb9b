"""The shape of a model, as far as memory, traffic and time depend on it. Plain numbers, no weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from gangline.errors import ModelError
from gangline.runs.job import REGEX, MethodJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One kind of `nn.Linear` inside a layer: what LoRA attaches to and what QLoRA quantises."""

    name: str
    """The last part of the module's name, such as q_proj."""
    inputs: int
    outputs: int
    part: Literal["attention", "mlp"]
    bias: bool = False
    number: int = 1
    """How many of this shape a layer has (experts that are modules of their own)."""
    active: float = 1.0
    """How many of them one token passes through."""
    parts: int = 1
    """Ranks that have its weights between them, while what goes in and comes out is whole on each."""
    rank: int | None = None
    """Of its adapter, where these are placed one by one (`place_adapters`), 0 for none; None: by its name alone."""
    saved: bool = False
    """Whether a copy of it is trained whole, beside adapters."""

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices, without biases, on one rank."""
        return self.inputs * self.outputs * self.number // self.parts

    @property
    def num_biases(self) -> int:
        """Numbers in the bias vectors."""
        return self.outputs * self.number if self.bias else 0


@dataclass(frozen=True, kw_only=True)  # no slots: a plan asks for these numbers thousands of times, and keeps them
class Layer:
    """Layers of one shape."""

    count: int
    """How many of them the model has."""
    linears: tuple[Linear, ...]
    heads: int
    """Attention heads of the queries."""
    kv_heads: int
    head_dim: int
    """Width of a head's queries and keys."""
    value_dim: int
    """Width of a head's values (differs in MLA)."""
    width: int
    """Of the activation between the MLP's matrices, per token: f for a dense one, top_k * f_e + shared for experts."""
    gated: bool = True
    """Whether the MLP multiplies two branches (SwiGLU)."""
    activation: str = "silu"
    """Between the MLP's matrices, by the name that config.json gives it."""
    window: int | None = None
    """Tokens that attention looks back on; None: all."""
    experts: int = 0
    """Experts of a layer; 0: dense."""
    top_k: int = 0
    """Experts that a token passes through."""
    fused_weights: int = 0
    """Numbers in expert tensors of three dimensions, which are no `nn.Linear` (neither LoRA nor QLoRA knows them)."""
    expert_shapes: tuple[tuple[int, int, int], ...] = ()
    """Of these tensors: gate and up in one, and down."""
    fused_active: int = 0
    """How many of these one token uses."""
    expert_linears: tuple[Linear, ...] = ()
    """Expert tensors and the router as peft gives them adapters; their weights are counted in `fused_weights` and
    `vectors`."""
    taken_names: tuple[str, ...] = ()
    """Names that mean expert tensors in all of this model, and no longer matrices of `linears`."""
    vectors: int = 0
    """Numbers in norms, sinks, routers and the like."""
    num_norms: int = 2
    """Norms over the hidden width."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """What these are: rms is computed step by step in fp32, which keeps more for backward than layer's one kernel."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """Whether queries and keys are normed, head by head or all at once."""
    shared_width: int = 0
    """The part of `width` that is an expert which every token passes through."""
    latent: bool = False
    """Whether keys and values come from one narrow projection (MLA)."""
    delta: bool = False
    """Whether it is no attention but a gated delta net, whose states are read and written in chunks."""
    gated_attention: bool = False
    """Whether a gate, which comes with the queries, multiplies what attention gives."""
    parallel: bool = False
    """Whether attention and MLP both start from the layer's input."""
    repeats_heads: bool = False
    """Whether the model itself repeats keys and values for all query heads."""
    plain_attention: bool = False
    """Whether no attention kernel takes it but the plain form: one broadcast head of keys, or slopes (alibi)."""
    rotary: bool = True
    """Whether queries and keys are turned by position."""
    dropout: bool = False
    """Whether the model drops numbers of what attention and MLP add to the stream."""
    attention_dropout: bool = False
    """Whether it drops attention weights."""

    @functools.cached_property
    def one(self) -> Layer:
        """One of them."""
        return replace(self, count=1)

    @functools.cached_property
    def linear_weights(self) -> int:
        """Numbers in the layer's `nn.Linear` matrices."""
        return sum(linear.num_weights for linear in self.linears)

    @functools.cached_property
    def linear_rows(self) -> int:
        """Rows of these matrices: each has one scale where numbers have 8 bits."""
        return sum(linear.outputs * linear.number for linear in self.linears)

    @functools.cached_property
    def num_parameters(self) -> int:
        """All numbers of one layer."""
        return self.linear_weights + sum(each.num_biases for each in self.linears) + self.fused_weights + self.vectors

    @property
    def active_weights(self) -> float:
        """Numbers that one token is multiplied with."""
        return sum(each.inputs * each.outputs * each.active for each in self.linears) + self.fused_active


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A causal language model."""

    model_type: str
    hidden: int
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding table."""
    layers: tuple[Layer, ...]
    """In order; neighbours of one shape are one entry."""
    extra_embeddings: int = 0
    """Numbers in further tables (learned positions)."""
    vectors: int = 0
    """Numbers outside layers and tables (the last norm)."""
    tower: Layer | None = None
    """The layers of a network for images, of which texts use nothing: its weights lie there, and its matrices carry
    adapters by their names. What it has beside layers is in `vectors`."""
    unloaded: str = ""
    """Why gangline's own trainer cannot load it; empty where it can."""
    head_bias: bool = False
    linear_head: bool = True
    """Whether logits are hidden states times the head, and nothing else (no scale, no cap): only then can the loss be
    fused with the head."""
    capped_logits: bool = False
    """Whether logits are squeezed, which keeps them once more."""
    max_positions: int | None = None
    entry_dropout: str = ""
    """The key of config.json by which a part of embeddings is dropped before the first layer; empty where none is."""
    modules: tuple[str, str, str] = ("model.layers", "self_attn", "mlp")
    """How the model calls the list of its layers, and attention and the MLP in one of them; "" where that is no module
    of its own."""
    saved_embedding: bool = False
    """Whether a copy of the embedding table (and of a head that is the same) is trained whole, beside adapters."""
    saved_head: bool = False
    """The same of a head of its own."""
    trained_rows: int = 0
    """Rows of the tables that are trained by themselves, beside adapters."""
    embedding_rank: int = 0
    """Rank of an adapter over the embedding table; 0: it carries none."""
    head_rank: int = 0
    """The same of the output head, which is adapted by itself where it is the same tensor, too."""
    source: Literal["config", "counted"] = "config"
    """Read from config.json by closed form, or counted on the model itself."""

    @property
    def weighed_layers(self) -> tuple[Layer, ...]:
        """All that has weights: of the language model, and of the network for images."""
        return (*self.layers, *([self.tower] if self.tower else []))

    @property
    def num_layers(self) -> int:
        """Depth."""
        return sum(layer.count for layer in self.layers)

    @property
    def embedding_weights(self) -> int:
        """Numbers in the embedding tables, a tied head counted once."""
        return self.hidden * self.vocabulary + self.extra_embeddings

    @property
    def head_weights(self) -> int:
        """Numbers of an output head of its own; 0 where it is tied."""
        return (0 if self.tied else self.hidden * self.vocabulary) + (self.vocabulary if self.head_bias else 0)

    @property
    def saved_weights(self) -> int:
        """Numbers in copies of the tables that are trained beside adapters."""
        table = self.hidden * self.vocabulary
        copies = (table if self.saved_embedding else 0) + (self.head_weights if self.saved_head else 0)
        return copies + self.trained_rows * self.hidden

    @property
    def trains_head(self) -> bool:
        """Whether logits come from a trained copy of the head, beside adapters."""
        return self.saved_head or (self.tied and self.saved_embedding)

    @property
    def linear_weights(self) -> int:
        """Numbers in `nn.Linear` matrices inside layers: what QLoRA quantises."""
        return sum(layer.count * layer.linear_weights for layer in self.layers)

    @property
    def expert_weights(self) -> int:
        """Numbers in expert tensors of three dimensions: what QLoRA leaves as it is."""
        return sum(layer.count * layer.fused_weights for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """All numbers of the model."""
        inside = sum(layer.count * layer.num_parameters for layer in self.weighed_layers)
        return inside + self.embedding_weights + self.head_weights + self.vectors

    @property
    def active_weights(self) -> float:
        """Numbers that one token is multiplied with, the output head among them (it is used once per token)."""
        return sum(layer.count * layer.active_weights for layer in self.layers) + self.hidden * self.vocabulary


# Where adapters sit, and how many numbers they have.


ALL_LINEAR = ("all-linear",)


def adapted(layer: Layer, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """What carries adapters in a layer.

    Experts that are one tensor of three dimensions carry them where peft (0.21) reaches these by the names that
    experts had as modules of their own; dense matrices of the same names then carry none.
    """
    choice = (*(each for each in layer.linears if each.name not in layer.taken_names), *layer.expert_linears)
    names = {target.rsplit(".", 1)[-1] for target in targets}
    every = targets == ALL_LINEAR
    return tuple(each for each in choice if (each.rank if each.rank is not None else every or each.name in names))


def table_adapters(architecture: Architecture, *, dora: bool = False) -> tuple[int, int]:
    """Numbers in the adapters over the embedding table and over the output head.

    dora: with the lengths, which peft (0.21) takes over the tokens of the embedding table.
    """
    hidden, vocabulary = architecture.hidden, architecture.vocabulary
    return (
        architecture.embedding_rank * (hidden + vocabulary) + (hidden if dora and architecture.embedding_rank else 0),
        architecture.head_rank * (hidden + vocabulary) + (vocabulary if dora and architecture.head_rank else 0),
    )


def layer_adapters(layer: Layer, rank: int, targets: tuple[str, ...], *, dora: bool = False) -> int:
    """Numbers in the adapters of one layer, and in copies of matrices that are trained beside them.

    dora: with the lengths of rows (Liu et al., DoRA, section 4.1).
    """
    factors = sum(
        ((each.rank or rank) * (each.inputs + each.outputs) + (each.outputs if dora else 0)) * each.number
        for each in adapted(layer, targets)
    )
    return factors + sum(each.num_weights + each.num_biases for each in layer.linears if each.saved)


def lora_parameters(architecture: Architecture, rank: int, targets: tuple[str, ...], *, dora: bool = False) -> int:
    """Numbers in all adapters: rank x (inputs + outputs) for each matrix (Hu et al., LoRA, section 4.1), and in what is
    trained beside them.

    Raises ModelError, with the names that there are, if a model has none of the targets, or one without another that
    is the same tensor.
    """
    matched = sum(
        layer.count * layer_adapters(layer, rank, targets, dora=dora) for layer in architecture.weighed_layers
    )
    beside = architecture.saved_weights + sum(table_adapters(architecture, dora=dora))
    if not (matched or beside) or _halves(architecture, targets):
        raise ModelError(
            f"method.targets: {', '.join(targets)} "
            + ("names one half of a tensor that holds two matrices" if matched else "matches nothing in this model"),
            seen=f"expected names among {', '.join(_names(architecture))}",
            fix="name some of these, or set targets: all-linear",
        )
    return matched + beside


def place_adapters(architecture: Architecture, method: MethodJob, *, num_added: int = 0) -> Architecture:
    """The shape of a model with what a method trains of it, beyond one rank and some names: written down matrix by
    matrix, as peft's rules have it (peft/utils/other.py, tuners_utils.py).

    num_added: tokens beside those of the model, each with a row of its own: some may find one in the table, which only
    ranks know. Raises ModelError for layers that the model does not have.
    """
    architecture = replace(architecture, vocabulary=architecture.vocabulary + num_added)
    if method.kind == "full":
        return architecture
    if beyond := [number for number in method.layers if number >= architecture.num_layers]:
        raise ModelError(
            f"method.layers: the model has no layer {beyond[0]}",
            seen=f"its layers have the numbers 0 to {architecture.num_layers - 1}",
            fix="name layers that are there",
        )
    if method.splits and _with_table_ranks(architecture, method).embedding_rank:
        raise ModelError(
            f"method.init: {method.init} splits a matrix that is multiplied, and an embedding table is looked up",
            seen=f"method.targets: {', '.join(method.targets)}",
            fix="take the table out of the targets, or delete init",
        )
    saved = {name.rpartition(".")[2] for name in method.modules_to_save}
    tables = bool(saved & EMBEDDINGS) or (architecture.tied and bool(saved & HEADS))
    architecture = replace(
        architecture, saved_embedding=tables, saved_head=bool(saved & HEADS) and not architecture.tied
    )
    architecture = _with_rows(_with_table_ranks(architecture, method), method, num_added)
    by_name = bool(method.targets) and not method.targets[0].startswith(REGEX) and not method.target_parameters
    if by_name and not (method.exclude or method.layers or method.rank_pattern or saved - EMBEDDINGS - HEADS):
        return architecture
    kinds = (layer.one for layer in architecture.layers for _ in range(layer.count))
    placed = [_placed(layer, index, architecture.modules, method) for index, layer in enumerate(kinds)]
    layers = tuple(replace(layer, count=len(list(same))) for layer, same in groupby(placed))
    return replace(architecture, layers=layers)


def _with_rows(architecture: Architecture, method: MethodJob, num_added: int) -> Architecture:
    """With the rows that `train_tokens` names; a head that takes part is none that the loss could be fused with."""
    if not method.train_tokens:
        return architecture
    added = method.train_tokens == ("added",)
    count = num_added if added else len(method.train_tokens)
    both = added and not architecture.tied
    plain = both or architecture.tied
    linear_head = architecture.linear_head and not plain
    return replace(architecture, trained_rows=count * (2 if both else 1), linear_head=linear_head)


def _with_table_ranks(architecture: Architecture, method: MethodJob) -> Architecture:
    """With adapters over the tables; a head that carries one is none that the loss could be fused with."""
    above = architecture.modules[0].rpartition(".")[0]
    embedding = _table_rank([f"{above}.{name}".lstrip(".") for name in sorted(EMBEDDINGS)], method)
    head = _table_rank(sorted(HEADS), method)
    linear_head = architecture.linear_head and not head
    return replace(architecture, embedding_rank=embedding, head_rank=head, linear_head=linear_head)


def _table_rank(names: Sequence[str], method: MethodJob) -> int:
    """The rank of the adapter over a table that a model calls by one of these names; 0 where it carries none."""
    first = method.targets[0] if method.targets else ""
    expression = first.removeprefix(REGEX) if first.startswith(REGEX) else ""
    for name in () if method.layers or method.targets == ALL_LINEAR else names:
        chosen = bool(re.fullmatch(expression, name)) if expression else _ends(name, method.targets)
        if chosen and not _excluded(name, method.exclude) and not _ends(name, method.modules_to_save):
            return _rank(name, method)
    return 0


def _rank(name: str, method: MethodJob) -> int:
    found = [rank for key, rank in method.rank_pattern.items() if re.match(rf"(.*\.)?({key})$", name)]
    return found[0] if found else method.rank


EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"}
HEADS = {"lm_head", "embed_out", "output"}
"""Names that families give their embedding table and their output head."""


def _placed(layer: Layer, index: int, modules: tuple[str, str, str], method: MethodJob) -> Layer:
    """One layer by itself, with the rank of every adapter."""
    stack, *parts = modules
    where = dict(zip(("attention", "mlp"), parts, strict=True))
    gated = any(each.name == "shared_expert_gate" for each in layer.linears)
    shared = ("shared_expert" if gated else "shared_experts") if layer.shared_width else ""

    def named(linear: Linear) -> str:
        inner = shared if linear.part == "mlp" and linear.name != "shared_expert_gate" else ""
        return ".".join(part for part in (stack, str(index), where[linear.part], inner, linear.name) if part)

    usual = {id(each) for each in adapted(layer, method.targets)}
    first = method.targets[0] if method.targets else ""
    expression = first.removeprefix(REGEX) if first.startswith(REGEX) else ""

    def with_rank(linear: Linear, *, is_module: bool) -> Linear:
        name = named(linear)
        saved = is_module and _ends(name, method.modules_to_save)
        chosen = is_module and bool(re.fullmatch(expression, name)) if expression else id(linear) in usual
        chosen = chosen and not saved and not _excluded(name, method.exclude)
        chosen = chosen and (not method.layers or index in method.layers)
        return replace(linear, saved=saved, rank=_rank(name, method) if chosen else 0)

    return replace(
        layer,
        linears=tuple(with_rank(each, is_module=True) for each in layer.linears),
        expert_linears=(
            *(with_rank(each, is_module=False) for each in layer.expert_linears),
            *_expert_tensors(layer, method, ".".join((stack, str(index), where["mlp"], "experts"))),
        ),
    )


def _expert_tensors(layer: Layer, method: MethodJob, place: str) -> Iterator[Linear]:
    """Those that `target_parameters` names, each with one adapter over all experts."""
    for name, shape in zip(("gate_up_proj", "down_proj"), layer.expert_shapes, strict=False):
        if _ends(f"{place}.{name}", method.target_parameters):
            number, inputs, outputs = shape
            yield Linear(name=name, inputs=inputs, outputs=outputs, number=number, part="mlp", rank=method.rank)


def _excluded(name: str, exclude: tuple[str, ...]) -> bool:
    if exclude and exclude[0].startswith(REGEX):
        return bool(re.fullmatch(exclude[0].removeprefix(REGEX), name))
    return _ends(name, exclude)


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def _names(architecture: Architecture) -> list[str]:
    return sorted({each.name for layer in architecture.layers for each in adapted(layer, ALL_LINEAR)})


def _halves(architecture: Architecture, targets: tuple[str, ...]) -> bool:
    """Whether only one of gate and up is named where both are one tensor."""
    for layer in architecture.layers:
        pair = {each.name for each in layer.expert_linears[:2]} if layer.taken_names else set()
        if len(pair & {each.name for each in adapted(layer, targets)}) == 1:
            return True
    return False
