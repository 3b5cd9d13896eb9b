"""The error tree.

    GanglineError                 1   anything that went wrong
    ├── UsageError                2   the command line is off
    │   ├── SpecError             2   cluster.yaml or job.yaml is off (all mistakes at once)
    │   ├── DataError             2   the data set is off (file, row, reason)
    │   ├── ModelError            2   the model folder is off, or asks for what is not allowed
    │   ├── PluginError           2   a plug-in of another package cannot be used
    │   └── RecordError           2   a record of a run cannot be used (the file is named)
    │       └── NewerRecord       2   a newer gangline wrote it (both versions are named)
    ├── CheckFailed               3   a check found something that stops the start
    ├── HostUnreachable           4   a host does not answer
    │   └── HostKeyRefused        4   a host shows another key than the pinned one, or none is pinned
    ├── RunFailed                 5   the run ended badly
    │   ├── CheckpointError       5   a checkpoint cannot be written, or none can be used
    │   └── BadState              5   what the ranks hold must not be saved: only an earlier checkpoint is good
    └── DoesNotFit                6   the plan does not fit the machines

The number is the exit code of the command. Every error has three parts: what went wrong and where, what was
expected and what was seen, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class GanglineError(Exception):
    """An error for the user, in three parts.

    what: what went wrong, and where (file, key, host).
    seen: what was expected, and what was seen instead.
    fix: what to do next.
    details: more keys of `to_json`, such as the host and the rank of a cause.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, seen: str = "", fix: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.seen = seen
        self.fix = fix
        self.details = dict(details or {})

    def __str__(self) -> str:
        rows = [self.what]
        if self.seen:
            rows.append(f"  seen  {self.seen}")
        if self.fix:
            rows.append(f"  fix   {self.fix}")
        return "\n".join(rows)

    def to_json(self) -> dict[str, Any]:
        """The error as plain data, for the files in which workers and the controller meet."""
        return {
            "kind": type(self).__name__,
            "what": self.what,
            "seen": self.seen,
            "fix": self.fix,
            "exit_code": self.exit_code,
            **self.details,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> GanglineError:
        """The error that `to_json` wrote; an unknown kind becomes a RunFailed."""
        kind = _by_name().get(str(data.get("kind")), RunFailed)
        error = kind(str(data.get("what", "")), seen=str(data.get("seen", "")), fix=str(data.get("fix", "")))
        if isinstance(error, HostUnreachable):
            error.reason = str(data.get("reason", ""))
        return error


class UsageError(GanglineError):
    """The command line, or a value on it, is off."""

    exit_code = 2


class SpecError(UsageError):
    """A cluster or job file is off; `what` lists every mistake."""


class DataError(UsageError):
    """The data set cannot be used."""


class ModelError(UsageError):
    """The model cannot be loaded, or asks for something that is not allowed."""


class PluginError(UsageError):
    """A plug-in cannot be used: it is named with its package, version and entry point."""


class RecordError(UsageError, ValueError):
    """A record of a run on disk cannot be used, because it is damaged in most cases. `what` names the file."""


class NewerRecord(RecordError):
    """A newer gangline wrote the record. `seen` names the version of the record and the versions that are read here."""


class CheckFailed(GanglineError):
    """A check found something that stops the start."""

    exit_code = 3


class HostUnreachable(GanglineError):
    """A host does not answer.

    reason: one word for checks: unreachable, refused, unknown-name, denied, key-changed, key-unpinned, no-python; ""
    where nobody knows.
    """

    exit_code = 4

    def __init__(self, what: str, *, seen: str = "", fix: str = "", reason: str = "") -> None:
        super().__init__(what, seen=seen, fix=fix)
        self.reason = reason

    def to_json(self) -> dict[str, Any]:
        """See `GanglineError.to_json`."""
        return super().to_json() | ({"reason": self.reason} if self.reason else {})


class HostKeyRefused(HostUnreachable):
    """Nothing tells that this host is the one it should be; trying again does not help, nothing was sent to it."""


class RunFailed(GanglineError):
    """The run ended badly."""

    exit_code = 5


class CheckpointError(RunFailed):
    """A checkpoint cannot be written, or none can be used."""


class BadState(RunFailed):
    """What the ranks hold is wrong, or led nowhere: it must not be saved, and the run goes back to what was."""


class DoesNotFit(GanglineError):
    """The plan does not fit the machines."""

    exit_code = 6


def error_summary(error: BaseException) -> str:
    """The kind of an error, and the first line of its text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _by_name() -> dict[str, type[GanglineError]]:
    found: dict[str, type[GanglineError]] = {}
    queue: list[type[GanglineError]] = [GanglineError]
    while queue:
        kind = queue.pop()
        found[kind.__name__] = kind
        queue.extend(kind.__subclasses__())
    return found
