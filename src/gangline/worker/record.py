"""What rank 0 writes down of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gangline.errors import RunFailed
from gangline.exporters import ExportedRun, Exporters
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.worker.agree import StepReport
from gangline.worker.evaluate import Evaluation
from gangline.worker.metrics import Lines
from gangline.worker.world import World

log = logging.getLogger(__name__)


class Recorder:
    """Writes metrics.jsonl and events.jsonl, and feeds the job's exporters.

    What cannot be written (a full disk) ends the run with RunFailed, or waits for room where the job goes on without
    what cannot be saved (`checkpoint.on_failure: continue`).
    """

    def __init__(self, job: Job, layout: RunLayout, world: World) -> None:
        self._goes_on = job.checkpoint.on_failure == "continue"
        self._folder = layout.folder
        self._world = world
        self._metrics = Lines(layout.metrics)
        self._events = Lines(layout.events)
        self._waits = ""
        run = ExportedRun(run_id=layout.run_id, attempt=world.gang.attempt, folder=layout.folder, job=job.to_json())
        self._exporters = Exporters(job.report.exporters, run, on_failure=self._exporter_failed)

    def event(self, event: str, **details: Any) -> None:
        """Note something that happened."""
        with self._tolerance():
            self._events.write("event", source="worker", event=event, attempt=self._world.gang.attempt, **details)

    def step(self, report: StepReport, *, step: int, shares: Sequence[int], **figures: Any) -> None:
        """Note one optimizer step; `figures` as the brief of metrics.jsonl in docs/metrics.md lists them.

        What the rank that waited least has waited for was the network; what others waited longer was for that rank.
        """
        exposed_s = min(times.wait_s for times in report.times)
        ranks = [
            {
                "rank": rank,
                "host": self._world.gang.ranks[rank].host,
                "micro_batches": shares[rank],
                "data_s": round(times.data_s, 6),
                "compute_s": round(times.compute_s, 6),
                "wait_s": round(times.wait_s, 6),
                "wait_others_s": round(times.wait_s - exposed_s, 6),
                "memory_bytes": times.memory_bytes,
            }
            for rank, times in enumerate(report.times)
        ]
        with self._tolerance():
            self._metrics.write(
                "step",
                attempt=self._world.gang.attempt,
                step=step,
                **figures,
                exposed_s=round(exposed_s, 6),
                ranks=ranks,
            )
            self._events.flush()
        named = {f"train/{name}": figures[name] for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s")}
        named["train/exposed_s"] = exposed_s
        if figures.get("mfu") is not None:
            named["train/mfu"] = figures["mfu"]
        for row in ranks:
            for name in ("micro_batches", "data_s", "compute_s", "wait_s", "wait_others_s", "memory_bytes"):
                named[f"rank{row['rank']}/{name}"] = row[name]
        self._exporters.step(step, named)

    def evaluation(self, evaluation: Evaluation, *, step: int) -> None:
        """Note one evaluation."""
        with self._tolerance():
            self._metrics.write(
                "evaluation",
                attempt=self._world.gang.attempt,
                step=step,
                loss=evaluation.loss,
                perplexity=evaluation.perplexity,
                label_tokens=evaluation.label_tokens,
                duration_s=round(evaluation.duration_s, 4),
            )
        named = {"evaluation/loss": evaluation.loss, "evaluation/perplexity": evaluation.perplexity}
        self._exporters.evaluation(step, named)

    def close(self) -> None:
        """Flush everything."""
        self._exporters.close()
        with self._tolerance():
            self._metrics.flush()
            self._events.flush()
        self._metrics.close()
        self._events.close()

    def _exporter_failed(self, name: str, error: str) -> None:
        self.event("exporter-failed", exporter=name, error=error)

    @contextmanager
    def _tolerance(self) -> Iterator[None]:
        try:
            yield
            self._waits = ""
        except OSError as error:
            if not self._goes_on:
                raise RunFailed(
                    f"the figures of the run cannot be written in {self._folder}",
                    seen=f"{type(error).__name__}: {error}",
                    fix="make room on that disk, then gangline resume; the checkpoints saved before are untouched",
                ) from error
            if str(error) != self._waits:  # once, not in every step
                log.error("figures wait for room: %s", error)  # noqa: TRY400 - the stack says no more
            self._waits = str(error)
