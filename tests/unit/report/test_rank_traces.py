"""Recorded steps of several ranks: one axis, and where the time went."""

import pytest

from gangline.errors import BadState
from gangline.report.rank_traces import RankTrace, advice, lines, merge, share
from gangline.runs.profile_order import CLOCK, DATA, STEPS, ProfileOrder

BASE_US = 5_000_000.0
"""Where the clock of the profiler stands when the steps begin."""


def event(name, cat, begin_ms, end_ms, *, tid=1):
    times = {"ts": BASE_US + begin_ms * 1000, "dur": (end_ms - begin_ms) * 1000}
    return {"ph": "X", "name": name, "cat": cat, "pid": 4711, "tid": tid, **times}


def trace(*events, rank=0, on_card=False, clock_ahead_ms=0.0, late_ms=0.0, window_ms=100.0):
    """Steps of 100 ms; the mark lies 1 ms before. late_ms: how much later than rank 0's they begin."""
    marks = [event(CLOCK, "user_annotation", -1, -0.9), event(STEPS, "user_annotation", 0, window_ms)]
    marked_ms = 1_000_000 + late_ms + clock_ahead_ms - 1
    return RankTrace(
        rank=rank,
        host=f"pc{rank + 1}",
        on_card=on_card,
        events=[{"ph": "M", "name": "process_name", "pid": 4711, "args": {"name": "python"}}, *marks, *events],
        marked_ns=int(marked_ms * 1e6),
        offset_ns=int(clock_ahead_ms * 1e6),
        error_ns=40_000,
    )


def milliseconds(found):
    parts = (found.compute_s, found.hidden_s, found.exposed_s, found.data_s, found.idle_s)
    return [round(each * 1000, 3) for each in parts]


def test_on_a_processor_operators_compute_and_collectives_are_exposed_where_none_runs():
    found = share(
        trace(
            event(DATA, "user_annotation", 0, 10),
            event("aten::index", "cpu_op", 2, 8),  # reading, too
            event("aten::mm", "cpu_op", 10, 50),
            event("autograd::engine::evaluate_function: X", "cpu_op", 50, 80),
            event("c10d::allreduce_", "cpu_op", 60, 80),  # it waits inside of that operator
            event("gloo:all_reduce", "user_annotation", 40, 75, tid=9),
            event("aten::late", "cpu_op", 95, 130),  # only up to the end of the steps
        )
    )
    # computing 10 to 60 and 95 to 100; the exchange 40 to 75, of which 60 to 75 alone
    assert milliseconds(found) == [55.0, 20.0, 15.0, 10.0, 20.0]
    assert found.window_s == 0.1


def test_on_a_card_only_what_runs_there_counts():
    found = share(
        trace(
            event("aten::mm", "cpu_op", 0, 100),
            event("gemm", "kernel", 10, 40, tid=7),
            event("gemm", "kernel", 30, 50, tid=8),  # another stream, at the same time
            event("Memcpy HtoD", "gpu_memcpy", 60, 62, tid=7),
            event("ncclDevKernel_AllReduce_Sum", "kernel", 45, 70, tid=9),
            event("nccl:all_reduce", "user_annotation", 0, 90),  # the call, not the transfer
            event(DATA, "user_annotation", 0, 15),
            on_card=True,
        )
    )
    assert milliseconds(found) == [42.0, 7.0, 18.0, 10.0, 30.0]
    assert found.kernels[0][:2] == ("gemm", 2)
    assert found.kernels[0][2] == pytest.approx(0.05)


def test_an_operator_has_its_time_without_what_it_calls():
    found = share(
        trace(
            event("aten::linear", "cpu_op", 0, 30),
            event("aten::addmm", "cpu_op", 5, 25),
            event("aten::addmm", "cpu_op", 40, 50),
            event("aten::other", "cpu_op", 0, 100, tid=2),
        )
    )
    assert {name: (calls, round(each, 6)) for name, calls, each in found.kernels} == {
        "aten::other": (1, 0.1),
        "aten::addmm": (2, 0.03),
        "aten::linear": (1, 0.01),
    }


def test_all_ranks_lie_on_the_clock_of_rank_0():
    traces = [
        trace(event("a", "cpu_op", 5, 6)),
        trace(event("b", "cpu_op", 5, 6), rank=1, clock_ahead_ms=700.0, late_ms=2.0),
    ]
    events = {each["name"]: each for each in merge(traces)["traceEvents"] if each["name"] in {"a", "b"}}
    assert events["a"]["ts"] == pytest.approx(5000)
    assert events["b"]["ts"] == pytest.approx(7000)
    assert (events["a"]["pid"], events["b"]["pid"]) == (0, 1)
    names = [each["args"]["name"] for each in merge(traces)["traceEvents"] if each["name"] == "process_name"]
    assert names == ["rank 0 on pc1", "rank 1 on pc2"]


def test_arrows_stay_within_their_rank():
    arrow = {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "id": 7, "pid": 4711, "tid": 1, "ts": BASE_US}
    ids = [each["id"] for each in merge([trace(arrow), trace(arrow, rank=1)])["traceEvents"] if "id" in each]
    assert ids == ["0.7", "1.7"]


def test_advice_names_reading_and_an_exchange_that_holds_up_all():
    reading = trace(event(DATA, "user_annotation", 0, 30), event("aten::mm", "cpu_op", 30, 100))
    fast = trace(event("aten::mm", "cpu_op", 0, 100), rank=1)
    (said,) = advice([share(reading), share(fast)])
    assert "holds up rank 0 (30%)" in said
    waits = [event("aten::mm", "cpu_op", 0, 50), event("gloo:all_reduce", "user_annotation", 50, 100)]
    (said,) = advice([share(trace(*waits)), share(trace(*waits, rank=1))])
    assert "every rank spends at least 50%" in said
    assert advice([share(trace(*waits)), share(fast)]) == [], "one rank waits for the other"
    assert any("within 40 us" in line for line in lines([reading, fast], [share(reading), share(fast)]))


def test_a_trace_without_marks_is_refused():
    bare = trace()
    bare = RankTrace(rank=0, host="pc1", on_card=False, events=[], marked_ns=0, offset_ns=0, error_ns=0)
    with pytest.raises(BadState, match="lacks its marks"):
        share(bare)


@pytest.mark.parametrize("record", [{"id": "a", "steps": 0}, {"id": "a", "steps": 51}, {"id": "../a", "steps": 1}])
def test_an_order_is_checked_where_it_is_read(record):
    with pytest.raises(ValueError, match="no order"):
        ProfileOrder.of(record)
