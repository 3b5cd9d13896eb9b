"""The runs of a sweep's trials: ordinary runs, started, continued, looked at and ended through the main path."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gangline import app
from gangline.context import REAL, Dependencies, ResumeOptions, StartOptions
from gangline.control.end import stop
from gangline.control.supervision import RunHandle, open_run, supervise_again
from gangline.control.user_command import CommandRecord
from gangline.errors import HostUnreachable
from gangline.provision.console import Console
from gangline.report.tail import AT_ONCE_BYTES, History, JsonTail
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord
from gangline.sweep.drive import TrialSight
from gangline.sweep.printed_metric import PrintedMetric
from gangline.sweep.records import MetricRecord


class RunReader:
    """Reads where one run stands; each look reads only the metrics, or the output, that are new."""

    def __init__(self, metric: str | None = None) -> None:
        """metric: the one that the user's own script prints; None: a job, whose metrics gangline knows."""
        self._history = History()
        self._printed = None if metric is None else PrintedMetric(name=metric)
        self._tails: dict[int, JsonTail] = {}
        """Attempt -> the end of its metrics, or of the output of its rank 0."""

    def look(self, run: RunHandle, record: RunRecord) -> TrialSight:
        """The run, and its last figures. record: read before, so that the files have everything from before an end."""
        state = record.state
        if state is not None and record.silent is None and record.phase not in {"queued", "preparing"}:
            # what a script printed in earlier attempts counts, too; metrics of all attempts lie in one file
            for attempt in range(1 if self._printed else state.attempt, state.attempt + 1):
                if attempt not in self._tails:
                    self._tails[attempt] = self._tail(run, attempt)
                self._read(self._tails[attempt])
        seen = TrialSight(phase=record.phase, error=state.error if state else None, silent=record.silent)
        if self._printed is not None:
            values = self._printed.values
            return dataclasses.replace(
                seen, step=max(values, default=0), losses={str(step): value for step, value in values.items()}
            )
        last = self._history.last_step or {}
        recent = [each["step_s"] for each in list(self._history.steps.values())[-20:] if each.get("step_s")]
        return dataclasses.replace(
            seen,
            step=last.get("step", 0),
            steps=last.get("steps"),
            step_s=sum(recent) / len(recent) if recent else None,
            losses={str(step): _finite(each.get("loss")) for step, each in self._history.evaluations.items()},
        )

    def _tail(self, run: RunHandle, attempt: int) -> JsonTail:
        view = run.view().at(attempt)
        path = view.head_layout.metrics if self._printed is None else view.head_layout.attempt(attempt) / "rank-0.log"
        return JsonTail(view.head, path)

    def _read(self, tail: JsonTail) -> None:
        if self._printed is not None:
            for line in tail.lines(limit_bytes=AT_ONCE_BYTES):
                self._printed.read(line)
            return
        for record in tail.objects():
            self._history.add(record)


class OwnRuns:
    """See `TrialRuns`. Connections to the hosts of a run are kept while it runs."""

    def __init__(
        self,
        home: Path,
        *,
        force: bool,
        metric: MetricRecord | None = None,
        console: Console,
        deps: Dependencies = REAL,
    ) -> None:
        """metric: see `RunReader`."""
        self._home, self._force, self._console, self._deps = home, force, console, deps
        self._metric = None if metric is None else metric.name
        self._open: dict[str, tuple[contextlib.ExitStack, RunHandle, RunReader]] = {}
        self._lock = threading.Lock()

    def start(
        self,
        work: Job | CommandRecord,
        cluster: Cluster,
        *,
        trial: Mapping[str, Any],
        turn: Callable[[], None] | None = None,
    ) -> str:
        """See `TrialRuns.start`."""
        if isinstance(work, CommandRecord):
            started = app.run(
                work, home=self._home, cluster_path=cluster, trial=trial, console=self._console, deps=self._deps
            )
            return started.run_id
        start = StartOptions(home=self._home, job=work, cluster=cluster, force=self._force, trial=trial, turn=turn)
        return app.train(start, console=self._console, deps=self._deps).run_id

    def resume(self, run: str, cluster: Cluster, *, pause_at: int | None) -> None:
        """See `TrialRuns.resume`."""
        self._close(run)  # its hosts may be others now
        path = RunLayout(self._home, run).job
        if (job := load_if_there(path, Job)) is not None:  # not of a command
            dataclasses.replace(job, pause_at=pause_at).save(path)
        asked = ResumeOptions(cluster=cluster, force=self._force)
        app.resume(run, asked, home=self._home, console=self._console, deps=self._deps)

    def look(self, run: str) -> TrialSight:
        """See `TrialRuns.look`. A run on this computer that lost its supervisor gets a new one."""
        _, handle, reader = self._opened(run)
        record = handle.record()
        if record.phase == "lost" and supervise_again(handle, console=self._console, deps=self._deps):
            record = handle.record()
        seen = reader.look(handle, record)
        if seen.ended or seen.phase == "preparing":  # its hosts may be others once it has been started
            self._close(run)
        return seen

    def end(self, run: str, *, now: bool) -> None:
        """See `TrialRuns.end`."""
        stop(self._opened(run)[1], now=now, deps=self._deps)

    def _opened(self, run: str) -> tuple[contextlib.ExitStack, RunHandle, RunReader]:
        with self._lock:
            if run not in self._open:
                stack = contextlib.ExitStack()
                handle = stack.enter_context(open_run(run, home=self._home, deps=self._deps))
                self._open[run] = stack, handle, RunReader(self._metric)
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
