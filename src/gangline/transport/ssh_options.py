"""What `ssh` is told: options, destinations and the files of our own that it reads.

The user's ssh_config, keys, agent and jump hosts stay in force; what could weaken the check of the host, prompt, or
open a way back to the user's computer is set by us.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gangline.agent.prepare.key_gate import REFUSED as REFUSED_BY_GATE
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, UsageError
from gangline.runs.cluster import Host
from gangline.transport.fanout import once

CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S = 3
ALIVE_COUNT = 4
"""ssh asks a host that is silent four times, and gives it up after 15 s without a word: once more than it asks."""

_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?"
_ADDRESS = r"[0-9A-Fa-f:]{2,39}(?:%[A-Za-z0-9_.-]{1,15})?"
_DESTINATION = re.compile(rf"(?:{_USER}@)?(?:{_NAME}|{_ADDRESS})")
_HOST_NAME = re.compile(_NAME)
KEY = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa|sk-[a-z0-9@.-]{1,60}) ([A-Za-z0-9+/]{40,4000}={0,2})"
)
SAFE_PATH = re.compile(r"/[A-Za-z0-9_/.+-]*")
"""A path that no program has to be told in quotes."""

FIXED = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_INTERVAL_S}",
    f"ServerAliveCountMax={ALIVE_COUNT}",
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    "VerifyHostKeyDNS=no",
    "NoHostAuthenticationForLocalhost=no",
    "CheckHostIP=no",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
)
"""Options of every connection."""
TELLING = "LogLevel=INFO"
"""Below it ssh does not say why a connection was closed, or that nobody agrees on a kind of key."""
QUIET = "LogLevel=ERROR"


def destination(host: Host) -> str:
    """What ssh is to reach; raises UsageError for what is no destination."""
    return checked_destination(host.name if host.ssh is None else host.ssh, host.ssh_port, host.name)


def checked_destination(text: str, port: int | None, name: str) -> str:
    """`text`, if it is a name or an address, perhaps with a user in front; raises UsageError."""
    if not _DESTINATION.fullmatch(text):
        raise UsageError(
            f"host {printable(name)}: {printable(text)!r} is nothing that ssh could reach",
            seen="expected a name of ssh_config, a host name or an address, or user@ in front of one",
            fix="correct `ssh` of this host in cluster.yaml",
        )
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"host {printable(name)}: {port} is no port", seen="expected 1 to 65535", fix="correct `port`")
    return text


def checked_key(host: Host) -> tuple[str, str]:
    """Type and base64 of the pinned host key; raises UsageError for what is no key."""
    found = KEY.fullmatch((host.host_key or "").strip())
    if found is None:
        raise UsageError(
            f"host {host.name}: its host key is not readable",
            seen="expected a type and a key, as in ssh-ed25519 AAAA...",
            fix=f"gangline init asks {host.name} for its key again",
        )
    return found.group(1), found.group(2)


def checked_name(host: Host) -> str:
    """The host's name, if it can stand in a known_hosts file; raises UsageError."""
    if not _HOST_NAME.fullmatch(host.name):
        raise UsageError(
            f"{printable(host.name)!r} is no name for a host",
            seen="expected letters, digits, dots, dashes and underscores",
            fix="correct it in cluster.yaml",
        )
    return host.name


def printable(text: str) -> str:
    """Text from elsewhere without control characters."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def key_algorithms(kind: str) -> str:
    """The signature algorithms with which a host can prove that it has a key of this kind."""
    return "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind


@once
def ssh_version() -> tuple[int, int]:
    """Of the ssh on this computer; (0, 0) if it does not say. Raises UsageError where there is none."""
    try:
        said = subprocess.run(["ssh", "-V"], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20)
    except FileNotFoundError:
        raise UsageError("there is no ssh on this computer", fix="install OpenSSH's client (openssh-client)") from None
    found = re.search(rb"OpenSSH\D*(\d+)\.(\d+)", said.stderr)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def as_arguments(options: list[str] | tuple[str, ...]) -> list[str]:
    """Each option behind its -o."""
    return [word for option in options for word in ("-o", option)]


# Folders of our own for one connection each: the key that is trusted, and the socket of ssh's master.


KNOWN_HOSTS = "known_hosts"
PREFIX = "gangline-ssh-"
SOCKET_PATH_BYTES = 80
"""sun_path holds 104 bytes on some systems, and ssh adds 17 while it binds."""
YOUNG_S = 60.0
"""A folder may be without its lock for a moment when it is made."""


class PrivateFolder:
    """One folder; `close` removes it, at the latest when Python ends, and after a kill -9 the next of us does."""

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def known_hosts(self, name: str, key: tuple[str, str]) -> list[str]:
        """Options that trust this key (type and base64) for this host, and nothing else."""
        path = self.path / KNOWN_HOSTS
        path.write_text(f"{name} {key[0]} {key[1]}\n", encoding="ascii")
        options = [f"UserKnownHostsFile={path}", f"GlobalKnownHostsFile={path}", f"HostKeyAlias={name}"]
        if ssh_version() >= (8, 5):
            options.append("KnownHostsCommand=none")
        return options

    @property
    def control_path(self) -> Path | None:
        """Where the master listens; None where no folder has a path short enough for a socket."""
        path = self.path / "ctl"
        return path if len(os.fsencode(path)) <= SOCKET_PATH_BYTES else None

    def close(self) -> None:
        """Remove the folder."""
        self._remove()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked ends without it
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _base() -> Path:
    """The temp folder, or /tmp where that has a long path or one that ssh would have to be told in quotes."""
    folder = tempfile.gettempdir()
    short = SAFE_PATH.fullmatch(folder) and len(folder) < 60
    return Path(folder if short else "/tmp")  # noqa: S108  (mkdtemp makes a private folder in it)


@once
def _sweep(base: Path) -> None:
    """Remove what a process of ours that was killed has left: nobody holds its lock."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# What ssh's last words mean, and what to do about it.


