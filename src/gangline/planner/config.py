"""The shape of a model from its config.json, by closed form: no weights, no torch.

`read_architecture` knows the families of catalog/families.json; another model_type raises UnknownArchitecture, and a
worker process counts the model itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from gangline import catalog
from gangline.errors import ModelError
from gangline.planner.architecture import Architecture, Layer, Linear
from gangline.runs.decode import build

# What config.json leaves unsaid about a family of models: names, biases, norms, defaults.


Switch = bool | str
"""Always, never, or the key of config.json that says so (absent: the value after a colon, else false)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How models of one model_type are built."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Three names, or one where the three are one matrix."""
    out: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Three names of a gated MLP, two where gate and up are one matrix (or where there is no gate)."""
    gated: bool = True
    activation: str = "silu"
    """When config.json says nothing."""
    drops: bool = False
    """Whether numbers are dropped from what a layer adds when config.json says nothing."""
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    norm: Literal["rms", "layer", "none"] = "rms"
    """rms: h numbers; layer: a scale and a shift; none: without numbers."""
    norm_bias: Switch = True
    """Whether a layer norm has a shift."""
    num_norms: int = 2
    """In a layer, over the hidden width."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """Norms of queries and keys: one of a head's width for all heads, or one of the projection's width."""
    qk_norm_if: Switch = True
    tied: bool = False
    """Whether the head is the embedding table when config.json says nothing."""
    head_bias: Switch = False
    kv_heads: int | None = None
    """When config.json says nothing; None: as many as query heads."""
    grouped: bool = True
    """Whether config.json may name fewer heads for keys and values."""
    width_keys: tuple[str, ...] = ("intermediate_size",)
    """Keys of the MLP's width; without any of them 4 times the hidden width, where there is no gate."""
    head_dim: int | None = None
    """When config.json says nothing; None: hidden / heads."""
    positions: Literal["rotary", "learned", "offset"] = "rotary"
    """learned: a table with a row per position; offset: with two rows more (opt)."""
    alibi: bool = False
    """Slopes on scores instead of positions."""
    embedding_norm: bool = False
    """A norm right after the embedding table (bloom)."""
    window: Literal["none", "always", "switched", "every-2", "every-4", "every-6"] = "none"
    """always: wherever sliding_window is a number; switched: only with use_sliding_window; every-n: each n-th layer
    sees everything, the others a window (unless layer_types says it layer by layer)."""
    experts: Literal["none", "all", "sparse-step", "after-dense"] = "none"
    """Which layers have experts: all; by decoder_sparse_step and mlp_only_layers; from first_k_dense_replace on."""
    expert_bias: bool = False
    router_linear: bool = False
    """Whether the router is an `nn.Linear` (adapters attach to it) or a parameter."""
    expert_names: tuple[str, ...] = ()
    """Names by which peft reaches expert tensors and their router (gate, up, down, router), which are no `nn.Linear`;
    the same names then no longer mean a dense layer's matrices. Empty: peft does not reach them."""
    latent: bool = False
    """Multi-head latent attention: keys and values from one narrow projection (MLA)."""
    parallel: bool = False
    """Whether attention and MLP both start from the layer's input."""
    halved_mlp: bool = False
    """Whether intermediate_size counts gate and up together (qwen)."""
    scaled_logits: tuple[str, ...] = ()
    """Keys that scale or cap logits when they are there and not 1."""
    unless: tuple[str, ...] = ()
    """Keys that lead away from what this row says when they are true."""
    entry_dropout: str = ""
    """The key of config.json that says which part of embeddings is dropped before the first layer."""
    modules: tuple[str, str, str] = ("model.layers", "self_attn", "mlp")
    """See `Architecture`."""
    transposed: bool = False
    """Whether matrices lie as [in, out], which is no `nn.Linear` (Conv1D)."""


def _families(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelFamily]:
    found: dict[str, ModelFamily] = {}
    for name, row in rows.items():
        like = dataclasses.asdict(found[row["like"]]) if "like" in row else {}
        found[name] = build(ModelFamily, {**like, **{key: value for key, value in row.items() if key != "like"}})
    return found


