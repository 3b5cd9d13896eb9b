"""DeepSpeed's ZeRO computes what one process computes, and goes on from what any other strategy has saved."""

import pytest

from tests.train.test_resume import run, sample_order

CASES = "tests.train.cases_zero"


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "shares", "offload"),
    [
        ("zero-1", [3, 0, 7], ()),
        ("zero-1", [7, 3], ("optimizer",)),
        ("zero-2", [5, 3, 2], ()),
        ("zero-2", [7, 3], ("optimizer",)),
        ("zero-3", [5, 3, 2], ()),
        ("zero-3", [7, 3], ("optimizer", "parameters")),
    ],
)
def test_the_gradient_is_that_of_one_process_and_what_is_in_parts_is(pool, strategy, shares, offload, method):
    words = {"strategy": strategy, "method": method, "offload": offload}
    results = pool(len(shares)).run(f"{CASES}:gradient", shares=shares, **words)
    for result in results:
        assert result["error"] < 1e-5
        assert result["norm_error"] < 1e-5
        assert result["stage"] == int(strategy[-1])
        assert result["states"] <= result["trained"] / len(shares) + 100
        assert (result["held"] == 0) == (strategy == "zero-3")
    assert sum(result["states"] for result in results) >= results[0]["trained"]


@pytest.mark.parametrize(
    ("strategy", "method", "shares", "precision"),
    [
        ("zero-1", "full", [5, 3, 2], "fp32"),
        ("zero-2", "lora", [7, 3], "fp32"),
        ("zero-3", "full", [5, 3, 2], "fp32"),
        ("zero-1", "full", [7, 3], "bf16"),
        ("zero-2", "full", [7, 3], "bf16"),
        ("zero-3", "lora", [7, 3], "bf16"),
    ],
)
def test_many_steps_have_the_losses_of_one_process(pool, strategy, method, shares, precision):
    words = {"strategy": strategy, "method": method, "precision": precision, "steps": 16, "warmup": 50}
    result = pool(len(shares)).run("tests.train.cases_exact:losses", shares=shares, **words, packed=len(shares) == 2)[0]
    tolerance = 1e-4 if precision == "fp32" else 5e-3
    assert len(result["split"]) == 16
    for (_, split, norm), (_, alone, norm_alone) in zip(result["split"], result["alone"], strict=True):
        assert split == pytest.approx(alone, rel=tolerance)
        assert norm == pytest.approx(norm_alone, rel=max(tolerance, 100 * tolerance * (precision == "bf16")))
    evaluations, expected = result["evaluations"]
    assert [loss for _, loss in evaluations] == pytest.approx([loss for _, loss in expected], rel=tolerance)


@pytest.mark.parametrize(
    ("strategy", "offload"), [("zero-1", ()), ("zero-2", ("optimizer",)), ("zero-2", ()), ("zero-3", ("optimizer",)), ("zero-3", ())]
)
def test_a_step_that_is_no_number_is_skipped_and_the_others_are_as_they_were(pool, strategy, offload):
    words = {"strategy": strategy, "precision": "fp32", "steps": 6, "poison": 1, "offload": offload}
    split, alone = pool(2).run(f"{CASES}:losses", shares=[7, 3], **words)[0]
    assert ["step-skipped", 3] in split["told"]
    assert split["told"] == [*alone["told"]]
    for ours, expected in zip(split["steps"], alone["steps"], strict=True):
        assert ours[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "method"),
    [
        (("ddp", [5, 5]), ("zero-2", [5, 3, 2]), "full"),
        (("zero-3", [7, 3]), ("zero-1", [5, 3, 2]), "full"),
        (("zero-1", [5, 3, 2]), ("fsdp", [7, 3]), "full"),
        (("zero-2", [7, 3]), ("zero-3", [5, 3, 2]), "lora"),
    ],
)
def test_saved_under_one_strategy_a_run_goes_on_under_another(pool, tmp_path, before, after, method):
    job = {"precision": "fp32", "method": method, "warmup": 50}
    whole = run(pool, tmp_path / "whole", [10], job=job, steps=12)
    first = run(pool, tmp_path / "cut", before[1], job=job, steps=12, stop_after=5, strategy=before[0])
    lacking = ["pc1"] if after[0] == "zero-3" else []
    second = run(
        pool, tmp_path / "cut", after[1], job=job, steps=12, resume_step=5, strategy=after[0], lacking=lacking
    )
    pieces = first[0]["losses"] + second[0]["losses"]
    assert [step for step, _, _ in pieces] == list(range(1, 13))
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)
    assert sample_order(first, second) == sample_order(whole)


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ({"precision": "fp64"}, "precision fp64"),
        ({"precision": "fp16"}, "precision fp16"),
        ({"precision": "bf16", "parameters": "compute"}, "pure bf16"),
        ({"precision": "fp32", "method": "qlora"}, "method: qlora"),
        ({"precision": "fp32", "optimizer": "adamw-8bit"}, "adamw-8bit"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(pool, words, seen):
    for said in pool(2).run(f"{CASES}:refused", strategy="zero-2", **words):
        assert seen in said
