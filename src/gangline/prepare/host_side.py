"""The other half of `prepare`, on one host: asked over the transport, as root where a change needs it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.prepare.prepare_step import Asks, FileRead, HostReading, PrepareStep, Scope, StepPlan
from gangline.transport.bootstrap import PREPARE_ARGV, prepare_words
from gangline.transport.ssh_options import printable, understood
from gangline.transport.transport import AGENT, Transport

TIMEOUT_S = 600.0
READ_S = 60.0
NEEDS_PASSWORD = "sudo needs a password"  # noqa: S105  (a message)
WRONG_PASSWORD = "sudo refuses the password"  # noqa: S105  (a message)
TRIES = 3
AskSecret = Callable[[str], str | None]
"""Asks the user for a word that is not shown; None where nobody is there to answer."""


class Passwords:
    """The passwords for sudo, asked once per host, in memory only."""

    def __init__(self, ask: AskSecret) -> None:
        self._ask = ask
        self._known: dict[str, str] = {}
        self._last: str | None = None
        self._lock = threading.Lock()

    def of(self, host: str) -> str | None:
        """The one that is known; None: it was not asked yet."""
        return self._known.get(host)

    def ask(self, host: str, user: str, *, purpose: str = "sudo") -> str:
        """Ask the user; an empty answer is the one given last. Raises UsageError where nobody answers.

        purpose: sudo, or ssh for the first login, whose password is then tried for sudo, too.
        """
        with self._lock:
            same = " (Enter: the same as before)" if self._last else ""
            said = self._ask(f"password of {user} on {host} for {purpose}{same}:")
            if said is None:
                raise UsageError(
                    f"{host}: nobody is here to type the password of {user}",
                    seen=f"{purpose} asks for a password, and there is no terminal",
                    fix="run it in a terminal"
                    + (", log in as root, or give that user sudo without a password" if purpose == "sudo" else ""),
                )
            self._known[host] = self._last = said or self._last or ""
            return self._known[host]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoable:
    """What an undo would do on a host, in order, as it was shown."""

    rows: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]
    """Changes that somebody else has touched since: `what`, `ours`, `theirs`, `step`."""
    token: str
    """Stands for the rows: the host does nothing if they are others by then."""


class HostSide:
    """One host."""

    def __init__(self, name: str, transport: Transport, *, user: str, passwords: Passwords) -> None:
        """user: who is asked for a password."""
        self.name = name
        self.user = user
        self._transport = transport
        self._passwords = passwords

    def by(self, transport: Transport) -> HostSide:
        """The same host over another connection."""
        return HostSide(self.name, transport, user=self.user, passwords=self._passwords)

    def read(self, asks: Asks, *, scope: Scope = "user") -> HostReading:
        """What a step wants to know; raises GanglineError."""
        (record,) = self._ask({"do": "read", "scope": scope, **asks.to_json()}, timeout_s=READ_S)
        with understood(self.name, "what a step asked for"):
            reading = _reading(record)
        if scope == "user":
            self.user = reading.user
        return reading

    def read_for(self, steps: Sequence[PrepareStep]) -> HostReading:
        """What these steps want to know, as root where one has to; raises GanglineError.

        Where nobody types a password that sudo wants, what root alone can read is not in the answer.
        """
        asks, root_asks = Asks(), Asks()
        for step in steps:
            asks = asks.with_all_of(step.asks)
        reading = self.read(asks)
        for step in steps:
            root_asks = root_asks.with_all_of(step.root_asks(reading)) if step.root_asks else root_asks
        if not root_asks:
            return reading
        try:
            return reading.with_all_of(self.read(root_asks, scope="root"))
        except UsageError:
            return reading

    def go_over_to(self, transport: Transport) -> None:
        """Ask the host over another connection from now on."""
        self._transport = transport

    def apply(self, step: str, scope: Scope, plan: StepPlan, *, txn: str, by: str) -> None:
        """Make the changes of one scope; raises GanglineError, and then none of them stands."""
        changes = [change.to_json() for change in plan.changes if change.scope == scope]
        request = {"do": "apply", "scope": scope, "step": step, "txn": txn, "by": by, "changes": changes}
        limit_s = sum(change.get("limit_s") or 0 for change in changes)
        self._ask({**request, "revert_s": plan.revert_s}, timeout_s=TIMEOUT_S + limit_s)

    def confirm(self, scope: Scope, txn: str) -> None:
        """Keep what the timer would take back; raises GanglineError where it has done so already."""
        self._ask({"do": "confirm", "scope": scope, "txn": txn}, timeout_s=READ_S)

    def undoable(self, scope: Scope, steps: Sequence[str] | None) -> Undoable:
        """What an undo of these steps (None: of all) would do."""
        records = self._ask(_undo(scope, steps, dry=True, expect=None), timeout_s=TIMEOUT_S)
        with understood(self.name, "what an undo would do"):
            return Undoable(
                rows=tuple(each for each in records if each["kind"] == "would undo"),
                refused=tuple(each for each in records if each["kind"] == "refused"),
                token=next(str(each["token"]) for each in records if each["kind"] == "token"),
            )

    def undo(self, scope: Scope, steps: Sequence[str] | None, shown: Undoable) -> None:
        """Do what was shown; raises GanglineError where something is not as it was then."""
        limit_s = sum(row["change"].get("limit_s") or 0 for row in shown.rows)
        self._ask(_undo(scope, steps, dry=False, expect=shown.token), timeout_s=TIMEOUT_S + limit_s)

    def restart(self) -> None:
        """Have the host restart itself; raises GanglineError. The connection may end before the answer."""
        with contextlib.suppress(HostUnreachable):
            self._ask({"do": "restart", "scope": "root"}, timeout_s=READ_S)

    def status(self, scope: Scope) -> list[dict[str, Any]]:
        """The changes that stand."""
        return self._ask({"do": "status", "scope": scope}, timeout_s=READ_S)

    def _ask(self, request: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        for _ in range(TRIES):
            records, error = self._answers(request, timeout_s)
            what = (error or {}).get("what")
            if what not in {NEEDS_PASSWORD, WRONG_PASSWORD}:
                break
            self._passwords.ask(self.name, self.user)
        if error is not None:
            raise GanglineError(
                f"{self.name}: {_text(error, 'what')}", seen=_text(error, "seen"), fix=_text(error, "fix")
            )
        return records

    def _answers(self, request: dict[str, Any], timeout_s: float) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The records of an answer, and the one that is an error."""
        password = self._passwords.of(self.name)
        secret = {} if password is None else {"password": password}
        body = json.dumps({**request, **secret}).encode()
        result = self._transport.run((AGENT, *PREPARE_ARGV), stdin=prepare_words() + body, timeout_s=timeout_s)
        with understood(self.name, "the answer of its agent"):
            records = [json.loads(line) for line in result.stdout.splitlines()]
            error = next((each for each in records if each["kind"] == "error"), None)
        if error is None and result.returncode:
            last = (result.stderr.strip() or "it printed nothing").splitlines()[-1]
            error = {"what": "its agent ended", "seen": f"exit code {result.returncode}: {last}", "fix": ""}
        return [each for each in records if each is not error], error


