"""Reading the shape of a model from its config.json: published totals, adapters, windows, and what is refused."""

import pytest

from gangline.catalog.models import known_config
from gangline.errors import ModelError
from gangline.planner.architecture import ALL_LINEAR, adapted, lora_parameters
from gangline.planner.config import UnknownArchitecture, read_architecture
from tests.unit.planner.published import PUBLISHED, config

LLAMA = PUBLISHED["Llama-2-7B"][0]


def read(name):
    return read_architecture(PUBLISHED[name][0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert read(name).num_parameters == PUBLISHED[name][1]


@pytest.mark.parametrize(
    ("name", "targets", "numbers"),
    [
        ("Llama-2-7B", ("q_proj", "v_proj"), 8_388_608),
        ("Llama-2-7B", ALL_LINEAR, 39_976_960),
        ("Llama-3-8B", ALL_LINEAR, 41_943_040),
        ("Qwen-7B", ("c_attn", "c_proj", "w1", "w2"), 35_782_656),
        ("GPT-2", ("c_attn",), 589_824),
    ],
)
def test_adapters_of_rank_16_have_the_known_numbers(name, targets, numbers):
    assert lora_parameters(read(name), 16, targets) == numbers


def test_targets_that_match_nothing_are_answered_with_names_that_do():
    with pytest.raises(ModelError) as caught:
        lora_parameters(read("Llama-2-7B"), 16, ("c_attn",))
    assert "c_attn" in caught.value.what
    assert "q_proj" in caught.value.seen
    assert "all-linear" in caught.value.fix


def test_experts_in_one_tensor_carry_adapters_under_their_old_names_and_only_both_halves():
    model = read("Mixtral-8x7B")
    assert [each.name for each in adapted(model.layers[0], ("w1", "w2", "w3"))] == ["w1", "w3", "w2"]
    with pytest.raises(ModelError, match="half"):
        lora_parameters(model, 16, ("w1",))


def test_dense_layers_come_before_layers_with_experts():
    first, rest = read("DeepSeek-V3").layers
    assert (first.count, first.experts) == (3, 0)
    assert (rest.count, rest.experts, rest.top_k) == (58, 256, 8)
    assert rest.width == 9 * 2048


def test_active_weights_count_a_tokens_own_experts_and_the_head():
    assert read("Mixtral-8x7B").active_weights == pytest.approx(12.75e9, rel=0.01)
    assert read("Llama-2-7B").active_weights == 6_738_415_616 - 32000 * 4096 - 65 * 4096


def test_windows_follow_the_family_or_layer_types():
    assert {layer.window for layer in read("Mistral-7B").layers} == {4096}
    assert [layer.window for layer in read("Gemma-2-2B").layers][:2] == [4096, None]
    assert [(layer.count, layer.window) for layer in read("Gemma-3-1B").layers][:2] == [(5, 512), (1, None)]
    assert {layer.window for layer in read("Qwen2.5-7B").layers} == {None}
    named = {**PUBLISHED["Gemma-3-1B"][0], "layer_types": ["full_attention"] * 26}
    assert {layer.window for layer in read_architecture(named).layers} == {None}


def test_heads_that_scale_or_cap_their_logits_are_told_apart():
    assert read("Llama-3-8B").linear_head
    assert not read("Gemma-2-2B").linear_head
    assert not read("Granite-3.0-8B").linear_head


def test_the_language_model_inside_a_larger_config_is_read():
    inner = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    nested = read_architecture({"model_type": "outer", "text_config": inner, "tie_word_embeddings": True})
    assert nested.num_parameters == 6_738_415_616 - 32000 * 4096


def test_layers_that_are_no_attention_stand_between_those_that_are():
    model = read_architecture(known_config("Qwen/Qwen3.5-9B"))
    assert [(layer.count, layer.delta) for layer in model.layers][:2] == [(3, True), (1, False)]
    net, attention = model.layers[:2]
    assert {each.name for each in net.linears} >= {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert attention.gated_attention
    assert attention.linears[0].outputs == 2 * attention.heads * attention.head_dim
    named = {**known_config("Qwen/Qwen3.5-9B"), "layer_types": ["full_attention"] * 32}
    assert not any(layer.delta for layer in read_architecture(named).layers)


def test_chunks_are_as_much_to_attend_to_as_a_window_of_half_their_size():
    layers = read_architecture(known_config("meta-llama/Llama-4-Scout-17B-16E")).layers
    assert [(layer.count, layer.window) for layer in layers][:2] == [(3, 4096), (1, None)]
    maverick = read_architecture(known_config("meta-llama/Llama-4-Maverick-17B-128E")).layers
    assert [layer.experts for layer in maverick][:2] == [0, 128]


def test_llama_4_multiplies_each_token_with_all_experts_as_transformers_does():
    layer = read_architecture(known_config("meta-llama/Llama-4-Scout-17B-16E")).layers[0]
    assert (layer.experts, layer.top_k) == (16, 16)
    assert layer.fused_active == layer.fused_weights


def test_a_layer_may_have_what_transformers_5_writes_for_it_alone():
    whole = known_config("google/gemma-4-31B")["text_config"]
    own = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    written = {key: value for key, value in whole.items() if "global" not in key}
    assert read_architecture({**written, "per_layer_config": own}) == read_architecture(whole)


def test_layers_that_see_everything_may_have_heads_of_their_own():
    near, far = read_architecture(known_config("google/gemma-4-31B")).layers[:2]
    assert (near.heads, near.kv_heads, near.head_dim, near.window) == (32, 16, 256, 1024)
    assert (far.heads, far.kv_heads, far.head_dim, far.window) == (32, 4, 512, None)
    assert "v_proj" in {each.name for each in near.linears}
    assert "v_proj" not in {each.name for each in far.linears}


def test_a_network_for_images_has_weights_and_adapters_and_no_layer_that_texts_pass():
    whole = known_config("google/gemma-3-4b-it")
    model, text = read_architecture(whole), read_architecture(whole["text_config"])
    assert model.layers == text.layers
    assert model.num_parameters - text.num_parameters == 419_816_304
    assert lora_parameters(model, 16, ("fc1",)) == 27 * 16 * (1152 + 4304)
    assert lora_parameters(model, 16, ("q_proj",)) - lora_parameters(text, 16, ("q_proj",)) == 27 * 16 * 2 * 1152
    assert not model.unloaded
    assert "mistral3" in read_architecture(known_config("mistralai/Ministral-3-8B-Base-2512")).unloaded


TINY = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        ({"model_type": "qwen3_5_text", **DELTA}, 1_353_216),
        ({"model_type": "qwen3_next", **DELTA, **SPARSE, "shared_expert_intermediate_size": 256}, 3_484_288),
        ({"model_type": "qwen3_5_moe_text", **DELTA, **SPARSE, "shared_expert_intermediate_size": 256}, 927_360),
        (
            {"model_type": "llama4_text", "intermediate_size": 768, "num_local_experts": 4, "num_experts_per_tok": 1},
            917_504,  # peft makes 983,552 with those of the routers, which break its forward
        ),
        (
            {"model_type": "minimax_m2", "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
            3_376_128,
        ),
        (
            {"model_type": "ernie4_5_moe", **SPARSE, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
            3_007_360,
        ),
        ({"model_type": "apertus"}, 950_272),
        ({"model_type": "exaone4"}, 1_212_416),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_adapters_on_every_linear_are_those_that_peft_makes(data, numbers):
    # of models of this shape that transformers 5.23 built, with peft 0.21
    assert lora_parameters(read_architecture({**TINY, **data}), 16, ALL_LINEAR) == numbers


@pytest.mark.parametrize(
    "data",
    [
        {"model_type": "mamba2", "hidden_size": 64},
        {"model_type": "gemma3", "text_config": PUBLISHED["Gemma-3-1B"][0], "vision_config": {"hidden_size": 8}},
        {**PUBLISHED["phi-2"][0], "qk_layernorm": True},
        {**PUBLISHED["OPT-6.7B"][0], "word_embed_proj_dim": 512},
    ],
    ids=[
        "unheard-of",
        "with a tower",
        "norms that the row does not have",
        "projected tables",
    ],
)
def test_a_model_without_a_closed_form_is_left_to_counting(data):
    with pytest.raises(UnknownArchitecture) as caught:
        read_architecture(data)
    assert caught.value.model_type == data["model_type"]
    assert caught.value.seen
    assert caught.value.fix


MAMBA = {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({**PUBLISHED["Gemma-3-1B"][0], "layer_types": ["linear_attention"] * 26}, "linear_attention"),
        ({"model_type": "gemma3n_text", "hidden_size_per_layer_input": 256}, "inputs of its own"),
        (
            {"model_type": "gemma3n", "text_config": {"hidden_size_per_layer_input": 256}, "audio_config": {"a": 1}},
            "inputs of its own",
        ),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}, "inputs of its own"),
        ({"model_type": "nemotron_h", "ssm_state_size": 128, "hybrid_override_pattern": "M-M*-"}, "ssm_state_size"),
        ({"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "moe"]}, "linear_attention"),
        ({"model_type": "granitemoehybrid", **MAMBA, "layer_types": ["mamba", "attention"]}, "mamba"),
        ({"model_type": "falcon_h1", **MAMBA}, "mamba_d_conv"),
        ({"model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [2, 5]}, "conv_L_cache"),
        ({"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "lfm2_moe", "conv_L_cache": 3}, "conv_L_cache"),
        ({"model_type": "bamba", **MAMBA, "attn_layer_indices": [9, 18]}, "mamba_d_conv"),
        ({"model_type": "zamba2", **MAMBA, "layers_block_type": ["mamba", "hybrid"]}, "hybrid, mamba"),
        ({"model_type": "jamba", **MAMBA, "attn_layer_period": 8}, "mamba_d_conv"),
        ({"model_type": "mamba2", "state_size": 128}, "state_size"),
        ({"model_type": "recurrent_gemma", "lru_width": 2560, "block_types": ["recurrent", "attention"]}, "recurrent"),
        ({"model_type": "kimi_linear", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "rwkv", "attention_hidden_size": 4096}, "attention_hidden_size"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_layers_that_are_no_attention_are_refused_by_name_and_not_counted(data, word):
    with pytest.raises(ModelError) as caught:
        read_architecture({"num_hidden_layers": 2, "hidden_size": 64, **data})
    assert not isinstance(caught.value, UnknownArchitecture)
    assert data["model_type"] in caught.value.what
    assert word in caught.value.seen
    assert "without a forecast" in caught.value.fix


def test_a_hybrid_family_whose_layers_are_all_attention_is_left_to_counting():
    with pytest.raises(UnknownArchitecture):
        read_architecture({"model_type": "granitemoehybrid", **MAMBA, "layer_types": ["attention"] * 2})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": "4096"},
        {"hidden_size": 4096.5},
        {"hidden_size": -1},
        {"hidden_size": True},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 1_000_000},
        {"num_attention_heads": 8192},
        {"num_key_value_heads": 5},
        {"num_key_value_heads": 64},
        {"vocab_size": 1 << 40},
        {"vocab_size": None},
        {"intermediate_size": None},
        {"intermediate_size": 1 << 23, "hidden_size": 1 << 23},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": "no"},
        {"layer_types": ["full_attention"]},
        {"model_type": ""},
        {"model_type": 7},
    ],
    ids=str,
)
def test_a_config_that_no_model_can_have_is_named_in_three_parts(change):
    with pytest.raises(ModelError) as caught:
        read_architecture({**LLAMA, **change})
    assert not isinstance(caught.value, UnknownArchitecture)
    assert "config.json" in caught.value.what
    assert caught.value.seen
    assert caught.value.fix


def test_more_experts_per_token_than_there_are_is_refused():
    with pytest.raises(ModelError, match="experts"):
        read_architecture({**PUBLISHED["Mixtral-8x7B"][0], "num_experts_per_tok": 9})


def test_a_short_config_is_completed_as_transformers_would():
    data = config("qwen2", 64, 2, 4, None, 96, 100)
    assert read_architecture(data).layers[0].kv_heads == 4
