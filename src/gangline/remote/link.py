"""The connection of a transport: made when it is needed, made anew after it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, HostUnreachable
from gangline.remote import rsync
from gangline.remote.connection import Connection, connect
from gangline.remote.request import Lost
from gangline.remote.ssh_options import printable
from gangline.remote.transport import AGENT
from gangline.runs.cluster import Host

ANSWER_S = 120.0
"""How long file work may take: a disk can be slow, a network file system can be dead."""
MARGIN_S = 10.0
"""How much later than its time limit the end of a command may be told."""
REPEAT_S = 15.0
"""How long a host that was never reached counts as such, without another try."""
COPY_S = 7 * 24 * 3600.0


class Link:
    """The way to one host, for any number of threads."""

    def __init__(self, host: Host, command: str, first_words: Callable[[], bytes], ssh_config: Path | None) -> None:
        self.host = host
        self._command = command
        self._first_words = first_words
        self._ssh_config = ssh_config
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._has_rsync: bool | None = None
        self._num_tries = 0
        self._failure: HostUnreachable | None = None
        self._failed_at = 0.0
        self._was_there = False

    def connection(self) -> Connection:
        """The connection, a fresh one if there is none; raises HostUnreachable."""
        num_tries = self._num_tries
        with self._lock:
            if self._connection is not None and self._connection.channel.is_open:
                return self._connection
            if (failure := self._failure) is not None and (self._num_tries != num_tries or self._is_given_up()):
                raise type(failure)(failure.what, seen=failure.seen, fix=failure.fix, reason=failure.reason)
            self._let_go()
            self._failure = None
            try:
                self._connection = connect(self.host, self._command, self._first_words(), ssh_config=self._ssh_config)
                self._was_there = True
            except HostUnreachable as error:
                # for those who wait for the lock, and who ask next: a dead host costs them one time limit
                self._failure, self._failed_at = error, time.monotonic()
                raise
            finally:
                self._num_tries += 1
            return self._connection

    def _is_given_up(self) -> bool:
        """Whether another try would only cost another time limit. A host that was there once may be back any moment."""
        return not self._was_there and time.monotonic() < self._failed_at + REPEAT_S

    def ask(
        self,
        body: dict[str, Any],
        *,
        data: bytes | Iterator[bytes] = b"",
        on_piece: Callable[[bytes], None] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> tuple[dict[str, Any], bytes]:
        """Ask the agent; its answer and the data of the answer. Raises HostUnreachable, and the OSError it met."""
        connection = self.connection()
        try:
            answer, last = connection.channel.ask(body, data=data, on_piece=on_piece, timeout_s=timeout_s)
        except Lost as lost:
            raise connection.explain(lost) from None
        except TimeoutError:
            self._drop(connection)
            raise HostUnreachable(
                f"{self.host.name} does not answer any more",
                seen=f"{body['op']} had no answer within {timeout_s:g} s",
                fix="a disk or a network file system there may hang: look at it with ssh",
            ) from None
        self._raise_error(answer, body)
        return answer, last

    def agent(
        self,
        words: Sequence[str],
        *,
        data: bytes | Iterator[bytes] = b"",
        on_piece: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        """Run a verb of the agent's program that may take long; its exit code and the end of its stderr."""
        body = {"op": "run", "argv": [AGENT, *words], "agent": True, "env": {}, "timeout_s": COPY_S}
        answer, stderr = self.ask(body, data=data, on_piece=on_piece, timeout_s=COPY_S + MARGIN_S)
        return exit_code(self.host.name, answer), stderr

    def has_rsync(self) -> bool:
        """Whether the host has an rsync that is new enough."""
        if self._has_rsync is None:
            said = bytearray()
            body = {"op": "run", "argv": ["rsync", "--version"], "env": {}, "timeout_s": ANSWER_S}
            self.ask(body, on_piece=said.extend, timeout_s=ANSWER_S + MARGIN_S)
            self._has_rsync = rsync.is_new_enough(said.decode("utf-8", "replace"))
        return self._has_rsync

    def close(self) -> None:
        """End the connection; the next one is tried, whatever became of the last."""
        with self._lock:
            self._let_go()
            self._failure = None

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._let_go()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _raise_error(self, answer: dict[str, Any], body: dict[str, Any]) -> None:
        if type(answer.get("errno")) is int:
            text = f"{self.host.name}: {printable(str(answer.get('text')))[:300]}"
            raise OSError(answer["errno"], text, body.get("path"))
        if "error" in answer:
            raise GanglineError(
                f"{self.host.name}: the agent cannot {body['op']}", seen=printable(str(answer["error"]))[:300]
            )
        if answer.get("cancelled"):
            raise HostUnreachable(f"{self.host.name}: {body['op']} was broken off", fix="try again")


def exit_code(host: str, answer: dict[str, Any]) -> int:
    """The exit code in an answer."""
    code = answer.get("returncode")
    if type(code) is not int:
        raise HostUnreachable(f"{host} does not speak our protocol", seen="the end of a command without an exit code")
    return code
