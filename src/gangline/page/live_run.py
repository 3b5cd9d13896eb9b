"""The runs that a browser looks at: each is kept open, and read by offset as it grows. Changes nothing.

A look begins a reading where none is under way and the last one is old enough, waits for it a moment, and answers with
what is known. A run at which nobody looked for a while is closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.context import REAL, Dependencies, read_cluster
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import CommandRecord
from gangline.control.watching import HostLooks, facts_of
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.page.run_logs import RunLogs
from gangline.page.series import RunSeries
from gangline.planner.plan import Plan
from gangline.provision.trees import host_layout
from gangline.report.dashboard import WatchedHost
from gangline.report.follow import View
from gangline.report.host_samples import SampleTail, card_events, seconds_of
from gangline.report.run_figures import RunFigures
from gangline.report.run_history import RunHistory
from gangline.report.run_summary import RunRecords, with_documents
from gangline.report.tail import JsonTail, Tail
from gangline.report.text_table import clean, event_line
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord, run_ids
from gangline.transport.ssh_options import NONSENSE

AT_ONCE_BYTES = 16 << 20
"""How much of the metrics is read before what was read can be shown."""
AGAIN_S = 1.5
"""A look earlier than this after the last reading reads nothing."""
FIRST_WAIT_S = 1.2
WAIT_S = 0.6
IDLE_S = 180.0
MOST_OPEN = 12
MOST_EVENTS = 2000


class LiveRun:
    """One run that is looked at."""

    def __init__(self, run_id: str, *, home: Path, deps: Dependencies = REAL) -> None:
        self._open = ExitStack()
        self.run: RunHandle = self._open.enter_context(open_run(run_id, home=home, deps=deps))
        self.id = run_id
        self.lock = threading.Lock()
        """Held while what was read is changed or shown."""
        self.series = RunSeries()
        self.events: list[dict[str, Any]] = []
        self.record: RunRecord = self.run.record()
        self._attempt = self.record.state.attempt if self.record.state else None
        self.trouble = ""
        """Why the last reading did not come to its end."""
        self.is_behind = True
        self.plan = _plan(self.run)
        facts, _ = facts_of(self.run)
        self.hosts = HostLooks(
            {host.name: WatchedHost(name=host.name, facts=facts.get(host.name)) for host in self.run.cluster.hosts}
        )
        self._samples = {
            host.name: SampleTail(
                host.name, self.run.transports[host.name], host_layout(host, run_id).samples(host.name)
            )
            for host in self.run.cluster.hosts
        }
        self.logs = RunLogs(self.run)
        self._files = _GrowingFiles(self.run)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"read {run_id}")
        self._reading: Future[None] | None = None
        self._read_at = float("-inf")
        self.looked_at = time.monotonic()

    def look(self) -> None:
        """Have it read, and wait for that a moment."""
        self.looked_at = time.monotonic()
        with self.lock:
            if self._reading is None or (self._reading.done() and time.monotonic() - self._read_at > AGAIN_S):
                is_first = self._reading is None
                self._reading = self._pool.submit(self._read)
            else:
                is_first = False
            reading = self._reading
        wait([reading], FIRST_WAIT_S if is_first else WAIT_S)

    def is_elsewhere(self) -> bool:
        """Whether a later attempt has other hosts than those that are open."""
        state = self.record.state
        if state is None or state.attempt == self._attempt:
            return False
        self._attempt = state.attempt
        return read_cluster(self.run.layout).hosts != self.run.cluster.hosts

    def close(self) -> None:
        """Wait for the reading that is under way, and close what is open."""
        self._files.is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.hosts.close()
        self._open.close()

    def _read(self) -> None:
        self.trouble = ""
        try:
            record = self.run.record()
            with self.lock:
                self.record = record
            if self.run.cluster.hosts:
                self._read_files(record)
                self.hosts.ask(self._sample)
        except (GanglineError, OSError, *NONSENSE) as error:
            self.trouble = clean(str(error).splitlines()[0] if str(error) else type(error).__name__)
        finally:
            self._read_at = time.monotonic()

    def _read_files(self, record: RunRecord) -> None:
        for lines, events in self._files.new(record.state.attempt if record.state else None):
            with self.lock:
                self.series.feed(lines)
                self.events += events
                del self.events[:-MOST_EVENTS]
        self.is_behind = False

    def _sample(self, host: WatchedHost) -> None:
        samples = self._samples[host.name].look()
        with self.lock:
            host.take(samples, time.time())

    def told(self) -> list[dict[str, Any]]:
        """Events in words, with their time and step, the oldest first; those of cards among them."""
        found = [
            {"time": seconds_of(record.get("time")), "step": record.get("step"), "event": str(record.get("event"))[:40]}
            | {"text": text}
            for record in self.events
            if (text := event_line(record))
        ]
        steps = [(moment, step) for moment, step in zip(self.series.times, self.series.steps, strict=True)]
        samples = [host.samples for host in self.hosts.hosts.values() if host.samples is not None]
        found += [
            {"time": moment, "step": None, "event": "card", "text": clean(text)}
            for moment, text in card_events(samples, steps)
        ]
        return sorted(found, key=lambda each: each["time"] or 0.0)


class _GrowingFiles:
    """Metrics and events of a run, on whatever host its head is."""

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._view: View | None = None
        self._attempt: int | None = None
        self._since = 0
        """The first attempt on this head; what earlier ones wrote came from the head before."""
        self._metrics: Tail | None = None
        self._events: list[JsonTail] = []
        self.is_closed = False

    def new(self, attempt: int | None) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
        """New lines of the metrics and new events, piece by piece; raises HostUnreachable."""
        self._move(attempt)
        assert self._metrics is not None
        is_behind = True
        while is_behind and not self.is_closed:
            lines = self._metrics.lines(limit_bytes=AT_ONCE_BYTES)
            is_behind = self._metrics.is_behind
            events: list[dict[str, Any]] = []
            for tail in self._events:
                with contextlib.suppress(HostUnreachable):
                    events += tail.objects()
            yield self._of_this_head(lines), events

    def _of_this_head(self, lines: list[str]) -> list[str]:
        if not self._since:
            return lines
        return [line for line in lines if _attempt_in(line) >= self._since]

    def _move(self, attempt: int | None) -> None:
        if self._view is not None and (attempt is None or attempt == self._attempt):
            return
        view = self._run.view()
        view = view if attempt is None else view.at(attempt)
        before, self._attempt = self._view, attempt
        if before is not None and (view.head.host, view.head_layout) == (before.head.host, before.head_layout):
            return
        self._since = 0 if before is None else attempt or 0
        self._view = view
        self._metrics, events = view.tails_of_head()
        self._events = [events, *(view.tails_here() if before is None else self._events[1:])]


def records_of_run(live: LiveRun) -> RunRecords:
    """What was asked, seen and decided of a run, with the losses that were read."""
    with live.lock:
        figures = RunFigures()
        figures.curves["loss"] = live.series.losses()
        record, steps = live.record, live.series.total_steps
    own = CommandRecord.of(live.run.layout)
    history = RunHistory(id=live.id, run=record, attempts=(), steps=steps, gaps=())
    return with_documents(live.run.layout, history, figures, own=None if own is None else own.words)


def _attempt_in(line: str) -> int:
    """The number behind "attempt" near the beginning of a line; 0 without one."""
    _, found, rest = line[:400].partition('"attempt": ')
    digits = rest.split(",", 1)[0].rstrip("}")
    return int(digits) if found and digits.isdecimal() else 0


def _plan(run: RunHandle) -> Plan | None:
    try:
        return load_if_there(run.layout.plan, Plan)
    except (GanglineError, OSError):
        return None


@dataclass(slots=True, eq=False)
class _KeptRun:
    """A run that is open or being opened, and how many requests use it."""

    opened: Future[LiveRun] = field(default_factory=Future)
    users: int = 0
    is_dropped: bool = False
    """Nobody gets it any more; its last user closes it."""


class LiveRuns:
    """The runs of a home that are open. None is closed while a request uses it."""

    def __init__(self, home: Path, *, deps: Dependencies = REAL) -> None:
        self.home = home
        self._deps = deps
        self._lock = threading.Lock()
        self._runs: dict[str, _KeptRun] = {}

    @contextlib.contextmanager
    def using(self, run_id: str) -> Iterator[LiveRun]:
        """A run, opened if need be, and read just now; raises UsageError for an id that is none."""
        if run_id not in run_ids(self.home):
            raise UsageError(
                f"no such run: {clean(run_id)[:80]!r}", seen=f"in {self.home}", fix="choose one of the list"
            )
        with self._held(run_id) as live:
            live.look()
            if not live.is_elsewhere():
                yield live
                return
            self.forget(run_id)
        with self._held(run_id) as live:
            live.look()
            yield live

    @contextlib.contextmanager
    def _held(self, run_id: str) -> Iterator[LiveRun]:
        with self._lock:
            self._close_idle()
            kept, is_new = self._runs.get(run_id), False
            if kept is None:
                kept, is_new = self._runs.setdefault(run_id, _KeptRun()), True
            kept.users += 1
        try:
            if is_new:  # outside of the lock: a host that is off takes seconds
                self._fill(run_id, kept)
            yield kept.opened.result()
        finally:
            with self._lock:
                kept.users -= 1
                self._close_if_unused(kept)

    def _fill(self, run_id: str, kept: _KeptRun) -> None:
        try:
            kept.opened.set_result(LiveRun(run_id, home=self.home, deps=self._deps))
        except BaseException as error:  # noqa: BLE001  (whoever waits for it gets the error, too)
            kept.opened.set_exception(error)
            with self._lock:
                if self._runs.get(run_id) is kept:
                    del self._runs[run_id]

    def forget(self, run_id: str) -> None:
        """Close a run as soon as no request uses it: it may go on with other hosts. The next one opens it anew."""
        with self._lock:
            kept = self._runs.pop(run_id, None)
            if kept is not None:
                kept.is_dropped = True
                self._close_if_unused(kept)

    def close(self) -> None:
        """Close all of them, whoever uses them: the server ends."""
        with self._lock:
            kept, self._runs = list(self._runs.values()), {}
        for each in kept:
            with contextlib.suppress(GanglineError, OSError):
                each.opened.result().close()

    def _close_if_unused(self, kept: _KeptRun) -> None:
        if kept.is_dropped and not kept.users and not kept.opened.exception():
            # it waits for the reading that is under way, and nobody needs to wait for that
            threading.Thread(target=kept.opened.result().close, daemon=True).start()

    def _close_idle(self) -> None:
        opened = [kept for kept in self._runs.values() if kept.opened.done() and not kept.opened.exception()]
        by_age = sorted(opened, key=lambda kept: kept.opened.result().looked_at)
        for place, kept in enumerate(by_age):
            live = kept.opened.result()
            is_old = time.monotonic() - live.looked_at > IDLE_S
            if not kept.users and (is_old or len(by_age) - place > MOST_OPEN):
                del self._runs[live.id]
                kept.is_dropped = True
                self._close_if_unused(kept)


def planned_memory(live: LiveRun) -> Mapping[tuple[int, str], int]:
    """(rank, host) -> the memory that its plan foresaw: torch's allocator on a GPU, the process elsewhere."""
    if live.plan is None or live.plan.forecast is None:
        return {}
    pairs = zip(live.plan.ranks, live.plan.forecast.ranks, strict=False)
    return {
        (rank, planned.host): forecast.allocated_bytes if forecast.gpu else forecast.process_bytes
        for rank, (planned, forecast) in enumerate(pairs)
    }
