"""Bytes, rates, durations and lists of names as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

DURATION = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,3})?) ?(s|m|min|h)")
MOST_NAMED = 8
"""Names in a sentence; the others are counted."""
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def is_address(text: str) -> bool:
    """Whether a text is an IP address, not a name."""
    import ipaddress  # not at the top: every verb imports this module

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def format_bytes(num_bytes: float) -> str:
    """Binary units, three significant digits: 1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < (1024 if unit == "B" else 999.5):  # four digits would be shown as 1.02e+03
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_duration(duration_s: float) -> str:
    """Seconds as "4.2 s", "3 min 05 s" or "4 h 41 min"."""
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def parse_duration(text: str) -> float:
    """Seconds of "90s", "10m", "10 min" or "1.5h"; raises ValueError for anything else."""
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration")
    return float(match[1]) * SECONDS[match[2]]


def format_count(count: float) -> str:
    """Decimal units: 5_030_000 -> "5.03 M"."""
    value = float(count)
    for unit in ("", " k", " M", " G"):
        if abs(value) < (1000 if not unit else 999.5):
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 key", "3 keys"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(words: Sequence[str], *, most: int = MOST_NAMED) -> list[str]:
    """The first few words, and how many more there are."""
    return [*words[:most], f"{len(words) - most} more"] if len(words) > most else list(words)


def listed(names: Sequence[str], *, most: int = MOST_NAMED) -> str:
    """As in: pc1, pc2 and pc3, or pc1, pc2 and 7 more."""
    *first, last = shortened(names, most=most) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def fold_names(names: Sequence[str]) -> str:
    """Names with runs of numbers folded: gpu01, gpu02, gpu03, nas -> "gpu[01-03], nas"."""
    return ", ".join(_folded(run) for run in name_runs(names))


def name_runs(names: Sequence[str]) -> list[list[str]]:
    """Names in order, those together that differ in a number which goes up by one."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _follows(before: str, after: str) -> bool:
    (stem, number), (next_stem, next_number) = _split(before), _split(after)
    alike = bool(number and next_number) and stem == next_stem and len(number) == len(next_number)
    return alike and int(next_number) == int(number) + 1


def _split(name: str) -> tuple[str, str]:
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]


def _folded(run: list[str]) -> str:
    stem, first = _split(run[0])
    return run[0] if len(run) < 2 else f"{stem}[{first}-{_split(run[-1])[1]}]"


def listed_ranks(ranks: Iterable[tuple[str, int]]) -> str:
    """Pairs of host and rank, as in: rank 0 on pc1 and ranks 2, 3 on pc2."""
    by_host: dict[str, list[str]] = {}
    for host, rank in ranks:
        by_host.setdefault(host, []).append(str(rank))
    return listed([f"{_ranks(own)} on {host}" for host, own in by_host.items()])


def _ranks(numbers: Sequence[str]) -> str:
    if len(numbers) > MOST_NAMED:
        return f"{len(numbers)} ranks"
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
