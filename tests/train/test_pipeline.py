"""A model whose layers lie on several ranks computes what one process computes."""

import pytest

from tests.train import cases_exact, cases_pipeline
from tests.train.test_resume import run
from tests.train.tolerances import BF16, FP32_GRADIENT, FP64

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize(("stages", "method"), [([3, 1, 2], "full"), ([1, 1], "qlora"), ([1, 1, 1, 1], "lora")])
def test_the_gradient_is_that_of_one_process(pool, stages, method):
    results = pool(len(stages)).run(cases_pipeline.contract, stages=stages, method=method, packed=len(stages) == 3)
    assert [result["on their way"] for result in results] == [min(5, left) for left in range(len(stages), 0, -1)]
    names = sorted(name for result in results for name in result["names"])
    assert names == results[0]["all"]  # every trained weight is one rank's
    for result in results:
        assert result["wrapper"]
        for step in result["steps"]:
            assert step["error"] < FP64
            assert step["norm_error"] < FP64
        ours, alone = result["evaluation"]
        assert ours == pytest.approx(alone, rel=FP64)
        assert result["held"] < result["whole"]


def test_with_twice_as_many_micro_batches_on_their_way_the_gradient_is_the_same(pool):
    results = pool(3).run(cases_pipeline.contract, stages=[1, 2, 1], method="lora", eager=True)
    assert [result["on their way"] for result in results] == [5, 3, 1]
    for result in results:
        assert max(max(step["error"], step["norm_error"]) for step in result["steps"]) < FP64


@pytest.mark.parametrize(
    ("stages", "rows", "method", "tied"),
    [
        ([2, 1, 1, 2], (6, 4), "full", True),
        ([3, 1, 2], (2, 8), "lora", False),
        ([1, 2, 2, 1], (10, 0), "qlora", False),
        ([1, 1, 1], (10,), "full", True),
    ],
    ids=["cut otherwise", "of one rank and of two", "one without work", "one with a table at both ends"],
)
def test_what_several_ranks_train_has_the_gradient_of_one_process(pool, stages, rows, method, tied):
    ask = {"stages": stages, "rows": rows, "method": method, "packed": method == "full", "tied": tied}
    results = pool(len(stages)).run(cases_pipeline.contract, **ask)
    for result in results:
        assert max(max(step["error"], step["norm_error"]) for step in result["steps"]) < FP64
        ours, alone = result["evaluation"]
        assert ours == pytest.approx(alone, rel=FP64)
    assert sum(result["done"] * result["last"] for result in results) == 5
    for name, digests in _by_name(results).items():  # each pipeline has it, a tied table twice; with the same bits
        assert len(digests) == len(rows) * (2 if tied and "embed_tokens" in name else 1), name
        assert len(set(digests)) == 1, name


def test_what_travels_between_pipelines_may_be_rounded(pool):
    ask = {"stages": [1, 2, 2, 1], "rows": (6, 4), "method": "lora", "exchange": "bf16"}
    results = pool(4).run(cases_pipeline.contract, **ask)
    assert 1e-4 < max(step["error"] for result in results for step in result["steps"]) < 1e-2
    assert all(len(set(digests)) == 1 for digests in _by_name(results).values())


def _by_name(results):
    found = {}
    for result in results:
        for name, digest in result["digests"].items():
            found.setdefault(name, []).append(digest)
    return found


def test_experts_have_the_same_gradient(pool):
    for result in pool(2).run(cases_pipeline.contract, stages=[1, 1], method="lora", mixture=True):
        assert max(step["error"] for step in result["steps"]) < FP32_GRADIENT


def test_recomputed_activations_have_the_same_gradient(pool):
    for result in pool(2).run(cases_pipeline.contract, stages=[2, 1], method="lora", checkpointing=True):
        assert max(step["error"] for step in result["steps"]) < FP64


def test_in_bf16_what_travels_is_bf16(pool):
    ask = {"shares": [1, 1], "strategy": "pipeline", "precision": "bf16", "steps": 10}
    result = pool(2).run(cases_exact.losses, **ask)[0]
    for split, alone in zip(result["split"], result["alone"], strict=True):
        assert split[1] == pytest.approx(alone[1], rel=BF16)


