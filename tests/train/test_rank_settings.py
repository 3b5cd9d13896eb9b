"""Ranks with a micro-batch and a recomputation of their own train as one process does."""

import pytest

from tests.train import cases_rank_settings
from tests.train.test_exact import _worst
from tests.train.tolerances import FP32, FP32_GRADIENT, FP32_SUM, FP64

pytestmark = pytest.mark.rotating

SETTINGS = [[1, True], [3, False], [8, None]]
SHARES = [3, 7, 14]
GRADIENT = {"fp64": FP64, "fp32": FP32_GRADIENT}


def test_every_rank_takes_passes_of_its_own_size_and_recomputes_where_it_is_told(pool):
    found = pool(3).run(cases_rank_settings.passes, shares=SHARES, settings=SETTINGS)
    assert [each["passes"] for each in found] == [[1, 1, 1], [2, 2, 3], [7, 7]]
    assert [each["recomputing"] for each in found] == [True, False, False]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_gradient_is_that_of_one_process(pool, method, precision, packed):
    ask = {"shares": SHARES, "settings": SETTINGS, "method": method, "precision": precision, "packed": packed}
    for result in pool(3).run(cases_rank_settings.gradient, **ask):
        assert result["norm"] > 1e-3
        assert result["error"] <= GRADIENT[precision]


@pytest.mark.parametrize(("attention", "limit"), [("eager", FP32_SUM), ("sdpa", FP64)])
def test_dropout_within_attention_belongs_to_samples(pool, attention, limit):
    """eager: transformers rounds the weights of attention to fp32 whatever the model computes in."""
    ask = {"shares": SHARES, "settings": SETTINGS, "precision": "fp64", "method": "lora"}
    for result in pool(3).run(cases_rank_settings.gradient, **ask, attention_dropout=0.2, attention=attention):
        assert result["norm"] > 1e-3
        assert result["error"] <= limit


@pytest.mark.parametrize(
    ("shares", "precision", "limit"), [(SHARES, "fp64", FP64), ([9, 0, 15], "fp64", FP64), (SHARES, "fp32", FP32)]
)
def test_losses_and_evaluations_are_those_of_one_process(pool, shares, precision, limit):
    result = pool(3).run(cases_rank_settings.losses, shares=shares, settings=SETTINGS, precision=precision)[0]
    assert len(result["split"]) == 12
    assert _worst(result) <= limit
    assert result["equal"]


def test_a_strategy_that_wants_all_ranks_alike_says_so(pool):
    for error in pool(3).run(cases_rank_settings.refused, shares=SHARES, settings=SETTINGS, strategy="local-sgd"):
        assert error["what"].startswith("strategy: local-sgd trains with one micro-batch")
        assert "sizes 1, 3, 8" in error["seen"]


def test_dropout_that_is_drawn_by_micro_batch_is_refused(pool):
    ask = {"shares": SHARES, "settings": SETTINGS, "strategy": "ddp"}
    assert pool(3).run(cases_rank_settings.refused, **ask) == [None, None, None]
    for error in pool(3).run(cases_rank_settings.refused, **ask, dropout=0.1):
        assert "dropout" in error["what"]
