"""The seam of a step: what it wants to know of a host, and the changes that follow from that. Pure.

A step never acts. It says which files, outputs and programs it has to see (`Asks`); the engine reads them; the step
turns them into changes as data (`StepPlan`); the engine shows them, makes them, and reads again: then no change may be
left.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gangline.runs.cluster import Cluster, Host

Scope = Literal["root", "user"]
"""Whether a change needs root, or is one of the user's own files."""
REVERT_S = 60.0
"""How long a change that may lock out stands without the proof of a new login."""


# What a step wants to know, and what the host answered.


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What a step has to see. Paths are absolute, or begin with ~/."""

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    """Whose names are listed."""
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> a command that only reads."""
    programs: tuple[str, ...] = ()

    def with_all_of(self, other: Asks) -> Asks:
        """What two steps have to see together."""
        return Asks(
            files=tuple(dict.fromkeys((*self.files, *other.files))),
            folders=tuple(dict.fromkeys((*self.folders, *other.folders))),
            commands={**self.commands, **other.commands},
            programs=tuple(dict.fromkeys((*self.programs, *other.programs))),
        )

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return bool(self.files or self.folders or self.commands or self.programs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "files": list(self.files),
            "folders": list(self.folders),
            "commands": {name: list(argv) for name, argv in self.commands.items()},
            "programs": list(self.programs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """A file of a host."""

    content: bytes | None = None
    """None: there is none, or it cannot be read."""
    unreadable: str = ""
    """Why it cannot be read."""
    mode: int | None = None

    @property
    def text(self) -> str:
        """The content as text; empty where there is none."""
        return (self.content or b"").decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """What a host answered."""

    user: str
    uid: int
    home: str
    files: Mapping[str, FileRead]
    folders: Mapping[str, tuple[str, ...] | None]
    """None: there is no such folder."""
    commands: Mapping[str, str]
    """What each command printed, stripped; empty where it cannot be run."""
    programs: Mapping[str, str | None]
    """Where each program lies; None: nowhere."""

    def with_all_of(self, other: HostReading) -> HostReading:
        """This answer, with what another user of the same host could read."""
        return dataclasses.replace(
            self,
            files={**self.files, **other.files},
            folders={**self.folders, **other.folders},
            commands={**self.commands, **other.commands},
            programs={**self.programs, **other.programs},
        )

    def output(self, name: str) -> str:
        """What a command printed."""
        return self.commands.get(name, "")

    def has(self, program: str) -> bool:
        """Whether a program is there."""
        return self.programs.get(program) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What a step sees: one host, and all others beside it."""

    host: Host
    cluster: Cluster
    reading: HostReading
    readings: Mapping[str, HostReading]
    """By host name, of every host that answered."""
    public_key: str = ""
    """The user's, where the host refuses a login by key so far; "" where it takes one."""
    named: tuple[str, ...] = ()
    """The hosts that the user named; none: all."""
    power_limit_w: int | None = None
    """What each GPU may draw, as the user said; None: as it is."""


# What a step wants to change.


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file with another content. Mode, owner and extended attributes stay, unless `mode` says otherwise."""

    path: str
    before: bytes | None
    """As it was read; None: there is no such file."""
    content: bytes | None
    """None: the file goes."""
    mode: int | None = None
    folder_mode: int = 0o755
    """Of folders that are made for it."""
    scope: Scope = "root"

    def to_json(self) -> dict[str, Any]:
        """As the host takes it."""
        return {
            "kind": "file",
            "path": self.path,
            "content": None if self.content is None else base64.b64encode(self.content).decode("ascii"),
            "before": None if self.before is None else hashlib.sha256(self.before).hexdigest(),
            "mode": self.mode,
            "folder_mode": self.folder_mode,
        }

    def lines(self) -> list[str]:
        """The difference, for people."""
        return [
            f"file  {self.path}{self._remark()}",
            *(f"  {line}" for line in content_diff(self.before, self.content)),
        ]

    def _remark(self) -> str:
        if self.before is None:
            return " (new)"
        return " (goes)" if self.content is None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChange:
    """A command with its reverse. An empty `argv` or `undo` does nothing on the way there, or back."""

    argv: tuple[str, ...]
    undo: tuple[str, ...]
    probe: tuple[str, ...] = ()
    """A command that only reads; its output is the state of the thing. Without one, nothing is compared."""
    before: str = ""
    """What the probe prints now."""
    after: str | None = None
    """What it has to print afterwards; None: that is not known before."""
    limit_s: float | None = None
    """How long it, or its reverse, may take; None: two minutes."""
    scope: Scope = "root"

    def to_json(self) -> dict[str, Any]:
        """As the host takes it."""
        return {
            "kind": "command",
            "argv": list(self.argv),
            "undo": list(self.undo),
            "probe": list(self.probe),
            "before": self.before,
            "after": self.after,
            "limit_s": self.limit_s,
        }

    def lines(self) -> list[str]:
        """The words, for people."""
        if not self.argv:
            return [f"undo  {' '.join(self.undo)}  (only when this is undone)"]
        return [f"run   {' '.join(self.argv)}", *([f"undo  {' '.join(self.undo)}"] if self.undo else [])]


Change = FileChange | CommandChange


def activated(changes: tuple[Change, ...], command: tuple[str, ...]) -> tuple[Change, ...]:
    """The changes with a command that puts them into force: after them, and after they were undone."""
    return (CommandChange(argv=(), undo=command), *changes, CommandChange(argv=command, undo=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step changes on one host."""

    changes: tuple[Change, ...] = ()
    reason: str = ""
    risk: str = ""
    """What could go wrong, and what an undo does not bring back."""
    remains: tuple[str, ...] = ()
    """What the user has to do."""
    revert_s: float | None = None
    """Seconds after which the host takes the changes back unless a new login worked; None: they cannot lock out."""
    restart: bool = False
    """Whether the host has to be restarted for them to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStep:
    """One row of the table of steps."""

    name: str
    summary: str
    asks: Asks
    plan: Callable[[StepView], StepPlan]
    only_by_name: bool = False
    """Whether it is done only where the user names it."""
    plan_first: Callable[[StepView], StepPlan] | None = None
    """The part of the plan that is shown and made on every host first, because the rest follows from it."""
    on_every_host: bool = False
    """Whether it is planned on every host, whichever are named: the words name something else for it."""
    on_witness: bool = False
    """Whether it is for a machine, too, that trains nothing."""
    root_asks: Callable[[HostReading], Asks] | None = None
    """What only root can read, from the answer to `asks`; nothing where it is not needed, for sudo costs a password.
    Where nobody gives one, the plan sees `asks` alone."""


def content_diff(before: bytes | None, after: bytes | None, *, context: int = 1) -> list[str]:
    """Lines that go (-) and come (+), with their neighbours."""
    old, new = ((text or b"").decode("utf-8", "replace").splitlines() for text in (before, after))
    rows = difflib.unified_diff(old, new, n=context, lineterm="")
    return [row for row in rows if not row.startswith(("---", "+++", "@@"))]


# A block of a file that is gangline's own.


BEGIN, END = "# BEGIN gangline prepare {}", "# END gangline prepare {}"


def with_block(text: str, name: str, lines: list[str]) -> str:
    """The text with the block of that name, in its place or at the end; without it where there are no lines."""
    begin, end = BEGIN.format(name), END.format(name)
    block = [begin, *lines, end] if lines else []
    rows = text.splitlines()
    if begin in rows and end in rows[rows.index(begin) :]:
        first = rows.index(begin)
        last = rows.index(end, first)
        rows[first : last + 1] = block
    else:
        rows += block
    return "".join(f"{row}\n" for row in rows)