NO_PYTHON = 97
"""Exit code of our remote command where no Python >= 3.8 is found."""
LAST_LINES = 6
REASON_LINES = 3
LINE_CHARACTERS = 300
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
REFUSED_KEY = re.compile(r"HOST IDENTIFICATION HAS CHANGED|host key verification failed", re.IGNORECASE)
LOOK_AT_KEY = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnd:
    """How a connection ended."""

    host: str
    """Its name in the cluster."""
    destination: str
    """What ssh was told."""
    key: tuple[str, str] | None
    """Type and base64 of the pinned key, if there is one."""
    known_hosts: str
    """The file that holds the pinned key: ssh names it when it speaks of this host, and not of one on the way."""
    returncode: int | None
    stderr: str
    noise: str
    """What came on stdout before the agent spoke."""
    why: str
    """What we saw of it ourselves."""
    greeted: bool
    """Whether the agent had answered before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One kind of failure."""

    pattern: str
    """Found in ssh's words, whatever their case."""
    what: str
    fix: str
    reason: str
    """What `HostUnreachable.reason` says of it."""


MEANINGS = (
    Meaning(
        pattern=r"could not resolve hostname|name or service not known|nodename nor servname",
        what="{host}: the name {destination} is not known",
        fix="put it into ~/.ssh/config or your DNS, or write an address for {host} into cluster.yaml",
        reason="unknown-name",
    ),
    Meaning(
        pattern=r"connection refused",
        what="{host}: connection refused: the machine is there, but no sshd listens",
        fix="on {host}: sudo systemctl start ssh (or sshd); or set `port` in cluster.yaml",
        reason="refused",
    ),
    Meaning(
        pattern=r"timed? ?out|no route to host|network is unreachable|host is down",
        what="{host} does not answer",
        fix="is it switched on, and on this network? ping {destination}",
        reason="unreachable",
    ),
    Meaning(
        pattern=r"permission denied|too many authentication failures|no more authentication methods",
        what="{host} refuses your key: permission denied",
        fix="ssh-copy-id {destination} brings your key there; gangline prepare access {destination} does, too, and "
        "makes one if you have none; a key with a passphrase has to be in your agent (ssh-add)",
        reason="denied",
    ),
    Meaning(
        pattern=r"kex_exchange_identification|banner exchange: .*broken pipe|connection (?:closed|reset)",
        what="{host} closes the connection before it has begun",
        fix="its sshd may be busy (MaxStartups) or ban this address (fail2ban): see journalctl -u ssh on {host}",
        reason="busy",
    ),
    Meaning(
        pattern=r"no matching (?:key exchange|cipher|mac)",
        what="{host}: its sshd and this ssh have no method in common",
        fix="bring OpenSSH on {host} up to date",
        reason="other",
    ),
    Meaning(
        pattern=r"bad configuration option|bad owner or permissions|terminating, \d+ bad",
        what="{host}: ssh does not accept its configuration on this computer",
        fix="correct the line that it names",
        reason="other",
    ),
)
"""In this order: the first that fits is taken."""

DROPPED = re.compile(r"kex_exchange_identification: .*(?:closed|reset)|banner exchange: .*broken pipe", re.IGNORECASE)
"""A busy sshd drops connections at random (MaxStartups): another try helps."""


