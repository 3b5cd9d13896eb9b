"""Shapes of well-known models by their hub names, so that a plan needs neither network nor weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache

# The table behind `models.py`: what config.json of well-known models says, as far as memory and time depend on it.


Value = int | bool | str | list[int] | None
COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_GPT2_COLUMNS = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Models whose configurations have the same keys."""

    source: str
    """Where the shapes were seen."""
    common: dict[str, Value]
    """What they share, `model_type` first."""
    shapes: dict[str, tuple[int, ...]]
    """By hub name: one number per column."""
    columns: tuple[str, ...] = COLUMNS
    apart: dict[str, dict[str, Value]] = field(default_factory=dict)
    """By hub name: keys that only this one has, or has otherwise."""


_LITGPT = "Lightning-AI/litgpt litgpt/config.py"
_TIED: dict[str, Value] = {"tie_word_embeddings": True}
_LLAMA: dict[str, Value] = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3: dict[str, Value] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA2: dict[str, Value] = {
    "model_type": "gemma2",
    "head_dim": 256,
    "attention_bias": False,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GPT_OSS: dict[str, Value] = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Value] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

GROUPS: tuple[Group, ...] = (
    Group(
        source=_LITGPT,
        common=_LLAMA,
        shapes={
            "meta-llama/Llama-2-7b-hf": (4096, 11008, 32, 32, 32, 32000, 4096),
            "meta-llama/Llama-2-13b-hf": (5120, 13824, 40, 40, 40, 32000, 4096),
            "meta-llama/Llama-2-70b-hf": (8192, 28672, 80, 64, 8, 32000, 4096),
            "codellama/CodeLlama-7b-hf": (4096, 11008, 32, 32, 32, 32016, 16384),
            "codellama/CodeLlama-13b-hf": (5120, 13824, 40, 40, 40, 32016, 16384),
            "codellama/CodeLlama-34b-hf": (8192, 22016, 48, 64, 8, 32000, 16384),
            "codellama/CodeLlama-70b-hf": (8192, 28672, 80, 64, 8, 32016, 16384),
            "meta-llama/Meta-Llama-3-8B": (4096, 14336, 32, 32, 8, 128256, 8192),
            "meta-llama/Meta-Llama-3-70B": (8192, 28672, 80, 64, 8, 128256, 8192),
            "meta-llama/Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, 131072),
            "meta-llama/Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256, 131072),
            "meta-llama/Llama-3.1-405B": (16384, 53248, 126, 128, 8, 128256, 131072),
            "meta-llama/Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, 131072),
            "meta-llama/Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128256, 131072),
            "meta-llama/Llama-3.3-70B-Instruct": (8192, 28672, 80, 64, 8, 128256, 131072),
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (2048, 5632, 22, 32, 4, 32000, 2048),
            "HuggingFaceTB/SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, 8192),
            "HuggingFaceTB/SmolLM2-360M": (960, 2560, 32, 15, 5, 49152, 8192),
            "HuggingFaceTB/SmolLM2-1.7B": (2048, 8192, 24, 32, 32, 49152, 8192),
        },
        apart={
            "meta-llama/Llama-3.2-1B": {"head_dim": 64, **_TIED},
            "meta-llama/Llama-3.2-3B": {"head_dim": 128, **_TIED},
            "HuggingFaceTB/SmolLM2-135M": _TIED,
            "HuggingFaceTB/SmolLM2-360M": _TIED,
            "HuggingFaceTB/SmolLM2-1.7B": _TIED,
        },
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        shapes={
            "mistralai/Mistral-7B-v0.1": (4096, 14336, 32, 32, 8, 32000, 32768),
            "mistralai/Mistral-7B-v0.3": (4096, 14336, 32, 32, 8, 32768, 32768),
        },
        apart={"mistralai/Mistral-7B-v0.1": {"sliding_window": 4096}},
    ),
    Group(
        source="COUNT",
        common={"model_type": "mistral", "head_dim": 128, "sliding_window": None, "tie_word_embeddings": False},
        shapes={
            "mistralai/Mistral-Nemo-Base-2407": (5120, 14336, 40, 32, 8, 131072, 131072),  # positions from memory
            "mistralai/Mistral-Small-24B-Base-2501": (5120, 32768, 40, 32, 8, 131072, 32768),  # positions from memory
        },
    ),
    Group(
        source=_LITGPT,
        common={
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        shapes={
            "mistralai/Mixtral-8x7B-v0.1": (4096, 14336, 32, 32, 8, 32000, 32768),
            "mistralai/Mixtral-8x22B-v0.1": (6144, 16384, 56, 48, 8, 32768, 65536),
        },
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "qwen2", "use_sliding_window": False, "tie_word_embeddings": False},
        shapes={
            "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, 32768),
            "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, 131072),
            "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, 32768),
            "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, 131072),
            "Qwen/Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, 131072),
            "Qwen/Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, 131072),
            "Qwen/Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, 131072),
        },
        apart={"Qwen/Qwen2.5-0.5B": _TIED, "Qwen/Qwen2.5-1.5B": _TIED, "Qwen/Qwen2.5-3B": _TIED},
    ),
    Group(
        source=_LITGPT,
        common=_QWEN3,
        shapes={
            "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, 40960),
            "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, 40960),
            "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, 40960),
            "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, 40960),
            "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, 40960),
            "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, 40960),
        },
        apart={"Qwen/Qwen3-0.6B": _TIED, "Qwen/Qwen3-1.7B": _TIED, "Qwen/Qwen3-4B": _TIED},
    ),
    Group(
        source=_LITGPT,
        common=_QWEN3
        | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        shapes={
            "Qwen/Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 151936, 40960, 768),
            "Qwen/Qwen3-235B-A22B": (4096, 12288, 94, 64, 4, 151936, 40960, 1536),
        },
        columns=(*COLUMNS, "moe_intermediate_size"),
    ),
    Group(
        source=_LITGPT,
        common=_GEMMA2,
        shapes={
            "google/gemma-2-2b": (2304, 9216, 26, 8, 4, 256000, 8192),
            "google/gemma-2-9b": (3584, 14336, 42, 16, 8, 256000, 8192),
            "google/gemma-2-27b": (4608, 36864, 46, 32, 16, 256000, 8192),
        },
        apart={"google/gemma-2-27b": {"head_dim": 128}},
    ),
    Group(
        source=_LITGPT,
        common=_GEMMA2 | {"model_type": "gemma3_text", "sliding_window": 512},
        shapes={"google/gemma-3-1b-pt": (1152, 6912, 26, 4, 1, 262144, 32768)},  # positions from memory
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "phi", "tie_word_embeddings": False},
        shapes={"microsoft/phi-2": (2560, 10240, 32, 32, 32, 51200, 2048)},
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "phi3", "attention_bias": False, "sliding_window": None, "tie_word_embeddings": False},
        shapes={
            "microsoft/Phi-3-mini-4k-instruct": (3072, 8192, 32, 32, 32, 32064, 4096),
            "microsoft/Phi-3.5-mini-instruct": (3072, 8192, 32, 32, 32, 32064, 131072),
            "microsoft/phi-4": (5120, 17920, 40, 40, 10, 100352, 16384),
            "microsoft/Phi-4-mini-instruct": (3072, 8192, 32, 24, 8, 200064, 131072),
        },
        apart={
            "microsoft/Phi-3-mini-4k-instruct": {"sliding_window": 2047},
            "microsoft/Phi-3.5-mini-instruct": {"sliding_window": 262144},
            "microsoft/Phi-4-mini-instruct": {"sliding_window": 262144, **_TIED},
        },
    ),
    Group(
        source="SLIME, TRANSFORMERS",
        common={
            "model_type": "glm4_moe",
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
        },
        shapes={"zai-org/GLM-4.5-Air": (4096, 10944, 46, 96, 8, 151552, 131072)},
    ),
    Group(
        source="OPENAI, TRANSFORMERS",
        common=_GPT_OSS,
        shapes={
            "openai/gpt-oss-20b": (2880, 2880, 24, 64, 8, 201088, 131072, 32),
            "openai/gpt-oss-120b": (2880, 2880, 36, 64, 8, 201088, 131072, 128),
        },
        columns=(*COLUMNS, "num_local_experts"),
    ),
    Group(
        source="DEEPSEEK",
        common={
            "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            **_LATENT,
        },
        shapes={"deepseek-ai/DeepSeek-V2-Lite": (2048, 10944, 27, 16, 16, 102400, 163840)},  # positions from memory
    ),
    Group(
        source="DEEPSEEK, TRANSFORMERS",
        common={
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            **_LATENT,
        },
        shapes={"deepseek-ai/DeepSeek-V3": (7168, 18432, 61, 128, 128, 129280, 163840)},  # positions from memory
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "olmo2", "attention_bias": False, "tie_word_embeddings": False},
        shapes={
            "allenai/OLMo-2-1124-7B": (4096, 11008, 32, 32, 32, 100352, 4096),
            "allenai/OLMo-2-1124-13B": (5120, 13824, 40, 40, 40, 100352, 4096),
        },
    ),
    Group(
        source="COUNT",
        common={
            "model_type": "smollm3",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        shapes={"HuggingFaceTB/SmolLM3-3B": (2048, 11008, 36, 16, 4, 128256, 65536)},  # positions from memory
    ),
    Group(
        source=_LITGPT,
        common={"model_type": "gpt_neox", "attention_bias": True, "tie_word_embeddings": False},
        shapes={
            "EleutherAI/pythia-70m": (512, 2048, 6, 8, 50304, 2048),
            "EleutherAI/pythia-160m": (768, 3072, 12, 12, 50304, 2048),
            "EleutherAI/pythia-410m": (1024, 4096, 24, 16, 50304, 2048),
            "EleutherAI/pythia-1b": (2048, 8192, 16, 8, 50304, 2048),
            "EleutherAI/pythia-1.4b": (2048, 8192, 24, 16, 50304, 2048),
            "EleutherAI/pythia-2.8b": (2560, 10240, 32, 32, 50304, 2048),
            "EleutherAI/pythia-6.9b": (4096, 16384, 32, 32, 50432, 2048),
            "EleutherAI/pythia-12b": (5120, 20480, 36, 40, 50688, 2048),
        },
        columns=tuple(column for column in COLUMNS if column != "num_key_value_heads"),
    ),
    Group(
        source="TRANSFORMERS (gpt2), COUNT (the others)",
        common={"model_type": "gpt2", "tie_word_embeddings": True},
        shapes={
            "openai-community/gpt2": (768, 12, 12, 50257, 1024),
            "openai-community/gpt2-medium": (1024, 24, 16, 50257, 1024),
            "openai-community/gpt2-large": (1280, 36, 20, 50257, 1024),
            "openai-community/gpt2-xl": (1600, 48, 25, 50257, 1024),
        },
        columns=_GPT2_COLUMNS,
    ),
)
"""Gemma 3 from 4B on is absent: what the hub has under these names includes a vision tower."""

