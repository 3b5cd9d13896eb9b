"""A login by password, to a host that does not have the user's key yet.

The password reaches ssh through a pipe that only this user can open (SSH_ASKPASS), once, and only where ssh asks for
the password of this very host: a jump host on the way is not told it. It is in no argument, file or environment.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport.bootstrap import BOOTSTRAP, first_words
from gangline.transport.connection import HANDSHAKES, Connection, HostLink, OpenConnection
from gangline.transport.ssh import ChannelTransport
from gangline.transport.ssh_options import checked_name, destination
from gangline.transport.transport import OUTPUT_LIMIT_BYTES

PAUSE_S = 0.02
PROGRAM = """#!/bin/sh
case $1 in
*"@{host}'s password"* | *"@{host}) "*assword*) exec cat {pipe} ;;
esac
exit 1
"""
"""ssh names the host in its question as HostKeyAlias does: by its name in the cluster, of safe characters only."""


class AskPass:
    """A program that answers ssh's question from a pipe, and the thread that fills the pipe once."""

    options: tuple[str, ...] = (
        "BatchMode=no",
        "PreferredAuthentications=password,keyboard-interactive",
        "PubkeyAuthentication=no",
        "NumberOfPasswordPrompts=1",
    )
    """One prompt: a wrong password may lock an account that is asked for it three times."""

    def __init__(self, folder: Path, host: str, password: str) -> None:
        self._pipe = folder / "answer"
        os.mkfifo(self._pipe, 0o600)
        program = folder / "askpass"
        program.write_text(PROGRAM.format(host=host, pipe=self._pipe), encoding="ascii")
        program.chmod(0o700)
        # before OpenSSH 8.4, DISPLAY alone says that the program may be asked
        self.environment = {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
        self._password = password.encode() + b"\n"
        self._over = threading.Event()
        threading.Thread(target=self._fill, name=f"password of {host}", daemon=True).start()

    def _fill(self) -> None:
        while not self._over.wait(PAUSE_S):
            with contextlib.suppress(OSError):  # nobody reads yet, or the folder has gone
                descriptor = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(descriptor, self._password)
                finally:
                    os.close(descriptor)
                return

    def close(self) -> None:
        """Nobody is answered any more."""
        self._over.set()


class PasswordLink(HostLink):
    """The way to a host by password."""

    def __init__(self, host: Host, password: str, ssh_config: Path | None) -> None:
        super().__init__(host, BOOTSTRAP, first_words, ssh_config)
        self._ssh = ssh_config
        self._password = password

    def _connect(self) -> OpenConnection:
        answers: list[AskPass] = []

        def login(folder: Path) -> AskPass:
            answers.append(AskPass(folder, self.host.name, self._password))
            return answers[0]

        with HANDSHAKES:
            connection = Connection(self.host, BOOTSTRAP, ssh_config=self._ssh, login=login)
            try:
                connection.greet(first_words())
            except HostUnreachable as error:
                connection.close()
                raise _refused(self.host, error) if error.reason == "denied" else error from None
            except BaseException:
                connection.close()
                raise
            finally:
                for answer in answers:
                    answer.close()
            return connection


def _refused(host: Host, error: HostUnreachable) -> HostUnreachable:
    return HostUnreachable(
        f"{host.name} refuses the password",
        seen=error.seen,
        fix=f"try it by hand: ssh {destination(host)}; or bring your public key there by its own console",
        reason=error.reason,
    )


class PasswordTransport(ChannelTransport):
    """A host behind ssh, for a user whose key it does not know yet."""

    def __init__(self, host: Host, password: str, *, ssh_config: Path | None = None) -> None:
        """ssh_config: read in the place of the user's and the system's. Raises UsageError for a bad destination."""
        name = checked_name(host)
        destination(host)
        super().__init__(name, PasswordLink(host, password, ssh_config), output_limit_bytes=OUTPUT_LIMIT_BYTES)
