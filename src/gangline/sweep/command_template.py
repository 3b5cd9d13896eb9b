"""The command of a sweep over the user's own script: `train.py --lr {lr}`, with the values of a point in the braces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gangline.errors import UsageError
from gangline.report.commands import joined
from gangline.sweep.points import Axis

NAME = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
"""A place for a value. Braces around anything else, such as JSON, stay as they are."""


def split_command(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys with their values, and the command behind them; raises UsageError where one of them is missing."""
    num_keys = next((place for place, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    keys, command = tuple(words[:num_keys]), tuple(words[num_keys:])
    if not keys or not command:
        raise UsageError(
            "gangline sweep run needs keys with values, and a command",
            seen=joined(("gangline", "sweep", "run", *words)),
            fix="gangline sweep run lr=1e-5,1e-4 -- train.py --lr {lr}",
        )
    return keys, command


def require_places(axes: Sequence[Axis], command: Sequence[str]) -> None:
    """Raise UsageError for a place without values, and for values without a place."""
    places = {name for word in command for name in NAME.findall(word)}
    keys = {axis.key for axis in axes}
    if unknown := sorted(places - keys):
        raise UsageError(
            f"the command has a place for {{{unknown[0]}}}, which has no values",
            seen=f"keys with values: {', '.join(sorted(keys))}",
            fix=f"write them before the command: {unknown[0]}=1,2",
        )
    if unused := sorted(keys - places):
        raise UsageError(
            f"the command has no place for {unused[0]}",
            seen=joined(command),
            fix=f"write it into the command, such as --{unused[0]} {{{unused[0]}}}, or leave the key out",
        )


def filled(command: Sequence[str], point: Mapping[str, str]) -> tuple[str, ...]:
    """The command of one point."""
    return tuple(NAME.sub(lambda found: point[found[1]], word) for word in command)
