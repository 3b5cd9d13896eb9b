"""What config.json leaves unsaid about a family of models: names, biases, norms, defaults.

Each row says what transformers' class of that model_type builds (compared with these classes, number by number, in
tests/train/test_architecture.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Switch = bool | str
"""Always, never, or the key of config.json that says so (absent: the value after a colon, else false)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
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
    num_last_norms: int = 1
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
    transposed: bool = False
    """Whether matrices lie as [in, out], which is no `nn.Linear` (Conv1D)."""


LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_PLAIN = Family()
_QWEN2 = Family(qkv_bias=True, kv_heads=32, window="switched")
_QWEN3 = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    kv_heads=32,
    head_dim=128,
    qk_norm="head",
    window="switched",
)
_GEMMA = Family(
    activation="gelu_pytorch_tanh",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    tied=True,
    kv_heads=16,
    head_dim=256,
)
_GEMMA2 = replace(_GEMMA, kv_heads=4, num_norms=4, window="every-2", scaled_logits=("final_logit_softcapping",))
_OLMO = Family(qkv_bias="attention_bias", out_bias="attention_bias", norm="none")
_OLMO2 = replace(_OLMO, norm="rms", qk_norm="projection")
_COHERE = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm="layer",
    norm_bias=False,
    num_norms=1,
    tied=True,
    parallel=True,
    scaled_logits=("logit_scale",),
    unless=("use_qk_norm",),
)
_GLM = Family(qkv_bias="attention_bias:true", mlp=("gate_up_proj", "down_proj"), kv_heads=2, head_dim=128)
_GPT2 = Family(
    qkv=("c_attn",),
    out="c_proj",
    mlp=("c_fc", "c_proj"),
    gated=False,
    activation="gelu_new",
    drops=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    norm="layer",
    tied=True,
    grouped=False,
    width_keys=("n_inner",),
    positions="learned",
    unless=("add_cross_attention",),
    transposed=True,
)
_NEOX = Family(
    qkv=("query_key_value",),
    out="dense",
    mlp=("dense_h_to_4h", "dense_4h_to_h"),
    gated=False,
    activation="gelu",
    qkv_bias="attention_bias:true",
    out_bias="attention_bias:true",
    mlp_bias=True,
    norm="layer",
    grouped=False,
)
_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate")
_DEEPSEEK = Family(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    experts="after-dense",
    latent=True,
    expert_names=_EXPERTS,
)
_MISTRAL = replace(_PLAIN, kv_heads=8, window="always")

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "aquila": LLAMA,
    "Yi": LLAMA,
    "internlm": replace(LLAMA, qkv_bias="bias", out_bias="bias"),
    "internlm2": Family(qkv=("wqkv",), out="wo", mlp=("w1", "w3", "w2"), qkv_bias="bias", out_bias="bias"),
    "internlm3": replace(LLAMA, qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias", head_dim=128, kv_heads=2),
    "baichuan": Family(qkv=("W_pack",)),
    "deepseek": Family(),
    "smollm3": replace(LLAMA, tied=True, kv_heads=4, window="switched"),
    "ernie4_5": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True, kv_heads=2, head_dim=128
    ),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, window="always"),
    "qwen": Family(
        qkv=("c_attn",), out="c_proj", mlp=("w1", "w2", "c_proj"), qkv_bias=True, grouped=False, halved_mlp=True
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, qk_norm="head", window="every-6"),
    "phi": Family(
        out="dense",
        mlp=("fc1", "fc2"),
        gated=False,
        activation="gelu_new",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm="layer",
        num_norms=1,
        head_bias=True,
        parallel=True,
        unless=("qk_layernorm",),
        entry_dropout="embd_pdrop",
    ),
    "phi3": Family(qkv=("qkv_proj",), mlp=("gate_up_proj", "down_proj"), window="always"),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window="every-4"),
    "stablelm": Family(
        qkv_bias="use_qkv_bias", norm="layer", kv_heads=32, unless=("qk_layernorm", "use_parallel_residual")
    ),
    "granite": replace(LLAMA, scaled_logits=("logits_scaling",)),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, window="every-4"),
    "glm": _GLM,
    "glm4": replace(_GLM, num_norms=4),
    "starcoder2": Family(
        mlp=("c_fc", "c_proj"),
        gated=False,
        activation="gelu_pytorch_tanh",
        qkv_bias="use_bias:true",
        out_bias="use_bias:true",
        mlp_bias="use_bias:true",
        norm="layer",
        tied=True,
        kv_heads=2,
        window="always",
        entry_dropout="embedding_dropout",
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, activation="gelu_pytorch_tanh", transposed=False),
    "gptj": Family(
        out="out_proj",
        mlp=("fc_in", "fc_out"),
        gated=False,
        activation="gelu_new",
        mlp_bias=True,
        norm="layer",
        num_norms=1,
        head_bias=True,
        grouped=False,
        width_keys=("n_inner",),
        parallel=True,
    ),
    "gpt_neox": replace(_NEOX, parallel=True, entry_dropout="hidden_dropout"),
    "bloom": replace(_NEOX, qkv_bias=True, out_bias=True, tied=True, width_keys=(), alibi=True, embedding_norm=True),
    "opt": Family(
        out="out_proj",
        mlp=("fc1", "fc2"),
        gated=False,
        activation="relu",
        drops=True,
        qkv_bias="enable_bias:true",
        out_bias="enable_bias:true",
        mlp_bias="enable_bias:true",
        norm="layer",
        tied=True,
        grouped=False,
        width_keys=("ffn_dim",),
        positions="offset",
    ),
    "falcon": replace(
        _NEOX, qkv_bias="bias", out_bias="bias", mlp_bias="bias", tied=True, width_keys=("ffn_hidden_size",)
    ),
    "mixtral": replace(_PLAIN, kv_heads=8, window="always", experts="all", expert_names=("w1", "w3", "w2", "gate")),
    "phimoe": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm="layer",
        head_bias="lm_head_bias",
        kv_heads=8,
        window="always",
        experts="all",
        router_linear=True,
    ),
    "granitemoe": replace(LLAMA, experts="all", scaled_logits=("logits_scaling",)),
    "olmoe": replace(_OLMO2, experts="all", expert_names=_EXPERTS),
    "qwen2_moe": replace(_QWEN2, qkv_bias="qkv_bias:true", kv_heads=16, experts="sparse-step"),
    "qwen3_moe": replace(_QWEN3, kv_heads=4, head_dim=None, experts="sparse-step", expert_names=_EXPERTS),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        kv_heads=8,
        experts="after-dense",
        expert_names=_EXPERTS,
    ),
    "gpt_oss": Family(
        qkv_bias="attention_bias:true",
        out_bias="attention_bias:true",
        kv_heads=8,
        head_dim=64,
        window="every-2",
        experts="all",
        expert_bias=True,
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, mlp_bias=False),
    "kimi_k2": replace(_DEEPSEEK, mlp_bias=False),
}
"""By model_type. Another one is counted on the model itself, by a worker process."""

SLICED = frozenset(
    {
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "internlm3", "smollm3", "ernie4_5", "granite", "olmo"),
        *("olmo2", "olmo3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "glm", "glm4", "gpt_neox", "phi"),
        *("phi3", "starcoder2"),
    }
)
"""Those for which transformers (5.23) has a plan of columns and rows, and of nothing else."""

STAGED = frozenset(
    {
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "internlm3", "smollm3", "ernie4_5", "olmo", "olmo2"),
        *("olmo3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "glm", "glm4", "gpt_neox", "phi", "phi3"),
        *("stablelm", "starcoder2", "mixtral", "phimoe", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"),
        *("deepseek_v2", "deepseek_v3"),
    }
)
"""Those whose decoder in transformers (5.23) hands embeddings to its first layer as they are, and from layer to layer
nothing but hidden states, so that strategies/pipeline/stages.py can cut it between any two;
tests/train/test_architecture.py tries each."""
