"""The seam to whatever starts ranks on hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.runs.job import build


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """What is started on one host."""

    host: str
    folder: str
    """The attempt's folder of this host: guard.json, exit.json and console.log go here."""
    rank_files: str
    """The attempt's folder: rank-<r>.pid and the like."""
    argv: tuple[str, ...]
    env: dict[str, str]
    guard_argv: tuple[str, ...]
    """The command that starts the guard; it reads this request as JSON from stdin."""
    grace_s: float = 120.0
    """After an orderly stop: how long ranks may show no progress before they are ended."""
    ranks: tuple[int, ...] = ()
    """Global ranks of this host; empty: every one whose files appear in `rank_files`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Exactly what will be started, printable before anything is."""

    run_id: str
    attempt: int
    hosts: tuple[HostRequest, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for request.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Request:
        """The request that `to_json` wrote."""
        return build(Request, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """How one host's part of the gang is doing."""

    host: str
    phase: Literal["starting", "running", "ended", "lost"]
    """lost: the guard is gone without having written exit.json."""
    returncode: int | None = None
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of the first rank of this host that failed with one."""
    reason: str | None = None
    """Once ended, as the guard says: finished (well or badly), stopped, killed, signalled."""
    failures: tuple[dict[str, Any], ...] = ()
    """Ranks that ended badly, in the order seen: rank, pid, time, ordered, error, exit, log, log_tail. While the host
    still runs, only those that left an error."""
    console_tail: tuple[str, ...] = ()
    """Last lines of console.log, if the host ended badly."""


class Backend(Protocol):
    """Renders, starts, watches and stops the gang of one attempt."""

    def render(self, cluster: Cluster, gang: Gang, *, port: int) -> Request:
        """Say exactly what would be started. Pure."""
        ...

    def start(self, request: Request, transports: Mapping[str, Transport]) -> None:
        """Start it on every host, or raise and leave nothing running."""
        ...

    def poll(self, request: Request, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """How every host is doing, in the order of the request."""
        ...

    def stop(self, request: Request, transports: Mapping[str, Transport], *, now: bool) -> None:
        """Order every guard to end its ranks; `now`: without waiting for a save. Returns at once."""
        ...
