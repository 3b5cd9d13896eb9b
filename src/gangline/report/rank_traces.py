"""Recorded steps of all ranks on one time axis, as a file for Perfetto, and where their time went.

A trace is what torch's profiler writes: Chrome's trace events, with times in microseconds on a clock of that process.
A span of a known time in it (`runs/profile_order.py`) and the measured offset of the host's clock lay it on the clock
of rank 0.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.errors import BadState
from gangline.report.text_table import table
from gangline.runs.profile_order import CLOCK, DATA, STEPS

Spans = list[tuple[float, float]]
"""Begin and end, in order, without overlaps."""
TOP = 8
_ON_CARD = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_COLLECTIVES = ("nccl", "rccl", "gloo:")
_CALLS = "c10d::"
"""The operators that hand a collective to its library, and wait for it on a processor."""
MUCH = 0.1
"""The part of the time from which on data are named as the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank has left."""

    rank: int
    host: str
    on_card: bool
    events: Sequence[Mapping[str, Any]]
    marked_ns: int
    """The host's clock at the span CLOCK."""
    offset_ns: int
    """By how much that clock is ahead of rank 0's."""
    error_ns: int
    """The most that the offset can be wrong."""

    @property
    def shift_us(self) -> float:
        """What is added to a time of its events for microseconds since 1970 on the clock of rank 0."""
        return (self.marked_ns - self.offset_ns) / 1000 - float(self._span(CLOCK)["ts"])

    @property
    def window(self) -> tuple[float, float]:
        """Begin and end of the recorded steps, on its own axis."""
        span = self._span(STEPS)
        return float(span["ts"]), float(span["ts"]) + float(span["dur"])

    def _span(self, name: str) -> Mapping[str, Any]:
        for event in self.events:
            if event.get("name") == name and event.get("cat") == "user_annotation":
                return event
        raise BadState(
            f"the trace of rank {self.rank} on {self.host} lacks its marks",
            seen=f"no span {name!r} among {len(self.events)} events",
            fix="record again: gangline profile",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Where the time of one rank went, in seconds over all recorded steps. Parts but `hidden_s` sum to `window_s`."""

    rank: int
    host: str
    window_s: float
    compute_s: float
    exposed_s: float
    """Collectives while nothing is computed: transfer, and waiting for other ranks."""
    data_s: float
    idle_s: float
    hidden_s: float
    """Collectives beside computing."""
    kernels: tuple[tuple[str, int, float], ...] = field(default=())
    """The dearest kernels, of a processor operators: name, calls, seconds without what they call."""

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        named = ("rank", "host", "window_s", "compute_s", "hidden_s", "exposed_s", "data_s", "idle_s")
        kernels = [{"name": name, "calls": calls, "seconds": round(each, 6)} for name, calls, each in self.kernels]
        return {name: getattr(self, name) for name in named} | {"kernels": kernels}


def share(trace: RankTrace) -> RankShare:
    """Where the time of the recorded steps went.

    Computing is, on a card, the time in which a kernel or a copy runs that is no collective; on a processor that of
    operators, without those that hand a collective over. A moment of computing is not exposed, one of both is hidden.
    """
    window = trace.window
    complete = [event for event in trace.events if event.get("ph") == "X" and "dur" in event]
    collectives = _union((e for e in complete if _is_collective(e, on_card=trace.on_card)), window)
    if trace.on_card:
        work = [e for e in complete if e.get("cat") in _ON_CARD and not _is_collective(e, on_card=True)]
        compute = _union(work, window)
    else:
        work = [e for e in complete if e.get("cat") == "cpu_op"]
        handing = _union((e for e in work if str(e["name"]).startswith(_CALLS)), window)
        compute = _minus(_union((e for e in work if not str(e["name"]).startswith(_CALLS)), window), handing)
    data = _union((e for e in complete if e.get("name") == DATA), window)
    exposed = _minus(collectives, compute)
    # a batch is read by operators, too; on a card beside what runs there
    data = _minus(_minus(data, exposed), compute if trace.on_card else [])
    compute = compute if trace.on_card else _minus(compute, data)
    seconds = {
        "window_s": window[1] - window[0],
        "compute_s": _length(compute),
        "hidden_s": _length(collectives) - _length(exposed),
        "exposed_s": _length(exposed),
        "data_s": _length(data),
    }
    rest = seconds["window_s"] - seconds["compute_s"] - seconds["exposed_s"] - seconds["data_s"]
    rounded = {name: round(value / 1e6, 6) for name, value in seconds.items()}
    kernels = _dearest(_self_times(work) if not trace.on_card else ((e, float(e["dur"])) for e in work))
    return RankShare(
        rank=trace.rank, host=trace.host, idle_s=round(max(0.0, rest) / 1e6, 6), kernels=kernels, **rounded
    )


def _is_collective(event: Mapping[str, Any], *, on_card: bool) -> bool:
    name = str(event.get("name", "")).lower()
    if on_card and event.get("cat") != "kernel":
        return False
    return name.startswith(_COLLECTIVES) and event.get("cat") in {"kernel", "user_annotation", "cpu_op"}


def _union(events: Iterable[Mapping[str, Any]], window: tuple[float, float]) -> Spans:
    """The time within the window that any of them covers."""
    cut = ((max(window[0], float(e["ts"])), min(window[1], float(e["ts"]) + float(e["dur"]))) for e in events)
    found: Spans = []
    for begin, end in sorted(each for each in cut if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _minus(spans: Spans, others: Spans) -> Spans:
    """The time of `spans` that `others` do not cover."""
    found: Spans = []
    at = 0
    for begin, end in spans:
        start = begin
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            if others[index][0] > start:
                found.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        if start < end:
            found.append((start, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def _self_times(work: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each operator with its time without those that it calls, in the same thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in work:
        threads[event.get("tid")].append(event)
    for events in threads.values():
        stack: list[list[Any]] = []  # end, event, time of its callees
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            while stack and stack[-1][0] <= float(event["ts"]):
                yield _closed(stack)
            if stack:
                stack[-1][2] += float(event["dur"])
            stack.append([float(event["ts"]) + float(event["dur"]), event, 0.0])
        while stack:
            yield _closed(stack)


def _closed(stack: list[list[Any]]) -> tuple[Mapping[str, Any], float]:
    _, event, inner = stack.pop()
    return event, max(0.0, float(event["dur"]) - inner)


def _dearest(times: Iterable[tuple[Mapping[str, Any], float]]) -> tuple[tuple[str, int, float], ...]:
    calls: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for event, duration in times:
        name = str(event["name"])
        if not name.startswith(_CALLS):
            calls[name] += 1
            sums[name] += duration / 1e6
    return tuple((name, calls[name], sums[name]) for name in heapq.nlargest(TOP, sums, key=sums.__getitem__))


def merge(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One document of trace events: a process for each rank, times since the first step, by rank 0's clock."""
    zero = min(trace.shift_us + trace.window[0] for trace in traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        shift = trace.shift_us - zero
        tracks: dict[tuple[Any, Any], int] = {}
        events += _named(trace)
        for event in trace.events:
            if event.get("ph") == "M" and event.get("name") != "thread_name":
                continue  # names of processes, which are ranks here
            track = tracks.setdefault((event.get("pid"), event.get("tid")), len(tracks))
            moved = {**event, "pid": trace.rank, "tid": track}
            if "ts" in event:
                moved["ts"] = round(float(event["ts"]) + shift, 3)
            if "id" in event:  # arrows between events, of one rank
                moved["id"] = f"{trace.rank}.{event['id']}"
            events.append(moved)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(trace: RankTrace) -> list[dict[str, Any]]:
    head = {"ph": "M", "pid": trace.rank, "tid": 0}
    return [
        {**head, "name": "process_name", "args": {"name": f"rank {trace.rank} on {trace.host}"}},
        {**head, "name": "process_sort_index", "args": {"sort_index": trace.rank}},
    ]


def lines(traces: Sequence[RankTrace], shares: Sequence[RankShare], *, width: int = 100) -> list[str]:
    """What is shown of it on a terminal."""
    rows = [
        [f"{each.rank}", each.host, f"{each.window_s * 1e3:.1f} ms"]
        + [f"{part / each.window_s:.1%}" for part in (each.compute_s, each.exposed_s, each.data_s, each.idle_s)]
        + [f"{each.hidden_s / each.window_s:.1%}"]
        for each in shares
    ]
    head = ["rank", "host", "steps took", "compute", "exposed", "data", "idle", "hidden"]
    dearest = max(shares, key=lambda each: each.compute_s)
    what = "kernels" if any(trace.on_card for trace in traces) else "operators, without what they call"
    kernels = [
        [f"{each * 1e3:.2f} ms", f"{calls}", name[: max(20, width - 24)]] for name, calls, each in dearest.kernels
    ]
    error_us = max(trace.error_ns for trace in traces) / 1000
    return [
        *table(head, rows),
        "exposed and hidden: exchange between ranks, while nothing and while something is computed",
        f"the clocks of the hosts agree within {error_us:.0f} us after correction",
        "",
        f"dearest {what}, of rank {dearest.rank}:",
        *table(["time", "calls", "name"], kernels),
        *advice(shares),
    ]


def advice(shares: Sequence[RankShare]) -> list[str]:
    """What follows for certain: reading is measured apart, and no rank waits for others all the time."""
    found = []
    slow = [each for each in shares if each.data_s > MUCH * each.window_s]
    if slow:
        names = ", ".join(f"{each.rank} ({each.data_s / each.window_s:.0%})" for each in slow)
        found.append(f"reading batches holds up rank {names}: look at the disk of its host (gangline top)")
    least = min(shares, key=lambda each: each.exposed_s / each.window_s)
    if len(shares) > 1 and least.exposed_s > 0.3 * least.window_s:
        found.append(
            f"every rank spends at least {least.exposed_s / least.window_s:.0%} of the time in exchange alone: "
            "gangline plan compares strategies and batches that exchange less"
        )
    return found