SAME: dict[str, tuple[str, int | None]] = {
    "meta-llama/Llama-2-7b-chat-hf": ("meta-llama/Llama-2-7b-hf", None),
    "meta-llama/Llama-2-13b-chat-hf": ("meta-llama/Llama-2-13b-hf", None),
    "meta-llama/Llama-2-70b-chat-hf": ("meta-llama/Llama-2-70b-hf", None),
    "codellama/CodeLlama-7b-Instruct-hf": ("codellama/CodeLlama-7b-hf", None),
    "codellama/CodeLlama-13b-Instruct-hf": ("codellama/CodeLlama-13b-hf", None),
    "codellama/CodeLlama-34b-Instruct-hf": ("codellama/CodeLlama-34b-hf", None),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("meta-llama/Meta-Llama-3-8B", None),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("meta-llama/Meta-Llama-3-70B", None),
    "meta-llama/Meta-Llama-3.1-8B": ("meta-llama/Llama-3.1-8B", None),
    "meta-llama/Meta-Llama-3.1-70B": ("meta-llama/Llama-3.1-70B", None),
    "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama/Llama-3.1-8B", None),
    "meta-llama/Llama-3.1-70B-Instruct": ("meta-llama/Llama-3.1-70B", None),
    "meta-llama/Llama-3.1-405B-Instruct": ("meta-llama/Llama-3.1-405B", None),
    "meta-llama/Llama-3.2-1B-Instruct": ("meta-llama/Llama-3.2-1B", None),
    "meta-llama/Llama-3.2-3B-Instruct": ("meta-llama/Llama-3.2-3B", None),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("meta-llama/Llama-3.1-8B", None),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": ("meta-llama/Llama-3.1-70B", None),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("HuggingFaceTB/SmolLM2-135M", None),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("HuggingFaceTB/SmolLM2-360M", None),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("HuggingFaceTB/SmolLM2-1.7B", None),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistralai/Mistral-7B-v0.1", None),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistralai/Mistral-7B-v0.3", None),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistralai/Mistral-Nemo-Base-2407", None),
    "mistralai/Mistral-Small-24B-Instruct-2501": ("mistralai/Mistral-Small-24B-Base-2501", None),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mistralai/Mixtral-8x7B-v0.1", None),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("mistralai/Mixtral-8x22B-v0.1", None),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen/Qwen2.5-0.5B", None),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen/Qwen2.5-1.5B", 32768),
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen/Qwen2.5-3B", None),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen/Qwen2.5-7B", 32768),
    "Qwen/Qwen2.5-14B-Instruct": ("Qwen/Qwen2.5-14B", 32768),
    "Qwen/Qwen2.5-32B-Instruct": ("Qwen/Qwen2.5-32B", 32768),
    "Qwen/Qwen2.5-72B-Instruct": ("Qwen/Qwen2.5-72B", 32768),
    "Qwen/Qwen3-0.6B-Base": ("Qwen/Qwen3-0.6B", 32768),
    "Qwen/Qwen3-1.7B-Base": ("Qwen/Qwen3-1.7B", 32768),
    "Qwen/Qwen3-4B-Base": ("Qwen/Qwen3-4B", 32768),
    "Qwen/Qwen3-8B-Base": ("Qwen/Qwen3-8B", 32768),
    "Qwen/Qwen3-14B-Base": ("Qwen/Qwen3-14B", 32768),
    "Qwen/Qwen3-30B-A3B-Base": ("Qwen/Qwen3-30B-A3B", 32768),
    "Qwen/Qwen3-4B-Instruct-2507": ("Qwen/Qwen3-4B", 262144),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("Qwen/Qwen3-30B-A3B", 262144),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ("Qwen/Qwen3-235B-A22B", 262144),
    "google/gemma-2-2b-it": ("google/gemma-2-2b", None),
    "google/gemma-2-9b-it": ("google/gemma-2-9b", None),
    "google/gemma-2-27b-it": ("google/gemma-2-27b", None),
    "google/gemma-3-1b-it": ("google/gemma-3-1b-pt", None),
    "zai-org/GLM-4.5-Air-Base": ("zai-org/GLM-4.5-Air", None),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": ("deepseek-ai/DeepSeek-V2-Lite", None),
    "deepseek-ai/DeepSeek-V3-Base": ("deepseek-ai/DeepSeek-V3", None),
    "deepseek-ai/DeepSeek-R1": ("deepseek-ai/DeepSeek-V3", None),
    "HuggingFaceTB/SmolLM3-3B-Base": ("HuggingFaceTB/SmolLM3-3B", None),
}
"""Names of models with the shape of another: that one, and max_position_embeddings where it differs (these from memory,
but the 2507 ones, which LITGPT has)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of this catalogue."""

    name: str
    """On the hub: owner/name."""
    config: dict[str, Value]
    """What its config.json says, as far as memory and time depend on it."""
    source: str
    """Where that was seen; the long names stand in `model_shapes.py`."""