@pytest.mark.parametrize(
    ("before", "after", "method"),
    [
        (("pipeline", [2, 1, 1]), ("ddp", [7, 3]), "full"),
        (("fsdp", [7, 3]), ("pipeline", [1, 3]), "lora"),
        (("pipeline", [1, 3]), ("pipeline", [2, 1, 1]), "qlora"),
        (("pipeline", [1, 3, 2, 2], (7, 3)), ("ddp", [7, 3]), "full"),
        (("ddp", [7, 3]), ("pipeline", [1, 3, 4], (7, 3)), "full"),
    ],
    ids=["to ddp", "from fsdp", "cut anew", "from two pipelines", "to two pipelines"],
)
def test_saved_under_one_strategy_a_run_goes_on_under_another(pool, tmp_path, before, after, method):
    job = {"precision": "fp64", "method": method, "dropout": 0.0, "layers": 4}
    whole = run(pool, tmp_path / "whole", [10], job=job, steps=12)
    one, other = ({"strategy": kind, "rows": rows[0] if rows else (10,)} for kind, _, *rows in (before, after))
    if len(before) > 2:  # each host has all layers: nothing passes between hosts
        one["hosts"] = ["pc0", "pc0", "pc1", "pc1"]
    first = run(pool, tmp_path / "cut", before[1], job=job, steps=12, stop_after=5, **one)
    second = run(pool, tmp_path / "cut", after[1], job=job, steps=12, resume_step=5, **other)
    pieces = first[0]["losses"] + second[0]["losses"]
    assert [step for step, _, _ in pieces] == list(range(1, 13))
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=FP64)


@pytest.mark.parametrize(
    ("method", "stages", "tied"), [("full", [3, 1, 2], True), ("lora", [1, 1, 1], True), ("qlora", [2, 1], False)]
)
def test_every_rank_reads_its_layers_of_a_model_that_none_has_held(pool, tmp_path, method, stages, tied):
    words = {"stages": stages, "method": method, "tied": tied}
    results = pool(len(stages)).run(cases_pipeline.read_by_stages, folder=str(tmp_path), **words)
    for result in results:
        assert result["strangers"] == []
        assert result["differing"] == []
    assert sorted({name for result in results for name in result["names"]}) == results[0]["all"]
    assert all(result["by parts"] for result in results)
    assert [result["fused"] for result in results] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ({"stages": [2, 1]}, "the model has 2"),
        ({"stages": [1, 1], "precision": "fp16", "method": "lora"}, "pipeline with precision: fp16"),
    ],
    ids=["stages", "fp16"],
)
def test_what_cannot_be_is_refused_by_its_name(pool, how, seen):
    assert all(seen in said for said in pool(2).run(cases_pipeline.refused, **how))


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_a_decoder_that_cannot_be_cut_is_refused(zygote, tmp_path, family):
    words = {"folder": str(tmp_path), "stages": [1, 1], "family": family}
    ranks = zygote.gang(2, cases_pipeline.other_family, words)
    assert "cannot split this model" in ranks.results()[1]


def test_every_pass_of_a_step_says_that_the_rank_goes_on(pool):
    """Else a long step would be taken for a hang: 5 micro-batches, two steps, forward and back."""
    ask = {"stages": [1, 1], "method": "lora", "targets": ["q_proj", "embed_tokens"]}
    results = pool(2).run(cases_pipeline.contract, **ask)
    assert [result["beats"] for result in results] == [20, 20]
    assert sorted(name for result in results for name in result["names"]) == results[0]["all"]
    assert any("lora_embedding" in name for name in results[0]["names"])
    assert max(step["error"] for result in results for step in result["steps"]) < FP64


def test_dropout_is_not_the_same_in_two_stages(pool):
    first, second = pool(2).run(cases_pipeline.masks, stages=[1, 1])
    assert first != second
    assert 8 < sum(first) < 56
