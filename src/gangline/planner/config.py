"""The shape of a model from its config.json, by closed form: no weights, no torch.

`read_architecture` knows the families of catalog/families.json; another model_type raises UnknownArchitecture, and a
worker process counts the model itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
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
    drops_attention: bool = False
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
    window: Literal["none", "always", "switched", "every-2", "every-4", "every-6", "chunks"] = "none"
    """always: wherever sliding_window is a number; switched: only with use_sliding_window; every-n: each n-th layer
    sees everything, the others a window (unless layer_types says it layer by layer); chunks: each fourth sees
    everything, the others their own chunk of the text."""
    delta: Literal["", "joined", "apart"] = ""
    """Layers of the kind linear_attention are gated delta nets; whether queries, keys, values and gate come out of one
    matrix. Without layer_types, all but each full_attention_interval-th."""
    gated_attention: bool = False
    """Whether q_proj gives a gate for what attention gives, too."""
    global_heads: bool = False
    """Whether layers that see everything have heads of their own (global_head_dim, num_global_key_value_heads), and
    with attention_k_eq_v no matrix for values."""
    experts: Literal["none", "all", "sparse-step", "after-dense", "interleaved", "range", "beside"] = "none"
    """Which layers have experts: all; by decoder_sparse_step and mlp_only_layers; from first_k_dense_replace on; each
    interleave_moe_layer_step-th; from moe_layer_start_index to moe_layer_end_index; all, beside a dense MLP."""
    expert_width: str = "moe_intermediate_size"
    """The key of an expert's width."""
    shared: Literal["counted", "gated", "one"] = "counted"
    """What every token passes through: n_shared_experts of an expert's width; one of
    shared_expert_intermediate_size, behind a gate; one of an expert's width."""
    every_expert: bool = False
    """Whether transformers multiplies each token with all experts, and those that are not its own with zeros."""
    router_bias: bool = False
    """Whether a number per expert corrects the router, and is a parameter."""
    expert_bias: bool = False
    router_linear: bool = False
    """Whether the router is an `nn.Linear` (adapters attach to it) or a parameter."""
    expert_names: tuple[str, ...] = ()
    """Names by which peft reaches expert tensors and their router (gate, up, down, router), which are no `nn.Linear`;
    the same names then no longer mean a dense layer's matrices. Empty: peft does not reach them."""
    latent: bool = False
    """Multi-head latent attention: keys and values from one narrow projection (MLA)."""
    indexer: bool = False
    """Whether a small network chooses which keys a query sees (sparse attention of DeepSeek)."""
    dense_first: int = 0
    """Layers without experts, when config.json says nothing."""
    more_numbers: int = 0
    """Parameters of a layer that are in no matrix and no norm (those of an activation)."""
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
TEXT_ONLY = frozenset(_FILE["text_only"])
SLICED, STAGED = frozenset(_FILE["sliced"]), frozenset(_FILE["staged"])
"""Families whose layers tensor parallelism can slice, and those that a pipeline can cut between any two layers."""