def fingerprint(key: str) -> str:
    """Of a public key ("ssh-ed25519 AAAA..."), as OpenSSH prints it: SHA256:..."""
    words = key.split()
    digest = hashlib.sha256(base64.b64decode(words[1] if len(words) > 1 else words[0])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def explain(ending: ConnectionEnd) -> HostUnreachable:
    """The error for the user."""
    # once greeted, the key was right, and what comes on stderr may be anybody's words
    if not ending.greeted and (refused := _refused_key(ending)) is not None:
        return refused
    words = {"host": ending.host, "destination": ending.destination}
    seen = _last_lines(ending.stderr) or ending.why
    if ending.greeted:
        return HostUnreachable(
            f"{ending.host}: the connection was lost",
            seen=f"{ending.why}; {seen}" if seen != ending.why else seen,
            fix=f"ssh {ending.destination} true; what runs there by itself goes on",
        )
    if ending.returncode == NO_PYTHON:
        return HostUnreachable(
            f"{ending.host} has no Python 3.8 or newer",
            seen="looked for python3, and python3.8 and newer, on the PATH of a login without terminal",
            fix=f"on {ending.host}: sudo apt install python3 (or dnf, zypper)",
            reason="no-python",
        )
    if ending.returncode == REFUSED_BY_GATE:
        return HostUnreachable(
            f"{ending.host} does not let this gangline in by its key between hosts",
            seen=seen,
            fix="on your computer: gangline prepare --between-hosts",
        )
    if ending.returncode == 255:
        # the reason stands at the end; a banner of the host, with any words in it, may stand before it
        reason = "\n".join([line for line in ending.stderr.splitlines() if line.strip()][-REASON_LINES:])
        for meaning in MEANINGS:
            if re.search(meaning.pattern, reason, re.IGNORECASE):
                return HostUnreachable(
                    meaning.what.format(**words), seen=seen, fix=meaning.fix.format(**words), reason=meaning.reason
                )
    return _no_protocol(ending)


def _no_protocol(ending: ConnectionEnd) -> HostUnreachable:
    said = [text for text in (ending.why, _last_lines(ending.noise), _last_lines(ending.stderr)) if text]
    if ending.returncode == 255 and not ending.noise:
        return HostUnreachable(
            f"{ending.host}: ssh cannot connect", seen="; ".join(said), fix=f"try: ssh {ending.destination} true"
        )
    if not ending.noise and (
        ending.returncode is None or ending.returncode < 0
    ):  # we ended it: it said nothing in time
        return HostUnreachable(
            f"{ending.host} does not answer",
            seen="; ".join(said),
            fix=f"is it busy? try: ssh {ending.destination} true",
        )
    return HostUnreachable(
        f"{ending.host} answers, but does not speak our protocol",
        seen="; ".join(said),
        fix=f"what does `ssh {ending.destination} true` print? It should print nothing",
    )


def _refused_key(ending: ConnectionEnd) -> HostKeyRefused | None:
    stderr = ending.stderr
    other_kind = re.search(r"no matching host key type found\. Their offer: (\S+)", stderr)
    if not other_kind and not REFUSED_KEY.search(stderr):
        return None
    kind, pinned = (ending.key[0], fingerprint(ending.key[1])) if ending.key else ("", "")
    shown = FINGERPRINT.search(stderr)
    if other_kind and pinned:
        now = f"it has only {printable(other_kind.group(1))}"
    elif shown and pinned and shown.group() != pinned and ending.known_hosts in stderr:
        now = f"it shows {shown.group()}"
    else:
        # a jump host's key is checked by the user's own ssh, against the user's own known_hosts
        return HostKeyRefused(
            f"{ending.host}: a host on the way to it is not known to your ssh, or has another key than it knows",
            seen=_last_lines(stderr),
            fix=f"look at its key, then once: ssh {ending.destination} true",
            reason="key-unpinned",
        )
    return HostKeyRefused(
        f"{ending.host} HAS ANOTHER HOST KEY than the pinned one: it was installed anew, or somebody is in between",
        seen=f"pinned {pinned} ({kind}), {now}",
        fix=f"look on its own console: {LOOK_AT_KEY}; only if that shows the new key: gangline init",
        reason="key-changed",
    )


def unpinned(host: str) -> HostKeyRefused:
    """The error for a host whose key nobody has pinned."""
    return HostKeyRefused(
        f"{host}: no host key is pinned, so that nothing tells who answers",
        seen="expected `host_key` for it in cluster.yaml",
        fix=f"gangline init shows the key of {host} and writes it down",
        reason="key-unpinned",
    )


def _last_lines(text: str) -> str:
    """The last lines that say something, on one line, without control characters."""
    lines = [printable(line).strip("\r? @")[:LINE_CHARACTERS] for line in text.splitlines()]
    return " / ".join([line for line in lines if line][-LAST_LINES:])


# What a host says may be anything: whatever comes of reading it is an error that names the host.


NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
"""What comes of words that are not what was asked for."""


@contextlib.contextmanager
def understood(host: str, what: str) -> Iterator[None]:
    """For reading what a host says, or its files: what is not an answer, or cannot be read, is a GanglineError."""
    try:
        yield
    except (*NONSENSE, OSError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise GanglineError(
            f"what {host} says cannot be understood",
            seen=printable(f"{what}: {type(error).__name__}: {first}"[:300]),
            fix=f"look at {host}: is its disk full or damaged, or does something else answer in the agent's place?",
        ) from error


def whole(value: object) -> int:
    """A whole number that a host says; raises TypeError."""
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value
