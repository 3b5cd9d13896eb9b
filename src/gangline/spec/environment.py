"""Where the Python of a host comes from: from the words to `Environment`, and the Python behind it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from gangline.runs.cluster import Environment
from gangline.spec.cluster_words import ClusterWords, EnvironmentWords
from gangline.spec.fields import HOST_PATH, HOST_PROGRAM, PATTERNS
from gangline.spec.mistakes import KeyPath, listed, quote
from gangline.spec.paths import absolute, what_is_there, what_was_meant
from gangline.spec.validate import Checked

SOURCES = ("kind", "lock", "conda", "modules", "apptainer")
"""Keys of which one says where the Python comes from; `python` alone is one more way."""
LOCKED = Environment(kind="locked")
INSIDE = "python3"
"""The Python behind a module system or inside an image, where none is named."""


def resolve_environment(
    checked: Checked[ClusterWords], key: KeyPath, words: EnvironmentWords, *, folder: Path
) -> Environment:
    """What the words mean; mistakes are recorded.

    An own Python is left as it was written: what it means depends on the host.
    """
    given = [name for name in SOURCES if getattr(words, name) is not None]
    if len(given) > 1 or (words.python is not None and set(given) & {"kind", "lock", "conda"}):
        given = [*given, "python"] if words.python is not None else given
        checked.report(
            key, seen=listed(given), expected="one source of Python", fix=f"keep one of the keys: {listed(given)}"
        )
    elif not given and words.python is None:
        checked.report(
            key, seen="nothing", expected="one source of Python", fix="write `locked`, or delete the key `environment`"
        )
    for name in ("conda", "apptainer"):
        refuse_parents(checked, (*key, name), getattr(words, name) or "")
    if words.conda:
        return Environment(kind="conda", path=words.conda)
    if words.modules:
        return Environment(kind="modules", modules=tuple(words.modules))
    if words.apptainer:
        return Environment(kind="apptainer", path=words.apptainer)
    if words.lock:
        return Environment(kind="locked", path=_lock(checked, (*key, "lock"), words.lock, folder=folder))
    return Environment(kind="own", path=words.python) if words.python else LOCKED


def _lock(checked: Checked[ClusterWords], key: KeyPath, text: str, *, folder: Path) -> str:
    base = Path.cwd() if checked.document.from_command_line(key) else folder
    path = absolute(text, base)
    if not path.is_file():
        fix = what_was_meant(text, base)
        checked.report(key, seen=what_is_there(text, base), expected="a lock file on this computer", fix=fix)
    return str(path)


def python_here(
    checked: Checked[Any], key: KeyPath, text: str | None, *, folder: Path, reads: tuple[KeyPath, ...] = ()
) -> str:
    """The whole path of a Python on this computer; None: the one that runs gangline."""
    if text is None:
        return sys.executable
    path = str(absolute(text, folder)) if "/" in text or text[0] == "~" else text
    found = shutil.which(path)
    if found is None:
        checked.report(
            key,
            seen=f"{quote(text)}, which is no program on this computer",
            expected="a Python with gangline[train] installed",
            fix="write the whole path of a Python, or delete the line for the one that runs gangline here",
            reads=reads,
        )
    return str(found or text)


def refuse_foreign_python(checked: Checked[Any], key: KeyPath, text: str, *, reads: tuple[KeyPath, ...] = ()) -> None:
    """Record a mistake for what cannot be a Python on another host; nobody has looked there yet."""
    if not _matches(HOST_PROGRAM, text):
        fix = "write, for example, /opt/train/bin/python"
        checked.report(key, seen=f"the text {quote(text)}", expected=PATTERNS[HOST_PROGRAM], fix=fix, reads=reads)


def refuse_foreign_path(
    checked: Checked[Any], key: KeyPath, text: str, *, fix: str, reads: tuple[KeyPath, ...]
) -> None:
    """Record a mistake for a path on another host that is relative, or that has what no path needs."""
    if not _matches(HOST_PATH, text):
        checked.report(key, seen=f"the text {quote(text)}", expected=PATTERNS[HOST_PATH], fix=fix, reads=reads)
    else:
        refuse_parents(checked, key, text)


def _matches(pattern: str, text: str) -> bool:
    """`$` also matches before a last newline."""
    return re.search(pattern, text) is not None and "\n" not in text


def refuse_parents(checked: Checked[Any], key: KeyPath, text: str) -> None:
    """Record a mistake for a path that leaves the folder it names."""
    if ".." in text.split("/"):
        checked.report(key, seen=quote(text), expected="a path without `..`", fix="write the folder that is meant")
