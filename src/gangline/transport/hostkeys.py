"""Which key a host shows, and whether the user's own ssh knows it: what `init` pins."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import HostUnreachable, UsageError
from gangline.transport.connection import HANDSHAKES, ssh_environment
from gangline.transport.ssh_options import (
    FIXED,
    KEY,
    TELLING,
    ConnectionEnd,
    PrivateFolder,
    as_arguments,
    checked_destination,
    explain,
    fingerprint,
    printable,
)

__all__ = [
    "Key",
    "SshDestination",
    "fingerprint",
    "known_already",
    "known_fingerprints",
    "own_key",
    "resolve",
    "scan_key",
]

SCAN_S = 40.0
ASK_S = 20.0
NAME = "scanned"
KINDS = "ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256"
"""The kinds of keys that we would pin, the best first; no certificates, whose key is not the host's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The public key of a host."""

    line: str
    """Type and base64: what goes into cluster.yaml."""
    fingerprint: str
    """SHA256:..., as `ssh-keygen -l` prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshDestination:
    """What the user's ssh_config makes of a destination."""

    user: str
    hostname: str
    port: int
    host_key_alias: str | None
    known_hosts: tuple[Path, ...]
    """Files in which the user's ssh looks for host keys."""
    identities: tuple[Path, ...] = ()
    """Private keys that it tries, whether they are there or not."""


def scan_key(destination: str, port: int | None = None, *, ssh_config: Path | None = None) -> Key:
    """The key that a host shows now, seen through the user's ssh_config and jump hosts. Nobody logs in.

    Whether it is the right one only the user can tell. Raises HostUnreachable, and UsageError for a bad destination.
    """
    folder = PrivateFolder()
    try:
        seen = folder.path / "seen"
        options = [option for option in FIXED if not option.startswith("StrictHostKeyChecking")]
        options += [
            TELLING,
            "StrictHostKeyChecking=accept-new",
            f"UserKnownHostsFile={seen}",
            f"GlobalKnownHostsFile={folder.path / 'none'}",
            f"HostKeyAlias={NAME}",
            f"HostKeyAlgorithms={KINDS}",
            "HashKnownHosts=no",
            "PreferredAuthentications=none",
            "ControlPath=none",
            "ClearAllForwardings=yes",
        ]
        done = _ssh(destination, port, ["-T", *as_arguments(options)], ["true"], ssh_config)
        for words in _known(seen):
            if words[0] == NAME and KEY.fullmatch(line := " ".join(words[1:3])):
                return Key(line=line, fingerprint=fingerprint(line))
        raise _unseen(destination, done)
    finally:
        folder.close()


def known_already(destination: str, key: str, port: int | None = None, *, ssh_config: Path | None = None) -> bool:
    """Whether the user's own known_hosts files have this very key for this destination."""
    return fingerprint(key) in known_fingerprints(destination, key, port, ssh_config=ssh_config)


def known_fingerprints(
    destination: str, key: str, port: int | None = None, *, ssh_config: Path | None = None
) -> tuple[str, ...]:
    """The fingerprints of the keys of this kind that the user's own known_hosts files have for this destination."""
    way = resolve(destination, port, ssh_config=ssh_config)
    name = way.host_key_alias or (way.hostname if way.port == 22 else f"[{way.hostname}]:{way.port}")
    found: list[str] = []
    for path in way.known_hosts:
        argv = ["ssh-keygen", "-F", name, "-f", str(path)]
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ASK_S).stdout
        for line in said.decode("utf-8", "replace").splitlines():
            kind_and_key = line.split()[1:3]
            if not line.startswith(("#", "@")) and kind_and_key[:1] == key.split()[:1]:
                found.append(fingerprint(" ".join(kind_and_key)))
    return tuple(dict.fromkeys(found))


def resolve(destination: str, port: int | None = None, *, ssh_config: Path | None = None) -> SshDestination:
    """What `ssh -G` says of a destination; connects to nobody. Raises UsageError."""
    done = _ssh(destination, port, ["-G"], [], ssh_config)
    if done.returncode:
        raise UsageError(
            f"ssh cannot make anything of {printable(destination)!r}",
            seen=printable(done.stderr.decode("utf-8", "replace").strip())[-300:],
            fix="correct ~/.ssh/config",
        )
    said: dict[str, str] = {}
    identities: list[Path] = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        word, _, value = line.partition(" ")
        said.setdefault(word, value)
        identities += [Path(value).expanduser()] if word == "identityfile" else []
    files = f"{said.get('userknownhostsfile', '')} {said.get('globalknownhostsfile', '')}".split()
    alias = said.get("hostkeyalias", "none")
    return SshDestination(
        user=said.get("user", ""),
        hostname=said.get("hostname", destination),
        port=int(said.get("port", "22")),
        host_key_alias=None if alias == "none" else alias,
        known_hosts=tuple(path for name in files if (path := Path(name).expanduser()).is_file()),
        identities=tuple(identities),
    )


def own_key(destination: str, port: int | None = None, *, ssh_config: Path | None = None) -> tuple[str, str]:
    """A public key of the user that ssh can use there without a question, and the reason where there is none.

    Keys of the agent come first, then files without a passphrase. Keys that have to be touched (FIDO) are none: nobody
    touches them while a run goes on.
    """
    argv = ["ssh-add", "-L"]
    agent = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ASK_S)
    held = (
        [line.strip() for line in agent.stdout.decode("utf-8", "replace").splitlines()] if not agent.returncode else []
    )
    if usable := [line for line in held if KEY.match(line) and not line.startswith("sk-")]:
        return printable(usable[0]), ""
    locked = ""
    for path in resolve(destination, port, ssh_config=ssh_config).identities:
        public = path.with_name(f"{path.name}.pub")
        if not path.is_file() or not public.is_file() or public.read_text(errors="replace").startswith("sk-"):
            continue
        argv = ["ssh-keygen", "-y", "-P", "", "-f", str(path)]
        if subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ASK_S).returncode:
            locked = locked or f"{path} has a passphrase, and your agent does not hold it: ssh-add {path}"
            continue
        return printable(public.read_text(errors="replace").strip()), ""
    return "", locked


def _ssh(
    destination: str, port: int | None, options: list[str], command: list[str], ssh_config: Path | None
) -> subprocess.CompletedProcess[bytes]:
    checked_destination(destination, port, destination)
    argv = ["ssh", *(["-F", str(ssh_config)] if ssh_config else []), *(["-p", str(port)] if port else [])]
    with HANDSHAKES:
        try:
            return subprocess.run(
                [*argv, *options, "--", destination, *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=ssh_environment(),
                check=False,
                timeout=SCAN_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise HostUnreachable(
                f"{destination} does not answer", seen=f"ssh did not end within {SCAN_S:g} s", fix=f"ping {destination}"
            ) from None


def _known(path: Path) -> Iterator[list[str]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield line.split()


def _unseen(destination: str, done: subprocess.CompletedProcess[bytes]) -> HostUnreachable:
    return explain(
        ConnectionEnd(
            host=destination.rpartition("@")[2],
            destination=destination,
            key=None,
            known_hosts="",
            returncode=done.returncode,
            stderr=done.stderr.decode("utf-8", "replace"),
            noise="",
            why="it showed no key",
            greeted=False,
        )
    )
