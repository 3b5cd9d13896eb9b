"""What the main path needs of the world, and what tests put in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gangline.launch.backend import Backend
from gangline.launch.port import free_port
from gangline.launch.registry import Backends
from gangline.remote.connect import connect_all
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.supervise.detached import (
    cannot_supervise,
    is_alive,
    leave_run,
    spawn,
    spawn_there,
    stop_run,
    unfinished,
)

Transports = dict[str, Transport]

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
"""Variables of the user's shell that ranks on other hosts get."""


class Talk(Protocol):
    """Where the path tells what it does."""

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def tick(self, line: str) -> None:
        """How a long step is getting on; the next line takes its place."""
        ...


class StopRun(Protocol):
    """See `gangline.supervise.detached.stop_run`."""

    def __call__(self, layout: RunLayout, keeper: Transport | None = None, *, now: bool) -> None:
        """Order a run to end, and return."""
        ...


class LeaveRun(Protocol):
    """See `gangline.supervise.detached.leave_run`."""

    def __call__(self, layout: RunLayout, keeper: Transport | None = None, *, hosts: Sequence[str]) -> None:
        """Ask a run to go on without some of its hosts, and return."""
        ...


class Spawn(Protocol):
    """See `gangline.supervise.detached.spawn`."""

    def __call__(self, run_folder: Path, attempt: int, *, secrets: Mapping[str, str] | None = None) -> None:
        """Have a detached supervisor on this computer start an attempt."""
        ...


class SpawnThere(Protocol):
    """See `gangline.supervise.detached.spawn_there`."""

    def __call__(
        self, head: Host, keeper: Transport, there: RunLayout, attempt: int, *, secrets: Mapping[str, str] | None = None
    ) -> None:
        """Have a detached supervisor on the head start an attempt."""
        ...


class FreePort(Protocol):
    """See `gangline.launch.port.free_port`."""

    def __call__(self, cluster: Cluster, head: Transport, *, claim: bool = True) -> int:
        """A port of the head for the ranks to meet at."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What touches the world; tests put fakes here."""

    connect: Callable[[Cluster], Transports] = connect_all
    backend: Callable[[], Backend] = Backends
    spawn: Spawn = spawn
    spawn_there: SpawnThere = spawn_there
    cannot_supervise: Callable[[Cluster, Transport], list[str]] = cannot_supervise
    is_alive: Callable[[RunLayout, Transport | None], bool] = is_alive
    unfinished: Callable[[RunLayout, Transport | None], tuple[str, ...]] = unfinished
    stop_run: StopRun = stop_run
    leave_run: LeaveRun = leave_run
    free_port: FreePort = free_port
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)


REAL = Seams()
"""Real hosts, real processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What every step of a verb works with."""

    transports: Transports
    home: Path
    talk: Talk
    seams: Seams

    @property
    def secrets(self) -> dict[str, str]:
        """Tokens of this shell that ranks get, by way of stdin and memory only."""
        variables = self.seams.variables
        return {name: variables[name] for name in SECRETS if variables.get(name)}


def default_home() -> Path:
    """Where the controller keeps its runs: $GANGLINE_HOME, or the user's state folder."""
    if named := os.environ.get("GANGLINE_HOME"):
        return Path(named).expanduser().absolute()
    # 30 ms that a set variable saves
    import platformdirs

    return platformdirs.user_state_path("gangline")
