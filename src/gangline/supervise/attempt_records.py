"""The records that the supervisor writes of its attempt, and its tolerance for polls that fail.

An error that one poll meets may be gone at the next one (docs/decisions/0010).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import RunFailed
from gangline.runs.cluster import Cluster
from gangline.runs.files import json_object
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there, write_record
from gangline.runs.state import AttemptOutcome, Phase, RunState, append_event
from gangline.transport.transport import Transport

log = logging.getLogger(__name__)


class Superseded(RunFailed):
    """Another supervisor with a higher epoch is in charge of the run: this one must change nothing any more."""


class Records:
    """state.json, events.jsonl and the files of one attempt.

    epoch: of this supervisor; once another one has a higher one, nothing is written and Superseded is raised.
    least_epoch: it is always above this, which rises when this very process is elected again.
    disk_s: how long a write that fails is repeated.
    beat: reports that the supervisor works; called often.
    """

    def __init__(
        self,
        layout: RunLayout,
        attempt: int,
        *,
        disk_s: float = 60.0,
        pause_s: float = 0.3,
        beat: Callable[[], None] = lambda: None,
        least_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        self._epoch = RunState.load(layout).epoch + 1
        self._least_epoch = least_epoch
        self.beat = beat
        self._layout = layout
        self._attempt = attempt
        self._disk_s = disk_s
        self._pause_s = pause_s
        self._complaints: set[str] = set()

    @property
    def epoch(self) -> int:
        """Of two supervisors of a run, the one with the higher epoch is in charge."""
        return max(self._epoch, self._least_epoch() + 1)

    def set_phase(self, phase: Phase, **changes: object) -> None:
        """Write the phase of the run, and other fields of state.json."""
        state = RunState.load(self._layout)
        self.require_charge(state.epoch)
        changed = replace(state, phase=phase, attempt=self._attempt, epoch=self.epoch, **changes)  # type: ignore[arg-type]
        self.persist(lambda: changed.save(self._layout))

    def set_quiet(self, since: str | None) -> None:
        """Write since when no rank has printed anything; None: they print."""
        state = RunState.load(self._layout)
        self.require_charge(state.epoch)
        self._try("that the ranks are quiet", lambda: replace(state, quiet_since=since).save(self._layout))

    def require_charge(self, epoch: int | None) -> None:
        """Raise Superseded for an epoch that is higher than ours."""
        if epoch is not None and epoch > self.epoch:
            raise Superseded(
                f"another supervisor is in charge of {self._layout.run_id}",
                seen=f"its epoch is {epoch}, ours is {self.epoch}",
                fix="nothing to do: this supervisor exits and has changed nothing since",
            )

    def outcome(self, outcome: AttemptOutcome) -> None:
        """Write outcome.json."""
        self.require_charge(RunState.load(self._layout).epoch)
        self.persist(lambda: outcome.save(self._layout.outcome(self._attempt)))

    def figures(self, path: Path, value: dict[str, Any]) -> None:
        """Write board.json, times.json or comparison.json; the run ends all the same where a disk is full."""
        self.require_charge(RunState.load(self._layout).epoch)
        self._try(path.name, lambda: write_record(path, value))

    def event(self, event: str, **details: object) -> None:
        """Add an event."""
        write = partial(append_event, self._layout.events, event, source="supervisor", attempt=self._attempt, **details)
        self._try(f"event {event}", write)

    def _try(self, name: str, write: Callable[[], None]) -> None:
        """Write something that the run does not need; on a full disk it is left out."""
        try:
            write()
        except OSError as error:
            self.complain(f"cannot write {name}: {error}")

    def persist(self, write: Callable[[], None]) -> None:
        """Write, and repeat for a while: a full disk may have room once the ranks have ended."""
        deadline = time.monotonic() + self._disk_s
        while True:
            try:
                return write()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise
                self.complain(str(error))
            self.beat()
            time.sleep(self._pause_s)

    def complain(self, words: str, *, error: Exception | None = None) -> None:
        """Write a line to supervisor.log, once; with the traceback of `error`."""
        if words not in self._complaints:
            self._complaints.add(words)
            log.warning("%s: %s", self._layout.run_id, words, exc_info=error)


class PollErrors:
    """Errors of polls, tolerated for `patience_s` after the last poll without one."""

    def __init__(self, records: Records, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = None

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        """Log the error of the poll in here; raise it once errors last too long, or Superseded."""
        try:
            yield
        except Superseded:
            raise
        except Exception as error:
            now = self._clock()
            self._since = now if self._since is None else self._since
            words = f"{type(error).__name__}: {error}"
            self._records.complain(f"polling the hosts failed: {words}", error=error)
            if now - self._since < self._patience_s:
                return
            self._records.event("unsupervised", what=f"the supervisor gave up; the ranks keep running: {words}")
            raise
        self._since = None


# The figures of an attempt that has ended: the plan compared with the measurements, and the time of each rank.


MOST_BYTES = 8 << 20
"""The last thousand steps of 64 ranks, or more of fewer."""
BLOCK_BYTES = 1 << 20
LARGEST_BYTES = 1 << 50
"""A larger file, as far as its host says, is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFigures:
    """The figures that are written when an attempt has ended."""

    times: dict[str, Any] | None = None
    """The content of times.json; None where there were no steps."""
    comparison: dict[str, Any] | None = None
    """The content of comparison.json; None without a forecast, or with too few steps."""
    problem: str | None = None
    """The error that prevented the comparison; None: there was none."""


