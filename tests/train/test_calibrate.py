"""The ranks of `bench compute`: what they time, within time and memory, one line each."""

import pytest

from tests.train import cases_calibrate

pytestmark = pytest.mark.rotating


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_every_rank_times_a_small_copy_at_the_same_time(pool, method):
    for rank, lines in enumerate(pool(2).run(cases_calibrate.lines, method=method)):
        (device,) = of_kind(lines, "device")
        assert (device["gpu"], device["dtype"], device["fused_loss"], device["kernels"]) == (
            "cpu",
            "fp32",
            True,
            "sdpa",
        )
        points = of_kind(lines, "point")
        assert [(point["tokens"], point["layers"]) for point in points] == [(16, 2), (16, 1), (128, 2), (128, 1)]
        assert {point["rank"] for point in points} == {rank}
        for point in points:
            assert 0 < point["head_s"] <= point["seconds"]
            assert 0 < point["backward_share"] < 1
            assert point["repeats"] >= 3
        (update,) = of_kind(lines, "optimizer")
        assert update["seconds"] > 0
        trained = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
        everything = 2 * 300 * 64 + 2 * (64 * 192 + 3 * 64 * 128 + 128) + 64
        assert update["numbers"] == (everything if method == "full" else trained)


def test_what_does_not_fit_into_memory_is_left_out_and_the_rest_is_timed(zygote):
    ranks = zygote.gang(2, cases_calibrate.lines, {"free": 1})
    lines = ranks.results()[0]
    assert {point["tokens"] for point in of_kind(lines, "point")} == {16}
    assert of_kind(lines, "skipped")[0] | {"rank": 0} == {
        "kind": "skipped",
        "rank": 0,
        "what": "2 x 64 tokens",
        "why": "too little free memory",
    }
    assert of_kind(lines, "optimizer")


def test_a_measurement_without_time_ends_at_once(pool):
    lines = pool(2).run(cases_calibrate.lines, seconds=0.0)[0]
    assert not of_kind(lines, "point")
    assert of_kind(lines, "skipped")[0]["why"] == "there was no time left"


def test_the_copy_has_the_kernels_that_the_strategy_allows(pool):
    assert [pool(2).run(cases_calibrate.adapted_at_once, by_module=each)[0] for each in (False, True)] == [14, 0]


def test_the_copy_can_lose_a_layer_and_gets_it_back(pool):
    assert pool(2).run(cases_calibrate.depths)[0] == [[True, 2], [True, 1], 2]


def test_a_slowed_rank_sleeps_and_reports_longer_times(zygote):
    """So the machine is as busy as in training."""
    plain, slow = zygote.gang(2, cases_calibrate.slowed, {"slowdowns": [1.0, 3.0]}).results()
    assert plain == [pytest.approx(0.03), []]
    assert slow == [pytest.approx(0.09), [0.06]]
