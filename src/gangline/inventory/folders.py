"""Folders of hosts: models and data that should be the same on all of them, and what can only be known by writing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Cluster, Host
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import AGENT, Transport

# Words of a host, before anybody shows them.


def plain(text: str) -> str:
    """A text of a host without what could steer a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOnHost:
    """What one host holds at a path."""

    host: str
    path: str
    tree: str | None = None
    """One hash over all names and contents; None: there is nothing."""
    num_files: int = 0
    num_bytes: int = 0
    error: str | None = None
    """Why nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model or data set on all hosts."""

    what: str
    """What people call it: model, data."""
    copies: tuple[CopyOnHost, ...]
    differing: tuple[str, ...] = ()
    """Files that are not the same, or not there, on all hosts that hold it; the first ten."""


# Is a folder the same one on all hosts? Asked by markers that are written, looked for, renamed and removed.


TURN_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedView:
    """What one host saw of a folder."""

    host: str
    error: str | None = None
    """Why it could not write there."""
    sees: tuple[str, ...] = ()
    """The hosts whose markers it saw; itself among them."""
    sees_rename: bool | None = None
    """Whether a file that another host renamed had its new name here within seconds; None: not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProbe:
    """What all hosts saw of a folder that should be one."""

    folder: str
    views: tuple[SharedView, ...]


def probe_shared(folder: str, transports: Mapping[str, Transport]) -> SharedProbe:
    """Try a folder on all hosts at once, in turns; every marker is removed at the end.

    A host that does not answer is left out: other checks tell of it.
    """
    probe = _Probe(folder, transports)
    try:
        written = probe.turn("write", tuple(transports))
        looked = probe.turn("look", tuple(transports))
        renamer = next((host for host, answer in written.items() if "error" not in answer), None)
        renamed = _renamed(probe, renamer, looked) if renamer is not None else {}
    finally:
        probe.turn("remove", tuple(transports))
    views = [
        SharedView(
            host=host,
            error=None if (error := written[host].get("error")) is None else plain(str(error))[:300],
            sees=probe.hosts(looked[host]),
            sees_rename=None if host not in renamed else renamer in probe.hosts(renamed[host]),
        )
        for host in transports
        if not written[host].get("lost")
    ]
    return SharedProbe(folder=folder, views=tuple(views))


def _renamed(probe: _Probe, renamer: str, looked: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the hosts that saw a marker see of it once it is renamed."""
    if "error" in probe.turn("rename", (renamer,))[renamer]:
        return {}
    others = tuple(host for host, answer in looked.items() if host != renamer and renamer in probe.hosts(answer))
    return probe.turn("renamed", others)


class _Probe:
    """One round of markers; hosts are numbers in their names, whatever the hosts are called."""

    def __init__(self, folder: str, transports: Mapping[str, Transport]) -> None:
        self._folder = folder
        self._transports = transports
        self._id = secrets.token_hex(8)
        self._numbers = {host: f"h{number}" for number, host in enumerate(transports)}

    def turn(self, word: str, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Have one thing done on hosts at the same time."""
        if not hosts:
            return {}
        with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
            return dict(zip(hosts, pool.map(lambda host: self._ask(host, word), hosts), strict=True))

    def hosts(self, answer: Mapping[str, Any]) -> tuple[str, ...]:
        """The hosts whose markers an answer names."""
        seen = answer.get("seen")
        return tuple(host for host, mark in self._numbers.items() if isinstance(seen, list) and mark in seen)

    def _ask(self, host: str, word: str) -> dict[str, Any]:
        request = {"folder": self._folder, "probe": self._id, "mine": self._numbers[host], "do": word}
        try:
            result = self._transports[host].run((AGENT, "shared"), stdin=json.dumps(request).encode(), timeout_s=TURN_S)
            answer = json.loads(result.stdout)
        except HostUnreachable as error:
            return {"error": error.what, "lost": True}
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            return {"error": str(error) or type(error).__name__}
        return answer if isinstance(answer, dict) else {"error": "it does not answer in JSON"}


# Can files really be written on every host?


DISK_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTry:
    """A file of 1 MiB that was written, synced, renamed and removed; or why not."""

    host: str
    folder: str
    seconds: float | None = None
    error: str | None = None


def probe_disks(cluster: Cluster, transports: Mapping[str, Transport]) -> tuple[WriteTry, ...]:
    """Try the work folders of all hosts at the same time; a host that does not answer is left out."""
    tries = in_parallel(lambda host: _try(host, transports[host.name]), cluster.hosts, at_once=64)
    return tuple(row for row in tries if row is not None)


def _try(host: Host, transport: Transport) -> WriteTry | None:
    request = json.dumps({"folders": [host.workdir]}).encode()
    try:
        result = transport.run((AGENT, "disk"), stdin=request, timeout_s=DISK_TIMEOUT_S)
        answer: Any = json.loads(result.stdout)["folders"][host.workdir]
        error, seconds = answer.get("error"), answer.get("seconds")
    except HostUnreachable:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return WriteTry(host=host.name, folder=host.workdir, error=plain(str(problem).partition("\n")[0]))
    return WriteTry(
        host=host.name,
        folder=host.workdir,
        seconds=float(seconds) if isinstance(seconds, (int, float)) else None,
        error=plain(str(error)) if error is not None else None,
    )
