"""One ssh process per host: it carries the channel, and is the master for rsync and terminals."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gangline.errors import HostUnreachable
from gangline.remote.channel import Channel, Hello
from gangline.remote.private import KNOWN_HOSTS, PrivateFolder
from gangline.remote.request import Lost
from gangline.remote.ssh_errors import DROPPED, Ending, explain, unpinned
from gangline.remote.ssh_options import (
    FIXED,
    TELLING,
    as_arguments,
    checked_key,
    checked_name,
    destination,
    key_algorithms,
)
from gangline.runs.cluster import Host

HANDSHAKES = threading.BoundedSemaphore(16)
"""Handshakes at once: an sshd, or a jump host, drops what is more (MaxStartups)."""
GREET_S = 30.0
"""From the first packet to the agent's first word, jump hosts and a slow disk included."""
TRIES = 3
NO_MASTER = "ControlPath=none"
"""Neither a master, nor by way of one."""
PAUSE_S = 0.5


class Connection:
    """A channel to a host, with the private files of its ssh. `close` leaves nothing of it."""

    def __init__(self, host: Host, command: str, *, ssh_config: Path | None = None) -> None:
        """Start ssh; `greet` waits for the host."""
        self.hello: Hello | None = None
        self._host = host
        if host.host_key is None:
            raise unpinned(host.name)
        self._key = checked_key(host)
        self._folder = PrivateFolder()
        try:
            path = self._folder.control_path
            options = [
                TELLING,
                "ControlPersist=no",
                *([f"ControlPath={path}", "ControlMaster=yes"] if path else [NO_MASTER]),
            ]
            argv = ssh_argv(host, self._folder, ssh_config=ssh_config, flags=["-T"], options=options)
            self.channel = Channel(spawn([*argv, command]))
        except BaseException:
            self._folder.close()
            raise

    @property
    def control_path(self) -> Path | None:
        """The socket of the master; None where there is none."""
        return self._folder.control_path

    @property
    def folder(self) -> Path:
        """A private folder on this computer that goes with the connection."""
        return self._folder.path

    def greet(self, first_words: bytes) -> None:
        """Send the agent and wait for its first word; raises HostUnreachable."""
        try:
            self.hello = self.channel.greet(first_words, GREET_S)
        except Lost as lost:
            raise self.explain(lost) from None

    @property
    def may_try_again(self) -> bool:
        """Whether it ended in a way that another try may not."""
        return DROPPED.search(self.channel.stderr.decode("utf-8", "replace")) is not None

    def explain(self, lost: Lost) -> HostUnreachable:
        """Why the connection ended."""
        channel = self.channel
        return explain(
            Ending(
                host=self._host.name,
                destination=destination(self._host),
                key=self._key,
                known_hosts=str(self._folder.path / KNOWN_HOSTS),
                returncode=channel.returncode,
                stderr=channel.stderr.decode("utf-8", "replace"),
                noise="" if channel.frames.started else channel.frames.noise.decode("utf-8", "replace"),
                why=str(lost),
                greeted=self.hello is not None,
            )
        )

    def close(self) -> None:
        """End ssh and remove its files."""
        self.channel.close()
        self._folder.close()


def connect(host: Host, command: str, first_words: bytes, *, ssh_config: Path | None = None) -> Connection:
    """A connection on which the agent has answered; raises HostUnreachable."""
    for left in reversed(range(TRIES)):
        with HANDSHAKES:
            connection = Connection(host, command, ssh_config=ssh_config)
            try:
                connection.greet(first_words)
                return connection
            except BaseException as error:
                again = left and isinstance(error, HostUnreachable) and connection.may_try_again
                connection.close()
                if not again:
                    raise
        time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def ssh_argv(
    host: Host, folder: PrivateFolder, *, ssh_config: Path | None, flags: Sequence[str], options: Sequence[str]
) -> list[str]:
    """An ssh to a host, up to the command that it is to run there. Raises UsageError for one that cannot be named."""
    kind, key = checked_key(host)
    every = [
        *FIXED,
        *folder.known_hosts(checked_name(host), (kind, key)),
        f"HostKeyAlgorithms={key_algorithms(kind)}",
        "ClearAllForwardings=yes",
        *options,
    ]
    return [
        "ssh",
        *flags,
        *(["-F", str(ssh_config)] if ssh_config else []),
        *(["-p", str(host.ssh_port)] if host.ssh_port else []),
        *as_arguments(every),
        "--",
        destination(host),
    ]


def ssh_environment() -> dict[str, str]:
    """Ours, but nobody asks for a passphrase in a window."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


def spawn(argv: list[str]) -> subprocess.Popen[bytes]:
    """Ssh with pipes, out of reach of our terminal: Ctrl-C is ours to handle, and no jump host can prompt there."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ssh_environment(),
        start_new_session=True,
    )