_KEYS = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_selected_experts", "moe_k", "top_k_experts"),
    "shared": ("n_shared_experts", "moe_num_shared_experts"),
}
"""One meaning, and the names that families give it."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout")
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

    def core(self, meaning: str, *, default: int | None = None, least: int = 1) -> int:
        """`number` by meaning, whatever this family calls it."""
        return self.number(*_KEYS[meaning], default=default, least=least)

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

    def of_layer(self, index: int) -> _Reader:
        """The same with what only this layer has (per_layer_config, which transformers 5 writes)."""
        layers = self.config.get("per_layer_config")
        own = layers.get(str(index)) if isinstance(layers, Mapping) else None
        if not isinstance(own, Mapping):
            return self
        return _Reader({**self.config, **own}, model_type=self.model_type, family=self.family)

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
    whole = config
    _require_attention(config)
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
    each = [_layer(reader, index, kind, window) for index, (kind, window) in enumerate(_sights(reader, depth))]
    architecture = _whole(reader, tuple(replace(layer, count=len(list(same))) for layer, same in groupby(each)))
    architecture = _with_tower(architecture, whole)
    if architecture.num_parameters > _MAX_NUMBERS:
        raise reader.broken(f"it adds up to {architecture.num_parameters:.1e} parameters", "expected a model of today")
    return architecture


_INPUTS = "every layer has inputs of its own for each token (hidden_size_per_layer_input)"
_STATES = (
    "mamba_",
    "ssm_",
    "time_step_",
    "state_size",
    "lru_width",
    "linear_attn_",
    "conv_L_cache",
    "attention_hidden_",
)
"""Beginnings of keys of models with states or convolutions in place of attention, or beside it."""
_KINDS = ("layer_types", "layers_block_type", "block_types")
_ATTENTION = {
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "moe",
    "mlp",
}


def _require_attention(whole: Mapping[str, Any]) -> None:
    """Refuse layers that keep what no formula here counts, and whose parameters alone say too little."""
    inner = whole.get("text_config")
    config = inner if isinstance(inner, Mapping) else whole
    model_type = str(config.get("model_type") or whole.get("model_type"))
    why = _INPUTS if config.get("hidden_size_per_layer_input") else ""
    if model_type not in FAMILIES and not why:
        told = [config[key] for key in _KINDS if isinstance(config.get(key), list)]
        others = sorted({str(kind) for kinds in told for kind in kinds} - _ATTENTION)
        keys = sorted(key for key in config if key.startswith(_STATES) and config[key] is not None)
        if others:
            why = f"it has layers of the kind {', '.join(others)}"
        elif keys and not told:
            why = f"it has layers with states or convolutions ({keys[0]})"
    if why:
        raise _unformed(str(whole.get("model_type")), why)


def _unformed(model_type: str, why: str) -> ModelError:
    return ModelError(
        f"model: the plan has no formulas for models of type {model_type}",
        seen=f"{why}, whose memory and time do not follow from the number of parameters",
        fix="gangline train starts it without a forecast; for a rough one, plan a model with attention of its size",
    )


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
    odd = [key for key in towers if config[key] and not (key == "vision_config" and outer in TOWERS)]
    if odd and outer not in TEXT_ONLY:
        raise UnknownArchitecture(outer, why=f"it has further networks beside the language model ({', '.join(odd)})")
    name = inner.get("model_type") or outer
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return str(name), {**tied, **inner}


# Networks for images beside a language model: their weights lie there, and texts use nothing of them.


def _siglip(reader: _Reader, text: int) -> tuple[Layer, int]:
    """Of Gemma 3 (transformers, models/siglip and models/gemma3): its layers, and numbers beside them."""
    hidden, width, patch = (reader.number(key) for key in ("hidden_size", "intermediate_size", "patch_size"))
    patches = (reader.number("image_size") // patch) ** 2
    names = {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden, "out_proj": hidden, "fc1": width}
    linears = [_inner(name, hidden, size, bias=True) for name, size in names.items()]
    layer = _tower_layer(reader, [*linears, _inner("fc2", width, hidden, bias=True)], vectors=4 * hidden)
    return layer, (3 * patch**2 + 1 + patches) * hidden + 2 * hidden + hidden * text + hidden


def _gemma4_vision(reader: _Reader, text: int) -> tuple[Layer, int]:
    """Of Gemma 4 (transformers, models/gemma4); peft reaches its matrices by the name `linear` alone."""
    hidden, patch = reader.number("hidden_size"), reader.number("patch_size")
    width = reader.number("head_dim")
    layer = _tower_layer(reader, _gated(reader, hidden), vectors=4 * hidden + 2 * width)
    keys = reader.number("num_key_value_heads", default=hidden // width) * width
    sizes = {"k_proj": keys, "v_proj": keys}
    linears = tuple(replace(each, name="linear", outputs=sizes.get(each.name, each.outputs)) for each in layer.linears)
    positions = 2 * reader.number("position_embedding_size") * hidden
    return replace(layer, linears=linears), positions + 3 * patch**2 * hidden + hidden * text


def _pixtral(reader: _Reader, text: int) -> tuple[Layer, int]:
    """Of Mistral Small 3.1 and Ministral 3 (transformers, models/pixtral and models/mistral3)."""
    hidden, patch = reader.number("hidden_size"), reader.number("patch_size")
    layer = _tower_layer(reader, _gated(reader, hidden), vectors=2 * hidden)
    merged = reader.number("spatial_merge_size", default=2) ** 2 * hidden * hidden
    return layer, (3 * patch**2 + 2) * hidden + merged + hidden * text + text * text


def _gated(reader: _Reader, hidden: int) -> list[Linear]:
    width = reader.number("intermediate_size")
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    linears = [_inner(name, hidden, hidden if name[1] == "_" else width) for name in names]
    return [*linears, _inner("down_proj", width, hidden)]


def _inner(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
    return Linear(name=name, inputs=inputs, outputs=outputs, part="mlp", bias=bias)


def _tower_layer(reader: _Reader, linears: list[Linear], *, vectors: int) -> Layer:
    layer = _mlp_layer(linears=tuple(linears), width=reader.number("intermediate_size"))
    return replace(layer, count=reader.number("num_hidden_layers"), vectors=vectors)


TOWERS = {"gemma3": _siglip, "gemma4": _gemma4_vision, "mistral3": _pixtral}
"""By the outer model_type."""
NO_CLASS = frozenset({"mistral3"})
"""Outer model_types for which transformers (5.23) has no class as a causal language model."""


def _with_tower(architecture: Architecture, whole: Mapping[str, Any]) -> Architecture:
    outer, vision = str(whole.get("model_type")), whole.get("vision_config")
    unloaded = f"models of type {outer} (with a network for images)" if outer in NO_CLASS else ""
    if outer not in TOWERS or not isinstance(vision, Mapping):
        return replace(architecture, unloaded=unloaded)
    if not {"hidden_size", "intermediate_size", "num_hidden_layers", "patch_size"} <= set(vision):
        raise UnknownArchitecture(outer, why="its vision_config does not say the shape of the network for images")
    reader = _Reader(vision, model_type=outer, family=FAMILIES[architecture.model_type])
    layer, beside = TOWERS[outer](reader, architecture.hidden)
    modules = ("model.language_model.layers", *architecture.modules[1:])
    vectors = architecture.vectors + beside
    return replace(architecture, tower=layer, vectors=vectors, modules=modules, unloaded=unloaded)


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


def _sights(reader: _Reader, depth: int) -> list[tuple[str, int | None]]:
    """The kind of each layer, and how far back it looks (None: to the beginning)."""
    config, rule, delta = reader.config, reader.family.window, reader.family.delta
    kinds = reader.names("layer_types", length=depth)
    own = {
        "linear_attention": bool(delta),
        "chunked_attention": rule == "chunks",
        "indexed_attention": reader.family.indexer,
    }
    strange = {kind for kind in kinds or () if not own.get(kind, kind in ("full_attention", "sliding_attention"))}
    if strange:
        raise _unformed(reader.model_type, f"it has layers of the kind {', '.join(sorted(strange))}")
    if rule == "chunks" or delta:
        key, default = ("full_attention_interval", "linear") if delta else ("no_rope_layer_interval", "chunked")
        kinds = kinds or _every(reader.number(key, default=4), depth, default)
        # of a chunk, a token sees half on average
        window = None if delta else max(1, reader.number("attention_chunk_size", default=8192) // 2)
        return [(kind, None if kind == "full_attention" else window) for kind in kinds]
    unswitched = rule == "switched" and not kinds and not config.get("use_sliding_window")
    if rule == "none" or config.get("sliding_window") is None or unswitched:
        return [(kind, None) for kind in kinds or ["full_attention"] * depth]
    window = reader.number("sliding_window", least=0) or None
    if kinds is None:
        kinds = _kinds(reader, depth)
    return [(kind, window if kind == "sliding_attention" else None) for kind in kinds]


def _kinds(reader: _Reader, depth: int) -> list[str]:
    rule = reader.family.window
    if rule == "always":
        return ["sliding_attention"] * depth
    if rule == "switched":
        first = reader.number("max_window_layers", default=depth, least=0)
        return ["sliding_attention" if index >= first else "full_attention" for index in range(depth)]
    every = reader.number("sliding_window_pattern", "_sliding_window_pattern", default=int(rule.partition("-")[2]))
    return _every(every, depth, "sliding")


def _every(number: int, depth: int, others: str) -> list[str]:
    return ["full_attention" if (index + 1) % number == 0 else f"{others}_attention" for index in range(depth)]


def _layer(reader: _Reader, index: int, kind: str, window: int | None) -> Layer:
    reader = reader.of_layer(index)
    family, hidden = reader.family, reader.core("hidden")
    if kind == "linear_attention":
        attention = _delta(reader)
    else:
        attention = _latent(reader) if family.latent else _attention(reader, seeing_all=kind == "full_attention")
    mlp = _experts(reader) if _is_sparse(reader, index) else _dense(reader)
    num_norms = _num_norms(reader) + (3 if mlp.experts and family.experts == "beside" else 0)
    return replace(
        attention,
        window=window or attention.window,
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
        vectors=attention.vectors + mlp.vectors + num_norms * _norm_numbers(reader, hidden) + family.more_numbers,
        num_norms=min(num_norms, 4),
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


def _global_heads(reader: _Reader) -> tuple[int, int, int]:
    """The same of a layer that sees everything, where these have heads of their own."""
    heads, kv_heads, width = _heads(reader)
    kv_heads = reader.number("num_global_key_value_heads", default=kv_heads)
    return heads, kv_heads, reader.number("global_head_dim", default=width)


def _kv_heads(reader: _Reader, heads: int) -> int:
    new_falcon = reader.model_type == "falcon" and reader.flag("new_decoder_architecture")
    if new_falcon:
        return reader.core("kv_heads", default=heads)
    if reader.model_type in ("falcon", "gpt_bigcode"):
        return 1 if reader.flag("multi_query:true") else heads
    if not reader.family.grouped:
        return heads
    return reader.core("kv_heads", default=min(reader.family.kv_heads or heads, heads))


def _attention(reader: _Reader, *, seeing_all: bool) -> Layer:
    family, hidden = reader.family, reader.core("hidden")
    apart = family.global_heads and seeing_all
    heads, kv_heads, width = _global_heads(reader) if apart else _heads(reader)
    bias = reader.flag(family.qkv_bias)
    sizes = [heads * width * (2 if family.gated_attention else 1), kv_heads * width, kv_heads * width]
    if len(family.qkv) == 1:
        sizes = [sum(sizes)]
    names = family.qkv[:2] if apart and reader.flag("attention_k_eq_v") else family.qkv
    linears = [
        Linear(name=name, inputs=hidden, outputs=size, part="attention", bias=bias)
        for name, size in zip(names, sizes, strict=len(names) == len(sizes))
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
        activation=_activation(reader, family),
        vectors=normed + (heads if reader.model_type == "gpt_oss" else 0),
        norm=family.norm,
        qk_norm=qk_norm,
        dropout=_drops(reader, _DROPOUTS, usual=family.drops),
        attention_dropout=_drops(reader, _ATTENTION_DROPOUTS, usual=family.drops_attention),
        gated_attention=family.gated_attention,
        repeats_heads=reader.model_type == "falcon",
        plain_attention=family.alibi or (reader.model_type == "falcon" and kv_heads == 1),
        rotary=family.positions == "rotary" and not family.alibi,
        parallel=family.parallel or (reader.model_type == "falcon" and reader.flag("parallel_attn:true")),
    )


def _activation(reader: _Reader, family: ModelFamily) -> str:
    """As transformers takes it: Gemma's files say gelu where the model was trained with that by tanh."""
    named = str(next((reader.config[key] for key in _ACTIVATIONS if reader.config.get(key)), family.activation))
    return family.activation if reader.model_type == "gemma" and named == "gelu" else named


