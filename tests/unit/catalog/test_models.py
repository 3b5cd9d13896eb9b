"""The catalogue knows what config.json of well-known models says, and the published sizes come out of it."""

import pytest

from gangline.catalog.models import known_config, known_model, known_models, suggest_models
from gangline.planner.config import read_architecture

HUB = {
    # "safetensors.total" of the hub's API, as public files recorded it in September and October 2026. Of Llama 2, the
    # 64 numbers per layer that the files hold for rotary frequencies are taken off.
    "meta-llama/Llama-2-7b-hf": 6_738_417_664 - 32 * 64,
    "meta-llama/Llama-2-13b-hf": 13_015_866_880 - 40 * 64,
    "meta-llama/Llama-2-70b-hf": 68_976_653_312 - 80 * 64,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
}
PRESETS = {
    # "params" in the presets of keras-team/keras-hub
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "bigscience/bloom-560m": 559_214_592,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "google/medgemma-4b-it": 4_300_079_472,
    "google/gemma-3-27b-it": 27_432_406_640,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
}
LOGS = {
    # what programs that loaded the weights printed, in public repositories (DeepSeek-V3 counts a bias per router, which
    # is no parameter to transformers)
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mixtral-8x22B-v0.1": 140_630_071_296,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,
}
COUNTED = {
    # all parameters of what transformers 5.23 builds of these configurations, on torch's meta device
    "tiiuae/Falcon3-1B-Base": 1_669_408_768,
    "tiiuae/Falcon3-3B-Base": 3_227_655_168,
    "tiiuae/Falcon3-7B-Base": 7_455_550_464,
    "tiiuae/Falcon3-10B-Base": 10_305_653_760,
    "openlm-research/open_llama_3b": 3_426_473_600,
    "BSC-LT/salamandra-2b": 2_253_490_176,
    "BSC-LT/salamandra-7b": 7_768_117_248,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-34B": 34_388_917_248,
    "mistralai/Mistral-Large-Instruct-2411": 122_610_069_504,
    "mistralai/Mistral-Small-Instruct-2409": 22_247_282_688,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "microsoft/phi-1_5": 1_418_270_720,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/Phi-3.5-MoE-instruct": 41_873_153_344,
    "stabilityai/stablelm-3b-4e1t": 2_795_443_200,
    "stabilityai/stablelm-2-zephyr-1_6b": 1_644_515_328,
    "allenai/OLMo-1B-hf": 1_176_764_416,
    "allenai/OLMo-7B-hf": 6_888_095_744,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "allenai/Olmo-3-1125-32B": 32_233_522_176,
    "EleutherAI/pythia-14m": 14_067_712,
    "EleutherAI/pythia-31m": 30_494_720,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "tiiuae/falcon-7b": 6_921_720_704,
    "tiiuae/falcon-40b": 41_303_293_952,
    "tiiuae/falcon-180B": 179_522_565_120,
    "Qwen/Qwen2-57B-A14B": 57_408_658_944,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "zai-org/glm-4-9b-chat-hf": 9_399_951_360,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4.5": 352_797_814_784,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "moonshotai/Moonlight-16B-A3B": 15_960_108_544,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_209_408,
    "CohereLabs/c4ai-command-r-v01": 34_980_831_232,
    "CohereLabs/aya-23-8B": 8_028_033_024,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "internlm/internlm3-8b-instruct": 8_804_241_408,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-66b": 65_719_701_504,
    "bigscience/bloom-7b1": 7_069_016_064,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "ibm-granite/granite-3.0-8b-base": 8_170_848_256,
    "ibm-granite/granite-3.0-2b-base": 2_533_525_504,
    "ibm-granite/granite-3.1-8b-base": 8_170_835_968,
    "CohereLabs/c4ai-command-r-plus": 103_810_674_688,
    "CohereLabs/c4ai-command-a-03-2025": 111_057_580_032,
    "CohereLabs/c4ai-command-r7b-12-2024": 8_028_033_024,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "google/gemma-3-12b-pt": 12_187_325_040,
    "google/gemma-3-27b-pt": 27_432_406_640,
    "google/gemma-4-31B": 31_273_086_512,
    "google/gemma-4-26B-A4B": 25_805_933_872,
    "mistralai/Devstral-2-123B-Instruct-2512": 125_025_988_608,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-0.8B": 752_393_024,
    "Qwen/Qwen3.5-4B": 4_205_751_296,
    "Qwen/Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen/Qwen3.5-397B-A17B": 396_346_350_336,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "meta-llama/Llama-4-Scout-17B-16E": 107_769_861_120,
    "meta-llama/Llama-4-Maverick-17B-128E": 400_711_848_960,
    "MiniMaxAI/MiniMax-M2.5": 228_689_748_992,
    "deepseek-ai/DeepSeek-V3.2": 671_877_929_216,
    "zai-org/GLM-4.7-Flash": 29_943_390_976,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32_003_216_384,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "openbmb/MiniCPM3-4B": 4_073_875_968,
    "swiss-ai/Apertus-8B-2509": 8_053_338_176,
    "swiss-ai/Apertus-70B-2509": 70_599_864_480,
    "arcee-ai/AFM-4.5B": 4_619_189_760,
    "tencent/Hunyuan-7B-Instruct": 7_504_568_320,
    "tencent/Hunyuan-4B-Instruct": 4_221_757_440,
    "nvidia/Nemotron-4-Mini-Hindi-4B-Instruct": 4_190_509_056,
    "mistralai/Mistral-Small-3.1-24B-Base-2503": 24_011_361_280,
    "mistralai/Devstral-Small-2-24B-Instruct-2512": 24_011_361_280,
    "mistralai/Ministral-3-3B-Base-2512": 3_849_090_048,
    "mistralai/Ministral-3-8B-Base-2512": 8_918_026_240,
}
PYTHIA = {
    # Pythia's paper (arXiv 2304.01373), table 1: parameters without the two tables, and the tables' rows and width
    "70m": (18_915_328, 50_304, 512),
    "160m": (85_056_000, 50_304, 768),
    "410m": (302_311_424, 50_304, 1024),
    "1b": (805_736_448, 50_304, 2048),
    "1.4b": (1_208_602_624, 50_304, 2048),
    "2.8b": (2_517_652_480, 50_304, 2560),
    "6.9b": (6_444_163_072, 50_432, 4096),
    "12b": (11_327_027_200, 50_688, 5120),
}


