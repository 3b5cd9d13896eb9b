"""Ranks with a micro-batch and a recomputation of their own train as one process does."""

import pytest

from tests.train import cases_exact, cases_rank_settings, cases_resume
from tests.train.test_exact import _worst
from tests.train.tolerances import FP32, FP32_GRADIENT, FP32_SUM, FP64

pytestmark = pytest.mark.rotating

SETTINGS = [[1, True], [3, False], [8, None]]
MOVING = [[1, True, True], [3, False, False], [8, True, None]]
"""The inputs of the layers of rank 0 lie in the machine's memory: on a processor where they are, by the same hooks."""
SHARES = [3, 7, 14]
GRADIENT = {"fp64": FP64, "fp32": FP32_GRADIENT}


def test_every_rank_takes_passes_of_its_own_size_and_recomputes_where_it_is_told(pool):
    found = pool(3).run(cases_rank_settings.passes, shares=SHARES, settings=SETTINGS)
    assert [each["passes"] for each in found] == [[1, 1, 1], [2, 2, 3], [7, 7]]
    assert [each["recomputing"] for each in found] == [True, False, False]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_moves_inputs_of_layers_has_the_gradient_of_one_process(pool, strategy):
    found = pool(3).run(cases_rank_settings.passes, shares=SHARES, settings=MOVING)
    assert [each["recomputing"] for each in found] == [True, False, True]
    assert found[0]["moved"] > 0
    assert [each["moved"] for each in found[1:]] == [0, 0]
    ask = {"shares": SHARES, "settings": MOVING, "precision": "fp64", "method": "lora", "strategy": strategy}
    for result in pool(3).run(cases_rank_settings.gradient, **ask):
        assert result["norm"] > 1e-3
        assert result["error"] <= FP64


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_gradient_is_that_of_one_process(pool, method, precision, packed):
    ask = {"shares": SHARES, "settings": SETTINGS, "method": method, "precision": precision, "packed": packed}
    for result in pool(3).run(cases_rank_settings.gradient, **ask):
        assert result["norm"] > 1e-3
        assert result["error"] <= GRADIENT[precision]


def test_a_mixture_of_experts_has_the_gradient_of_one_process(pool):
    ask = {"shares": SHARES, "settings": SETTINGS, "precision": "fp32", "mixture": True}
    for result in pool(3).run(cases_rank_settings.gradient, **ask):
        assert result["norm"] > 1e-3
        assert result["error"] <= FP32_GRADIENT


@pytest.mark.parametrize(
    ("attention", "packed", "limit"), [("eager", False, FP32_SUM), ("sdpa", False, FP64), ("sdpa", True, FP64)]
)
def test_dropout_within_attention_belongs_to_samples(pool, attention, packed, limit):
    """eager: transformers rounds the weights of attention to fp32 whatever the model computes in."""
    ask = {"shares": SHARES, "settings": SETTINGS, "precision": "fp64", "method": "lora", "packed": packed}
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


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("precision", "packed"), [("fp64", False), ("fp64", True), ("fp32", False)])
def test_ranks_whose_weights_lie_in_parts_have_the_gradient_of_one_process(pool, method, precision, packed):
    ask = {"shares": SHARES, "settings": SETTINGS, "method": method, "precision": precision, "packed": packed}
    for result in pool(3).run(cases_rank_settings.gradient, **ask, strategy="fsdp", attention_dropout=0.2):
        assert result["norm"] > 1e-3
        assert result["error"] <= GRADIENT[precision]


