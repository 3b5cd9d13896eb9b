"""What `ssh` is told: options, destinations and the files of our own that it reads.

The user's ssh_config, keys, agent and jump hosts stay in force; what could weaken the check of the host, prompt, or
open a way back to the user's computer is set by us.
"""

from __future__ import annotations

import re
import subprocess

from gangline.errors import UsageError
from gangline.remote.once import once
from gangline.runs.cluster import Host

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