def read_figures(layout: RunLayout, attempt: int, *, cluster: Cluster, head: Transport) -> AttemptFigures:
    """Read the figures of an attempt; raises the error of a host that does not answer."""
    from gangline.planner.outcome import spent

    try:
        records = last_records(head, RunLayout(Path(cluster.head.workdir), layout.run_id).metrics)
    except FileNotFoundError:
        return AttemptFigures()
    report = spent(records, run_id=layout.run_id, attempt=attempt)
    times = report.to_json() if report is not None else None
    try:
        return AttemptFigures(times=times, comparison=compared(layout, attempt, records))
    except Exception as error:  # noqa: BLE001  (a damaged plan, of another version perhaps)
        return AttemptFigures(times=times, problem=f"{type(error).__name__}: {error}")


def compared(layout: RunLayout, attempt: int, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The content of comparison.json; None without a forecast, or with too few steps.

    Raises the error of a damaged plan.
    """
    # imported here: a supervisor needs the planner only at the end
    from gangline.planner.outcome import compare, observe
    from gangline.planner.plan import Plan

    plan = load_if_there(layout.plan, Plan)
    if plan is None or plan.forecast is None:
        return None
    observed = observe(records, attempt=attempt, batch=plan.batch, num_ranks=len(plan.ranks))
    comparison = compare(plan, observed, run_id=layout.run_id, attempt=attempt)
    return None if comparison is None else comparison.to_json()


def last_records(head: Transport, path: PurePath) -> list[dict[str, Any]]:
    """The objects in the last 8 MiB of a file of JSON lines; raises FileNotFoundError."""
    begin = max(0, _end(head, path) - MOST_BYTES)
    data = b""
    while len(data) < MOST_BYTES and (piece := head.read(path, offset=begin + len(data), limit=BLOCK_BYTES)):
        data += piece
    lines = data.split(b"\n")
    values = map(json_object, lines[1:] if begin else lines)  # the first line is incomplete
    return [value for value in values if value is not None]


def _end(head: Transport, path: PurePath) -> int:
    """The size of a file, rounded up to whole MiB: a Transport has no sizes, but reads nothing beyond the end."""
    low, high = 0, MOST_BYTES
    while high < LARGEST_BYTES and head.read(path, offset=high, limit=1):
        low, high = high, 2 * high
    while low and high - low > BLOCK_BYTES:
        middle = (low + high) // 2 // BLOCK_BYTES * BLOCK_BYTES
        low, high = (middle, high) if head.read(path, offset=middle, limit=1) else (low, middle)
    return high
