"""One ssh process per host: it carries the channel, and is the master for rsync and terminals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gangline.errors import GanglineError, HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport.channel import AgentChannel, Hello, Lost
from gangline.transport.fanout import once
from gangline.transport.ssh_options import (
    DROPPED,
    FIXED,
    KNOWN_HOSTS,
    SAFE_PATH,
    TELLING,
    ConnectionEnd,
    PrivateFolder,
    as_arguments,
    checked_key,
    checked_name,
    destination,
    explain,
    key_algorithms,
    printable,
    unpinned,
)
from gangline.transport.transport import AGENT, ByteProgress, exit_code

HANDSHAKES = threading.BoundedSemaphore(16)
"""Handshakes at once: an sshd, or a jump host, drops what is more (MaxStartups)."""
GREET_S = 30.0
"""From the first packet to the agent's first word, jump hosts and a slow disk included."""
TRIES = 3
NO_MASTER = "ControlPath=none"
"""Neither a master, nor by way of one."""
PAUSE_S = 0.5


class OpenConnection(Protocol):
    """A channel to a host, however it came to be."""

    channel: AgentChannel
    hello: Hello | None

    @property
    def control_path(self) -> Path | None:
        """The socket of ssh's master, by which rsync goes; None where there is none."""
        ...

    def explain(self, lost: Lost) -> HostUnreachable:
        """Why it ended."""
        ...

    def close(self) -> None:
        """End it, and remove its files."""
        ...


class LoginAnswer(Protocol):
    """What answers ssh in the user's place, such as with a password."""

    options: tuple[str, ...]
    """Of ssh, before all others."""
    environment: dict[str, str]


