"""The runs of a sweep's trials: ordinary runs, started, continued, looked at and ended through the main path."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gangline import app
from gangline.context import REAL, Dependencies, StartOptions
from gangline.control.end import stop
from gangline.control.supervision import RunHandle, open_run, supervise_again
from gangline.errors import HostUnreachable
from gangline.provision.console import Console
from gangline.report.tail import History, JsonTail
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.sweep.drive import TrialSight


class OwnRuns:
    """See `TrialRuns`. Connections to the hosts of a run are kept while it runs."""

    def __init__(self, home: Path, *, force: bool, console: Console, deps: Dependencies = REAL) -> None:
        self._home, self._force, self._console, self._deps = home, force, console, deps
        self._open: dict[str, tuple[contextlib.ExitStack, RunHandle, History, dict[int, JsonTail]]] = {}
        self._lock = threading.Lock()

    def start(
        self, job: Job, cluster: Cluster, *, trial: Mapping[str, Any], turn: Callable[[], None] | None = None
    ) -> str:
        """See `TrialRuns.start`."""
        start = StartOptions(home=self._home, job=job, cluster=cluster, force=self._force, trial=trial, turn=turn)
        return app.train(start, console=self._console, deps=self._deps).run_id

    def resume(self, run: str, cluster: Cluster, *, pause_at: int | None) -> None:
        """See `TrialRuns.resume`."""
        self._close(run)  # its hosts may be others now
        path = RunLayout(self._home, run).job
        dataclasses.replace(Job.load(path), pause_at=pause_at).save(path)
        app.resume(
            run,
            home=self._home,
            cluster_path=cluster,
            force=self._force,
            console=self._console,
            deps=self._deps,
        )

    def look(self, run: str) -> TrialSight:
        """See `TrialRuns.look`. A run on this computer that lost its supervisor gets a new one."""
        _, handle, history, tails = self._opened(run)
        record = handle.record()  # before the files, so that they have everything from before an end
        if record.phase == "lost" and supervise_again(handle, console=self._console, deps=self._deps):
            record = handle.record()
        waits = record.phase in {"queued", "preparing"}
        if record.state is not None and record.silent is None and not waits:
            attempt = record.state.attempt
            if attempt not in tails:
                view = handle.view().at(attempt)
                tails[attempt] = JsonTail(view.head, view.head_layout.metrics)
            for line in tails[attempt].objects():
                history.add(line)
        last = history.last_step or {}
        recent = [each["step_s"] for each in list(history.steps.values())[-20:] if each.get("step_s")]
        seen = TrialSight(
            phase=record.phase,
            step=last.get("step", 0),
            steps=last.get("steps"),
            step_s=sum(recent) / len(recent) if recent else None,
            losses={str(step): _finite(each.get("loss")) for step, each in history.evaluations.items()},
            error=record.state.error if record.state else None,
            silent=record.silent,
        )
        if seen.ended or waits:  # the hosts of a run that waits are known later
            self._close(run)
        return seen

    def end(self, run: str, *, now: bool) -> None:
        """See `TrialRuns.end`."""
        stop(self._opened(run)[1], now=now, deps=self._deps)

    def _opened(self, run: str) -> tuple[contextlib.ExitStack, RunHandle, History, dict[int, JsonTail]]:
        with self._lock:
            if run not in self._open:
                stack = contextlib.ExitStack()
                handle = stack.enter_context(open_run(run, home=self._home, deps=self._deps))
                self._open[run] = stack, handle, History(), {}
            return self._open[run]

    def _close(self, run: str) -> None:
        with self._lock:
            found = self._open.pop(run, None)
        if found is not None:
            with contextlib.suppress(HostUnreachable):
                found[0].close()


def _finite(loss: Any) -> float | None:
    """Figures that are not finite stand in words in metrics.jsonl."""
    return float(loss) if isinstance(loss, (int, float)) else None
