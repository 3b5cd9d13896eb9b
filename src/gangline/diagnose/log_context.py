"""What lines around a failure add to it: where each rank stood, its learning rate, what its sizes tell. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

_OWN_FRAME = re.compile(rb'File "(?![^"\n]{0,300}(?:[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|<))')
_FRAME = re.compile(rb'File "(?:[^"\n]{0,300}[/\\])?([^"/\\\n]{1,100})", line (\d{1,7})')
_TRACEBACK = b"raceback (most recent call last)"
_OF_RANK = re.compile(rb"[^\n]{0,30}?\brank[ =:]?(\d{1,6})\b[\]:)]{0,3}\s{0,3}([^\n]{1,300})")
"""A line that begins with its rank, and its words."""
_WORDS_CHARS = 100
_RATE = re.compile(
    r"(?i)(?<![a-z])(?:lr|learning[_ ]rate)['\"]?[:=| ]{1,4}['\"]?(\d{1,9}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?)(?![\w.])"
)
_HIGHEST_RATE, _ZERO_RATES = 1.0, 4
"""No optimizer in use for language models learns with a rate above this; so many rates of 0 are no warm-up."""
_VIEW = re.compile(r"shape '\[([\d, ]{1,80})\]' is invalid for input of size (\d{1,15})")


def stood_at(lines: Sequence[bytes], tag: bytes) -> str:
    """The last call of the user's own code in a traceback whose lines begin with a tag: `train.py line 3: loss()`.

    lines: those above the exception. Empty where they have none.
    """
    own = [line for line in lines if line.startswith(tag)]
    for at in range(len(own) - 1, -1, -1):
        if _TRACEBACK in own[at]:
            return ""
        if _OWN_FRAME.search(own[at]) and (frame := _FRAME.search(own[at])):
            name, number = frame[1].decode("utf-8", "replace"), frame[2].decode()
            code = own[at + 1][len(tag) :].decode("utf-8", "replace").strip() if at + 1 < len(own) else ""
            return f"{name} line {number}" + (f": {code[:_WORDS_CHARS]}" if code and "File " not in code else "")
    return ""


def last_words(lines: Sequence[bytes], but: str) -> tuple[str, str] | None:
    """The last line of another rank than `but`, as rank and words; None where no line has its rank at its beginning."""
    for line in reversed(lines):
        found = _OF_RANK.match(line)
        if found and (rank := found[1].decode()) != but:
            return rank, found[2].decode("utf-8", "replace").strip()[:_WORDS_CHARS]
    return None


def ranks_apart(places: Mapping[str, str], other: tuple[str, str] | None) -> str:
    """That ranks stood at different places of the code, which each named; empty where they do not show that.

    places: by rank. other: a rank that raised nothing, and its last words.
    """
    if len(set(places.values())) > 1:
        shown = sorted(places.items(), key=lambda each: int(each[0]))
        told = [
            next(each for each in shown if each[1] == place) for place in dict.fromkeys(place for _, place in shown)
        ]
        where = ", ".join(f"rank {rank} at {place}" for rank, place in told[:3])
        return f"ranks waited for each other at different places of the script: {where}"
    if len(places) == 1 and other is not None and other[0] not in places:
        ((rank, place),) = places.items()
        return f"rank {rank} waited at {place}, where rank {other[0]} did not come: its last line is '{other[1]}'"
    return ""


def too_high_rate(lines: Sequence[bytes]) -> str:
    """The last learning rate that the lines tell, where it is far too high; else empty."""
    text = b"\n".join(line[:2000] for line in lines).decode("utf-8", "replace")
    rates = [found[1] for found in _RATE.finditer(text)]
    return rates[-1] if rates and float(rates[-1]) > _HIGHEST_RATE else ""


def zero_rate(texts: Sequence[str]) -> str:
    """That the learning rate is 0 in all lines that tell it; a rate that was rounded to 0 does not count."""
    rates = [found[1] for text in texts for found in _RATE.finditer(text)]
    is_zero = len(rates) >= _ZERO_RATES and all(float(each) == 0 for each in rates)
    is_exact = all("e" in each.lower() or each in {"0", "0.0"} for each in rates)
    return f"the learning rate is 0 in the last {len(rates)} lines that tell it" if is_zero and is_exact else ""


def view_of_a_part(text: str) -> str:
    """That a view asks for a whole number of times the numbers that are there: only a part of them; else empty."""
    found = _VIEW.search(text)
    if found is None or "0" in (sizes := found[1].replace(" ", "").split(",")) or not all(sizes):
        return ""
    wanted, there = math.prod(map(int, sizes)), int(found[2])
    if there == 0 or wanted % there or wanted == there:
        return ""
    times = wanted // there
    return (
        f"the view wants {times} times as many numbers as there are: where {times} ranks share the weight before it "
        f"(tensor parallelism), each has 1/{times} of the heads, and the view must take that number of heads"
    )
