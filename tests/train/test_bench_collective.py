"""The ranks of `bench network`: sizes in order, within time and memory, one line each."""

import signal

import pytest

from tests.train import cases_bench
from tests.train.pool import RankFailure


def test_every_size_is_a_line_of_rank_0(pool):
    head, other = pool(2).run(cases_bench.measured, sizes=[1 << 20, 4 << 10], seconds=30.0)
    assert other == []
    small, large = head
    assert (small["kind"], small["operation"], small["num_bytes"], small["world_size"]) == (
        "collective",
        "all_reduce",
        4096,
        2,
    )
    assert large["num_bytes"] == 1 << 20
    assert 3 <= large["iterations"] <= 50
    assert large["seconds"] > 0


def test_a_size_for_which_there_is_no_time_is_left_out(pool):
    first, second = pool(2).run(cases_bench.measured, sizes=[4 << 10, 1 << 20], seconds=-1.0)[0]
    assert (first["kind"], second["kind"]) == ("collective", "skipped")
    assert second["why"].startswith("-1.")


def test_a_size_that_does_not_fit_is_left_out(zygote):
    ranks = zygote.gang(2, cases_bench.measured, {"sizes": [4 << 10, 1 << 20], "seconds": 30.0, "free": 3 << 20})
    assert ranks.results()[0][1] == {
        "kind": "skipped",
        "rank": 0,
        "num_bytes": 1 << 20,
        "why": "too little free memory",
    }


def test_a_rank_that_waits_for_nobody_ends_itself(zygote):
    rank = zygote.fork(cases_bench.wait_for_nobody)
    with pytest.raises(RankFailure):
        rank.result()
    assert rank.wait() == -signal.SIGALRM
