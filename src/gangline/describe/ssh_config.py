"""The hosts that the user's ssh_config names one by one. What their words mean is for `ssh -G` to say."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from gangline.spec.hostfile import is_destination

MAX_DEPTH = 16
"""As ssh itself: files that include each other have an end."""
MAX_BYTES = 1 << 20
_FIRST_EQUALS = re.compile(r"^(\w+)\s*=\s*")


def config_hosts(path: Path) -> list[str]:
    """The names behind `Host`, in order, without patterns; [] where there is no such file.

    Included files count where they stand; `Match` blocks do not.
    """
    return [name for name in dict.fromkeys(_names(path, folder=path.parent, depth=0)) if is_destination(name)]


def _names(path: Path, *, folder: Path, depth: int) -> Iterator[str]:
    for keyword, values in _lines(path):
        if keyword == "host":
            yield from (value for value in values if not set(value) & set("*?!"))
        elif keyword == "include" and depth < MAX_DEPTH:
            for file in (file for value in values for file in _included(value, folder)):
                yield from _names(file, folder=folder, depth=depth + 1)


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        keyword, values = _words(line.strip())
        if values:
            yield keyword, values


def _words(line: str) -> tuple[str, list[str]]:
    """`Host a "b c"` and `Host=a`; a line that cannot be read has no words."""
    if not line or line.startswith("#"):
        return "", []
    try:
        keyword, *values = shlex.split(_FIRST_EQUALS.sub(r"\1 ", line), comments=True)
    except ValueError:
        return "", []
    return keyword.lower(), values


def _included(pattern: str, folder: Path) -> list[Path]:
    path = Path(pattern).expanduser()
    return [Path(found) for found in sorted(glob.glob(str(path if path.is_absolute() else folder / path)))]  # noqa: PTH207