_FILE = json.loads((Path(catalog.__file__).parent / "families.json").read_text(encoding="utf-8"))
FAMILIES: dict[str, ModelFamily] = _families(_FILE["families"])
"""By model_type. Another one is counted on the model itself, by a worker process."""
SLICED, STAGED = frozenset(_FILE["sliced"]), frozenset(_FILE["staged"])
"""Families whose layers tensor parallelism can slice, and those that a pipeline can cut between any two layers."""

_KEYS = {
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""One meaning, and the names that families give it."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_DROPOUTS = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout")
_LIMIT = 1 << 24
"""No width, count or vocabulary of a model is near this."""
_MAX_LAYERS = 4096
_MAX_NUMBERS = 10**14


class UnknownArchitecture(ModelError):
    """No closed form for this model_type: to be counted on the model itself."""

    def __init__(self, model_type: str, *, why: str) -> None:
        super().__init__(
            f"model.path: models of type {model_type!r} are not known to the planner",
            seen=why,
            fix="let a worker count the model (python -m gangline.worker.trace), which needs torch and transformers",
        )
        self.model_type = model_type


class _Reader:
    """Checked access to config.json."""

    def __init__(self, config: Mapping[str, Any], *, model_type: str, family: ModelFamily) -> None:
        self.config, self.model_type, self.family = config, model_type, family

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of these keys that is there; raises ModelError for a missing or impossible one."""
        key = next((key for key in keys if self.config.get(key) is not None), None)
        if key is None:
            if default is None:
                raise self.broken(f"it has no {keys[0]}", f"expected a whole number from {least} on")
            return default
        value = self.config[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LIMIT:
            raise self.broken(f"{key} is {value!r}", f"expected a whole number from {least} to {_LIMIT - 1}")
        return value

    def core(self, meaning: str, *, default: int | None = None) -> int:
        """`number` by meaning, whatever this family calls it."""
        return self.number(*_KEYS[meaning], default=default)

    def flag(self, switch: Switch) -> bool:
        """Whether a family's switch is on for this model."""
        if isinstance(switch, bool):
            return switch
        key, _, default = switch.partition(":")
        value = self.config.get(key)
        if value is None:
            return default == "true"
        if not isinstance(value, bool):
            raise self.broken(f"{key} is {value!r}", "expected true or false")
        return value

    def names(self, key: str, *, length: int) -> list[str] | None:
        """A list with one name per layer, if it is there."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(each, str) for each in value):
            raise self.broken(f"{key} does not name {length} layers", "expected one name per layer")
        return list(value)

    def broken(self, what: str, expected: str) -> ModelError:
        """The error for a config that no model can have."""
        return ModelError(
            f"model.path: config.json (model_type {self.model_type!r}): {what}",
            seen=expected,
            fix="copy config.json again from where the model comes from",
        )


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The shape of the causal language model that config.json describes.

    Raises UnknownArchitecture where there is no closed form (another model_type, towers for images or sound, layers
    that are no attention), and ModelError for a config that no model can have.
    """
    model_type, config = _text_part(config)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownArchitecture(model_type, why=f"expected one of {', '.join(sorted(FAMILIES))}")
    reader = _Reader(config, model_type=model_type, family=family)
    exotic = [key for key in family.unless if config.get(key)]
    if exotic or (model_type == "opt" and _is_odd_opt(config)):
        raise UnknownArchitecture(model_type, why=f"config.json changes its layers ({', '.join(exotic) or 'opt-350m'})")
    depth = reader.core("layers")
    if depth > _MAX_LAYERS:
        raise reader.broken(f"it has {depth} layers", f"expected {_MAX_LAYERS} at the most")
    each = [_layer(reader, index, window) for index, window in enumerate(_windows(reader, depth))]
    architecture = _whole(reader, tuple(replace(layer, count=len(list(same))) for layer, same in groupby(each)))
    if architecture.num_parameters > _MAX_NUMBERS:
        raise reader.broken(f"it adds up to {architecture.num_parameters:.1e} parameters", "expected a model of today")
    return architecture


