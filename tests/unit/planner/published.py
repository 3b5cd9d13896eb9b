"""Published models: what their config.json says about shape, and how many parameters their makers state.

Totals are those of the model cards and of the weight files' headers (without copies of tied tables and without
layers for multi-token prediction, which transformers does not build, and without the correction biases of routers,
which are buffers).
"""


def config(model_type, hidden, layers, heads, kv_heads, width, vocabulary, **more):
    """config.json of a model with the common keys."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        **more,
    }


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
QWEN3 = {"head_dim": 128, "attention_bias": False}
GEMMA2 = {"head_dim": 256, "sliding_window": 4096, "attention_bias": False, "final_logit_softcapping": 30.0}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GPT_OSS = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "num_experts_per_tok": 4, **UNTIED}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}

PUBLISHED = {
    "Llama-2-7B": (config("llama", 4096, 32, 32, 32, 11008, 32000, **UNTIED), 6_738_415_616),
    "Llama-2-13B": (config("llama", 5120, 40, 40, 40, 13824, 32000, **UNTIED), 13_015_864_320),
    "Llama-2-70B": (config("llama", 8192, 80, 64, 8, 28672, 32000, **UNTIED), 68_976_648_192),
    "Llama-3-8B": (config("llama", 4096, 32, 32, 8, 14336, 128256, **UNTIED), 8_030_261_248),
    "Llama-3-70B": (config("llama", 8192, 80, 64, 8, 28672, 128256, **UNTIED), 70_553_706_496),
    "Llama-3.2-1B": (config("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED), 1_235_814_400),
    "Llama-3.2-3B": (config("llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED), 3_212_749_824),
    "TinyLlama-1.1B": (config("llama", 2048, 22, 32, 4, 5632, 32000, **UNTIED), 1_100_048_384),
    "SmolLM-135M": (config("llama", 576, 30, 9, 3, 1536, 49152, **TIED), 134_515_008),
    "Yi-6B": (config("llama", 4096, 32, 32, 4, 11008, 64000, **UNTIED), 6_061_035_520),
    "Mistral-7B": (config("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096, **UNTIED), 7_241_732_096),
    "Qwen2.5-0.5B": (config("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED), 494_032_768),
    "Qwen2.5-1.5B": (config("qwen2", 1536, 28, 12, 2, 8960, 151936, **TIED), 1_543_714_304),
    "Qwen2.5-3B": (config("qwen2", 2048, 36, 16, 2, 11008, 151936, **TIED), 3_085_938_688),
    "Qwen2.5-7B": (config("qwen2", 3584, 28, 28, 4, 18944, 152064, **UNTIED), 7_615_616_512),
    "Qwen2.5-14B": (config("qwen2", 5120, 48, 40, 8, 13824, 152064, **UNTIED), 14_770_033_664),
    "Qwen2.5-72B": (config("qwen2", 8192, 80, 64, 8, 29568, 152064, **UNTIED), 72_706_203_648),
    "Qwen3-0.6B": (config("qwen3", 1024, 28, 16, 8, 3072, 151936, **QWEN3, **TIED), 596_049_920),
    "Qwen3-8B": (config("qwen3", 4096, 36, 32, 8, 12288, 151936, **QWEN3, **UNTIED), 8_190_735_360),
    "Gemma-2B": (config("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256), 2_506_172_416),
    "Gemma-7B": (config("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    "Gemma-2-2B": (config("gemma2", 2304, 26, 8, 4, 9216, 256000, **GEMMA2), 2_614_341_888),
    "Gemma-2-9B": (config("gemma2", 3584, 42, 16, 8, 14336, 256000, **GEMMA2), 9_241_705_984),
    "Gemma-3-1B": (
        config("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    "phi-2": (config("phi", 2560, 32, 32, 32, 10240, 51200, **UNTIED), 2_779_683_840),
    "Phi-3-mini": (config("phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=2047, **UNTIED), 3_821_079_552),
    "phi-4": (config("phi3", 5120, 40, 40, 10, 17920, 100352, **UNTIED), 14_659_507_200),
    "OLMo-7B": (config("olmo", 4096, 32, 32, 32, 11008, 50304, **UNTIED), 6_888_095_744),
    "OLMo-2-7B": (config("olmo2", 4096, 32, 32, 32, 11008, 100352, **UNTIED), 7_298_617_344),
    "StableLM-3B-4E1T": (config("stablelm", 2560, 32, 32, 32, 6912, 50304, **UNTIED), 2_795_443_200),
    "StarCoder2-3B": (config("starcoder2", 3072, 30, 24, 2, 12288, 49152, use_bias=True), 3_030_371_328),
    "Granite-3.0-8B": (config("granite", 4096, 40, 32, 8, 12800, 49155, logits_scaling=16.0, **TIED), 8_170_848_256),
    "SmolLM3-3B": (config("smollm3", 2048, 36, 16, 4, 11008, 128256, **TIED), 3_075_098_624),
    "GPT-2": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "GPT-2 XL": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "Pythia-1.4B": (config("gpt_neox", 2048, 24, 16, None, 8192, 50304, **UNTIED), 1_414_647_808),
    "Pythia-6.9B": (config("gpt_neox", 4096, 32, 32, None, 16384, 50432, **UNTIED), 6_857_302_016),
    "GPT-NeoX-20B": (config("gpt_neox", 6144, 44, 64, None, 24576, 50432, **UNTIED), 20_554_567_680),
    "GPT-J-6B": (
        {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400, "n_positions": 2048},
        6_050_882_784,
    ),
    "OPT-6.7B": (
        {**config("opt", 4096, 32, 32, None, None, 50272, ffn_dim=16384), "max_position_embeddings": 2048},
        6_658_473_984,
    ),
    "BLOOM-7B1": (
        {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880},
        7_069_016_064,
    ),
    "Falcon-7B": (
        config("falcon", 4544, 32, 71, None, None, 65024, multi_query=True, parallel_attn=True),
        6_921_720_704,
    ),
    "Falcon-40B": (
        config("falcon", 8192, 60, 128, None, None, 65024, num_kv_heads=8, new_decoder_architecture=True),
        41_303_293_952,
    ),
    "Qwen-1.8B": (config("qwen", 2048, 24, 16, None, 11008, 151936, kv_channels=128, **UNTIED), 1_836_828_672),
    "Qwen-7B": (config("qwen", 4096, 32, 32, None, 22016, 151936, kv_channels=128, **UNTIED), 7_721_324_544),
    "Qwen-14B": (config("qwen", 5120, 40, 40, None, 27392, 152064, kv_channels=128, **UNTIED), 14_167_290_880),
    "InternLM2-7B": (config("internlm2", 4096, 32, 32, 8, 14336, 92544, bias=False, **UNTIED), 7_737_708_544),
    "Mixtral-8x7B": (
        config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, **UNTIED),
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "qwen2_moe", 2048, 24, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1, **UNTIED,
        ),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], **QWEN3, **UNTIED,
        ),
        30_532_122_624,
    ),
    "OLMoE-1B-7B": (
        config("olmoe", 2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8, **UNTIED),
        6_919_161_856,
    ),
    "GLM-4.5-Air": (
        config(
            "glm4_moe", 4096, 46, 96, 8, 10944, 151552, head_dim=128, attention_bias=True, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1,
            use_qk_norm=False, num_nextn_predict_layers=1, **UNTIED,
        ),
        106_852_245_504,
    ),
    "gpt-oss-20b": (config("gpt_oss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, **GPT_OSS), 20_914_757_184),
    "gpt-oss-120b": (
        config("gpt_oss", 2880, 36, 64, 8, 2880, 201088, num_local_experts=128, **GPT_OSS),
        116_829_156_672,
    ),
    "DeepSeek-V2-Lite": (
        config(
            "deepseek_v2", 2048, 27, 16, 16, 10944, 102400, **MLA, q_lora_rank=None, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, **UNTIED,
        ),
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        config(
            "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, **MLA, q_lora_rank=1536, n_routed_experts=256,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, **UNTIED,
        ),
        671_026_404_352,
    ),
}  # fmt: skip
