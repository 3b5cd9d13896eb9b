"""What a soak says: faults, what grew, and whether its bars are reached (soak.py)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.hangs_world import Line

GOODPUT, LOSS_OFF = 0.8, 0.01
MORE_PROCESSES, MORE_HANDLES, MORE_MIB, MORE_MEMORY = 1.0, 2.0, 2.0, 0.1
"""What is no growth: one more process of a kind; two more handles each; 2 MiB and a tenth more memory each."""
WATCHED = {
    "rss_mib": {"host-agent", "supervisor"},
    "handles": {"host-agent", "supervisor", "sshd", "ssh", "prefork", "other python"},
}
"""Of which kinds memory and handles may not grow. Ranks are new in every attempt, and of torchruns those of the first
attempt, which meet, hold fewer than later ones: there single processes are looked at."""
LASTING = ("host-agent", "supervisor", "torchrun", "prefork")
"""Processes that outlive attempts."""
LONG = 10
"""Samples of one process that say something of it."""


def report(lines: Sequence[Line]) -> int:
    """Tables of the last soak; 1 if a bar is missed."""
    ends = [number for number, line in enumerate(lines) if line["kind"] == "end"]
    if not ends:
        print("no soak has come to its end")
        return 1
    begin = max(number for number, line in enumerate(lines[: ends[-1]]) if line["kind"] == "begin")
    end, mine = lines[ends[-1]], lines[begin : ends[-1]]
    samples = [line for line in mine if line["kind"] == "sample"]
    _print_faults([line for line in mine if line["kind"] == "fault"])
    grown = growth(samples)
    _print_growth(grown)
    oldest = [row for host, kind in sorted(_kinds(samples)) if kind in LASTING for row in _oldest(host, kind, samples)]
    for row in oldest:
        who = f"the {row['kind']} on {row['host']} that lived longest, {row['samples']} samples"
        print(f"{who}: MiB {row['mib']}, handles {row['handles']}")
    losses = next((line for line in lines[ends[-1] :] if line["kind"] == "losses"), {})
    print(f"\n{json.dumps(end)}\n{json.dumps(losses)}")
    missed = _missed(end, losses, [*grown, *oldest])
    print("; ".join(missed) or "all bars reached")
    return 1 if missed else 0


def growth(samples: Sequence[Line]) -> list[Line]:
    """Medians of the first and the last quarter, by host and kind of process."""
    size = max(1, len(samples) // 4)
    return [_grown(host, kind, (samples[:size], samples[-size:])) for host, kind in sorted(_kinds(samples))]


def _kinds(samples: Sequence[Line]) -> set[tuple[str, str]]:
    return {(host, kind) for sample in samples for host, kinds in sample["hosts"].items() for kind in kinds}


def _grown(host: str, kind: str, quarters: tuple[Sequence[Line], Sequence[Line]]) -> Line:
    row: Line = {"host": host, "kind": kind, "grows": []}
    for name, more, part in (
        ("processes", MORE_PROCESSES, 0.0),
        ("handles", MORE_HANDLES, 0.0),
        ("rss_mib", MORE_MIB, MORE_MEMORY),
    ):
        before, after = (statistics.median(_each(host, kind, name, samples)) for samples in quarters)
        row[name] = [round(before, 1), round(after, 1)]
        is_watched = name == "processes" or kind in WATCHED[name]
        if is_watched and after > before * (1 + part) + more:
            row["grows"].append(name)
    return row


def _each(host: str, kind: str, name: str, samples: Sequence[Line]) -> Iterator[float]:
    """Of every sample: processes in all; handles and memory of each, where there is one."""
    rows = [sample["hosts"].get(host, {}).get(kind) for sample in samples]
    if name == "processes":
        yield from (row["processes"] if row else 0 for row in rows)
    else:
        yield from [row[name] / row["processes"] for row in rows if row] or [0.0]


def _oldest(host: str, kind: str, samples: Sequence[Line]) -> list[Line]:
    """Memory and handles of the process that was seen most often; [] where none lived long."""
    series: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for sample in samples:
        row = sample["hosts"].get(host, {}).get(kind)
        if row:
            pid, since, mib, handles = row["oldest"]
            series.setdefault((pid, since), []).append((mib, handles))
    longest = max(series.values(), key=len, default=[])
    if len(longest) < LONG:
        return []
    before, after = longest[1], longest[-1]  # not the first: it has just begun
    grows = ["memory of one process"] if after[0] > before[0] * (1 + MORE_MEMORY) + MORE_MIB else []
    grows += ["handles of one process"] if after[1] > before[1] + MORE_HANDLES else []
    found = {"mib": [before[0], after[0]], "handles": [before[1], after[1]], "grows": grows}
    return [{"host": host, "kind": kind, "samples": len(longest), **found}]


def _missed(end: Line, losses: Line, grown: Sequence[Line]) -> list[str]:
    missed = list(end["wrong"])
    missed += [] if end["goodput"] >= GOODPUT else [f"goodput {end['goodput']:.1%}"]
    off = losses.get("loss_off_end")
    missed += [] if off is not None and off <= LOSS_OFF else [f"the last losses are off by {off}"]
    missed += [f"steps without figures: {losses['missing_steps']}"] if losses.get("missing_steps") else []
    return missed + [f"{row['kind']} on {row['host']}: {', '.join(row['grows'])} grow" for row in grown if row["grows"]]


def _print_faults(faults: Sequence[Line]) -> None:
    print("\n| fault | times | seconds to the next step, median (worst) | steps done again, worst |\n|" + "---|" * 4)
    for kind in sorted({line["fault"] for line in faults}):
        mine = [line for line in faults if line["fault"] == kind]
        back = [line["back_s"] for line in mine if line["back_s"] is not None]
        times = f"{statistics.median(back):.1f} ({max(back):.1f})" if back else "-"
        print(f"| {kind} | {len(mine)} | {times} | {max(line.get('lost_steps', 0) for line in mine)} |")


def _print_growth(grown: Sequence[Line]) -> None:
    print("\n| host | kind | processes, first and last quarter | handles each | MiB each |\n|" + "---|" * 5)
    for row in grown:
        cells = [f"{row[name][0]:g}, {row[name][1]:g}" for name in ("processes", "handles", "rss_mib")]
        print(f"| {row['host']} | {row['kind']} | {' | '.join(cells)} |")
