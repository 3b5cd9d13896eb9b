"""What rank 0 writes down of a run."""

from __future__ import annotations

from typing import Any

from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.worker.agree import StepReport
from gangline.worker.evaluate import Evaluation
from gangline.worker.metrics import Lines, make_reporters
from gangline.worker.world import World


class Recorder:
    """Writes metrics.jsonl, events.jsonl and the job's other reporters."""

    def __init__(self, job: Job, layout: RunLayout, world: World) -> None:
        self._world = world
        self._metrics = Lines(layout.metrics)
        self._events = Lines(layout.events)
        self._reporters = make_reporters(job, layout)

    def event(self, event: str, **details: Any) -> None:
        """Note something that happened."""
        self._events.write("event", source="worker", event=event, attempt=self._world.gang.attempt, **details)

    def step(self, report: StepReport, *, step: int, **figures: Any) -> None:
        """Note one optimizer step; `figures` as the brief of metrics.jsonl in docs/metrics.md lists them."""
        ranks = [
            {
                "rank": rank,
                "host": self._world.gang.ranks[rank].host,
                "data_s": round(times.data_s, 6),
                "compute_s": round(times.compute_s, 6),
                "wait_s": round(times.wait_s, 6),
                "memory_bytes": times.memory_bytes,
            }
            for rank, times in enumerate(report.times)
        ]
        self._metrics.write("step", attempt=self._world.gang.attempt, step=step, **figures, ranks=ranks)
        named = {f"train/{name}": figures[name] for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s")}
        if figures.get("mfu") is not None:
            named["train/mfu"] = figures["mfu"]
        for row in ranks:
            for name in ("data_s", "compute_s", "wait_s", "memory_bytes"):
                named[f"rank{row['rank']}/{name}"] = row[name]
        self._scalars(named, step)

    def evaluation(self, evaluation: Evaluation, *, step: int) -> None:
        """Note one evaluation."""
        self._metrics.write(
            "evaluation",
            attempt=self._world.gang.attempt,
            step=step,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            label_tokens=evaluation.label_tokens,
            duration_s=round(evaluation.duration_s, 4),
        )
        self._scalars({"evaluation/loss": evaluation.loss, "evaluation/perplexity": evaluation.perplexity}, step)

    def close(self) -> None:
        """Flush every reporter."""
        for reporter in self._reporters:
            reporter.close()
        self._metrics.close()
        self._events.close()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for reporter in self._reporters:
            reporter.scalars(values, step=step)
