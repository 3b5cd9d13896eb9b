"""A model whose layers the ranks of a host have between them computes what one process computes."""

import pytest

from tests.train import cases_exact, cases_tensor_parallel
from tests.train.tolerances import BF16, FP64

pytestmark = pytest.mark.rotating


def require_exact(results):
    for result in results:
        assert result["strategy"]
        for step in result["steps"]:
            assert step["error"] < FP64
            assert step["norm_error"] < FP64
            assert step["loss_error"] < FP64
            assert step["least"] > 1e-9
        ours, alone = result["evaluation"]
        assert ours == pytest.approx(alone, rel=FP64)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_gradient_is_that_of_one_process(pool, method):
    results = pool(2).run(cases_tensor_parallel.contract, shares=[5], method=method, attention_bias=True, mlp_bias=True)
    require_exact(results)
    whole = results[0]["whole"]
    for result in results:
        assert result["fused"]
        assert result["flops"][0] == result["flops"][1]
        weights = {name.rsplit("self_attn.", 1)[-1]: (name, shape) for name, shape in result["cut"].items()}
        inside = "" if method == "full" else ".base_layer"
        for layer, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            name, shape = weights[f"{layer}{inside}.weight"]
            assert shape[dim] * 2 == whole[name][dim]
            assert shape[1 - dim] == whole[name][1 - dim]
        halves = {"lora_A": "q_proj", "lora_B": "o_proj"}  # each rank has all of them
        assert all(
            any(f"{layer}.{half}" in name for name in result["others"]) == (method == "lora")
            for half, layer in halves.items()
        )
        assert not any("_proj" in name and "lora" not in name and "bias" not in name for name in result["others"])


@pytest.mark.parametrize(("method", "dropout"), [("full", 0.0), ("lora", 0.1)])
def test_hosts_of_unequal_shares_have_the_gradient_of_one_process(pool, method, dropout):
    words = {"shares": [3, 2], "method": method, "dropout": dropout}
    require_exact(pool(4).run(cases_tensor_parallel.contract, **words, packed=True, checkpointing=True))


def test_a_host_without_work_and_four_ranks_on_one_host(pool):
    require_exact(pool(4).run(cases_tensor_parallel.contract, shares=[0, 5], method="lora"))
    words = {"shares": [5], "hosts": ["pc0"] * 4, "num_key_value_heads": 4}
    require_exact(pool(4).run(cases_tensor_parallel.contract, **words, method="full", tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("family", "method"),
    [("gemma2", "full"), ("qwen3", "lora"), ("phi3", "lora")],
    ids=["capped logits, tied", "norms of heads", "gathered"],
)
def test_other_words_of_plans_are_as_exact(zygote, tmp_path, family, method):
    words = {"folder": str(tmp_path), "shares": [5], "family": family, "method": method}
    results = zygote.gang(2, cases_tensor_parallel.other_family, words).results()
    require_exact(results)
    assert all(result["fused"] == (family != "gemma2") for result in results)


@pytest.mark.parametrize(
    ("method", "checkpointing"), [("full", False), ("full", True), ("lora", False), ("lora", True)]
)
def test_what_ranks_send_is_what_the_plan_says(pool, method, checkpointing):
    for result in pool(2).run(cases_tensor_parallel.sent, method=method, checkpointing=checkpointing):
        for name, (counted, planned) in result.items():
            assert counted == planned, name


def test_in_bf16_what_travels_is_bf16(pool):
    ask = {"shares": [10], "strategy": "tp", "precision": "bf16", "steps": 12}
    result = pool(2).run(cases_exact.losses, **ask)[0]
    for split, alone in zip(result["split"], result["alone"], strict=True):
        assert split[1] == pytest.approx(alone[1], rel=BF16)


@pytest.mark.parametrize(("method", "tied"), [("full", True), ("lora", False)])
def test_every_rank_reads_its_part_of_a_model_that_none_has_held(pool, tmp_path, method, tied):
    words = {"folder": str(tmp_path), "shares": [10], "method": method, "tied": tied}
    for result in pool(2).run(cases_tensor_parallel.read_by_slices, **words):
        assert result["by parts"]
        assert result["names"]
        assert result["differing"] == []
        assert result["held"] < 0.65 * result["whole"]  # the table and the head are whole
        assert result["fused"]


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ({"num_key_value_heads": 1}, "1 key-value heads"),
        ({"intermediate_size": 33}, "33 outputs of gate_proj"),
        ({"hosts": ["pc0", "pc1"], "shares": [5, 5]}, "it was built"),
        ({"changes": {"precision": "fp16", "method": "lora"}}, "tp with precision: fp16"),
        ({"changes": {"method": "qlora"}}, "tp with method: qlora"),
        ({"changes": {"optimizer": "adamw-8bit"}}, "tp with optimizer: adamw-8bit"),
        ({"changes": {"method": "lora", "targets": ["embed_tokens"]}}, "nothing to divide"),
        ({"mixture": True}, "for model.layers.0.mlp.experts"),
        ({"other": "gpt2"}, "no plan"),
    ],
    ids=["heads", "width", "one rank each", "fp16", "4 bits", "8 bits", "targets", "experts", "plan"],
)
def test_what_cannot_be_is_refused_by_its_name(pool, tmp_path, how, seen):
    said = pool(2).run(cases_tensor_parallel.refused, **{"shares": [5], **how}, empty=str(tmp_path))
    assert all(seen in each for each in said), said


def test_hosts_with_unequal_numbers_of_ranks_are_refused(pool):
    words = {"shares": [3, 3, 4], "hosts": ["pc0", "pc0", "pc1"]}
    assert all("2 on pc0, 1 on pc1" in said for said in pool(3).run(cases_tensor_parallel.refused, **words))
