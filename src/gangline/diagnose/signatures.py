"""Finding known words in what programs wrote. Pure."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gangline.diagnose.known import SIGNATURES, Signature

LINE_CHARS = 400
"""Of a line that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Known words that stand in a text."""

    id: str
    means: str
    fix: str
    is_echo: bool
    line: str
    """The line in which they stand first."""
    number: int
    """Of that line, from 1."""
    times: int
    """In how many lines they stand."""


def recognise(text: str, *, host: str = "the host") -> list[Sighting]:
    """Known words in a text, in the order in which they stand there first. A line tells one thing: of several
    signatures that fit, the first in the table.
    """
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    taken: set[int] = set()
    found = []
    for signature in SIGNATURES:
        place: tuple[int, re.Match[str]] | None = None
        times = 0
        for match in _matches(signature, text):
            first, last = (bisect.bisect_right(starts, at) - 1 for at in (match.start(), match.end() - 1))
            if first not in taken:
                times += 1
                place = min(place or (first, match), (first, match), key=lambda each: each[0])
                taken.update(range(first, last + 1))
        if place is not None:
            number, match = place
            end = starts[number + 1] if number + 1 < len(starts) else len(text)
            line = text[starts[number] : end].strip()[:LINE_CHARS]
            found.append(_sighting(signature, match, host, line, number + 1, times))
    return sorted(found, key=lambda sighting: sighting.number)


def verdict(text: str, *, host: str) -> tuple[str, str] | None:
    """What is wrong and what to do, where words in a text are the whole cause; None where none of them is there."""
    for signature in SIGNATURES:
        if signature.is_verdict:
            for word in signature.words:
                if match := re.search(word, text, re.DOTALL):
                    return _filled(signature.means, match, host), _filled(signature.fix, match, host)
    return None


def is_witness(text: str) -> bool:
    """Whether words in a text only tell that another rank or host has gone."""
    return any(re.search(word, text, re.DOTALL) for one in SIGNATURES if one.is_echo for word in one.words)


def _matches(signature: Signature, text: str) -> Iterator[re.Match[str]]:
    for word in signature.words:
        yield from re.finditer(word, text, re.DOTALL)


def _sighting(signature: Signature, match: re.Match[str], host: str, line: str, number: int, times: int) -> Sighting:
    return Sighting(
        id=signature.id,
        means=_filled(signature.means, match, host),
        fix=_filled(signature.fix, match, host),
        is_echo=signature.is_echo,
        line=line,
        number=number,
        times=times,
    )


def _filled(words: str, match: re.Match[str], host: str) -> str:
    return words.format(*match.groups(), host=host)
