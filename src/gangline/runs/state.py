"""Where a run stands (state.json), how an attempt ended (outcome.json), and what the user ordered (order.json) or asked
of it (leave.json).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gangline.runs.events import now_iso
from gangline.runs.files import read_json, write_json
from gangline.runs.job import build
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId

Phase = Literal["preparing", "running", "stopping", "restarting", "finished", "stopped", "failed"]
"""restarting: an attempt has ended, and the supervisor prepares the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """state.json of the controller. `train` writes it until the supervisor does."""

    name: str
    phase: Phase = "preparing"
    attempt: int = 1
    created: str = field(default_factory=now_iso)
    updated: str = field(default_factory=now_iso)
    supervisor: ProcessId | None = None
    """The supervisor of this attempt; it may be gone."""
    epoch: int = 0
    """Counts the supervisors of the run; of two that look after it, the one with the higher number is in charge."""
    error: dict[str, Any] | None = None
    """`GanglineError.to_json` of what ended the run."""
    quiet_since: str | None = None
    """While it runs: since when no rank has printed anything, if that was told."""

    def save(self, layout: RunLayout) -> None:
        """Write state.json, with the time of now."""
        write_json(layout.state, dataclasses.asdict(dataclasses.replace(self, updated=now_iso())))

    @staticmethod
    def load(layout: RunLayout) -> RunState:
        """Read state.json; raises FileNotFoundError."""
        return build(RunState, read_json(layout.state))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutcome:
    """How one host's part of an attempt ended."""

    phase: str
    returncode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """outcome.json of one attempt."""

    result: Literal["finished", "stopped", "failed"]
    hosts: dict[str, HostOutcome]
    error: dict[str, Any] | None = None
    """The first cause: `GanglineError.to_json` and, where known, "host", "rank", "log" and "log_tail"."""
    failures: tuple[dict[str, Any], ...] = ()
    """Every rank that ended badly, as the guards saw it, with its host."""
    left: tuple[str, ...] = ()
    """What was still there after the end, as seen on the hosts."""
    unverified: tuple[str, ...] = ()
    """Hosts that did not answer at the end: nobody has seen whether something is left there."""
    ended: str = field(default_factory=now_iso)

    def save(self, path: Path) -> None:
        """Write outcome.json."""
        write_json(path, dataclasses.asdict(self))

    @staticmethod
    def load(path: Path) -> Outcome:
        """Read outcome.json; raises FileNotFoundError."""
        return Outcome.from_json(read_json(path))

    @staticmethod
    def from_json(data: dict[str, Any]) -> Outcome:
        """The outcome that `save` wrote; raises LookupError, TypeError, ValueError or AttributeError for others."""
        hosts = {name: build(HostOutcome, host) for name, host in data["hosts"].items()}
        lists = {name: tuple(data.get(name, ())) for name in ("failures", "left", "unverified")}
        outcome = Outcome(**{**data, "hosts": hosts, **lists})
        if outcome.result not in {"finished", "stopped", "failed"} or not isinstance(outcome.error, dict | None):
            raise ValueError("no outcome of an attempt")
        if not all(isinstance(each, str) for each in (*outcome.left, *outcome.unverified)):
            raise TypeError("a host that is no name")
        return outcome


Order = Literal["stop", "kill"]


def write_order(layout: RunLayout, order: Order, *, attempt: int) -> None:
    """Ask an attempt to end: `stop` saves first, `kill` does not."""
    write_json(layout.folder / "order.json", {"order": order, "attempt": attempt})


def read_order(layout: RunLayout, *, attempt: int) -> Order | None:
    """What was ordered of this attempt, if anything."""
    try:
        said = read_json(layout.folder / "order.json")
    except FileNotFoundError:
        return None
    order = said.get("order") if said.get("attempt") == attempt else None
    return order if order in {"stop", "kill"} else None


def write_leave(layout: RunLayout, hosts: Iterable[str], *, attempt: int) -> None:
    """Ask a run to go on without some hosts of this attempt; those that were asked to leave it before stay asked."""
    asked = dict.fromkeys((*read_leave(layout, attempt=attempt), *hosts))
    write_json(layout.folder / "leave.json", {"hosts": list(asked), "attempt": attempt})


def read_leave(layout: RunLayout, *, attempt: int) -> tuple[str, ...]:
    """Hosts of this attempt that the user wants to leave."""
    try:
        said = read_json(layout.folder / "leave.json")
    except FileNotFoundError:
        return ()
    return tuple(said.get("hosts", ())) if said.get("attempt") == attempt else ()
