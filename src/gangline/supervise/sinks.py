"""Where messages about a run go: a program, an address that takes JSON over HTTP, or any service that apprise knows.

The addresses hold secrets. They lie in `notify.secret` of the run, for this user alone, and stand in no argument of a
process, no record and no message of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, load_if_there

TIMEOUT_S = 20.0
"""How long one try to deliver may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAddresses(Record):
    """notify.secret: what the places in `job.notify` held when the run was started."""

    urls: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    """Kinds of messages that are wanted."""
    since: int = 1
    """The attempt that `train` or `resume` started."""

    @staticmethod
    def of(layout: RunLayout) -> SinkAddresses | None:
        """The addresses of a run; None: nobody is told anything."""
        return load_if_there(layout.sinks, SinkAddresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What somebody is told."""

    key: str
    """The same for the same event, whoever sends it and how often."""
    event: str
    """A `gangline.runs.job.MessageKind`."""
    title: str
    text: str
    """A sentence with the cause, then the next command."""
    details: dict[str, Any]
    """For programs: run, name, attempt, host, time, what, next."""
    is_repeat: bool = False
    """It may have arrived before: the supervisor died while it was sent."""

    @property
    def body(self) -> str:
        """The text for people."""
        again = f"\nThis may be a repeat; its key is {self.key}." if self.is_repeat else ""
        return f"{self.text}{again}"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        head = {"schema_version": 1, "key": self.key, "repeat": self.is_repeat, "event": self.event}
        return {**head, "title": self.title, "text": self.body, **self.details}


Send = Callable[[Message], None]
"""Delivers a message, or raises; it takes `TIMEOUT_S` or a few times that."""


def senders(addresses: SinkAddresses) -> list[Send]:
    """A function for each sink."""
    found: list[Send] = [_web(url) if is_web(url) else _by_apprise(url) for url in addresses.urls]
    return [*found, _program(addresses.command)] if addresses.command else found


def is_web(url: str) -> bool:
    """Whether an address takes JSON over HTTP; any other is one of apprise."""
    return url.lower().startswith(("http://", "https://"))


def _web(url: str) -> Send:
    def send(message: Message) -> None:
        import urllib.request  # here: only those who are told pay for it

        headers = {"Content-Type": "application/json", "Idempotency-Key": message.key}
        data = json.dumps(message.to_json()).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")  # noqa: S310  (http or https)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            answer.read(1)

    return send


def _by_apprise(url: str) -> Send:
    def send(message: Message) -> None:
        import apprise

        service = apprise.Apprise()
        if not service.add(url):
            raise ValueError("apprise does not know this kind of address")
        if not service.notify(title=message.title, body=message.body):
            raise OSError("apprise could not deliver it")

    return send


def _program(words: tuple[str, ...]) -> Send:
    def send(message: Message) -> None:
        env = {**os.environ, "GANGLINE_MESSAGE": json.dumps(message.to_json())}
        text = f"{message.title}\n{message.body}\n".encode()
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        try:
            process.communicate(text, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"it took more than {TIMEOUT_S:.0f} s") from error
        if process.returncode:
            raise OSError(f"it ended with exit code {process.returncode}")

    return send