@pytest.mark.parametrize(
    ("strategy", "shares", "settings"),
    [
        ("fsdp", SHARES, SETTINGS),
        ("fsdp", [9, 0, 15], SETTINGS),
        ("hsdp", [3, 7, 5, 9], [*SETTINGS, [2, True]]),
    ],
)
def test_losses_of_weights_in_parts_are_those_of_one_process(pool, strategy, shares, settings):
    ask = {"shares": shares, "settings": settings, "strategy": strategy}
    result = pool(len(shares)).run(cases_rank_settings.losses, **ask)[0]
    assert len(result["split"]) == 12
    assert _worst(result) <= FP64
    assert result["equal"]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "shares", "rows", "settings"),
    [
        ("pipeline", [2, 1, 1], (10,), [[1, True], [1, False], [1, True]]),
        ("pipeline", [1, 1, 1, 1], (7, 3), [[1, True], [1, False], [1, False], [1, True]]),
        ("tp", [7, 3], (10,), [[1, False], [1, False], [1, True], [1, True]]),
    ],
)
def test_ranks_with_a_part_of_the_layers_recompute_each_as_it_wants(pool, strategy, shares, rows, settings, method):
    ask = {"shares": shares, "settings": settings, "strategy": strategy, "rows": rows, "method": method, "steps": 12}
    ask["dropout"] = 0.0  # theirs belongs to micro-batches, and that of one process to samples
    result = pool(len(settings)).run(cases_exact.losses, **ask)[0]
    assert len(result["split"]) == 12
    assert _worst(result) <= FP64


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rounds_have_the_losses_of_hosts_that_take_one_sample_at_a_time(pool, dropout):
    """Shares of which an inner step, and so a pass, holds micro-batches of several steps of the run."""
    for result in pool(3).run(cases_rank_settings.rounds, shares=SHARES, settings=SETTINGS, attention_dropout=dropout):
        assert _worst(result) <= FP64
        assert result["moved"] <= FP64


def test_a_strategy_that_wants_all_ranks_alike_says_so(pool):
    for error in pool(3).run(cases_rank_settings.refused, shares=SHARES, settings=SETTINGS, strategy="zero-1"):
        assert error["what"].startswith("strategy: zero-1 trains with one micro-batch")
        assert "sizes 1, 3, 8" in error["seen"]


def test_dropout_that_is_drawn_by_micro_batch_is_refused(pool):
    ask = {"shares": SHARES, "settings": SETTINGS, "strategy": "ddp"}
    assert pool(3).run(cases_rank_settings.refused, **ask) == [None, None, None]
    for error in pool(3).run(cases_rank_settings.refused, **ask, dropout=0.1):
        assert "dropout" in error["what"]


def test_shares_that_move_leave_the_losses_those_of_one_process(pool):
    ask = {"shares": SHARES, "settings": SETTINGS, "moving": True, "steps": 24, "method": "lora"}
    result = pool(3).run(cases_rank_settings.losses, **ask)[0]
    assert len({tuple(each) for each in result["shares"]}) > 1
    assert _worst(result) <= FP64
    assert result["equal"]


JOB = {"batch": 24, "draws": "sample", "method": "lora", "precision": "fp64"}
FULL = {**JOB, "method": "full"}


def piece(gang, folder, shares, settings, *, resume_step=None, stop_after=None, job=JOB, strategy="ddp"):
    """One attempt of 8 steps, or the part of it until a stop, as rank 0 tells it."""
    ask = {"shares": shares, "settings": settings, "steps": 8, "resume_step": resume_step, "stop_after": stop_after}
    return gang.run(cases_resume.piece, folder=str(folder), job=job, strategy=strategy, **ask)[0]


@pytest.mark.parametrize(("strategy", "job"), [("ddp", JOB), ("fsdp", FULL)])
def test_a_run_goes_on_with_other_settings_on_other_ranks_as_one_process_would(pool, tmp_path, strategy, job):
    how = {"strategy": strategy, "job": job}
    begun = piece(pool(3), tmp_path / "a", SHARES, SETTINGS, stop_after=4, **how)
    other = piece(pool(2), tmp_path / "a", [9, 15], [[4, True], [6, False]], resume_step=begun["step"], **how)
    alone = piece(pool(1), tmp_path / "b", [24], [[1, False]], job=job)
    assert len(begun["losses"] + other["losses"]) == len(alone["losses"]) == 8
    assert _worst({"split": begun["losses"] + other["losses"], "alone": alone["losses"]}) <= FP64


@pytest.mark.parametrize(("strategy", "job"), [("ddp", JOB), ("fsdp", FULL)])
def test_a_run_goes_on_with_the_same_settings_as_if_it_had_not_stopped_to_the_last_bit(pool, tmp_path, strategy, job):
    how = {"strategy": strategy, "job": job}
    through = piece(pool(3), tmp_path / "a", SHARES, SETTINGS, **how)
    begun = piece(pool(3), tmp_path / "b", SHARES, SETTINGS, stop_after=4, **how)
    ended = piece(pool(3), tmp_path / "b", SHARES, SETTINGS, resume_step=begun["step"], **how)
    assert begun["losses"] + ended["losses"] == through["losses"]
    assert ended["digest"] == through["digest"]
