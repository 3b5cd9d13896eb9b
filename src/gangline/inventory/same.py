"""Do all hosts hold the same model and the same data? Compared by content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gangline.errors import HostUnreachable
from gangline.inventory.plain import plain
from gangline.remote.transport import AGENT, Transport

TIMEOUT_S = 3600.0
"""A disk reads 300 GB in that time; somebody is looking at the progress."""
NUM_NAMES = 10
NUM_FILES = 100_000
"""Of more files nobody is told which differ; that they do, the hash over all of them tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What one host holds at a path."""

    host: str
    path: str
    tree: str | None = None
    """One hash over all names and contents; None: there is nothing."""
    num_files: int = 0
    num_bytes: int = 0
    error: str | None = None
    """Why nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model or data set on all hosts."""

    what: str
    """What people call it: model, data."""
    copies: tuple[Copy, ...]
    differing: tuple[str, ...] = ()
    """Files that are not the same, or not there, on all hosts that hold it; the first ten."""


def compare(
    what: str,
    paths: Mapping[str, str],
    transports: Mapping[str, Transport],
    *,
    on_progress: Callable[[str, dict[str, Any]], None] = lambda _host, _record: None,
) -> Compared:
    """Hash a path on every host at the same time. paths: by host, they need not be called the same.

    on_progress: gets the host and {"done_bytes", "total_bytes"} while it goes on.
    """

    def ask(host: str) -> tuple[Copy, dict[str, Any]]:
        return _ask(host, paths[host], transports[host], lambda record: on_progress(host, record))

    with ThreadPoolExecutor(max_workers=min(64, max(1, len(paths)))) as pool:
        answers = list(pool.map(ask, paths))
    marks = [files for copy, files in answers if copy.tree is not None]
    names = sorted({name for files in marks for name in files})
    differing = [name for name in names if len({json.dumps(files.get(name)) for files in marks}) > 1]
    return Compared(
        what=what,
        copies=tuple(copy for copy, _ in answers),
        differing=tuple(plain(name) or "." for name in differing[:NUM_NAMES]),
    )


def _ask(
    host: str, path: str, transport: Transport, on_progress: Callable[[dict[str, Any]], None]
) -> tuple[Copy, dict[str, Any]]:
    """The copy of a host, and its files by name where it told them."""
    found: list[dict[str, Any]] = []
    files: dict[str, Any] = {}

    def hear(line: str) -> None:
        record = _record(line)
        if record.get("kind") == "progress":
            on_progress(record)
        elif record.get("kind") == "files" and isinstance(record.get("files"), dict) and len(files) < NUM_FILES:
            files.update(record["files"])
        elif record.get("kind") == "result":
            found.append(record)

    try:
        request = json.dumps({"folders": [path]}).encode()
        result = transport.run((AGENT, "digests"), stdin=request, timeout_s=TIMEOUT_S, on_line=hear)
    except (HostUnreachable, OSError) as error:
        return Copy(host=host, path=path, error=plain(str(error).partition("\n")[0])), {}
    folders = found[-1].get("folders") if found else None
    answer = folders.get(path) if isinstance(folders, dict) else None
    if result.returncode != 0 or not isinstance(answer, dict):
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return Copy(host=host, path=path, error=plain(last)), {}
    return _copy(host, path, answer), files


def _copy(host: str, path: str, answer: dict[str, Any]) -> Copy:
    tree, odd = answer.get("tree"), answer.get("odd")
    if isinstance(odd, dict) and odd:
        name, why = next(iter(odd.items()))
        return Copy(host=host, path=path, error=plain(f"{name}: {why}"))
    return Copy(
        host=host,
        path=path,
        tree=tree if isinstance(tree, str) else None,
        num_files=_number(answer.get("num_files")),
        num_bytes=_number(answer.get("num_bytes")),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _record(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}  # a library printed something
    return value if isinstance(value, dict) else {}