def _drops(reader: _Reader, keys: Sequence[str], *, usual: bool) -> bool:
    told = [reader.config[key] for key in keys if reader.config.get(key) is not None]
    return any(isinstance(value, float) and value > 0 for value in told) if told else usual


def _delta(reader: _Reader) -> Layer:
    """A gated delta net (Yang et al., arXiv 2412.06464): states of d_k x d_v numbers a head, read and written in chunks
    of 64 tokens. Its products cost about what attention over `window` keys would.
    """
    hidden, heads = reader.core("hidden"), reader.number("linear_num_value_heads")
    key_dim, value_dim = reader.number("linear_key_head_dim"), reader.number("linear_value_head_dim")
    keys, values = reader.number("linear_num_key_heads") * key_dim, heads * value_dim
    names = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    if reader.family.delta == "apart":
        names = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    inner = [Linear(name=name, inputs=hidden, outputs=size, part="attention") for name, size in names.items()]
    convolution = reader.number("linear_conv_kernel_dim", default=4) * (2 * keys + values)
    return Layer(
        count=1,
        linears=(*inner, Linear(name="out_proj", inputs=values, outputs=hidden, part="attention")),
        heads=heads,
        kv_heads=heads,
        head_dim=key_dim,
        value_dim=value_dim,
        width=0,
        window=64 + 2 * key_dim * value_dim // (key_dim + value_dim),
        vectors=convolution + 2 * heads + value_dim,
        delta=True,
        rotary=False,
    )


