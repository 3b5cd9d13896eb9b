"""Which address of the page answers with which document. Ids and names in addresses are looked up, never joined."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.control.listing import list_runs
from gangline.errors import UsageError
from gangline.page.live_run import LiveRuns, records_of_run
from gangline.page.orders import PageOrders
from gangline.page.page_documents import hosts_document, list_document, run_document, series_document
from gangline.page.run_logs import RunLogs
from gangline.page.series import SeenBefore
from gangline.report.run_diff import compare_runs, described, diff_json
from gangline.report.text_table import clean
from gangline.runs.layout import SweepLayout
from gangline.runs.registry import run_ids
from gangline.sweep.records import sweep_ids
from gangline.sweep.standings import sweep_document, sweep_rows

LIST_S = 2.0
"""The list of runs is read anew after that time: it asks the hosts of all active runs."""
_SWEEP = re.compile(r"/api/sweeps/([a-z]+-[a-z]+-[1-9][0-9]*)")
_RUN = re.compile(r"/api/runs/([a-z]+-[a-z]+-[1-9][0-9]*)(?:/([a-z]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request that was let in."""

    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> int | None:
        """A whole number of the query; raises UsageError for anything else."""
        text = self.query.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,15}", text):
            raise UsageError(f"{name} is no number", seen=repr(text[:40]), fix="leave it out")
        return int(text)


class Answers:
    """The documents of one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runs = LiveRuns(home)
        self.orders = PageOrders(home)
        self._listing = threading.Lock()
        self._listed: tuple[float, dict[str, Any]] | None = None

    def close(self) -> None:
        """Close the runs that are open."""
        self.runs.close()

    def read(self, asked: PageRequest) -> dict[str, Any]:
        """What an address shows; raises UsageError where there is nothing."""
        if (plain := self._plain().get(asked.path)) is not None:
            return plain(asked)
        if (sweep := _SWEEP.fullmatch(asked.path)) is not None:
            return self._sweep(sweep[1])
        found = _RUN.fullmatch(asked.path)
        of_run = self._of_run().get(found[2] or "") if found else None
        if found is None or of_run is None:
            raise _nothing(asked)
        return of_run(found[1], asked)

    def order(self, asked: PageRequest) -> dict[str, Any]:
        """Do what was ordered; raises UsageError where there is nothing to order."""
        found = _RUN.fullmatch(asked.path)
        if found is None or found[2] not in {"stop", "resume"}:
            raise _nothing(asked)
        run_id = found[1]
        if run_id not in run_ids(self.home):
            raise UsageError(f"no such run: {run_id}", seen=f"in {self.home}", fix="choose one of the list")
        if found[2] == "resume":
            return self.orders.resume(run_id).document()
        return self.orders.stop(run_id, now=asked.body.get("now") is True).document()

    def _plain(self) -> Mapping[str, Callable[[PageRequest], dict[str, Any]]]:
        return {
            "/api/runs": lambda _: self._list(),
            "/api/orders": lambda _: self.orders.document(),
            "/api/sweeps": lambda _: {"now": time.time(), "sweeps": sweep_rows(self.home)},
            "/api/diff": self._diff,
        }

    def _of_run(self) -> Mapping[str, Callable[[str, PageRequest], dict[str, Any]]]:
        return {
            "": self._run,
            "series": self._series,
            "hosts": self._hosts,
            "logs": lambda run_id, asked: self._log(run_id, asked, lambda logs, attempt: logs.document(attempt)),
            "log": lambda run_id, asked: self._log(
                run_id,
                asked,
                lambda logs, attempt: logs.end(attempt, asked.query.get("name", ""), after=asked.number("after")),
            ),
            "search": lambda run_id, asked: self._log(
                run_id,
                asked,
                lambda logs, attempt: logs.search(attempt, _words(asked), name=asked.query.get("name")),
            ),
            "job": self._job,
        }

    def _run(self, run_id: str, _: PageRequest) -> dict[str, Any]:
        with self.runs.using(run_id) as live:
            return run_document(live)

    def _hosts(self, run_id: str, asked: PageRequest) -> dict[str, Any]:
        with self.runs.using(run_id) as live:
            return hosts_document(live, chosen=asked.query.get("host"))

    def _log(self, run_id: str, asked: PageRequest, answer: Callable[[RunLogs, int], dict[str, Any]]) -> dict[str, Any]:
        with self.runs.using(run_id) as live:
            last = live.record.state.attempt if live.record.state else 1
            attempt = asked.number("attempt") or last
            if not 1 <= attempt <= last:
                fix = "leave it out for the last"
                raise UsageError(f"{run_id} has no attempt {attempt}", seen=f"1 to {last}", fix=fix)
            return {**answer(live.logs, attempt), "attempts": last}

    def _job(self, run_id: str, _: PageRequest) -> dict[str, Any]:
        with self.runs.using(run_id) as live:
            records = records_of_run(live)
        parts = {
            part: [[key, clean(value)] for key, value in rows.items()] for part, rows in described(records).items()
        }
        return {"run": run_id, "parts": parts, "missing": [clean(gap) for gap in records.gaps]}

    def _diff(self, asked: PageRequest) -> dict[str, Any]:
        with contextlib.ExitStack() as used:
            lives = [used.enter_context(self.runs.using(asked.query.get(name, ""))) for name in ("one", "other")]
            one, other = map(records_of_run, lives)
            return {**diff_json(compare_runs(one, other)), "reading": any(live.is_behind for live in lives)}

    def _sweep(self, sweep_id: str) -> dict[str, Any]:
        if sweep_id not in sweep_ids(self.home):
            raise UsageError(f"no such sweep: {sweep_id}", seen=f"in {self.home}", fix="choose one of the list")
        return {"now": time.time(), **sweep_document(SweepLayout(self.home, sweep_id))}

    def _list(self) -> dict[str, Any]:
        with self._listing:
            if self._listed is None or time.monotonic() - self._listed[0] > LIST_S:
                document = list_document(list_runs(self.home), home=self.home)
                self._listed = time.monotonic(), document
            return {**self._listed[1], "now": time.time()}

    def _series(self, run_id: str, asked: PageRequest) -> dict[str, Any]:
        numbers = [asked.number(name) for name in ("generation", "width", "count")]
        generation, width, count = numbers
        before = None
        if generation is not None and width is not None and count is not None:
            before = SeenBefore(generation=generation, width=width, count=count)
        rank, host = asked.number("rank"), asked.query.get("host")
        with self.runs.using(run_id) as live:
            return series_document(
                live,
                first=asked.number("first"),
                last=asked.number("last"),
                before=before,
                rank=(rank, host) if rank is not None and host is not None else None,
            )


def _words(asked: PageRequest) -> str:
    words = asked.query.get("words", "").strip()
    if not 1 <= len(words) <= 200:
        raise UsageError("nothing to search for", seen=f"{len(words)} letters; expected 1 to 200", fix="type some")
    return words


def _nothing(asked: PageRequest) -> UsageError:
    return UsageError("there is nothing at this address", seen=repr(asked.path[:80]), fix="begin at /")
