"""gangline from Python: the same steps as the command, on the same files.

    plan = gangline.plan("job.yaml", hosts="pc1=rtx4090,pc2=rtx3090")     # starts nothing
    run = gangline.train({"model": "./llama", "data": {"train": "rows.jsonl"}, "batch": 8})
    run.wait()
    print(run.metrics()[-1]["loss"], run.export())

A run that was started here is listed by `gangline ps`, and a run of the command can be opened here by its id. Errors
are those of gangline.errors, each with what, seen and fix. What the command prints while it works goes to the logger
"gangline".
"""

from __future__ import annotations

import contextlib
import html
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gangline import app
from gangline.context import ResumeOptions, StartOptions, cluster_file, default_home
from gangline.control.end import stop
from gangline.control.model_card import write_card
from gangline.control.recorded_run import records_of_opened
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import require_job
from gangline.decide.what_if import WhatIf, plan_json, plan_lines, predict, refusal
from gangline.errors import RunFailed
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.report.follow import Update, follow, raise_failure
from gangline.runs.registry import RunRecord, find_run, run_ids
from gangline.serve.run_model import export_model, find_saved
from gangline.transport.local import LocalTransport

JobLike = str | Path | Mapping[str, Any]
"""The path of a job file, or its keys; paths among them begin at the current folder."""
PathLike = str | Path

log = logging.getLogger("gangline")


