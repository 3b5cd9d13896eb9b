"""Messages about a run, by its supervisor: every event once, and at least once where a supervisor is killed.

The events of the run are the queue. A sink notes the key of each message before it is sent and after it has arrived, in
a file of its own: a later supervisor sends what has not arrived, and marks the one that was on its way as a repeat. A
sink has a thread of its own, so that one that hangs delays neither the run nor the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import json_object
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_record
from gangline.runs.state import RunState, append_event
from gangline.supervise.sinks import Message, Send, SinkAddresses, senders
from gangline.transport.connect import connect_all
from gangline.transport.local import LocalTransport
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import Transport

log = logging.getLogger(__name__)

LOOK_S = 0.5
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Between two tries of one message: the first pause, and the longest; each is twice as long as the one before."""
AT_END_S = 20.0
"""How long the end of a run waits for its message, before the state says that it has ended."""
LINGER_S = 3600.0
"""How long a supervisor stays after the end while messages wait, for an uplink that is down, say."""
BLOCK_BYTES = 1 << 22
TEXT_CHARS = 600

KINDS = {
    "finished": "finished",
    "failed": "failed",
    "unreachable": "lost",
    "host-left-out": "lost",
    "reachable": "back",
    "straggler": "straggler",
    "hanging": "stalled",
    "standing": "stalled",
}
"""Event -> the kind of message that it makes."""
_ENDS = frozenset({"finished", "failed"})


def message_of(line: bytes, *, run_id: str, name: str) -> Message | None:
    """The message that a line of events.jsonl makes; None for any other."""
    event = json_object(line) or {}
    kind = KINDS.get(str(event.get("event")))
    if kind is None or (kind in _ENDS and event.get("source") != "supervisor"):
        return None
    attempt = event.get("attempt") if type(event.get("attempt")) is int else 0
    # one end per attempt, though a supervisor that takes over writes it once more
    mark = str(attempt) if kind in _ENDS else f"{attempt}-{hashlib.sha256(line.strip()).hexdigest()[:12]}"
    host = None if event.get("host") is None else _clean(event["host"])
    cause = _clean(next(iter(str(event.get("what") or event.get("why") or "").splitlines()), ""))
    title = f"{run_id} ({_clean(name)}) {_TITLES[kind]}{f' {host}' if host and kind in {'lost', 'back'} else ''}"
    said = _sentence(kind, host, cause, event)
    following = _NEXT[kind].format(run_id)
    return Message(
        key=f"{run_id}-{kind}-{mark}",
        event=kind,
        title=title,
        text=f"{said}\nNext: {following}",
        details={
            "run": run_id,
            "name": _clean(name),
            "attempt": attempt,
            "host": host,
            "time": _clean(event.get("time", "")),
            "what": cause,
            "next": following,
        },
    )


_TITLES = {
    "finished": "has finished",
    "failed": "has failed",
    "lost": "lost",
    "back": "has back",
    "straggler": "is slowed down",
    "stalled": "stands still",
}
_NEXT = {
    "finished": "gangline summary {}",
    "failed": "gangline explain {}",
    "lost": "gangline attach {}",
    "back": "gangline attach {}",
    "straggler": "gangline attach {}",
    "stalled": "gangline explain {}",
}
"""Kind of message -> the next command."""


def _sentence(kind: str, host: str | None, cause: str, event: Mapping[str, Any]) -> str:
    if kind == "finished":
        return "All steps are done."
    if kind == "failed":
        why = _clean(event.get("why", ""))
        return f"{cause or 'Its cause is not recorded'}{f'; no attempt follows: {why}' if why else ''}."
    if kind == "lost":
        return f"{host} does not answer{f': {cause}' if cause else ''}. The run waits for it or goes on without it."
    if kind == "back":
        return f"{host} answers again."
    return f"{cause or 'Ranks make no progress'}."


def _clean(value: object) -> str:
    """A text of a host in one line, without control characters."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]} ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered(Record):
    """messages-<n>.json: what one sink has."""

    keys: tuple[str, ...] = ()
    """Of messages that have arrived."""
    trying: str | None = None
    """The message that is being sent."""


class _ByteTail:
    """Whole lines of a growing file on a host; none while it cannot be read."""

    def __init__(self, transport: Transport, path: Path) -> None:
        self._transport = transport
        self._path = path
        self._offset = 0
        self._rest = b""

    def lines(self) -> Iterator[bytes]:
        while data := self._read():
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole

    def _read(self) -> bytes:
        try:
            return self._transport.read(self._path, offset=self._offset, limit=BLOCK_BYTES)
        except (GanglineError, OSError):
            return b""


class EventReader:
    """New lines in all event files of a run: the supervisor's, and those of rank 0 on the heads."""

    def __init__(self, layout: RunLayout, connect: Callable[[Cluster], Mapping[str, Transport]] = connect_all) -> None:
        here = LocalTransport(Host(name="here", workdir=str(layout.root), python=""))
        self._layout = layout
        self._connect = connect
        self._tails = {("", layout.events): _ByteTail(here, layout.events)}
        """By host and path."""
        self._attempt = 0

    def lines(self) -> Iterator[bytes]:
        """Lines that are new; a file that cannot be read now is read later."""
        self._find_head()
        for tail in list(self._tails.values()):
            yield from tail.lines()

    def _find_head(self) -> None:
        """The head of the current attempt has the events of rank 0."""
        try:
            attempt = RunState.load(self._layout).attempt
            if attempt == self._attempt:
                return
            head = Cluster.of_attempt(self._layout, attempt).head
            path = RunLayout(Path(head.workdir), self._layout.run_id).events
            if path != self._layout.events and (head.name, path) not in self._tails:
                cluster = replace(Cluster.of_attempt(self._layout, attempt), hosts=(head,))
                self._tails[head.name, path] = _ByteTail(self._connect(cluster)[head.name], path)
            self._attempt = attempt
        except (GanglineError, OSError, *NONSENSE):
            return


