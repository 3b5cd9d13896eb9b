"""Memory that is not as planned is told once, after the first steps."""

import pytest

from tests.train import cases_memory_watch

GIB = 1 << 30


def told(zygote, **words):
    return zygote.fork(cases_memory_watch.told, **{"steps": 30, **words}).result()


def test_a_rank_that_needs_more_than_planned_is_named_once(zygote):
    (event,) = told(zygote, planned=[10 * GIB, 8 * GIB], memory=[10 * GIB, 9 * GIB])
    assert (event["event"], event["step"], event["rank"], event["host"]) == ("memory-off", 10, 1, "pc1")
    assert event["what"].startswith("rank 1 on pc1 needs 9 GiB for tensors, and 8 GiB were planned (+12 %): ")


def test_much_less_is_told_too(zygote):
    (event,) = told(zygote, planned=[10 * GIB, 8 * GIB], memory=[5 * GIB, 5 * GIB])
    assert "rank 1 on pc1 needs 5 GiB for tensors" in event["what"]
    assert "there is room for larger micro-batches" in event["what"]


@pytest.mark.parametrize(
    ("planned", "memory", "steps"),
    [
        ([10 * GIB, 8 * GIB], [10.9 * GIB, 7 * GIB], 30),  # within what is to be expected
        ([None, None], [10 * GIB, 8 * GIB], 30),  # no GPU
        ([GIB, GIB], [2 * GIB, GIB], 9),  # too early
    ],
)
def test_else_nothing_is_said(zygote, planned, memory, steps):
    assert told(zygote, planned=planned, memory=[int(each) for each in memory], steps=steps) == []