class _Log:
    """A console whose lines go to the logger."""

    def report(self, line: str) -> None:
        """A line that stays."""
        log.info(line)

    def progress(self, line: str) -> None:
        """A line of progress."""
        log.debug(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer of `plan`; printed, it reads as on the screen."""

    fits: bool
    """Whether the job fits the machines."""
    strategy: str | None
    """Such as ddp or pipeline; None where nothing fits, or nothing is known of the model."""
    step_s: float | None
    """Seconds of an optimizer step, as they are expected."""
    steps: int | None
    """Optimizer steps of the run, as far as that is known."""
    document: Mapping[str, Any] = field(repr=False)
    """All of it as plain data: what `gangline plan --json` prints."""
    text: str = field(repr=False)
    """All of it for people."""

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def plan(
    job: JobLike,
    *,
    hosts: str | None = None,
    cluster: PathLike | None = None,
    link: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    home: PathLike | None = None,
) -> PlanAnswer:
    """Say whether a job fits, who does what, how long it takes, and why. Starts nothing.

    hosts: machines that need not exist, such as "pc1=rtx4090,pc2=2xrtx3090"; none is asked then. Without it, the
    machines of `cluster`, of ./cluster.yaml, or this computer are asked. link: the network between them, such as
    "1gbit". overrides: keys of the job and their values, such as {"method.rank": 8}. home: gangline's own folder.
    Raises GanglineError.
    """
    at_home = _home(home)
    start = _start(job, overrides, None if hosts else cluster, at_home, looks=hosts is None)
    prediction = predict(start, WhatIf(hosts=hosts, link=link), console=_Log())
    choice = prediction.job_forecast.choice
    best = None if choice is None else choice.best
    return PlanAnswer(
        fits=choice is None or best is not None,
        strategy=None if best is None else best.strategy.kind,
        step_s=None if best is None or best.time is None else best.time.total_s,
        steps=prediction.length.steps,
        document=plan_json(prediction, [], refusal(prediction)),
        text="\n".join(plan_lines(prediction, [], home=at_home, why=False, width=100)),
    )


def train(
    job: JobLike,
    *,
    cluster: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
    home: PathLike | None = None,
) -> Run:
    """Check, plan, bring and start; returns once the ranks have been started. The run goes on when Python ends.

    Arguments as those of `plan`; force: start even if the plan calls it too slow. Raises GanglineError, and then
    nothing runs.
    """
    at_home = _home(home)
    start = _start(job, overrides, cluster, at_home, force=force)
    with _private():
        layout = app.train(start, console=_Log())
    return Run(layout.run_id, home=at_home)


def untrained_model(
    folder: PathLike, *, texts: PathLike | Sequence[PathLike], vocabulary: int = 512, home: PathLike | None = None
) -> Path:
    """Make a small Llama without weights, with a tokenizer that is trained on text files or JSON lines, to try things
    with: `model: {path: FOLDER, start: random}`. Takes the trainer's packages on this computer; the new folder.
    """
    files = [texts] if isinstance(texts, (str, Path)) else list(texts)
    target = Path(folder).absolute()
    words = [*map(str, files), "--to", str(target), "--vocabulary", str(vocabulary), "--hidden", "64", "--layers", "2"]
    host = trainer_here(_home(home))
    ask_worker(host, LocalTransport(host), ("scratch", *words, "--heads", "2"))
    return target


def list_runs(*, home: PathLike | None = None) -> list[Run]:
    """Every run that this computer knows, by id."""
    at_home = _home(home)
    return [Run(run_id, home=at_home) for run_id in run_ids(at_home)]


class Run:
    """A run that has been started, by its id or the beginning of it. Raises UsageError where there is none."""

    def __init__(self, run_id: str, *, home: PathLike | None = None) -> None:
        self._home = _home(home)
        self.id: str = find_run(self._home, run_id).run_id

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    @property
    def phase(self) -> str:
        """Where it stands: preparing, running, restarting, finished, stopped, failed, lost or unknown."""
        return self._record().phase

    @property
    def ended(self) -> bool:
        """Whether it has ended, or cannot go on by itself."""
        return self._record().ended

    def metrics(self) -> list[dict[str, Any]]:
        """Figures of every optimizer step so far, oldest first: step, loss, learning_rate, tokens_per_s and more
        (docs/metrics.md). Of a step that was done again after a failure, the last figures.
        """
        return self._last_of("step")

    def evaluations(self) -> list[dict[str, Any]]:
        """Loss and perplexity of every evaluation so far, oldest first."""
        return self._last_of("evaluation")

    def events(self) -> list[dict[str, Any]]:
        """What happened so far: checkpoints, restarts, moved shares and the like, oldest first."""
        return [record for record in self._records() if record.get("kind") == "event"]

    def wait(self, *, timeout_s: float | None = None, on_update: Callable[[Update], None] | None = None) -> Run:
        """Wait until it has ended, and return it. Raises its error where it failed.

        on_update: called with every `Update` (records, run, board). Raises TimeoutError after `timeout_s`; the run goes
        on then, as it does after Ctrl-C.
        """
        begun = time.monotonic()
        with self._opened() as opened:
            for update in follow(opened.view()):
                if on_update is not None:
                    on_update(update)
                if update.last:
                    raise_failure(update.run)
                elif timeout_s is not None and time.monotonic() - begun > timeout_s:
                    raise TimeoutError(f"{self.id} is {update.run.phase} after {timeout_s:g} s; it goes on")
        return self

    def stop(self, *, now: bool = False, timeout_s: float = 600.0) -> Run:
        """Save, end, and wait until it has ended; now: end at once, without saving.

        Raises TimeoutError where it has not ended after `timeout_s`; the order stays.
        """
        with _private(), self._opened() as opened:
            if not stop(opened, now=now):
                return self
        with contextlib.suppress(RunFailed):
            self.wait(timeout_s=timeout_s)
        return self

    def resume(self, *, cluster: PathLike | None = None, force: bool = False) -> Run:
        """Go on from the newest valid checkpoint, on the same hosts or those of another cluster file."""
        path = None if cluster is None else Path(cluster)
        with _private():
            app.resume(self.id, ResumeOptions(cluster=path, force=force), home=self._home, console=_Log())
        return self

    def export(self, *, to: PathLike | None = None, merged: bool = False, step: int | None = None) -> Path:
        """Write the model for transformers and peft, load it again and compare it; the new folder.

        to: a folder that is not there yet. merged: the whole model instead of an adapter. step: by default the newest
        checkpoint.
        """
        target = None if to is None else Path(to)
        with _private(), self._opened() as opened:
            require_job(opened.layout)
            saved = find_saved(self.id, opened.cluster, opened.transports, step=step)
            record = export_model(saved, opened.layout, to=target, merged=merged, on_text=_Log().progress)
            folder = Path(str(record["folder"]))
            write_card(folder, records_of_opened(opened))
        return folder

    def curve(self, value: str = "loss") -> Curve:
        """A picture of one figure over the steps, with the evaluations where it is the loss; a notebook shows it."""
        of_steps = [(each["step"], each[value]) for each in self.metrics() if _is_number(each.get(value))]
        marks = [(each["step"], each["loss"]) for each in self.evaluations() if _is_number(each.get("loss"))]
        return Curve(title=f"{self.id}: {value}", points=of_steps, marks=marks if value == "loss" else [])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[RunHandle]:
        with open_run(self.id, home=self._home) as opened:
            yield opened

    def _record(self) -> RunRecord:
        with self._opened() as opened:
            return opened.record()

    def _records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with self._opened() as opened:
            for update in follow(opened.view(), wait=lambda _seconds: None):
                found += update.records
                if not update.more:
                    break
        return found

    def _last_of(self, kind: Literal["step", "evaluation"]) -> list[dict[str, Any]]:
        by_step = {record["step"]: record for record in self._records() if record.get("kind") == kind}
        return [by_step[step] for step in sorted(by_step)]


SVG = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT, EDGE = 640, 240, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Figures over steps, as a picture in SVG that a notebook shows by itself."""

    title: str
    points: Sequence[tuple[int, float]]
    marks: Sequence[tuple[int, float]] = ()
    """More figures, drawn as dots."""

    def svg(self) -> str:
        """The picture."""
        if not self.points:
            return f'<svg xmlns="{SVG}" width="{WIDTH}" height="20"><text y="15">no steps yet</text></svg>'
        steps = [step for step, _ in (*self.points, *self.marks)]
        values = [value for _, value in (*self.points, *self.marks)]

        def place(point: tuple[int, float]) -> str:
            across = (point[0] - min(steps)) / max(1, max(steps) - min(steps))
            up = (point[1] - min(values)) / ((max(values) - min(values)) or 1.0)
            return f"{EDGE + across * (WIDTH - 2 * EDGE):.1f},{HEIGHT - EDGE - up * (HEIGHT - 2 * EDGE):.1f}"

        dots = "".join(
            '<circle r="3" fill="#d55e00" cx="{}" cy="{}"/>'.format(*place(mark).split(",")) for mark in self.marks
        )
        texts = (
            (EDGE, 20, self.title),
            (2, EDGE, f"{max(values):.4g}"),
            (2, HEIGHT - EDGE, f"{min(values):.4g}"),
            (EDGE, HEIGHT - 10, f"step {min(steps)}"),
            (WIDTH - 2 * EDGE, HEIGHT - 10, f"step {max(steps)}"),
        )
        words = "".join(f'<text x="{x}" y="{y}" font-size="11">{html.escape(text)}</text>' for x, y, text in texts)
        line = f'<polyline fill="none" stroke="#0072b2" points="{" ".join(map(place, self.points))}"/>'
        return f'<svg xmlns="{SVG}" width="{WIDTH}" height="{HEIGHT}">{line}{dots}{words}</svg>'

    def save(self, path: PathLike) -> Path:
        """Write the picture into a file."""
        target = Path(path)
        target.write_text(self.svg(), encoding="utf-8")
        return target

    def _repr_svg_(self) -> str:
        return self.svg()


def _is_number(value: Any) -> bool:
    """Figures that are not finite stand in words in metrics.jsonl."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _home(home: PathLike | None) -> Path:
    return default_home() if home is None else Path(home).expanduser().absolute()


def _start(
    job: JobLike,
    overrides: Mapping[str, Any] | None,
    cluster: PathLike | None,
    home: Path,
    *,
    looks: bool = True,
    force: bool = False,
) -> StartOptions:
    """looks: whether hosts are asked, so that ./cluster.yaml counts."""
    named = None if cluster is None else Path(cluster)
    return StartOptions(
        home=home,
        job=dict(job) if isinstance(job, Mapping) else Path(job),
        overrides=tuple(f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()),
        cluster=cluster_file(named) if looks else None,
        force=force,
    )


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Files that are made within are readable by their owner only, as those of the command are."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