@pytest.mark.parametrize(("name", "published"), [*HUB.items(), *PRESETS.items(), *LOGS.items(), *COUNTED.items()])
def test_the_published_number_of_parameters_comes_out(name, published):
    assert read_architecture(known_config(name)).num_parameters == published


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_without_its_tables_is_what_the_paper_says(size):
    others, rows, width = PYTHIA[size]
    assert read_architecture(known_config(f"EleutherAI/pythia-{size}")).num_parameters == others + 2 * rows * width


def test_every_model_can_be_read():
    for name in known_models():
        config = known_config(name)
        architecture = read_architecture(config)
        text = config.get("text_config", config)
        assert architecture.num_layers == text.get("num_hidden_layers", text.get("n_layer")), name
        assert architecture.max_positions, name
        assert known_model(name).source, name
    assert len(known_models()) > 430


def test_a_total_is_known_for_most_shapes():
    checked = {str(known_config(name)) for name in (*HUB, *PRESETS, *LOGS, *COUNTED)}
    shapes = {str(known_config(name)) for name in known_models()}
    assert len(checked) > len(shapes) / 2


def test_names_in_any_case_and_by_their_last_part():
    config = known_config("meta-llama/Llama-2-7b-hf")
    assert config["hidden_size"] == 4096
    assert known_config("META-LLAMA/llama-2-7B-HF") == config
    assert known_config(" Llama-2-7b-hf ") == config
    assert known_config("gpt2")["n_embd"] == 768
    assert known_model("qwen2.5-7b").name == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize("name", ["", "/", "somebody/Llama-2-7b-hf", "./Llama-2-7b-hf", "/models/gpt2", "Llama-2-7b"])
def test_other_names_are_not_claimed(name):
    assert known_config(name) is None


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("unsloth/Qwen2.5-7B-unsloth-bnb-4bit", "Qwen/Qwen2.5-7B"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("nousresearch/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen3-8B-4bit", "Qwen/Qwen3-8B"),
    ],
)
def test_copies_and_few_bits_have_the_shape_of_the_original(copy, original):
    assert known_config(copy) == known_config(original) is not None


def test_an_ending_alone_or_another_owner_makes_no_copy():
    assert known_config("unsloth/no-such-model-bnb-4bit") is None
    assert known_config("somebody/Llama-2-7b-hf-bnb-4bit") is None
    assert known_config("unsloth/-bnb-4bit") is None


def test_a_last_part_that_two_owners_have_is_not_guessed(monkeypatch):
    from gangline.catalog import models

    one, other = (known_model("gpt2"), known_model("Qwen/Qwen3-8B"))
    monkeypatch.setattr(models, "_models", lambda: {"here/same": one, "there/same": other})
    assert known_config("same") is None
    assert known_config("there/same") == other.config


def test_a_model_tuned_from_another_has_its_shape_and_its_own_positions():
    base, tuned = known_config("Qwen/Qwen2.5-7B"), known_config("Qwen/Qwen2.5-7B-Instruct")
    assert (base.pop("max_position_embeddings"), tuned.pop("max_position_embeddings")) == (131072, 32768)
    assert base == tuned


def test_what_is_handed_out_can_be_changed():
    known_config("google/gemma-3-4b-it")["text_config"]["hidden_size"] = 1
    assert known_config("google/gemma-3-4b-it")["text_config"]["hidden_size"] == 2560
    known_config("gpt2")["n_embd"] = 1
    assert known_config("gpt2")["n_embd"] == 768


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Lama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("glm-4.5", "zai-org/GLM-4.5"),
        ("glm-4.5-ai", "zai-org/GLM-4.5-Air"),
        ("qwen2.5-7b-instuct", "Qwen/Qwen2.5-7B-Instruct"),
        ("gpt-oss", "openai/gpt-oss-20b"),
    ],
)
def test_what_was_meant(text, first):
    assert suggest_models(text)[0] == first


def test_nothing_is_suggested_for_something_else():
    assert suggest_models("xyzzy") == ()
    assert len(suggest_models("llama", limit=3)) == 3