def _latent(reader: _Reader) -> Layer:
    """Attention of deepseek: queries (if q_lora_rank is a number), keys and values each pass a narrow projection."""
    hidden, heads = reader.core("hidden"), reader.core("heads")
    rank, plain = reader.number("kv_lora_rank"), reader.number("qk_nope_head_dim")
    default = hidden // heads if reader.model_type == "minicpm3" else None
    rotary, value = reader.number("qk_rope_head_dim"), reader.number("v_head_dim", default=default)
    q_rank = reader.number("q_lora_rank", default=0)
    bias, queries = reader.flag(reader.family.qkv_bias), heads * (plain + rotary)

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        return Linear(name=name, inputs=inputs, outputs=outputs, part="attention", bias=bias)

    first: tuple[Linear, ...] = (linear("q_proj", hidden, queries),)
    if q_rank:
        first = (linear("q_a_proj", hidden, q_rank, bias=bias), linear("q_b_proj", q_rank, queries))
    chooser: tuple[Linear, ...] = ()
    if reader.family.indexer:
        count, width = reader.number("index_n_heads"), reader.number("index_head_dim")
        sizes = (("wq_b", q_rank, count * width), ("wk", hidden, width), ("weights_proj", hidden, count))
        chooser = tuple(linear(name, inputs, outputs) for name, inputs, outputs in sizes)
    return Layer(
        count=1,
        linears=(
            *first,
            *chooser,
            linear("kv_a_proj_with_mqa", hidden, rank + rotary, bias=bias),
            linear("kv_b_proj", rank, heads * (plain + value)),
            linear("o_proj", heads * value, hidden, bias=bias),
        ),
        heads=heads,
        kv_heads=heads,
        head_dim=plain + rotary,
        value_dim=value,
        width=0,
        vectors=rank + q_rank + (2 * reader.number("index_head_dim") if chooser else 0),
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
        return index >= reader.number("first_k_dense_replace", default=reader.family.dense_first, least=0)
    if rule == "sparse-step":
        dense = reader.config.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % reader.number("decoder_sparse_step", default=1) == 0
    if rule == "interleaved":
        return (index + 1) % reader.number("interleave_moe_layer_step", default=1) == 0
    if rule == "range":
        first, last = (
            reader.number("moe_layer_start_index", default=1, least=0),
            reader.config.get("moe_layer_end_index"),
        )
        inside = first <= index and (last in (None, -1) or index <= reader.number("moe_layer_end_index", least=0))
        return inside and (index + 1) % reader.number("moe_layer_interval", default=1) == 0
    return rule == "all" or (rule == "beside" and bool(reader.config.get("enable_moe_block")))


def _experts(reader: _Reader) -> Layer:
    """Experts of transformers 5: two tensors of three dimensions per layer, which are no `nn.Linear`."""
    family, hidden, experts = reader.family, reader.core("hidden"), reader.core("experts")
    top_k = reader.core("top_k")
    if top_k > experts:
        raise reader.broken(f"{top_k} experts per token of {experts}", "expected no more than there are")
    top_k = experts if family.every_expert else top_k
    width = reader.number(family.expert_width)
    one = 3 * hidden * width + ((2 * width + hidden) if family.expert_bias else 0)
    linears, shared = _shared_expert(reader, width)
    router = hidden * experts + (experts if family.expert_bias else 0)
    if family.router_linear:
        name = "proj" if family.experts == "beside" else "router"
        linears = (*linears, Linear(name=name, inputs=hidden, outputs=experts, part="mlp"))
    vectors = 0 if family.router_linear else router
    vectors += experts if family.router_bias else 0
    vectors += hidden + experts if family.experts == "beside" else 0  # what scales the router's input, and its output
    return replace(
        _mlp_layer(linears=linears, width=top_k * width + shared),
        expert_linears=_expert_linears(reader, experts, width),
        shared_width=shared,
        experts=experts,
        top_k=top_k,
        fused_weights=experts * one,
        expert_shapes=((experts, 2 * width, hidden), (experts, hidden, width)),
        fused_active=top_k * one,
        vectors=vectors,
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
    """Matrices that every token passes through beside its experts, and their width."""
    family = reader.family
    if family.experts == "beside":
        dense = _dense(reader)
        return dense.linears, dense.width
    if family.shared == "counted":
        shared = width * reader.core("shared", default=0, least=0)
    else:
        gated = family.shared == "gated"
        shared = reader.number("shared_expert_intermediate_size", default=0, least=0) if gated else width
    if not shared:
        return (), 0
    linears = _mlp_linears(reader, shared, names=family.mlp)
    if family.shared == "gated":
        linears = (*linears, Linear(name="shared_expert_gate", inputs=reader.core("hidden"), outputs=1, part="mlp"))
    return linears, shared


# What a model itself rules out: to have its matrices in few bits. Pure.


def unpackable(architecture: Architecture) -> str:
    """Which weights of its layers are in no `nn.Linear`, and so in nothing that has few bits; empty where few are."""
    if architecture.expert_weights:
        return "experts"
    family = FAMILIES.get(architecture.model_type)
    return "matrices that are no nn.Linear" if family is not None and family.transposed else ""
