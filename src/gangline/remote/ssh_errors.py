"""What ssh's last words mean, and what to do about it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.remote.ssh_options import printable

NO_PYTHON = 97
"""Exit code of our remote command where no Python >= 3.8 is found."""
LAST_LINES = 6
REASON_LINES = 3
LINE_CHARACTERS = 300
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
REFUSED_KEY = re.compile(r"HOST IDENTIFICATION HAS CHANGED|host key verification failed", re.IGNORECASE)
LOOK_AT_KEY = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
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
        fix="ssh-copy-id {destination}; a key with a passphrase has to be in your agent (ssh-add)",
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


def explain(ending: Ending) -> HostUnreachable:
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
    if ending.returncode == 255:
        # the reason stands at the end; a banner of the host, with any words in it, may stand before it
        reason = "\n".join([line for line in ending.stderr.splitlines() if line.strip()][-REASON_LINES:])
        for meaning in MEANINGS:
            if re.search(meaning.pattern, reason, re.IGNORECASE):
                return HostUnreachable(
                    meaning.what.format(**words), seen=seen, fix=meaning.fix.format(**words), reason=meaning.reason
                )
    return _no_protocol(ending)


def _no_protocol(ending: Ending) -> HostUnreachable:
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


def _refused_key(ending: Ending) -> HostKeyRefused | None:
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
