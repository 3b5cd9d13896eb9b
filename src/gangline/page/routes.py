"""Which address of the page answers with which document. Ids and names in addresses are looked up, never joined."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.control.listing import list_runs
from gangline.errors import UsageError
from gangline.page.live_run import LiveRuns
from gangline.page.page_documents import list_document, run_document, series_document
from gangline.page.series import SeenBefore

LIST_S = 2.0
"""The list of runs is read anew after that time: it asks the hosts of all active runs."""
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
        self._listing = threading.Lock()
        self._listed: tuple[float, dict[str, Any]] | None = None

    def close(self) -> None:
        """Close the runs that are open."""
        self.runs.close()

    def read(self, asked: PageRequest) -> dict[str, Any]:
        """What an address shows; raises UsageError where there is nothing."""
        if asked.path == "/api/runs":
            return self._list()
        found = _RUN.fullmatch(asked.path)
        of_run = self._of_run().get(found[2] or "") if found else None
        if found is None or of_run is None:
            raise _nothing(asked)
        return of_run(found[1], asked)

    def order(self, asked: PageRequest) -> dict[str, Any]:
        """Do what was ordered; raises UsageError where there is nothing to order."""
        raise _nothing(asked)

    def _of_run(self) -> Mapping[str, Callable[[str, PageRequest], dict[str, Any]]]:
        return {
            "": lambda run_id, _: run_document(self.runs.get(run_id)),
            "series": self._series,
        }

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
        return series_document(
            self.runs.get(run_id),
            first=asked.number("first"),
            last=asked.number("last"),
            before=before,
            rank=(rank, host) if rank is not None and host is not None else None,
        )


def _nothing(asked: PageRequest) -> UsageError:
    return UsageError("there is nothing at this address", seen=repr(asked.path[:80]), fix="begin at /")