class _Sink:
    """One sink: what it has, and how it gets the next message. Used by one thread."""

    def __init__(self, layout: RunLayout, number: int, send: Send, addresses: SinkAddresses) -> None:
        self._layout = layout
        self._path = layout.messages(number)
        self._number = number
        self._send = send
        self._addresses = addresses
        self._complained = False
        self.num_passes = 0
        """How often everything that was written before has arrived."""

    def run(self, reader: EventReader, stop: threading.Event) -> None:
        """Send until `stop` is set and nothing waits."""
        with _OnlySender(self._path.with_suffix(".lock"), stop) as is_ours:
            if not is_ours:
                return
            delivered = self._load()
            name = RunState.load(self._layout).name
            while True:
                is_last = stop.is_set()
                for line in reader.lines():
                    message = message_of(line, run_id=self._layout.run_id, name=name)
                    if message is not None and self._is_wanted(message) and message.key not in delivered.keys:
                        delivered = self._deliver(message, delivered)
                self.num_passes += 1
                if is_last:
                    return
                stop.wait(LOOK_S)

    def _is_wanted(self, message: Message) -> bool:
        """Events of attempts before the last `train` or `resume` were told then."""
        return message.event in self._addresses.events and message.details["attempt"] >= self._addresses.since

    def _deliver(self, message: Message, delivered: Delivered) -> Delivered:
        """Send until it has arrived."""
        message = replace(message, is_repeat=delivered.trying == message.key)
        self._save(replace(delivered, trying=message.key))
        pause_s = PAUSE_S
        while True:
            try:
                self._send(message)
                break
            except Exception as error:  # noqa: BLE001  (whatever a service raises is no fault of the run)
                self._complain(error)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        delivered = Delivered(keys=(*delivered.keys, message.key))
        self._save(delivered)
        return delivered

    def _complain(self, error: Exception) -> None:
        """Tell once that the sink does not work; the words of an error may hold its address, its kind does not."""
        if self._complained:
            return
        self._complained = True
        code = getattr(error, "code", None)
        kind = f"{type(error).__name__}{f' {code}' if type(code) is int else ''}"
        log.warning("message sink %d: %s; it is tried again", self._number + 1, kind)
        what = f"messages do not reach sink {self._number + 1} of notify ({kind}); they wait, and are tried again"
        try:
            attempt = RunState.load(self._layout).attempt
            append_event(self._layout.events, "notify-failed", source="supervisor", attempt=attempt, what=what)
        except (GanglineError, OSError):
            return

    def _load(self) -> Delivered:
        try:
            return load_record(self._path, Delivered)
        except FileNotFoundError:
            return Delivered()
        except (GanglineError, OSError):  # damaged: everything is sent once more
            return Delivered()

    def _save(self, delivered: Delivered) -> None:
        try:
            delivered.save(self._path)
        except OSError as error:
            log.warning("cannot write %s: %s", self._path.name, error.strerror)


class _OnlySender:
    """Held by the one process that sends to a sink; a second supervisor waits until the first has ended."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._path = path
        self._stop = stop
        self._descriptor = -1

    def __enter__(self) -> bool:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._stop.wait(LOOK_S):
                    return False
            else:
                return True

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class Courier:
    """Sends the messages of a run, each sink in a thread of its own. Without `notify` it does nothing."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._stop = threading.Event()
        self._workers: list[tuple[threading.Thread, _Sink]] = []

    def start(self) -> None:
        """Begin to send."""
        try:
            addresses = SinkAddresses.of(self._layout)
        except (GanglineError, OSError) as error:
            log.warning("no messages are sent: %s", type(error).__name__)
            return
        if addresses is None:
            return
        for number, send in enumerate(senders(addresses)):
            sink = _Sink(self._layout, number, send, addresses)
            work = (EventReader(self._layout), self._stop)
            thread = threading.Thread(target=sink.run, args=work, name=f"messages {number}", daemon=True)
            thread.start()
            self._workers.append((thread, sink))

    def deliver(self) -> None:
        """Wait until what is written so far has arrived, `AT_END_S` at most."""
        # the pass that is under way may have read before it was written
        wanted = [(thread, sink, sink.num_passes + 2) for thread, sink in self._workers]
        deadline = time.monotonic() + AT_END_S
        for thread, sink, num_passes in wanted:
            while thread.is_alive() and sink.num_passes < num_passes and time.monotonic() < deadline:
                time.sleep(LOOK_S / 5)

    def finish(self) -> None:
        """The run has ended: wait until everything has arrived, `LINGER_S` at most; then the addresses go."""
        self._stop.set()
        deadline = time.monotonic() + LINGER_S
        for thread, _ in self._workers:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._workers and not any(thread.is_alive() for thread, _ in self._workers):
            self._layout.sinks.unlink(missing_ok=True)
