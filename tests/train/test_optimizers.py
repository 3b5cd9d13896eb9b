"""Every optimizer is its reference implementation, is exact on every split that a strategy allows, and is kept."""

import pytest

from tests.train import cases_optimizers
from tests.train.test_resume import run
from tests.train.tolerances import FP64, SAME_SUMS

pytestmark = pytest.mark.rotating

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
    ("kind", "strategy", "shares"),
    [
        *((kind, "ddp", [3, 2, 1]) for kind in KINDS),
        *((kind, "fsdp", [3, 2, 1]) for kind in ("sgd", "lion")),
        ("lion", "tp", [4, 2]),
        ("muon", "pipeline", [1, 1]),
    ],
)
def test_twenty_steps_of_any_split_are_those_of_one_process(pool, kind, strategy, shares):
    size = len(shares) * (2 if strategy == "tp" else 1)
    found = pool(size).run(cases_optimizers.split_and_alone, **KINDS[kind], strategy=strategy, shares=shares)[0]
    assert len(found["split"]) == 20
    for (_, loss, norm), (_, loss_alone, norm_alone) in zip(found["split"], found["alone"], strict=True):
        assert loss == pytest.approx(loss_alone, rel=FP64)
        assert norm == pytest.approx(norm_alone, rel=10 * FP64)


GANGS = {"ddp": [3, 2, 1], "fsdp": [4, 2], "pipeline": [1, 1], "alone": [6]}
SIX = {"batch": 6, "warmup": 2}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("sgd", "ddp", "fsdp"), ("lion", "fsdp", "ddp"), ("adafactor", "pipeline", "ddp"), ("muon", "ddp", "pipeline")],
)
def test_a_checkpoint_goes_on_under_another_strategy(pool, tmp_path, kind, before, after):
    ask = {"job": {"optimizer": kind, "precision": "fp64", **SIX}, "steps": 6, "rows": [6]}
    whole = run(pool, tmp_path / "whole", GANGS["alone"], **ask)
    first = run(pool, tmp_path / "cut", GANGS[before], stop_after=3, strategy=before, **ask)
    second = run(pool, tmp_path / "cut", GANGS[after], resume_step=3, strategy=after, **ask)
    pieces = first[0]["losses"] + second[0]["losses"]
    assert len(pieces) == 6
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=FP64)


def test_stopped_and_resumed_on_the_same_ranks_it_is_the_same_to_the_bit(pool, tmp_path):
    """Muon: its matrices have other states than the rest."""
    ask = {"job": {"optimizer": "muon", "precision": "fp32", **SIX}, "steps": 5}
    whole = run(pool, tmp_path / "whole", [4, 2], **ask)
    first = run(pool, tmp_path / "cut", [4, 2], stop_after=2, **ask)
    second = run(pool, tmp_path / "cut", [4, 2], resume_step=2, **ask)
    assert first[0]["losses"] + second[0]["losses"] == whole[0]["losses"]
    assert second[0]["digest"] == second[1]["digest"] == whole[0]["digest"]


STATES = [
    ("sgd", {}, "full", 0, 0, []),
    ("sgd", NESTEROV, "full", 1, 1, ["momentum_buffer"]),
    ("lion", {}, "full", 1, 1, ["lion_mean"]),
    ("adafactor", {}, "full", 0, 0.2, ["column_mean", "row_mean", "square_mean", "step"]),
    ("muon", {}, "full", 1, 2, ["exp_avg", "exp_avg_sq", "muon_mean", "step"]),
    ("muon", {}, "lora", 1, 1, ["muon_mean"]),
]


def test_states_take_what_the_plan_says(pool):
    found = pool(1).run(cases_optimizers.states, asked=[row[:3] for row in STATES])[0]
    for (kind, *_, low, high, names), (per_number, kept) in zip(STATES, found, strict=True):
        assert low <= per_number <= high, kind
        assert kept == names


def test_under_fsdp_muon_moves_adapters_which_are_whole_and_nothing_else(pool):
    (said, *_) = pool(2).run(cases_optimizers.refused, shares=[3, 3], kind="muon", method="full")
    assert "fsdp with optimizer: muon and method: full" in said
    assert pool(2).run(cases_optimizers.refused, shares=[3, 3], kind="muon", method="lora") == ["it trains"] * 2


def test_an_orthogonal_matrix_has_singular_values_near_one(pool):
    found = pool(1).run(cases_optimizers.stacks)[0]
    assert 0.5 < found["least"] <= found["most"] < 1.5
    assert found["alike"]
    assert found["matrices"] == [False, True, True, False, False]
