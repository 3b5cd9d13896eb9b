"""Every option of an adapter is peft's own, on one process and on any split."""

import pytest

from tests.train import cases_adapters
from tests.train.tolerances import FP32, FP64, LOGITS

UNEVEN = {"shares": [5, 3, 2]}
OPTIONS = {
    "one scale and rank for each": (
        {"rslora": True, "init": "gaussian", "exclude": ["v_proj"], "rank_pattern": {"q_proj": 2, "layers.1.*": 6},
         "alpha_pattern": {"down_proj": 3.0}},
        {"use_rslora": True, "init_lora_weights": "gaussian", "exclude_modules": ["v_proj"],
         "rank_pattern": {"q_proj": 2, "layers.1.*": 6}, "alpha_pattern": {"down_proj": 3.0}},
    ),
    "expressions": (
        {"init": "orthogonal", "targets": [r"regex:model\.layers\.\d\.mlp\..*_proj"], "exclude": ["regex:.*up_proj"]},
        {"init_lora_weights": "orthogonal", "target_modules": r"model\.layers\.\d\.mlp\.(gate|down)_proj"},
    ),
    "names in one layer": (
        {"targets": ["q_proj", "down_proj"], "layers": [1]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "all of one layer": ({"layers": [1]}, {"target_modules": r"model\.layers\.1\..*_proj"}),
    "lengths and modules": (
        {"dora": True, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"use_dora": True, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
}  # fmt: skip
TIED = ({"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True})


def worst(one, other) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the models with weights, written once."""
    return str(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", [*OPTIONS, "tied"])
def test_twenty_steps_of_one_process_are_those_of_peft_in_a_plain_loop(pool, folder, name):
    options, config = TIED if name == "tied" else OPTIONS[name]
    words = {"folder": folder, "options": options, "config": config, "tied": name == "tied"}
    found = pool(1).run(cases_adapters.by_peft_too, **words)[0]
    assert worst(found["alone"], found["peft"]) <= FP64


def test_twenty_steps_over_uneven_ranks_are_those_of_one_process(pool, folder):
    options = {"dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]}
    found = pool(3).run(cases_adapters.divided, folder=folder, options=options, gang=UNEVEN, steps=20)[0]
    assert worst(found["split"], found["alone"]) <= FP64


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "targets": ["q_proj"]}
"""In fp32: torch multiplies groups of rows in no wider format."""


def test_tensors_of_experts_are_trained_as_by_peft(pool, folder):
    config = {"target_parameters": EXPERTS["target_parameters"], "target_modules": EXPERTS["targets"]}
    words = {"options": EXPERTS, "config": config, "precision": "fp32"}
    found = pool(1).run(cases_adapters.by_peft_too, folder=folder, **words)[0]
    assert worst(found["alone"], found["peft"]) <= FP32


@pytest.mark.parametrize(("bits", "trained"), [(4, True), (4, False), (8, True)])
def test_quantised_experts_are_trained_as_by_peft_over_the_weights_that_they_stand_for(pool, folder, bits, trained):
    config = {"target_modules": EXPERTS["targets"]}
    options = {"kind": "qlora", "bits": bits, "quantise_experts": True, "targets": EXPERTS["targets"]}
    if trained:
        options |= {"target_parameters": EXPERTS["target_parameters"]}
        config |= {"target_parameters": EXPERTS["target_parameters"]}
    found = pool(1).run(cases_adapters.over_what_few_bits_stand_for, folder=folder, options=options, config=config)[0]
    assert worst(found["alone"], found["peft"]) <= FP32
    experts = [off for is_expert, off in found["rounded"] if is_expert]
    assert len(experts) == 4  # two tensors in each of two layers
    assert 0 < min(experts) <= max(experts) < (0.12 if bits == 4 else 0.01)
    assert found["held"] == pytest.approx(found["planned"], rel=0.01)  # without tables of 256 values
    assert found["left"] == 0


def test_quantised_experts_over_uneven_ranks_are_those_of_one_process(pool, folder):
    options = {**EXPERTS, "kind": "qlora", "quantise_experts": True}
    how = {"gang": UNEVEN, "precision": "fp32", "steps": 20, "activation_checkpointing": True}
    found = pool(3).run(cases_adapters.divided, folder=folder, options=options, **how)[0]
    assert worst(found["split"], found["alone"]) <= FP32


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero-1"])
def test_tensors_of_experts_and_rows_of_tokens_are_trained_on_every_split(pool, folder, kind):
    words = {"options": {**EXPERTS, "train_tokens": [5, 7]}, "precision": "fp32"}
    found = pool(2).run(cases_adapters.divided, folder=folder, gang={"shares": [7, 3], "strategy": kind}, **words)[0]
    assert worst(found["split"], found["alone"]) <= FP32


LENGTHS = {"dora": True, "modules_to_save": ["lm_head"]}
ADDS = {"options": {"train_tokens": ["added"]}, "add": [f"<{number}>" for number in range(52)]}
THREE, TWO, STAGES, ONE = [5, 3, 2], [7, 3], [1, 1], [10]
WAYS = {
    "lengths": ({"options": LENGTHS}, ("fsdp", TWO), ("single", ONE)),
    "lengths, to fewer": ({"options": LENGTHS}, ("ddp", THREE), ("fsdp", TWO)),
    "lengths, from stages": ({"options": LENGTHS}, ("pipeline", STAGES), ("ddp", THREE)),
    "a part of the weight": ({"options": {"init": "pissa", "train_tokens": [5, 7]}}, ("fsdp", TWO), ("single", ONE)),
    "a part of the weight, to stages": ({"options": {"init": "pissa"}}, ("fsdp", THREE), ("pipeline", STAGES)),
    "a part of the weight, from columns": ({"options": {"init": "olora"}}, ("tp", ONE), ("ddp", THREE)),
    "experts": ({"options": EXPERTS, "precision": "fp32"}, ("fsdp", THREE), ("ddp", TWO)),
    "tokens added": (ADDS, ("ddp", THREE), ("fsdp", TWO)),
    "an adapter gone on with": ({"options": {"dora": True}, "begun": "dora"}, ("hsdp", [4, 3, 2, 1]), ("ddp", TWO)),
    "modules, by DeepSpeed": ({"options": LENGTHS, "precision": "fp32"}, ("zero-1", TWO), ("fsdp", THREE)),
    "modules, to DeepSpeed": ({"options": LENGTHS, "precision": "fp32"}, ("ddp", THREE), ("zero-2", TWO)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", WAYS)
def test_saved_on_some_ranks_a_run_goes_on_on_others(pool, tmp_path, name):
    words, *gangs = WAYS[name]
    before, after = ({"strategy": kind, "shares": shares} for kind, shares in gangs)
    sizes = [len(gang["shares"]) * (2 if gang["strategy"] == "tp" else 1) for gang in (before, after)]
    words = {"folder": str(tmp_path), **words}
    pool(sizes[0]).run(cases_adapters.saved_by, gang=before, **words)
    found = pool(sizes[1]).run(cases_adapters.gone_on_by, gang=after, **words)[0]
    alone = pool(1).run(cases_adapters.losses_of, gang=None, steps=4, **words)[0]["losses"]
    assert worst(found, alone[2:]) <= (FP32 if "precision" in words else FP64)


SPLIT = {
    "pissa": ({"init": "pissa"}, {"init_lora_weights": "pissa"}),
    "olora": ({"init": "olora", "rslora": True}, {"init_lora_weights": "olora", "use_rslora": True}),
}


@pytest.mark.parametrize("name", SPLIT)
def test_adapters_that_begin_in_the_weights_are_those_of_peft_but_for_its_rounding_of_the_rest(pool, folder, name):
    """peft writes the rest into the weight, in fp32; here the weight stays, and what began is subtracted."""
    options, config = SPLIT[name]
    found = pool(1).run(cases_adapters.by_peft_too, folder=folder, options=options, config=config)[0]
    assert worst(found["alone"], found["peft"]) <= FP32


ADDED = list(range(258, 310))
ROWS = {
    "added": ({"train_tokens": ["added"]}, 52, {"trainable_token_indices": {"embed_tokens": ADDED, "lm_head": ADDED}}),
    "added to a tied table": ({"train_tokens": ["added"]}, 52, {"trainable_token_indices": ADDED}),
    "some": ({"train_tokens": [5, "<s>"]}, 0, {"trainable_token_indices": [0, 5]}),
    "all": (
        {"modules_to_save": ["embed_tokens", "lm_head"]}, 52, {"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_tokens_are_trained_as_by_peft_in_a_model_that_was_resized_by_the_mean(pool, folder, name):
    options, num_added, config = ROWS[name]
    words = {"options": options, "config": config, "tied": "tied" in name, "add": [f"<{n}>" for n in range(num_added)]}
    found = pool(1).run(cases_adapters.by_peft_too, folder=folder, **words)[0]
    assert worst(found["alone"], found["peft"]) <= FP64
    assert found["rows"] == (310 if num_added else 300)


GANGS = {
    "fsdp": {"shares": [7, 3]},
    "pipeline": {"shares": [1, 1]},
    "zero-1": {"shares": [7, 3]},
    "zero-2": {"shares": [7, 3]},
}


@pytest.mark.parametrize(
    ("gang", "options", "tied"),
    [
        ({"shares": [7, 3], "strategy": "fsdp"}, {"init": "pissa"}, False),
        ({"shares": [1, 1], "strategy": "pipeline"}, {"init": "pissa"}, False),
        ({"shares": [10], "strategy": "tp"}, {"init": "olora"}, False),
        ({"shares": [7, 3], "strategy": "ddp"}, {"init": "pissa_niter_2", "train_tokens": [5, 7]}, True),
        ({"shares": [7, 3], "strategy": "fsdp"}, {"train_tokens": [5, 7]}, True),
    ],
    ids=lambda value: value.get("strategy", "") if isinstance(value, dict) else "",
)
def test_what_begins_in_weights_or_tables_is_the_same_on_every_split(pool, folder, gang, options, tied):
    words = {"folder": folder, "options": options, "tied": tied}
    found = pool(2).run(cases_adapters.divided, gang=gang, **words)[0]
    assert worst(found["split"], found["alone"]) <= FP64


@pytest.mark.parametrize("kind", GANGS)
def test_lengths_of_rows_and_whole_modules_are_trained_under_every_strategy_that_allows_them(pool, folder, kind):
    gang = {**GANGS[kind], "strategy": kind}
    how, tolerance = ({"precision": "fp32"}, FP32) if kind.startswith("zero") else ({}, FP64)
    for tied in (False, True):
        options = {"rslora": True, "modules_to_save": ["embed_tokens"]} if tied else {"dora": True}
        words = {"folder": folder, "options": options, "tied": tied}
        found = pool(2).run(cases_adapters.divided, gang=gang, **words, **how)[0]
        assert worst(found["split"], found["alone"]) <= tolerance


EXPORTED = {
    "lengths": {"dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.*": 3.0}},
    "modules": {"targets": [r"regex:.*_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "a part of the weight": {"init": "pissa", "rslora": True, "rank_pattern": {"q_proj": 2}, "train_tokens": [5, 7]},
}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", [*EXPORTED, "tied"])
def test_what_is_exported_is_the_trained_model_for_plain_peft_and_transformers(pool, tmp_path, name, merged):
    options, model = EXPORTED.get(name, {"modules_to_save": ["lm_head"]}), {"tie_word_embeddings": name == "tied"}
    words = {"folder": str(tmp_path), "options": options, "merged": merged, **model}
    done = pool(1).run(cases_adapters.exported, **words)[0]
    assert done["difference"] <= LOGITS
    assert done["from_base"] > 0.05


def test_whole_modules_over_a_base_in_bf16_are_exported_as_they_were_trained(pool, tmp_path):
    words = {"folder": str(tmp_path), "options": EXPORTED["modules"], "dtype": "bfloat16"}
    done = pool(1).run(cases_adapters.exported, **words)[0]
    assert done["difference"] <= done["tolerance"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [1, 5]}, "method.layers: LlamaForCausalLM has no layer 5"),
        ({"modules_to_save": ["head"]}, "method.modules_to_save: head is no module of this model"),
        ({"rank_pattern": {"q_porj": 2}}, "method.rank_pattern: q_porj names no module with an adapter"),
        ({"targets": ["regex:.*mlp.*"]}, "method.targets: regex:.*mlp.* matches modules that take no adapter"),
        ({"exclude": ["regex:.*"]}, "matches nothing that exclude and layers leave"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_by_name(pool, folder, options, said):
    error = pool(1).run(cases_adapters.refused, folder=folder, options=options)[0]
    assert said in error["what"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_adapter_of_peft_is_trained_on_from_its_own_values_on_every_split(pool, tmp_path, kind):
    gang = {"shares": [7, 3], "strategy": kind}
    found = pool(2).run(cases_adapters.continued, folder=str(tmp_path), gang=gang)[0]
    assert found["difference"] <= FP64
    assert worst(found["split"], found["alone"]) <= FP64
