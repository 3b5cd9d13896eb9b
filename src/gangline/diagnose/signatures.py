"""Finding known words in what programs wrote. Pure."""

from __future__ import annotations

import bisect
import functools
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.diagnose.known import SIGNATURES, Signature

LINE_CHARS = 400
"""Of a line that is shown."""

THEN_CHARS = 3000
"""Within so many characters after the beginning of a match its `then` stands."""

_HEAD = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s])*(?![*?{])")
"""The plain characters with which a regular expression begins; the last one is not optional."""


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
        for match in matches(signature, text):
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
            for match in matches(signature, text):
                return _filled(signature.means, match, host), _filled(signature.fix, match, host)
    return None


def is_witness(text: str) -> bool:
    """Whether words in a text only tell that another rank or host has gone."""
    return any(True for one in SIGNATURES if one.is_echo for _ in matches(one, text))


def matches(signature: Signature, text: str) -> Iterator[re.Match[str]]:
    """Every match of every word. Most texts have few heads, and a search for plain characters is 20 times faster."""
    for word in signature.words:
        expression, head, at, then_at = re.compile(word, re.DOTALL), head_of(word), 0, -1
        while (at := text.find(head, at)) >= 0:
            if then_at < at and (then_at := text.find(signature.then, at)) < 0:
                break
            if then_at - at > THEN_CHARS:
                at = then_at - THEN_CHARS
            elif match := expression.match(text, at):
                yield match
                at = match.end()
            else:
                at += 1


@functools.cache
def head_of(word: str) -> str:
    """The plain characters with which every match of a regular expression begins."""
    found = _HEAD.match(word)
    return re.sub(r"\\(.)", r"\1", found.group()) if found else ""


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


# How far the failure of a rank is from being the cause. Pure.


ECHOES = 2
"""Weight from which a failure is no cause any more."""

ORDERED = 3
"""Weight of an end that an order or torchrun brought about."""

Failure = Mapping[str, Any]
"""How one rank ended, as its host agent says (HostStatus.failures)."""


def weight(failure: Failure) -> int:
    """How far a failure is from being the cause; time decides among equals.

    0: an error of its own, or a signal from outside. 1: an exit that nobody explained. 2: an echo of another's end.
    3: torchrun or an order ended it.
    """
    code = failure["exit"]
    if failure["error"] is not None:
        return ECHOES if is_echo(failure["error"]) else 0
    if failure["ordered"] or code == -signal.SIGTERM or code is None:
        return ORDERED
    return 0 if code < 0 else 1


def is_echo(error: Mapping[str, Any]) -> bool:
    """Whether an error only tells that another rank has gone."""
    return is_witness(f"{error.get('what', '')}\n{error.get('seen', '')}")


# The verdict that torchrun prints when it ends: it is not believed, and not shown as a cause.


VERDICT = "Root Cause (first observed failure)"
LEFT_OUT = (
    'what torchrun calls the "root cause" is left out: it is the end that it saw first, often of a rank that waited'
)
_FENCE = re.compile(r"={20,}\s*$")


def without_verdict(lines: Sequence[str]) -> list[str]:
    """Lines of torchrun's output without its verdict, which ends at a line of equals signs; a line says so instead."""
    kept: list[str] = []
    inside = False
    for line in lines:
        if VERDICT in line:
            inside = True
            kept.append(LEFT_OUT)
        elif inside and _FENCE.search(line):
            inside = False
        elif not inside:
            kept.append(line)
    return kept
