"""What the lines of a trainer benchmark say: medians, ratios by round, and whether the losses agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.trainer_cases import CASES

Line = dict[str, Any]
MIB = 1 << 20
# Dense bf16 peaks of the makers' data sheets, in FLOP/s, by a part of the name that CUDA gives.
PEAKS = {"H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}

COLUMNS = (
    "case",
    "side",
    "tokens/s (median)",
    "ours / side: median",
    "worst round",
    "peak memory, MiB",
    "above start, MiB",
    "MFU",
    "final loss",
)


class LossesDiffer(Exception):
    """Two sides did not do the same training: their figures must not be compared."""


def markdown(lines: Iterable[Line]) -> str:
    """A table of all cases, one row per side. Raises LossesDiffer."""
    lines = list(lines)
    loaded = any(line["loaded"] for line in lines)
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in dict.fromkeys(line["case"] for line in lines):
        rows += _case_rows([line for line in lines if line["case"] == name])
    notes = [_note(lines)] + (["**Taken on a loaded machine: not for the record.**"] if loaded else [])
    return "\n".join([*rows, "", *notes])


def check_losses(lines: Sequence[Line]) -> None:
    """Raise LossesDiffer unless all measurements of one case have the same mean and final loss."""
    for name in ("mean_loss", "final_loss") if lines else ():
        values = {f"{line['side']} round {line['round']}": line[name] for line in lines}
        tolerance = CASES[lines[0]["case"]].loss_tolerance
        if not max(values.values()) - min(values.values()) <= tolerance:
            raise LossesDiffer(f"case {lines[0]['case']}: {name} differs by more than {tolerance}: {values}")


SPEED_COLUMNS = (
    "row",
    "side",
    "tokens/s",
    "ours / side",
    "MFU",
    "slowest step / median",
    "peak memory, GiB",
    "processor",
    "mean loss",
    "final loss",
)


def speed_markdown(lines: Iterable[Line]) -> str:
    """The speed table, one row per side; sides that failed, and rows whose losses differ, say so."""
    lines = list(lines)
    rows = [f"| {' | '.join(SPEED_COLUMNS)} |", "|---" * len(SPEED_COLUMNS) + "|"]
    notes = []
    for name in dict.fromkeys(line["case"] for line in lines):
        found = [line for line in lines if line["case"] == name]
        good = [line for line in found if "error" not in line]
        try:
            check_losses(good)
            ours = [line for line in good if line["side"] == "ours"]
        except LossesDiffer as error:
            notes.append(f"invalid: {error}")
            ours = []
        for side in dict.fromkeys(line["side"] for line in found):
            own = [line for line in good if line["side"] == side]
            failed = next((line["error"] for line in found if line["side"] == side and "error" in line), "")
            rows.append(_speed_row(own, ours) if own else f"| {name} | {side} | {failed} |" + " |" * 7)
    for line in [line for line in lines if "error" not in line][:1]:
        named = ", ".join(f"{package} {number}" for package, number in line["versions"].items())
        notes.append(f"{line['device']}, commit {line['commit']}, {named}.")
    return "\n".join([*rows, "", *notes])


def _speed_row(lines: list[Line], ours: list[Line]) -> str:
    speeds = {line["round"]: line["tokens_per_s"] for line in ours}
    is_ours = lines[0]["side"] == "ours"
    ratios = [speeds[line["round"]] / line["tokens_per_s"] for line in lines if line["round"] in speeds]
    uneven = [max(line["step_s"]) / median(line["step_s"]) for line in lines if line["step_s"]]
    cells = [
        lines[0]["case"],
        lines[0]["side"],
        f"{median(line['tokens_per_s'] for line in lines):,.0f}",
        "" if is_ours or not ratios else f"{median(ratios):.3f}",
        _utilisation(lines),
        f"{max(uneven):.2f}" if uneven else "-",
        f"{median(line['peak_bytes'] for line in lines) / (1 << 30):.2f}",
        f"{100 * median(line['cpu_s'] / line['duration_s'] for line in lines):.0f} %",
        f"{median(line['mean_loss'] for line in lines):.4f}",
        f"{median(line['final_loss'] for line in lines):.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _case_rows(lines: list[Line]) -> list[str]:
    check_losses(lines)
    sides = {side: [line for line in lines if line["side"] == side] for side in dict.fromkeys(x["side"] for x in lines)}
    return [_row(side_lines, sides.get("ours", [])) for side_lines in sides.values()]


def _row(lines: list[Line], ours: list[Line]) -> str:
    speeds = {line["round"]: line["tokens_per_s"] for line in ours}
    is_ours = lines[0]["side"] == "ours"
    ratios = [speeds[line["round"]] / line["tokens_per_s"] for line in lines if line["round"] in speeds]
    speed_cells = ["", ""] if is_ours or not ratios else [f"{median(ratios):.3f}", f"{min(ratios):.3f}"]
    peak = median(line["peak_bytes"] for line in lines) / MIB
    above = median(line["peak_bytes"] - line["start_bytes"] for line in lines) / MIB
    cells = [
        lines[0]["case"],
        lines[0]["side"],
        f"{median(line['tokens_per_s'] for line in lines):,.0f}",
        *speed_cells,
        f"{peak:,.0f}",
        f"{above:,.0f}",
        _utilisation(lines),
        f"{median(line['final_loss'] for line in lines):.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _utilisation(lines: list[Line]) -> str:
    peak = next((value for name, value in PEAKS.items() if name in lines[0]["device"]), None)
    return f"{100 * median(line['flops_per_s'] for line in lines) / peak:.1f} %" if peak else "-"


def _note(lines: list[Line]) -> str:
    first = lines[0]
    rounds = len({line["round"] for line in lines})
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    busiest = max(line["others"] for line in lines)
    return (
        f"{rounds} rounds, {first['threads']} threads, {first['device']}, {versions}; "
        f"load per core at the start {first['load']}, other programs took up to {busiest:.0%} of the cores."
    )
