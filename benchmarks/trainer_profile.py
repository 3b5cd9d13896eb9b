"""What a step of our loop does on the device, and when that waits for the processor: torch's profiler, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trainer_cases import Case

TOP = 25
LEAST_GAP_US = 20.0
Span = tuple[float, float, str]
"""Begin and end in microseconds, and a name."""


def profile(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    """Train our side of a row, and write what two of its steps did into `out`."""
    import torch
    from torch.profiler import ProfilerActivity

    from benchmarks.trainer_sides import PROFILED_STEPS, Clock, train_ours

    on_card = case.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    profiler = torch.profiler.profile(activities=activities)
    train_ours(case, folder, Clock(case, profiler=profiler))
    device, processor = spans(profiler.events() or [])
    title = (
        f"{case.name}, {PROFILED_STEPS} steps of ours on {torch.cuda.get_device_name() if on_card else 'a processor'}"
    )
    out.write_text(report(device if on_card else processor, processor, title=title), encoding="utf-8")
    return {"path": str(out)}


def spans(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """What ran on the device (kernels and copies), and the operators on the processor; each in order of its begin."""
    found: dict[bool, list[Span]] = {True: [], False: []}
    for event in events:
        found[event.device_type.name == "CUDA"].append((event.time_range.start, event.time_range.end, event.name))
    return sorted(found[True]), sorted(found[False])


def report(device: Sequence[Span], processor: Sequence[Span], *, title: str) -> str:
    """Text: the share of time in which the device was busy, its dearest kernels, and what it waited for."""
    if not device:
        return f"{title}: nothing was recorded\n"
    durations = defaultdict[str, list[float]](list)
    for begin, end, name in device:
        durations[name].append(end - begin)
    first, last = device[0][0], max(end for _, end, _ in device)
    gaps = list(idle(device))
    idle_us = sum(end - begin for begin, end in gaps)
    head = f"{title}: {(last - first) / 1e3:.1f} ms, of which the device was idle {idle_us / 1e3:.1f} ms "
    rows = [
        head + f"({idle_us / (last - first):.1%}) in {len(gaps)} gaps; {len(device)} kernels and copies",
        "",
        f"{'ms':>9} {'share':>6} {'calls':>6}  kernel",
    ]
    for name in sorted(durations, key=lambda each: sum(durations[each]), reverse=True)[:TOP]:
        each = durations[name]
        rows.append(f"{sum(each) / 1e3:9.2f} {sum(each) / (last - first):6.1%} {len(each):6}  {name[:140]}")
    waits = defaultdict[str, list[float]](list)
    for begin, end in gaps:
        if end - begin >= LEAST_GAP_US:
            waits[_inside(processor, end)].append(end - begin)
    rows += [
        "",
        f"gaps of {LEAST_GAP_US:.0f} us and more, by what the processor did at their end (outermost > innermost)",
    ]
    for name in sorted(waits, key=lambda each: sum(waits[each]), reverse=True)[:TOP]:
        each = waits[name]
        rows.append(f"{sum(each) / 1e3:9.2f} ms {len(each):6} gaps, longest {max(each) / 1e3:.2f} ms  {name[:140]}")
    return "\n".join(rows) + "\n"


def idle(device: Sequence[Span]) -> Iterable[tuple[float, float]]:
    """Where nothing ran between the first begin and the last end."""
    until = device[0][1]
    for begin, end, _ in device:
        if begin > until:
            yield until, begin
        until = max(until, end)


def _inside(processor: Sequence[Span], moment: float) -> str:
    """The operators that were under way, outermost and innermost."""
    under_way = [span for span in processor if span[0] <= moment <= span[1]]
    if not under_way:
        return "between operators (Python)"
    longest = max(under_way, key=lambda span: span[1] - span[0])
    shortest = min(under_way, key=lambda span: span[1] - span[0])
    return longest[2] if longest is shortest else f"{longest[2]} > {shortest[2]}"