def _undo(scope: Scope, steps: Sequence[str] | None, *, dry: bool, expect: str | None) -> dict[str, Any]:
    named = None if steps is None else list(steps)
    return {"do": "undo", "scope": scope, "steps": named, "dry": dry, "expect": expect}


def _text(record: dict[str, Any], name: str) -> str:
    return printable(str(record.get(name) or ""))[:2000]


def _reading(record: dict[str, Any]) -> HostReading:
    return HostReading(
        user=printable(str(record["user"])),
        uid=int(record["uid"]),
        home=str(record["home"]),
        files={str(name): _file(row) for name, row in record["files"].items()},
        folders={
            str(name): None if rows is None else tuple(map(str, rows)) for name, rows in record["folders"].items()
        },
        commands={str(name): str(row["stdout"]).strip() for name, row in record["commands"].items()},
        programs={str(name): None if path is None else str(path) for name, path in record["programs"].items()},
    )


def _file(row: dict[str, Any]) -> FileRead:
    if row["kind"] == "unreadable":
        return FileRead(unreadable=printable(str(row["why"])))
    if row["kind"] == "absent":
        return FileRead()
    return FileRead(content=base64.b64decode(row["content"]), mode=row.get("mode"))


def new_txn() -> str:
    """The name of a transaction: no two on a host are alike."""
    return os.urandom(8).hex()