class Connection:
    """A channel to a host, with the private files of its ssh. `close` leaves nothing of it."""

    def __init__(
        self,
        host: Host,
        command: str,
        *,
        ssh_config: Path | None = None,
        login: Callable[[Path], LoginAnswer] | None = None,
    ) -> None:
        """Start ssh; `greet` waits for the host. login: makes the answers, in a private folder; by default ssh asks
        nothing.
        """
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
            answer = login(self._folder.path) if login else None
            first = answer.options if answer else ()
            argv = ssh_argv(host, self._folder, ssh_config=ssh_config, flags=["-T"], options=options, first=first)
            self.channel = AgentChannel(spawn([*argv, command], answer.environment if answer else {}))
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
            ConnectionEnd(
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
    host: Host,
    folder: PrivateFolder,
    *,
    ssh_config: Path | None,
    flags: Sequence[str],
    options: Sequence[str],
    first: Sequence[str] = (),
) -> list[str]:
    """An ssh to a host, up to the command that it is to run there. Raises UsageError for one that cannot be named.

    first: options that count more than ours: of several, ssh takes the first.
    """
    kind, key = checked_key(host)
    every = [
        *first,
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


def spawn(argv: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Ssh with pipes, out of reach of our terminal: Ctrl-C is ours to handle, and no jump host can prompt there."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ssh_environment(), **(environment or {})},
        start_new_session=True,
    )


# rsync over the connection that is there already: large trees, gone on with where they were broken off.


OPTIONS = (
    "--recursive",
    "--times",  # what is whole already is seen by size and time when a copy is gone on with
    "--copy-links",
    "--safe-links",
    "--perms",
    "--chmod=u+rw,go=,u-s,g-s,o-t,Du+x",
    "--delete",
    "--partial",
    "-s",  # paths go through the protocol, no shell there reads them
    "--timeout=300",
    "--no-human-readable",
    "--info=progress2",
)
PLACE = "gangline"
"""Stands for the host in rsync's words: the way there is the control socket."""
VERSION = re.compile(r"rsync\s+version v?(\d+)\.(\d+)")
LOWEST = (3, 1)
PROGRESS = re.compile(rb"^\s*([\d.,]+)\s+\d+%")
STDERR_BYTES = 1 << 14


def is_new_enough(said: str) -> bool:
    """Whether `rsync --version` names one that has what we need; openrsync has not."""
    found = VERSION.search(said)
    return found is not None and (int(found.group(1)), int(found.group(2))) >= LOWEST


@once
def is_here() -> bool:
    """Whether this computer has an rsync that is new enough."""
    try:
        said = subprocess.run(["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return False
    return is_new_enough(said.stdout.decode("utf-8", "replace"))


def argv(source: str, target: str, control_path: Path) -> list[str]:
    """The command that copies; one of the two is a `far` place. Pure."""
    return ["rsync", *OPTIONS, "-e", shell_words(control_path), "--", source, target]


def far(path: str) -> str:
    """A path on the host, as rsync takes it."""
    return f"{PLACE}:{path}"


def shell_words(control_path: Path) -> str:
    """The ssh that rsync starts. rsync splits it at blanks: everything in it is ours and has none.

    Without the master it must not connect by itself, to whatever is called like PLACE: hence the proxy that fails.
    """
    if not SAFE_PATH.fullmatch(str(control_path)):
        raise ValueError(f"{control_path} would have to be quoted")
    return f"ssh -F none -o ControlMaster=no -o ControlPath={control_path} -o ProxyCommand=false -o BatchMode=yes"


def copy(command: Sequence[str], total_bytes: int, host: str, on_progress: ByteProgress | None) -> None:
    """Run rsync to its end; raises GanglineError with its last words."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=ssh_environment(),
            start_new_session=True,
        )
        try:
            _follow(process, total_bytes, on_progress)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it may have left its ssh
            process.wait()
        if process.returncode:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_BYTES))
            raise _failed(host, process.returncode, stderr.read().decode("utf-8", "replace"))


def _follow(process: subprocess.Popen[bytes], total_bytes: int, on_progress: ByteProgress | None) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        while words := os.read(stream.fileno(), 1 << 12):
            found = PROGRESS.search(words.replace(b"\r", b"\n").rstrip().rpartition(b"\n")[2])
            if on_progress and found:
                done = int(re.sub(rb"\D", b"", found.group(1)))
                on_progress(min(done, total_bytes), total_bytes)
    process.wait()
    if on_progress and process.returncode == 0:
        on_progress(total_bytes, total_bytes)


def _failed(host: str, code: int, stderr: str) -> GanglineError:
    lines = [printable(line) for line in stderr.splitlines() if line.strip()]
    return GanglineError(
        f"{host}: rsync ended with code {code}",
        seen=" / ".join(lines[-4:])[:600],
        fix="what was copied is kept: start again, and it goes on there",
    )


# The connection of a transport: made when it is needed, made anew after it was lost.


ANSWER_S = 120.0
"""How long file work may take: a disk can be slow, a network file system can be dead."""
MARGIN_S = 10.0
"""How much later than its time limit the end of a command may be told."""
REPEAT_S = 15.0
"""How long a host that was never reached counts as such, without another try."""
COPY_S = 7 * 24 * 3600.0


class HostLink:
    """The way to one host, for any number of threads."""

    def __init__(
        self, host: Host, command: str, first_words: Callable[[], bytes], ssh_config: Path | None = None
    ) -> None:
        self.host = host
        self._command = command
        self._first_words = first_words
        self._ssh_config = ssh_config
        self._lock = threading.Lock()
        self._connection: OpenConnection | None = None
        self._has_rsync: bool | None = None
        self._num_tries = 0
        self._failure: HostUnreachable | None = None
        self._failed_at = 0.0
        self._was_there = False

    def _connect(self) -> OpenConnection:
        """A fresh connection on which the agent has answered; raises HostUnreachable."""
        return connect(self.host, self._command, self._first_words(), ssh_config=self._ssh_config)

    def connection(self) -> OpenConnection:
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
                self._connection = self._connect()
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
            self._has_rsync = is_new_enough(said.decode("utf-8", "replace"))
        return self._has_rsync

    def close(self) -> None:
        """End the connection; the next one is tried, whatever became of the last."""
        with self._lock:
            self._let_go()
            self._failure = None

    def _drop(self, connection: OpenConnection) -> None:
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
