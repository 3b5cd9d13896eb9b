"""What the supervisor writes down of its attempt, and how it bears looks that fail: the next one may be better.

Nobody restarts a supervisor (docs/decisions/0010).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gangline.errors import RunFailed
from gangline.runs.events import append_event
from gangline.runs.layout import RunLayout
from gangline.runs.state import Outcome, Phase, RunState
from gangline.runs.versions import write_record

log = logging.getLogger(__name__)


class Superseded(RunFailed):
    """Another supervisor with a higher epoch looks after the run: this one has nothing to say any more."""


class Records:
    """state.json, events.jsonl and the files of one attempt.

    epoch: of this supervisor; once another one has a higher one, nothing is written and Superseded is raised.
    disk_s: how long a file that cannot be written is tried again.
    beat: says to who looks that we get on; called often.
    """

    def __init__(
        self,
        layout: RunLayout,
        attempt: int,
        *,
        disk_s: float = 60.0,
        pause_s: float = 0.3,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = RunState.load(layout).epoch + 1
        self.beat = beat
        self._layout = layout
        self._attempt = attempt
        self._disk_s = disk_s
        self._pause_s = pause_s
        self._complaints: set[str] = set()

    def set_phase(self, phase: Phase, **changes: object) -> None:
        """Say where the run stands."""
        state = RunState.load(self._layout)
        self.require_charge(state.epoch)
        changed = replace(state, phase=phase, attempt=self._attempt, epoch=self.epoch, **changes)  # type: ignore[arg-type]
        self.persist(lambda: changed.save(self._layout))

    def set_quiet(self, since: str | None) -> None:
        """Say since when no rank has printed anything; None: they print. On a full disk only the event tells."""
        state = RunState.load(self._layout)
        self.require_charge(state.epoch)
        try:
            replace(state, quiet_since=since).save(self._layout)
        except OSError as error:
            self.complain(f"cannot write that the ranks are quiet: {error}")

    def require_charge(self, epoch: int | None) -> None:
        """Raise Superseded if somebody has seen a higher epoch than ours."""
        if epoch is not None and epoch > self.epoch:
            raise Superseded(
                f"another supervisor looks after {self._layout.run_id}",
                seen=f"its epoch is {epoch}, ours is {self.epoch}",
                fix="nothing: this one leaves, and has changed nothing since",
            )

    def outcome(self, outcome: Outcome) -> None:
        """Write outcome.json."""
        self.require_charge(RunState.load(self._layout).epoch)
        self.persist(lambda: outcome.save(self._layout.outcome(self._attempt)))

    def board(self, board: dict[str, Any]) -> None:
        """Write board.json; on a full disk it waits for the next."""
        try:
            write_record(self._layout.board(self._attempt), board)
        except OSError as error:
            self.complain(f"cannot write board.json: {error}")

    def comparison(self, comparison: dict[str, Any]) -> None:
        """Write comparison.json; on a full disk the run ends without it."""
        self.require_charge(RunState.load(self._layout).epoch)
        try:
            write_record(self._layout.comparison, comparison)
        except OSError as error:
            self.complain(f"cannot write comparison.json: {error}")

    def times(self, times: dict[str, Any]) -> None:
        """Write times.json; on a full disk the run ends without it."""
        try:
            write_record(self._layout.times(self._attempt), times)
        except OSError as error:
            self.complain(f"cannot write times.json: {error}")

    def event(self, event: str, **details: object) -> None:
        """Add an event."""
        try:
            append_event(self._layout.events, event, source="supervisor", attempt=self._attempt, **details)
        except OSError as error:
            self.complain(f"cannot write event {event}: {error}")

    def persist(self, write: Callable[[], None]) -> None:
        """Write, and try again for a while: a full disk may get room once the ranks have ended."""
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
        """One line for supervisor.log, once; with the way on which `error` came."""
        if words not in self._complaints:
            self._complaints.add(words)
            log.warning("%s: %s", self._layout.run_id, words, exc_info=error)


class Troubles:
    """What goes wrong in looks of the supervisor; borne for `patience_s`, counted from the last look that was good."""

    def __init__(self, records: Records, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = None

    @contextmanager
    def borne(self) -> Iterator[None]:
        """Do one look in here. What it raises is kept, until it has lasted too long or somebody else is in charge."""
        try:
            yield
        except Superseded:
            raise
        except Exception as error:
            now = self._clock()
            self._since = now if self._since is None else self._since
            words = f"{type(error).__name__}: {error}"
            self._records.complain(f"a look failed: {words}", error=error)
            if now - self._since < self._patience_s:
                return
            self._records.event("unsupervised", what=f"the supervisor gave up, and the ranks run on: {words}")
            raise
        self._since = None
