"""Bytes, rates and durations as people read them."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Binary units, three significant digits: 1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
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


def format_count(count: float) -> str:
    """Decimal units: 5_030_000 -> "5.03 M"."""
    value = float(count)
    for unit in ("", " k", " M", " G"):
        if abs(value) < 1000:
            return f"{value:.0f}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"
