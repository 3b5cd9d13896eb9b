"""What rank 0 writes down of a run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gangline.callbacks import Callbacks
from gangline.errors import RunFailed
from gangline.exporters import ExportedRun, Exporters, named_figures
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.state import now_iso
from gangline.worker.agree import StepReport
from gangline.worker.batch import empty_batch, joined, pick, split_work
from gangline.worker.process_group import ProcessGroup
from gangline.worker.session import Session

# The figures and events of a run as JSON lines, written by rank 0.


MOST_WAITING = 4096
"""Lines that are kept in memory while a disk is full."""


class Lines:
    """A file of JSON lines, each whole: one write call with O_APPEND.

    What finds no room on a full disk waits, and goes before the next line; of very many the last ones.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._stream = path.open("ab+", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._is_torn = False
        self._close_torn_line()

    def write(self, kind: str, **values: Any) -> None:
        """Append one line with its kind and the time. Raises OSError where it has to wait."""
        line = {"kind": kind, "time": now_iso(), **values}
        self._waiting.append((json.dumps(_finite(line)) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Append what waits. Raises OSError where there is still no room."""
        while self._waiting:
            line = (b"\n" if self._is_torn else b"") + self._waiting[0]
            written = self._stream.write(line) or 0
            self._is_torn = written < len(line) and (written > 0 or self._is_torn)
            if written >= len(line) - 1:  # all of it, but perhaps for its end
                self._waiting.popleft()
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _close_torn_line(self) -> None:
        """A full disk may have cut the last line of an attempt before; ours must not be glued to it."""
        if self._stream.seek(0, 2) > 0:
            self._stream.seek(-1, 2)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: say it in words, so that any reader can parse the line and nobody overlooks it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# The loss on the evaluation set: the same number on any number of ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss per trained token over the whole set."""

    loss: float
    label_tokens: int
    duration_s: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(session: Session, *, shares: Sequence[int], beat: Callable[[], None] = lambda: None) -> Evaluation:
    """Mean loss over all trained tokens of the evaluation set, or of its first `evaluation.max_samples` samples.

    Micro-batches are the same on any number of ranks; they are only split differently, by `shares`, and joined to
    passes by each rank. Sums are in fp64; every sample counts once, for nothing is padded to equal counts. beat: called
    before every pass, for an evaluation is long, and no hang.
    """
    started = time.perf_counter()
    source, loss, world = session.evaluation_set, session.loss, session.world
    assert source is not None, "nothing to evaluate on"
    micro_batch = session.order.micro_batch
    num_samples = min(len(source), session.job.evaluation.max_samples or len(source))
    starts = range(0, num_samples, micro_batch)
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = loss.training
    loss.eval()
    strategy = session.strategy
    work_split = split_work(len(starts), shares, world.gang.replica_groups)
    lengths = world.gang.pass_lengths(micro_batch)
    passes = [joined(mine, length) for mine, length in zip(work_split, lengths, strict=True)]
    for together in passes[world.rank]:
        beat()
        samples = range(starts[together[0]], min(starts[together[-1]] + micro_batch, num_samples))
        sums[0] += strategy.evaluate(pick(samples, source).to(world.device)).double().cpu()
        sums[1] += strategy.counts_loss * float(source.label_counts[samples.start : samples.stop].sum())
    for _ in range(max(map(len, passes)) - len(passes[world.rank]) if strategy.lockstep else 0):
        beat()
        strategy.evaluate(empty_batch().to(world.device))
    strategy.reshard()
    loss.train(was_training)
    if world.size > 1:
        dist.all_reduce(sums)
    total, tokens = sums.tolist()
    return Evaluation(loss=total / max(1.0, tokens), label_tokens=int(tokens), duration_s=time.perf_counter() - started)


log = logging.getLogger(__name__)


class Recorder:
    """Writes metrics.jsonl and events.jsonl, and feeds the job's exporters.

    What cannot be written (a full disk) ends the run with RunFailed, or waits for room where the job goes on without
    what cannot be saved (`checkpoint.on_failure: continue`).
    """

    def __init__(self, job: Job, layout: RunLayout, world: ProcessGroup) -> None:
        self._goes_on = job.checkpoint.on_failure == "continue"
        self._folder = layout.folder
        self._world = world
        self._metrics = Lines(layout.metrics)
        self._events = Lines(layout.events)
        self._waits = ""
        run = ExportedRun(
            run_id=layout.run_id,
            attempt=world.gang.attempt,
            folder=layout.folder,
            job=job.to_json(),
            metrics=layout.metrics,
        )
        self._exporters = Exporters(
            job.report.exporters, run, on_failure=self._exporter_failed, on_return=self._exporter_back
        )
        self.callbacks = Callbacks(job.callbacks, run, on_failure=self._callback_failed)

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
        line = {"step": step, **figures, "exposed_s": round(exposed_s, 6), "ranks": ranks}
        with self._tolerance():
            self._metrics.write("step", attempt=self._world.gang.attempt, **line)
            self._events.flush()
        named = named_figures({"kind": "step", **line})
        self._exporters.step(step, named)
        self.callbacks.on_step(step, named)

    def evaluation(self, evaluation: Evaluation, *, step: int) -> None:
        """Note one evaluation."""
        line = {
            "step": step,
            "loss": evaluation.loss,
            "perplexity": evaluation.perplexity,
            "label_tokens": evaluation.label_tokens,
            "duration_s": round(evaluation.duration_s, 4),
        }
        with self._tolerance():
            self._metrics.write("evaluation", attempt=self._world.gang.attempt, **line)
        named = named_figures({"kind": "evaluation", **line})
        self._exporters.evaluation(step, named)
        self.callbacks.on_evaluation(step, named)

    def close(self, *, in_haste: bool = False) -> None:
        """Flush everything. in_haste: after a failure, see `Exporters.close`."""
        self._exporters.close(in_haste=in_haste)
        with self._tolerance():
            self._metrics.flush()
            self._events.flush()
        self._metrics.close()
        self._events.close()

    def _callback_failed(self, name: str, error: str) -> None:
        self.event("callback-failed", callback=name, error=error)

    def _exporter_failed(self, name: str, error: str) -> None:
        self.event("exporter-failed", exporter=name, error=error)

    def _exporter_back(self, name: str) -> None:
        self.event("exporter-back", exporter=name)

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
