"""The small parts of the worker: schedule, clipping, decay, recomputation, FLOPs, lines."""

import math

import pytest

from tests.train import cases_parts
from tests.train.tolerances import SAME_SUMS

pytestmark = pytest.mark.rotating


def test_warm_up_counts_optimizer_steps_and_wastes_none(pool):
    rates = pool(1).run(cases_parts.rates, kind="constant", warmup=4, total=8)[0]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_falls_to_the_final_ratio_one_step_after_the_last(pool):
    rates = pool(1).run(cases_parts.rates, kind="linear", warmup=2, total=10, final_ratio=0.2)[0]
    assert rates == pytest.approx([0.5, 1.0, *(1 - 0.1 * step for step in range(8))])


def test_cosine_is_half_way_in_the_middle(pool):
    rates = pool(1).run(cases_parts.rates, kind="cosine", warmup=0, total=100)[0]
    assert rates[0] == 1
    assert rates[50] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    assert rates == sorted(rates, reverse=True)


SCHEDULES = [
    ("constant_with_warmup", {}, {"kind": "constant"}),
    ("linear", {}, {"kind": "linear"}),
    ("cosine", {}, {"kind": "cosine"}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"kind": "cosine", "final_ratio": 0.1}),
    ("cosine_with_restarts", {"num_cycles": 3}, {"kind": "cosine-restarts", "cycles": 3}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-4}, {"kind": "polynomial", "power": 2.0, "final_ratio": 0.05}),
    ("inverse_sqrt", {}, {"kind": "inverse-sqrt"}),
    ("inverse_sqrt", {"timescale": 20}, {"kind": "inverse-sqrt", "timescale": 20}),
    *(
        (
            "warmup_stable_decay",
            {"num_decay_steps": 13, "decay_type": decay, "min_lr_ratio": final},
            {"kind": "wsd", "decay_steps": 13, "decay": decay, "final_ratio": final},
        )
        for decay, final in (("cosine", 0.0), ("linear", 0.1), ("1-sqrt", 0.0))
    ),
]


@pytest.mark.parametrize("warmup", [0, 7])
def test_every_schedule_is_that_of_transformers_at_every_step(pool, warmup):
    """What differs: our warm-up is a step ahead unless the job says otherwise, and that of wsd begins at 0."""
    for name, words, schedule in SCHEDULES:
        ask = {"name": name, "warmup": warmup, "total": 60, "words": words, "schedule": schedule}
        found = pool(1).run(cases_parts.rates_of_transformers, **ask)[0]
        begin = warmup if words.get("min_lr_ratio") else 0
        assert found["ours"][begin:] == pytest.approx(found["theirs"][begin:], rel=1e-12, abs=0), name
        assert found["shifted"][warmup:] == found["ours"][warmup:], name
        assert found["shifted"][:warmup] == pytest.approx([2e-3 * (step + 1) / 7 for step in range(warmup)]), name


@pytest.mark.parametrize(("maximum", "after"), [(1.0, 1.0), (20.0, 13.0), (None, 13.0)])
def test_the_global_norm_is_clipped(pool, maximum, after):
    assert pool(1).run(cases_parts.clipped, maximum=maximum)[0] == pytest.approx([13.0, after])


def test_only_matrices_decay_and_the_optimizer_is_whole_before_the_first_step(pool):
    assert pool(1).run(cases_parts.decayed) == [{"matrices": [2], "vectors": [1], "ready": True}]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("shares", [[10], [7, 3]])
def test_activation_checkpointing_changes_no_number(pool, shares, method):
    for result in pool(len(shares)).run(cases_parts.recomputed, shares=shares, method=method):
        assert result["on"]
        assert result["error"] < SAME_SUMS


@pytest.mark.parametrize(("full", "passes"), [(True, 3), (False, 2)])
def test_flops_follow_the_formula_and_utilisation_needs_every_peak(pool, full, passes):
    found = pool(1).run(cases_parts.flops_of, full=full)[0]
    layers, hidden = found["shape"]
    assert found["flops"] == pytest.approx(passes * (2 * found["weights"] * 8 + 4 * layers * hidden * (9 + 25)))
    assert found["use"] == pytest.approx(0.1)
    assert found["unknown"] is None
    assert found["strange"] is None


def test_combinations_that_cannot_train_are_refused(pool):
    for changes in ({"precision": "fp16", "parameters": "compute"}, {"precision": "fp64", "parameters": "fp32"}):
        error = pool(1).run(cases_parts.precision_error, **changes)[0]
        assert error["kind"] == "UsageError"
        assert "precision.parameters: " in error["what"]
    assert pool(1).run(cases_parts.precision_error, precision="auto") == [None]


def test_a_line_that_was_cut_is_not_glued_to_the_next_and_nan_is_said_in_words(pool):
    first, torn, last = pool(1).run(cases_parts.torn_line)[0]
    assert (first, torn) == ('{"a": 1}', '{"b": ')
    assert '"loss": "nan"' in last


def test_figures_that_cannot_be_written_end_the_run_unless_the_job_goes_on(pool):
    error = pool(1).run(cases_parts.figures_without_room, on_failure="stop")[0]["error"]
    assert error["kind"] == "RunFailed"
    assert "No space left" in error["seen"]
    assert pool(1).run(cases_parts.figures_without_room, on_failure="continue") == [{"kinds": ["step", "evaluation"]}]
    found = pool(1).run(cases_parts.figures_without_room, on_failure="stop", exporter=True)
    assert found == [{"kinds": ["step", "evaluation"]}]


def test_random_weights_do_not_depend_on_the_dtype_they_are_drawn_for(pool):
    assert pool(1).run(cases_parts.drawn_alike) == [True]


def test_every_gradient_of_the_chunked_head_is_that_of_the_models_own_logits(pool):
    assert pool(1).run(cases_parts.plain_and_fused_gradients)[0] < SAME_SUMS


def test_members_of_one_enum_may_be_written_as_getattr_and_nothing_else(pool):
    # Python 3.11.2 writes them so; a system Python then could not read its own checkpoints
    assert pool(1).run(cases_parts.enum_members) == [[True, "refused", "refused"]]