def known_model(name: str) -> KnownModel | None:
    """The model of a hub name, in any case; its last part is enough where only one model has it. None: not known.

    What begins with a dot or a slash is a folder, not a name.
    """
    wanted = name.strip().lower()
    exact = _models().get(wanted)
    if exact or not wanted or "/" in wanted:
        return exact
    ending = [model for full, model in _models().items() if full.partition("/")[2] == wanted]
    return ending[0] if len(ending) == 1 else None


def known_config(name: str) -> dict[str, Value] | None:
    """The contents of a model's config.json, a copy that may be changed; None where the catalogue lacks the model."""
    model = known_model(name)
    return dict(model.config) if model else None


def known_models() -> tuple[str, ...]:
    """All hub names, in order."""
    return tuple(sorted((model.name for model in _models().values()), key=str.lower))


def suggest_models(text: str, limit: int = 5) -> tuple[str, ...]:
    """Names that somebody who wrote `text` may have meant, the likeliest first; () where nothing is near."""
    wanted = text.strip().lower().rpartition("/")[2]
    rated = [(_likeness(wanted, name.lower().partition("/")[2]), name) for name in known_models()]
    near = sorted((pair for pair in rated if pair[0] >= 0.6), key=lambda pair: (-pair[0], pair[1].lower()))
    return tuple(name for _, name in near[:limit])


def _likeness(wanted: str, name: str) -> float:
    """From 0 to 1; what contains the other counts as near."""
    ratio = SequenceMatcher(None, wanted, name, autojunk=False).ratio()
    return max(ratio, 0.8 + 0.2 * ratio) if len(wanted) >= 3 and (wanted in name or name in wanted) else ratio


@cache
def _models() -> dict[str, KnownModel]:
    """By name in small letters."""
    found = {name.lower(): _of_group(group, name) for group in GROUPS for name in group.shapes}
    for name, (original, positions) in SAME.items():
        model = found[original.lower()]
        changed = {} if positions is None else {"max_position_embeddings": positions}
        found[name.lower()] = KnownModel(name=name, config={**model.config, **changed}, source=model.source)
    return found


def _of_group(group: Group, name: str) -> KnownModel:
    columns = zip(group.columns, group.shapes[name], strict=True)
    config = {**group.common, **dict(columns), **group.apart.get(name, {})}
    return KnownModel(name=name, config=config, source=group.source)