def _text_part(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    outer = config.get("model_type")
    if not isinstance(outer, str) or not outer:
        raise ModelError(
            "model.path: config.json has no model_type",
            seen=f"expected a name such as llama; saw {outer!r}",
            fix="copy config.json again from where the model comes from",
        )
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return outer, config
    towers = sorted(key for key in config if key.endswith("_config") and key in ("vision_config", "audio_config"))
    if any(config[key] for key in towers):
        raise UnknownArchitecture(outer, why=f"it has further networks beside the language model ({', '.join(towers)})")
    name = inner.get("model_type") or outer
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return str(name), {**tied, **inner}


def _is_odd_opt(config: Mapping[str, Any]) -> bool:
    """opt-350m: norms after, and projections beside the tables."""
    narrow = config.get("word_embed_proj_dim") not in (None, config.get("hidden_size"))
    return narrow or config.get("do_layer_norm_before") is False


def _whole(reader: _Reader, layers: tuple[Layer, ...]) -> Architecture:
    family, hidden = reader.family, reader.core("hidden")
    norm = _norm_numbers(reader, hidden)
    positions = reader.core("positions", default=0 if family.positions == "rotary" else None)
    rows = {"rotary": 0, "learned": positions, "offset": positions + 2}[family.positions]
    tied = reader.config.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise reader.broken(f"tie_word_embeddings is {tied!r}", "expected true or false")
    return Architecture(
        model_type=reader.model_type,
        hidden=hidden,
        vocabulary=reader.number("vocab_size"),
        tied=family.tied if tied is None else tied,
        layers=layers,
        extra_embeddings=rows * hidden,
        vectors=norm * (1 + family.embedding_norm),
        head_bias=reader.flag(family.head_bias),
        linear_head=all(reader.config.get(key) in (None, 1, 1.0) for key in family.scaled_logits),
        capped_logits=reader.config.get("final_logit_softcapping") is not None,
        max_positions=positions or None,
        modules=family.modules,
        entry_dropout=family.entry_dropout if reader.config.get(family.entry_dropout) else "",
    )


def _windows(reader: _Reader, depth: int) -> list[int | None]:
    """How far back each layer looks."""
    config, rule = reader.config, reader.family.window
    kinds = reader.names("layer_types", length=depth)
    strange = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if strange:
        raise UnknownArchitecture(reader.model_type, why=f"it has layers of the kind {', '.join(sorted(strange))}")
    unswitched = rule == "switched" and not kinds and not config.get("use_sliding_window")
    if rule == "none" or config.get("sliding_window") is None or unswitched:
        return [None] * depth
    window = reader.number("sliding_window", least=0) or None
    if kinds is None:
        kinds = _kinds(reader, depth)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _kinds(reader: _Reader, depth: int) -> list[str]:
    rule = reader.family.window
    if rule == "always":
        return ["sliding_attention"] * depth
    if rule == "switched":
        first = reader.number("max_window_layers", default=depth, least=0)
        return ["sliding_attention" if index >= first else "full_attention" for index in range(depth)]
    every = reader.number("sliding_window_pattern", "_sliding_window_pattern", default=int(rule.partition("-")[2]))
    return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(depth)]


def _layer(reader: _Reader, index: int, window: int | None) -> Layer:
    family, hidden = reader.family, reader.core("hidden")
    attention = _latent(reader) if family.latent else _attention(reader)
    mlp = _experts(reader) if _is_sparse(reader, index) else _dense(reader)
    num_norms = _num_norms(reader)
    return replace(
        attention,
        window=window,
        linears=(*attention.linears, *mlp.linears),
        width=mlp.width,
        shared_width=mlp.shared_width,
        experts=mlp.experts,
        expert_linears=mlp.expert_linears,
        taken_names=family.expert_names,
        top_k=mlp.top_k,
        fused_weights=mlp.fused_weights,
        expert_shapes=mlp.expert_shapes,
        fused_active=mlp.fused_active,
        vectors=attention.vectors + mlp.vectors + num_norms * _norm_numbers(reader, hidden),
        num_norms=num_norms,
    )


def _num_norms(reader: _Reader) -> int:
    if reader.model_type != "falcon":
        return reader.family.num_norms
    if reader.flag("new_decoder_architecture"):
        return reader.number("num_ln_in_parallel_attn", default=2)
    return 1 if reader.flag("parallel_attn:true") else 2


def _norm_numbers(reader: _Reader, width: int) -> int:
    if reader.family.norm == "none":
        return 0
    return width * (2 if reader.family.norm == "layer" and reader.flag(reader.family.norm_bias) else 1)


