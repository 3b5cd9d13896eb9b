"""What the buttons of the page do: the same as `gangline stop` and `gangline resume`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gangline import app
from gangline.control.end import stop
from gangline.control.other_users import refuse_of_another
from gangline.control.slurm_job import cancel_waiting
from gangline.control.supervision import open_run
from gangline.errors import GanglineError, UsageError
from gangline.report.text_table import clean
from gangline.runs.files import full_disk
from gangline.runs.registry import find_run

MOST_LINES = 200
MOST_ORDERS = 50


@dataclass(slots=True, kw_only=True)
class PageOrder:
    """An order that was given, and what came of it. It is the console of what it starts, too."""

    run: str
    what: Literal["stop", "resume"]
    time: float = field(default_factory=time.time)
    is_done: bool = False
    lines: list[str] = field(default_factory=list)
    doing: str = ""
    error: dict[str, Any] | None = None

    def report(self, line: str) -> None:
        """See `Console.report`."""
        self.lines = [*self.lines, clean(line)][-MOST_LINES:]

    def progress(self, line: str) -> None:
        """See `Console.progress`."""
        self.doing = clean(line)

    def document(self) -> dict[str, Any]:
        """The order as plain data."""
        return {name: getattr(self, name) for name in ("run", "what", "time", "is_done", "lines", "doing", "error")}


class PageOrders:
    """The orders of one home, the last ones."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._given: list[PageOrder] = []

    def document(self) -> dict[str, Any]:
        """All orders, the newest first."""
        return {"orders": [order.document() for order in reversed(self._given)]}

    def stop(self, run_id: str, *, now: bool) -> PageOrder:
        """Order a run to end, and return; now: without saving. Raises as `gangline stop`."""
        order = self._begun(run_id, "stop")
        try:
            refuse_of_another(run_id, home=self._home)
            if cancel_waiting(find_run(self._home, run_id)):
                order.report(f"{run_id} no longer waits")
                return order
            with open_run(run_id, home=self._home) as run:
                ordered = stop(run, now=now)
            ends = "ends at once" if now else "saves and ends"
            order.report(f"{run_id} {ends}" if ordered else f"{run_id} has ended already")
            return order
        except GanglineError as error:
            order.error = error.to_json()
            raise
        finally:
            order.is_done = True

    def resume(self, run_id: str) -> PageOrder:
        """Have a run go on from its newest checkpoint; what comes of it is told by `document`."""
        order = self._begun(run_id, "resume")
        threading.Thread(target=self._resume, args=(order,), name=f"resume {run_id}").start()
        return order

    def _resume(self, order: PageOrder) -> None:
        try:
            app.resume(order.run, home=self._home, console=order)
        except GanglineError as error:
            order.error = error.to_json()
        except Exception as error:
            known = full_disk(error)
            order.error = (known or GanglineError(f"{type(error).__name__}: {error}")).to_json()
            if known is None:
                raise  # a bug: its traceback is in the terminal
        finally:
            order.doing, order.is_done = "", True

    def _begun(self, run_id: str, what: Literal["stop", "resume"]) -> PageOrder:
        with self._lock:
            if any(order.run == run_id and not order.is_done for order in self._given):
                raise UsageError(
                    f"an order for {run_id} is still being carried out", seen=what, fix="wait until it is done"
                )
            order = PageOrder(run=run_id, what=what)
            self._given = [*self._given, order][-MOST_ORDERS:]
            return order
