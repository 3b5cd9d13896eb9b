"""Have something done on hosts by programs of ours: JSON lines while it goes on, a result at the end; many at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.runs.cluster import Host
from gangline.runs.files import json_object
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT, CommandResult, Transport

TIMEOUT_S = 7 * 86400.0
"""A large corpus takes hours to tokenise; this only ends what nobody waits for any more."""

SHORT_S = 600.0
"""For what takes a moment, unless a disk hangs or holds gigabytes of small files."""

OnProgress = Callable[[dict[str, Any]], None]


def _nothing(_record: dict[str, Any]) -> None:
    """Nobody listens."""


def ask_worker(
    host: Host,
    transport: Transport,
    words: Sequence[str],
    *,
    secrets: Mapping[str, str] | None = None,
    on_progress: OnProgress = _nothing,
) -> dict[str, Any]:
    """Run `python -m gangline.worker WORDS` on a host and return its result. `secrets`: more of its environment.

    The worker's own GanglineError is raised here as it was there; RunFailed where it printed nothing.
    """
    talk = _Talk(on_progress)
    argv = host.argv("-m", "gangline.worker", *words)
    try:
        result = transport.run(argv, env={**host.code_env, **(secrets or {})}, timeout_s=TIMEOUT_S, on_line=talk.hear)
    except TimeoutError as error:
        raise HostUnreachable(f"{host.name}: {words[0]} did not end", seen=str(error)) from error
    if talk.error:
        raise GanglineError.from_json({**talk.error, "kind": talk.error.get("error_kind")})
    if result.returncode != 0 or talk.result is None:
        raise _failed(host.name, f"gangline.worker {words[0]}", result)
    return talk.result


def ask_agent(
    transport: Transport,
    verb: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: OnProgress = _nothing,
) -> dict[str, Any]:
    """Have the agent of a host do `verb` and return its result; RunFailed with its words where it cannot."""
    talk = _Talk(on_progress)
    stdin = json.dumps(request).encode()
    try:
        result = transport.run((AGENT, verb), stdin=stdin, timeout_s=timeout_s, on_line=talk.hear)
    except TimeoutError as error:
        raise HostUnreachable(f"{transport.host}: {verb} did not end", seen=str(error)) from error
    if talk.error:
        raise RunFailed(
            f"{transport.host}: {talk.error.get('what')}",
            seen=str(talk.error.get("seen", "")),
            fix=str(talk.error.get("fix", "")),
        )
    if result.returncode != 0 or talk.result is None:
        raise _failed(transport.host, f"{AGENT} {verb}", result)
    return talk.result


def run_there(
    transport: Transport, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = SHORT_S
) -> CommandResult:
    """Run a command that should soon end; HostUnreachable where it does not."""
    try:
        return transport.run(argv, env=env, timeout_s=timeout_s)
    except TimeoutError as error:
        raise HostUnreachable(
            f"{transport.host} does not get on",
            seen=str(error),
            fix="a disk or a network file system there may hang: look at it with ssh",
        ) from error


LOOK_S = 120.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""A look before a start loads nothing from the hub."""

AskLook = Callable[[Host, str, Mapping[str, Any]], dict[str, Any]]
"""(host, verb, request) -> what a worker saw; see `ask_look`."""


def ask_look(host: Host, verb: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker on this computer sees of rows. host: its Python. Raises the worker's own error, RunFailed where it
    says nothing.
    """
    argv, stdin = host.argv("-m", "gangline.worker", verb), json.dumps(asked).encode()
    try:
        result = LocalTransport(host).run(argv, stdin=stdin, env={**host.code_env, **OFFLINE}, timeout_s=LOOK_S)
    except TimeoutError as error:
        raise RunFailed(f"{verb} did not end", seen=str(error)) from error
    answer = json_object((result.stdout.strip().splitlines() or [""])[-1]) or {}
    if answer.get("kind") == "error":
        raise GanglineError.from_json({**answer, "kind": answer.get("error_kind")})
    if answer.get("kind") != "result":
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise RunFailed(f"{host.python} cannot look at rows", seen=lines[-1])
    return answer


class _Talk:
    """What a program of ours says, line by line."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self._on_progress = on_progress

    def hear(self, line: str) -> None:
        """Take the next line."""
        record = json_object(line)
        if record is None:  # a library printed something
            return
        if record.get("kind") == "result":
            self.result = record
        elif record.get("kind") == "error":
            self.error = record
        else:
            self._on_progress(record)


def _failed(host: str, what: str, result: CommandResult) -> RunFailed:
    tail = "\n".join(f"    {line}" for line in result.stderr.strip().splitlines()[-40:]) or "    (nothing on stderr)"
    return RunFailed(
        f"{host}: {what} ended with exit code {result.returncode}",
        seen=f"its last words:\n{tail}",
        fix=f"run it by hand to see more: {' '.join(result.argv)}",
    )