def _heads(reader: _Reader) -> tuple[int, int, int]:
    """Query heads, heads of keys and values, width of a head."""
    hidden, heads, family = reader.core("hidden"), reader.core("heads"), reader.family
    kv_heads = _kv_heads(reader, heads)
    if heads > hidden or kv_heads > heads or heads % kv_heads:
        raise reader.broken(
            f"{heads} heads with {kv_heads} for keys and values, hidden_size {hidden}",
            "expected a number of heads that the number for keys and values divides",
        )
    width = reader.number("head_dim", "kv_channels", default=family.head_dim or hidden // heads)
    return heads, kv_heads, width


def _kv_heads(reader: _Reader, heads: int) -> int:
    new_falcon = reader.model_type == "falcon" and reader.flag("new_decoder_architecture")
    if new_falcon:
        return reader.core("kv_heads", default=heads)
    if reader.model_type in ("falcon", "gpt_bigcode"):
        return 1 if reader.flag("multi_query:true") else heads
    if not reader.family.grouped:
        return heads
    return reader.core("kv_heads", default=min(reader.family.kv_heads or heads, heads))


def _attention(reader: _Reader) -> Layer:
    family, hidden = reader.family, reader.core("hidden")
    heads, kv_heads, width = _heads(reader)
    bias = reader.flag(family.qkv_bias)
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    if len(family.qkv) == 1:
        sizes = [sum(sizes)]
    linears = [
        Linear(name=name, inputs=hidden, outputs=size, part="attention", bias=bias)
        for name, size in zip(family.qkv, sizes, strict=True)
    ]
    out = reader.flag(family.out_bias)
    linears.append(Linear(name=family.out, inputs=heads * width, outputs=hidden, part="attention", bias=out))
    qk_norm = family.qk_norm if reader.flag(family.qk_norm_if) else "none"
    normed = {"none": 0, "head": 2 * width, "projection": (heads + kv_heads) * width}[qk_norm]
    return Layer(
        count=1,
        linears=tuple(linears),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        value_dim=width,
        width=0,
        gated=family.gated,
        activation=str(next((reader.config[key] for key in _ACTIVATIONS if reader.config.get(key)), family.activation)),
        vectors=normed + (heads if reader.model_type == "gpt_oss" else 0),
        norm=family.norm,
        qk_norm=qk_norm,
        dropout=_drops(reader),
        repeats_heads=reader.model_type == "falcon",
        plain_attention=family.alibi or (reader.model_type == "falcon" and kv_heads == 1),
        rotary=family.positions == "rotary" and not family.alibi,
        parallel=family.parallel or (reader.model_type == "falcon" and reader.flag("parallel_attn:true")),
    )


def _drops(reader: _Reader) -> bool:
    told = [reader.config[key] for key in _DROPOUTS if reader.config.get(key) is not None]
    return any(isinstance(value, float) and value > 0 for value in told) if told else reader.family.drops


def _latent(reader: _Reader) -> Layer:
    """Attention of deepseek: queries (if q_lora_rank is a number), keys and values each pass a narrow projection."""
    hidden, heads = reader.core("hidden"), reader.core("heads")
    rank, plain = reader.number("kv_lora_rank"), reader.number("qk_nope_head_dim")
    rotary, value = reader.number("qk_rope_head_dim"), reader.number("v_head_dim")
    q_rank = reader.number("q_lora_rank", default=0)
    bias, queries = reader.flag(reader.family.qkv_bias), heads * (plain + rotary)

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        return Linear(name=name, inputs=inputs, outputs=outputs, part="attention", bias=bias)

    first: tuple[Linear, ...] = (linear("q_proj", hidden, queries),)
    if q_rank:
        first = (linear("q_a_proj", hidden, q_rank, bias=bias), linear("q_b_proj", q_rank, queries))
    return Layer(
        count=1,
        linears=(
            *first,
            linear("kv_a_proj_with_mqa", hidden, rank + rotary, bias=bias),
            linear("kv_b_proj", rank, heads * (plain + value)),
            linear("o_proj", heads * value, hidden, bias=bias),
        ),
        heads=heads,
        kv_heads=heads,
        head_dim=plain + rotary,
        value_dim=value,
        width=0,
        vectors=rank + q_rank,
        latent=True,
    )


def _mlp_linears(reader: _Reader, width: int, *, names: tuple[str, ...]) -> tuple[Linear, ...]:
    """The matrix down is last; one name before it holds gate and up together, or there is no gate."""
    hidden, bias = reader.core("hidden"), reader.flag(reader.family.mlp_bias)
    together = 2 if reader.family.gated and len(names) == 2 else 1
    up = (Linear(name=name, inputs=hidden, outputs=together * width, part="mlp", bias=bias) for name in names[:-1])
    return (*up, Linear(name=names[-1], inputs=width, outputs=hidden, part="mlp", bias=bias))


def _mlp_layer(*, linears: tuple[Linear, ...], width: int) -> Layer:
    """The MLP's half of a layer."""
    return Layer(count=1, linears=linears, heads=1, kv_heads=1, head_dim=1, value_dim=1, width=width)


def _dense(reader: _Reader) -> Layer:
    hidden = reader.core("hidden")
    keys = reader.family.width_keys or ("width",)
    width = reader.number(*keys, default=None if reader.family.gated else 4 * hidden)
    if reader.family.halved_mlp:
        width //= 2
    return _mlp_layer(linears=_mlp_linears(reader, width, names=reader.family.mlp), width=width)


def _is_sparse(reader: _Reader, index: int) -> bool:
    rule = reader.family.experts
    if rule == "after-dense":
        return index >= reader.number("first_k_dense_replace", default=0, least=0)
    if rule == "sparse-step":
        dense = reader.config.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % reader.number("decoder_sparse_step", default=1) == 0
    return rule == "all"


def _experts(reader: _Reader) -> Layer:
    """Experts of transformers 5: two tensors of three dimensions per layer, which are no `nn.Linear`."""
    family, hidden, experts = reader.family, reader.core("hidden"), reader.core("experts")
    top_k = reader.number("num_experts_per_tok", "num_selected_experts")
    if top_k > experts:
        raise reader.broken(f"{top_k} experts per token of {experts}", "expected no more than there are")
    width = reader.number("moe_intermediate_size") if family.experts != "all" else reader.number("intermediate_size")
    one = 3 * hidden * width + ((2 * width + hidden) if family.expert_bias else 0)
    linears, shared = _shared_expert(reader, width)
    router = hidden * experts + (experts if family.expert_bias else 0)
    if family.router_linear:
        linears = (*linears, Linear(name="router", inputs=hidden, outputs=experts, part="mlp"))
    return replace(
        _mlp_layer(linears=linears, width=top_k * width + shared),
        expert_linears=_expert_linears(reader, experts, width),
        shared_width=shared,
        experts=experts,
        top_k=top_k,
        fused_weights=experts * one,
        expert_shapes=((experts, 2 * width, hidden), (experts, hidden, width)),
        fused_active=top_k * one,
        vectors=0 if family.router_linear else router,
    )


def _expert_linears(reader: _Reader, experts: int, width: int) -> tuple[Linear, ...]:
    """Expert tensors as peft gives them adapters: gate and up in one tensor, each with an adapter over both."""
    hidden, names = reader.core("hidden"), reader.family.expert_names
    if not names:
        return ()
    sizes = ((hidden, 2 * width, experts), (hidden, 2 * width, experts), (width, hidden, experts), (hidden, experts, 1))
    return tuple(
        Linear(name=name, inputs=inputs, outputs=outputs, number=number, part="mlp")
        for name, (inputs, outputs, number) in zip(names, sizes, strict=True)
    )


def _shared_expert(reader: _Reader, width: int) -> tuple[tuple[Linear, ...], int]:
    """Matrices of the expert that every token passes through, and its width."""
    shared = reader.number("shared_expert_intermediate_size", default=0, least=0)
    if reader.model_type != "qwen2_moe":
        shared = width * reader.number("n_shared_experts", default=0, least=0)
    if not shared:
        return (), 0
    linears = _mlp_linears(reader, shared, names=reader.family.mlp)
    if reader.model_type == "qwen2_moe":
        linears = (*linears, Linear(name="shared_expert_gate", inputs=reader.core("hidden"), outputs=1, part="mlp"))
    return linears, shared


# What a model itself rules out: to have its matrices in few bits. Pure.


def unpackable(architecture: Architecture) -> str:
    """Which weights of its layers are in no `nn.Linear`, and so in nothing that has few bits; empty where few are."""
    if architecture.expert_weights:
        return "experts"
    family = FAMILIES.get(architecture.model_type)
    return "matrices that are no nn.Linear" if family is not None and family.transposed else ""
