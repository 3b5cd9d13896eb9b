"""Have a worker verb done on a host: JSON lines while it goes on, a result at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.remote.transport import Result, Transport
from gangline.runs.cluster import Host

TIMEOUT_S = 7 * 86400.0
"""A large corpus takes hours to tokenise; this only ends what nobody waits for any more."""

OnProgress = Callable[[dict[str, Any]], None]


def ask_worker(
    host: Host, transport: Transport, words: Sequence[str], *, on_progress: OnProgress = lambda _: None
) -> dict[str, Any]:
    """Run `python -m gangline.worker WORDS` on a host and return its result.

    The worker's own GanglineError is raised here as it was there; RunFailed where it ended without a word.
    """
    found: dict[str, dict[str, Any]] = {}

    def on_line(line: str) -> None:
        record = _record(line)
        if record is None:
            return
        if record.get("kind") in {"result", "error"}:
            found[record["kind"]] = record
        else:
            on_progress(record)

    argv = (host.python, "-m", "gangline.worker", *words)
    try:
        result = transport.run(argv, timeout_s=TIMEOUT_S, on_line=on_line)
    except TimeoutError as error:
        raise HostUnreachable(f"{host.name}: {words[0]} did not end", seen=str(error)) from error
    if error_record := found.get("error"):
        raise GanglineError.from_json({**error_record, "kind": error_record.get("error_kind")})
    if result.returncode != 0 or "result" not in found:
        raise _failed(host, words[0], result)
    return found["result"]


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a library printed something
    return value if isinstance(value, dict) else None


def _failed(host: Host, verb: str, result: Result) -> RunFailed:
    tail = "\n".join(f"    {line}" for line in result.stderr.strip().splitlines()[-40:]) or "    (nothing on stderr)"
    return RunFailed(
        f"{host.name}: gangline.worker {verb} ended with exit code {result.returncode}",
        seen=f"its last words:\n{tail}",
        fix=f"run it by hand to see more: {' '.join(result.argv)}",
    )
