"""Every optimizer is its reference implementation, is exact on every split that a strategy allows, and is kept."""

import pytest

from tests.train import cases_optimizers
from tests.train.test_resume import run
from tests.train.tolerances import FP64, SAME_SUMS

NESTEROV = {"momentum": 0.9, "nesterov": True}
KINDS = {
    "sgd": {"kind": "sgd", "rate": 0.05, "words": NESTEROV},
    "lion": {"kind": "lion", "rate": 1e-4, "words": {}},
    "adafactor": {"kind": "adafactor", "rate": 1e-3, "words": {}},
    "muon": {"kind": "muon", "rate": 1e-3, "words": {}},
}


@pytest.mark.parametrize(
    ("kind", "changes", "tolerance"),
    [
        ("sgd", {"precision": "fp64"}, SAME_SUMS),
        ("sgd", {"precision": "fp64", "words": {}, "method": "lora"}, SAME_SUMS),
        ("lion", {"precision": "fp64"}, SAME_SUMS),
        ("adafactor", {"precision": "fp64"}, SAME_SUMS),
        # products in bf16 by the same operations: to the bit
        ("muon", {"precision": "fp32"}, 0.0),
        ("muon", {"precision": "fp32", "words": {"scale": "original", "nesterov": False}}, 0.0),
    ],
)
def test_twenty_steps_are_those_of_the_reference(pool, kind, changes, tolerance):
    found = pool(1).run(cases_optimizers.beside_reference, **{**KINDS[kind], **changes})[0]
    assert found["far"] <= tolerance
    ours, theirs = found["losses"]
    assert ours == pytest.approx(theirs, rel=max(tolerance, SAME_SUMS))
    assert ours[-1] != pytest.approx(ours[0], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, {"shares": [5, 3, 2], "strategy": "ddp"}) for kind in KINDS),
        *((kind, {"shares": [5, 3, 2], "strategy": "fsdp"}) for kind in ("sgd", "lion")),
        *((kind, {"shares": [7, 3], "strategy": "tp"}) for kind in ("sgd", "lion")),
        *((kind, {"shares": [1, 1], "strategy": "pipeline"}) for kind in ("adafactor", "muon")),
    ],
)
def test_twenty_steps_of_any_split_are_those_of_one_process(pool, kind, place):
    size = len(place["shares"]) * (2 if place["strategy"] == "tp" else 1)
    found = pool(size).run(cases_optimizers.split_and_alone, **KINDS[kind], **place)[0]
    assert len(found["split"]) == 20
    for (_, loss, norm), (_, loss_alone, norm_alone) in zip(found["split"], found["alone"], strict=True):
        assert loss == pytest.approx(loss_alone, rel=FP64)
        assert norm == pytest.approx(norm_alone, rel=10 * FP64)


GANGS = {"ddp": [5, 3, 2], "fsdp": [7, 3], "pipeline": [1, 1], "alone": [10]}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("sgd", "ddp", "fsdp"), ("lion", "fsdp", "ddp"), ("adafactor", "pipeline", "ddp"), ("muon", "ddp", "pipeline")],
)
def test_a_checkpoint_goes_on_under_another_strategy(pool, tmp_path, kind, before, after):
    job = {"optimizer": kind, "precision": "fp64"}
    whole = run(pool, tmp_path / "whole", GANGS["alone"], job=job, steps=10)
    first = run(pool, tmp_path / "cut", GANGS[before], job=job, steps=10, stop_after=5, strategy=before)
    second = run(pool, tmp_path / "cut", GANGS[after], job=job, steps=10, resume_step=5, strategy=after)
    pieces = first[0]["losses"] + second[0]["losses"]
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=FP64)


@pytest.mark.parametrize("kind", list(KINDS))
def test_stopped_and_resumed_on_the_same_ranks_it_is_the_same_to_the_bit(pool, tmp_path, kind):
    job = {"optimizer": kind, "precision": "fp32"}
    whole = run(pool, tmp_path / "whole", [7, 3], job=job, steps=8)
    first = run(pool, tmp_path / "cut", [7, 3], job=job, steps=8, stop_after=3)
    second = run(pool, tmp_path / "cut", [7, 3], job=job, steps=8, resume_step=3)
    assert first[0]["losses"] + second[0]["losses"] == whole[0]["losses"]
    assert second[0]["digest"] == second[1]["digest"] == whole[0]["digest"]


@pytest.mark.parametrize(
    ("kind", "words", "method", "low", "high", "names"),
    [
        ("sgd", {}, "full", 0, 0, []),
        ("sgd", NESTEROV, "full", 1, 1, ["momentum_buffer"]),
        ("lion", {}, "full", 1, 1, ["lion_mean"]),
        ("adafactor", {}, "full", 0, 0.2, ["column_mean", "row_mean", "square_mean", "step"]),
        ("muon", {}, "full", 1, 2, ["exp_avg", "exp_avg_sq", "muon_mean", "step"]),
        ("muon", {}, "lora", 1, 1, ["muon_mean"]),
    ],
)
def test_states_take_what_the_plan_says(pool, kind, words, method, low, high, names):
    found = pool(1).run(cases_optimizers.states, kind=kind, words=words, method=method)[0]
    assert low <= found["per_number"] <= high
    assert found["names"] == names


@pytest.mark.parametrize(("kind", "strategy"), [("muon", "fsdp"), ("adafactor", "tp"), ("lion", "local-sgd")])
def test_a_rank_refuses_what_its_strategy_does_not_train_with(pool, kind, strategy):
    shares = [10] if strategy == "tp" else [5, 5]
    for said in pool(2).run(cases_optimizers.refused, shares=shares, kind=kind, strategy=strategy):
        assert f"{strategy} with optimizer: {kind}" in said


def test_under_fsdp_adapters_are_whole_so_muon_moves_them(pool):
    ask = {"shares": [5, 5], "kind": "muon", "strategy": "fsdp", "method": "lora"}
    assert pool(2).run(cases_optimizers.refused, **ask) == ["it trains"] * 2


def test_an_orthogonal_matrix_has_singular_values_near_one(pool):
    found = pool(1).run(cases_optimizers.stacks)[0]
    assert 0.5 < found["least"] <= found["most"] < 1.5
    assert found["alike"]
    assert found["matrices"] == [False, True, True, False, False]
