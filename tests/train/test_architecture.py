"""The planner's closed forms against the models that transformers and peft really build, number by number."""

import pytest

from gangline.errors import ModelError
from gangline.planner.architecture import lora_parameters
from gangline.planner.config import FAMILIES, SLICED, read_architecture, unpackable
from gangline.strategies.pipeline.plan import unstageable
from tests.train import cases_architecture
from tests.train.tolerances import FP32_SUM
from tests.unit.planner.published import PUBLISHED, config

pytestmark = pytest.mark.rotating

RANK = 4
TARGETS = [["all-linear"], ["q_proj", "v_proj"], ["down_proj", "dense", "c_proj", "fc2"], ["gate_proj"]]
OUTSIDE = {"qwen", "internlm2"}
"""Families that transformers has no class for: pinned in tests/unit/planner/test_config.py."""
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 6, "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 24,
}  # fmt: skip
GATED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
SPARSE_MLA = {**MOE, **MLA, "n_shared_experts": 1, "q_lora_rank": 20, "n_group": 2, "topk_group": 1}
SWITCHES = {
    "arcee": {"attention_bias": True, "mlp_bias": True},
    "apertus": {"attention_bias": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True, "head_dim": 24},
    "hunyuan_v1_dense": {"attention_bias": True, "head_dim": 24},
    "exaone4": {"sliding_window": 8, "head_dim": 24},
    "ministral3": {"head_dim": 24},
    "cwm": {"head_dim": 24},
    "minicpm3": {**MLA, "q_lora_rank": 20},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24},
    "ernie4_5_moe": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1, "use_bias": True,
    },
    "llama4_text": {
        "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2,
        "head_dim": 24,
    },
    "qwen3_next": {**DELTA, **GATED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **GATED},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "global_head_dim": 32, "head_dim": 24,
        "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "deepseek_v32": {**SPARSE_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "glm4_moe_lite": SPARSE_MLA,
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "internlm3": {"head_dim": 16, "attention_bias": False},
    "ministral": {"head_dim": 16},
    "ernie4_5": {"use_bias": True, "head_dim": 24},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": {"attention_bias": True, "head_dim": 24},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1], "head_dim": 24,
    },
    "glm4_moe": {**MOE, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True, "head_dim": 24},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v2": {**MOE, **MLA, "n_shared_experts": 2, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**MOE, **MLA, "n_shared_experts": 1, "q_lora_rank": 20, "n_group": 2, "topk_group": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "starcoder2": {"use_bias": False},
    "gemma3_text": {"head_dim": 24},
    "gpt_neox": {"attention_bias": False},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "stablelm": {"use_qkv_bias": True},
}  # fmt: skip
TRUE_SIZES = [
    "Llama-2-7B", "Qwen2.5-7B", "Qwen3-8B", "Gemma-2-9B", "Gemma-3-1B", "Phi-3-mini", "GPT-2 XL", "Falcon-7B",
    "Falcon-40B", "GPT-NeoX-20B", "Mixtral-8x7B", "GLM-4.5-Air", "gpt-oss-20b", "DeepSeek-V2-Lite",
]  # fmt: skip
DROPPING = [("phi", "embd_pdrop"), ("gpt_neox", "hidden_dropout"), ("starcoder2", "embedding_dropout")]
OLD_NAMES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 120, "n_positions": 32, "n_inner": 96}


def small(model_type):
    """A small model of this family, with its switches the other way round where it has some."""
    if model_type in ("gpt2", "gpt_bigcode", "gptj"):
        more = {"rotary_dim": 4} if model_type == "gptj" else {}
        return {"model_type": model_type, **OLD_NAMES, **more}
    if model_type == "bloom":
        return {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 120}
    if model_type == "mpt":
        return {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 120, "max_seq_len": 32}
    base = config(model_type, 64, 3, 4, 2, 96, 120, pad_token_id=None, max_position_embeddings=32)
    return {**base, **SWITCHES.get(model_type, {})}


def known_to_transformers(pool):
    known = pool(1).run(cases_architecture.known, names=sorted(FAMILIES))[0]
    return [name for name in known if name not in OUTSIDE]


def assert_counts(name, data, counted):
    for source in (data, counted["saved"]):
        architecture = read_architecture(source)
        seen = {
            "total": architecture.num_parameters,
            "embedding": architecture.embedding_weights,
            "linear": architecture.linear_weights,
            "lora": [adapters(architecture, tuple(names)) for names in TARGETS],
        }
        assert seen == {key: counted[key] for key in seen}, name


def adapters(architecture, names):
    try:
        return lora_parameters(architecture, RANK, names)
    except ModelError:
        return None


def test_routers_that_give_two_tensors_get_no_adapter_from_all_linear(pool):
    options = [{}, {"layers": (1,)}, {"exclude": ("o_proj",)}, {"exclude": ("regex:.*o_proj",)}]
    run = pool(1).run
    found = run(cases_architecture.adapted_modules, config=small("llama4_text"), options=options)[0]
    without = ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert found == [sorted([*without, "o_proj"])] * 2 + [without] * 2


def test_small_models_of_every_family_have_the_numbers_that_the_planner_says(pool):
    names = known_to_transformers(pool)
    assert len(names) >= 30
    configs = [small(name) for name in names]
    counted = pool(1).run(cases_architecture.counts, configs=configs, rank=RANK, targets=TARGETS)[0]
    for name, data, numbers in zip(names, configs, counted, strict=True):
        assert_counts(name, data, numbers)


@pytest.mark.parametrize("name", TRUE_SIZES)
def test_published_models_have_the_numbers_that_the_planner_says(pool, name):
    data = {key: value for key, value in PUBLISHED[name][0].items() if value is not None or key == "q_lora_rank"}
    counted = pool(1).run(cases_architecture.counts, configs=[data], rank=RANK, targets=TARGETS[:1])[0][0]
    architecture = read_architecture(PUBLISHED[name][0])
    assert counted["total"] == architecture.num_parameters == PUBLISHED[name][1]
    assert counted["linear"] == architecture.linear_weights
    assert counted["lora"][0] == lora_parameters(architecture, RANK, ("all-linear",))


def test_families_that_can_be_cut_by_columns_and_rows_are_those_whose_plan_says_so(pool):
    plans = pool(1).run(cases_architecture.plans, families=sorted(set(FAMILIES) - OUTSIDE))[0]
    assert {family for family, cut in plans.items() if cut} == SLICED


def test_what_the_plan_says_can_be_cut_between_layers_the_worker_cuts_and_refuses_the_others(pool):
    names = known_to_transformers(pool)
    configs = [*map(small, names), *({**small(name), key: 0.1} for name, key in DROPPING)]
    found = pool(1).run(cases_architecture.staged, configs=configs)[0]
    for name, data, seen in zip([*names, *(f"{name}, {key}" for name, key in DROPPING)], configs, found, strict=True):
        assert bool(seen["refused"]) == bool(unstageable(read_architecture(data))), f"{name}: {seen}"
        assert seen["refused"] or seen["off"] < FP32_SUM, name


def test_what_the_plan_says_can_have_few_bits_the_worker_packs_and_refuses_the_others(pool):
    names = known_to_transformers(pool)
    configs = [small(name) for name in names]
    found = pool(1).run(cases_architecture.packed, configs=configs)[0]
    for name, data, said in zip(names, configs, found, strict=True):
        assert bool(said) == bool(unpackable(read_architecture(data))), f"{name}: {said}"
