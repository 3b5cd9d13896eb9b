"""The points of a sweep, from the words of the user: `optimizer.learning_rate=1e-5,1e-4 method.rank=8,16`. Pure.

A key with several values is an axis, and so is one with a range (`1e-5..1e-3`, `1e-5..1e-3:log`, `8..64`), of which
only `--random` takes points. A key with one value is the same in all points. Commas in brackets and quotes belong to
the value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gangline.errors import UsageError

Point = dict[str, str]
"""Key of the job -> its value, as on a command line."""
MOST_POINTS = 10_000
"""More is a slip: each is a run."""
_RANGE = re.compile(r"(?P<low>[-+.\w]+?)\.\.(?P<high>[-+.\w]+?)(?P<log>:log)?")
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One key and what it may be: some values, or a range of numbers."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    """A range whose logarithm is drawn evenly."""
    is_whole: bool = False
    """A range of whole numbers."""

    @property
    def is_range(self) -> bool:
        """Whether only a draw gives a value."""
        return not self.values

    def draw(self, dice: Random) -> str:
        """A value at random; numbers that are not whole have four digits, so that a point can be typed again."""
        if self.values:
            return dice.choice(self.values)
        low, high = (math.log(edge) if self.is_log else edge for edge in (self.low, self.high))
        drawn = dice.uniform(low, high)
        drawn = math.exp(drawn) if self.is_log else drawn
        if self.is_whole:
            return str(round(drawn) if self.is_log else dice.randint(int(self.low), int(self.high)))
        return f"{drawn:.4g}"


def axes_of(words: Sequence[str]) -> tuple[Axis, ...]:
    """One axis per word, those with a single value too. Raises UsageError for a word that is none."""
    axes = tuple(map(_axis, words))
    keys = [axis.key for axis in axes]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise UsageError(
            f"{twice[0]} is given twice",
            seen=f"expected each key once, found {', '.join(word for word in words if word.startswith(twice[0]))}",
            fix=f"write all its values in one word: {twice[0]}=1,2",
        )
    return axes


def grid(axes: Sequence[Axis], *, least: int = 2) -> list[Point]:
    """Every combination of values; the last key varies fastest. Raises UsageError for ranges, and for fewer points than
    `least`.
    """
    for axis in axes:
        if axis.is_range:
            raise UsageError(
                f"{axis.key}: a range has no points of its own",
                seen=f"{axis.low:g}..{axis.high:g} without --random",
                fix=f"say how many are drawn: --random 20; or name the values: {axis.key}={axis.low:g},{axis.high:g}",
            )
    if math.prod(len(axis.values) for axis in axes) > MOST_POINTS:
        raise _too_many(math.prod(len(axis.values) for axis in axes))
    combinations = itertools.product(*(axis.values for axis in axes))
    return _several([dict(zip([axis.key for axis in axes], values, strict=True)) for values in combinations], least)


def draw_points(axes: Sequence[Axis], count: int, *, seed: int) -> list[Point]:
    """Different points at random; the same seed gives the same ones. Raises UsageError where there are fewer."""
    if not 1 <= count <= MOST_POINTS:
        raise _too_many(count)
    dice = Random(seed)
    found: dict[tuple[str, ...], Point] = {}
    for _ in range(100 * count):
        point = {axis.key: axis.draw(dice) for axis in axes}
        found.setdefault(tuple(point.values()), point)
        if len(found) == count:
            return _several(list(found.values()))
    raise UsageError(
        f"--random {count} asks for more points than there are",
        seen=f"these keys have {len(found)} different points",
        fix=f"--random {len(found)}, all of them without --random, or more values",
    )


def shown(point: Mapping[str, str], keys: Sequence[str] | None = None) -> str:
    """A point in words, with the keys that vary: `optimizer.learning_rate=1e-4 method.rank=8`."""
    return " ".join(f"{key}={value}" for key, value in point.items() if keys is None or key in keys)


def varying(points: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys with more than one value among the points."""
    keys = dict.fromkeys(key for point in points for key in point)
    return [key for key in keys if len({point.get(key) for point in points}) > 1]


def read_number(text: str) -> float | None:
    """The number that a value is; None: it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _several(points: list[Point], least: int = 2) -> list[Point]:
    if len(points) < least:
        raise UsageError(
            "a sweep needs at least two points",
            seen="expected a key with several values, found none",
            fix="optimizer.learning_rate=1e-5,1e-4; a single run: gangline train",
        )
    return points


def _axis(word: str) -> Axis:
    key, equals, text = word.partition("=")
    if not equals or not key or "" in key.split("."):
        raise UsageError(
            f"{word[:80]!r} is no key with values",
            seen="expected key=value,value",
            fix="write a dotted key, an equals sign and values, such as optimizer.learning_rate=1e-5,1e-4",
        )
    if (found := _RANGE.fullmatch(text)) and "." not in {found["low"][-1], found["high"][0]}:
        return _range(key, text, found)
    values = _split(text)
    if "" in values and len(values) > 1:
        raise UsageError(f"{key}: a value is empty", seen=text, fix="take a comma away, or write '' for an empty text")
    if len(set(values)) < len(values):
        raise UsageError(f"{key}: a value is there twice", seen=text, fix="name each value once")
    return Axis(key=key, values=tuple(values))


def _range(key: str, text: str, found: re.Match[str]) -> Axis:
    low, high, is_log = read_number(found["low"]), read_number(found["high"]), found["log"] is not None
    if low is None or high is None or not low < high or (is_log and low <= 0):
        raise UsageError(
            f"{key}: {text} is no range",
            seen=f"expected two numbers, the smaller one first{' and above 0' if is_log else ''}",
            fix=f"{key}=1e-5..1e-3:log, or {key}=8..64",
        )
    is_whole = all(re.fullmatch(r"[-+]?\d+", found[edge]) for edge in ("low", "high"))
    return Axis(key=key, low=low, high=high, is_log=is_log, is_whole=is_whole)


def _split(text: str) -> list[str]:
    """The values between the commas that are in no bracket and no quotes."""
    values, depth, quote, begun = [], 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPEN or character in _CLOSE:
            depth += 1 if character in _OPEN else -1
        elif character == "," and depth == 0:
            values.append(text[begun:place].strip())
            begun = place + 1
    return [*values, text[begun:].strip()]


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"{count} points",
        seen=f"expected 2 to {MOST_POINTS}: each is a run",
        fix="take values away, or draw some: --random 50",
    )
