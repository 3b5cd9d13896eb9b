"""Exporters of metrics: where the figures of a run go besides its own metrics.jsonl.

An exporter is one row of `EXPORTERS`, or of a plug-in (`gangline.exporters`). job.yaml names it below `report`:

    report:
      tensorboard: true           # on, with its defaults; `false` or `none` switches an exporter off
      wandb: my-project           # its first option
      prometheus: 9464            # its port
      csv: {path: figures.csv}    # its options by name (a plug-in)

It runs in rank 0, on the head. An error of an exporter never ends a run: it is told once, and the exporter is off from
there on, except that a full disk is tried again.

An exporter of a service that may fail or hang is a tracker (`apart=True`): a process beside rank 0 reads metrics.jsonl
for it, which is its queue (`exporter_process.py`). Rank 0 only starts and ends that process, and hears of its trouble.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from gangline.plugins import Table, instance_of

log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """What an exporter is told of the run when it is opened."""

    run_id: str
    attempt: int
    """The first is 1. A later attempt writes on where the one before ended, and may repeat some steps."""
    folder: Path
    """The folder of the run on the head; an exporter that writes files writes them below it."""
    job: Mapping[str, Any]
    """The resolved job, as in job.json."""
    metrics: Path | None = None
    """metrics.jsonl of the run, from which trackers get their points; they need it."""


class MetricWriter(Protocol):
    """An open exporter. Each call is part of a training step on rank 0, so it must return quickly."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one optimizer step by name: train/loss, train/tokens_per_s, rank0/memory_bytes and others."""
        ...

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one evaluation by name: evaluation/loss, evaluation/perplexity."""
        ...

    def close(self) -> None:
        """The attempt ends: write out what is buffered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figures of one line of metrics.jsonl."""

    step: int
    time: datetime
    values: Mapping[str, float]
    """By name, as a `MetricWriter` gets them."""


class Tracker(Protocol):
    """An open exporter in a process of its own. It may take its time; what it raises is tried again later."""

    def send(self, points: Sequence[Point]) -> None:
        """Deliver these points. The same ones come again where it raises, or is killed before it ends."""
        ...

    def close(self, *, failed: bool) -> None:
        """The attempt ends: deliver what is buffered. failed: it has; neither finished nor stopped."""
        ...


def named_figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line of metrics.jsonl by the names of docs/metrics.md; of other lines none."""
    if line.get("kind") == "evaluation":
        return {f"evaluation/{name}": float(line[name]) for name in ("loss", "perplexity")}
    if line.get("kind") != "step":
        return {}
    rows = {f"rank{row['rank']}": row for row in line.get("ranks", ())}
    found = {f"train/{name}": line.get(name) for name in _OF_STEP}
    found |= {f"{rank}/{name}": row.get(name) for rank, row in rows.items() for name in _OF_RANK}
    return {name: float(value) for name, value in found.items() if value is not None}


_OF_STEP = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "exposed_s", "mfu")
_OF_RANK = ("micro_batches", "data_s", "compute_s", "wait_s", "wait_others_s", "memory_bytes")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """An exporter without options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A key that an exporter needs on the head."""

    variable: str
    netrc: str = ""
    """Its machine in ~/.netrc of the head, which is as good."""
    off: tuple[str, ...] = ()
    """Settings that go without it, such as "WANDB_MODE=offline"."""
    how: str = ""
    """How a user gets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """One exporter: its options, and the function that opens it."""

    open: Callable[[Any, ExportedRun], Any]
    """Called with an instance of `options`, before the first step of every attempt; gives a `MetricWriter`. `apart`:
    called in a process of its own, again after an error; gives a `Tracker`."""
    apart: bool = False
    """Whether it is a tracker: it may hang or fail, and the run shall not notice."""
    options: type = NoOptions
    """A dataclass whose fields are plain data (bool, int, float, str, and lists of them); job.yaml is checked by it.
    The metadata of a field may have `help`, `pattern` (of a str), `least` and `most` (of a number) and `examples`, for
    messages and for the reference."""
    help: str = ""
    """What it does, in a sentence, for the reference."""
    default: bool = False
    """Whether a job has it that says nothing about it."""
    modules: tuple[str, ...] = ()
    """Slow imports of `open`, done before the ranks start."""
    package: str = ""
    """A package that the head needs for it; a start without is refused."""
    secret: Secret | None = None
    """A key that the head needs for it; a start without is refused."""

    def __post_init__(self) -> None:
        require_row(self.open, self.options)


def require_row(opens: object, options: object) -> None:
    """Raise TypeError for what cannot be the `open` and the `options` of a row."""
    if not callable(opens):
        raise TypeError("open is no function of (options, run)")
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise TypeError("options is no dataclass")


class Exporters:
    """The exporters of a job, opened; what one of them raises is its own end and not the run's."""

    def __init__(
        self,
        names: Mapping[str, Mapping[str, Any]],
        run: ExportedRun,
        *,
        on_failure: Callable[[str, str], None],
        on_return: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """Open them.

        names: exporter -> its options. on_failure: called once with the exporter and its error in words. on_return:
        called with a tracker that has failed, has answered again, and has what it had missed.
        """
        self._open: dict[str, MetricWriter] = {}
        self._on_failure = on_failure
        self._on_return = on_return
        self._full: set[str] = set()
        for name, options in names.items():
            self._try(name, functools.partial(self._start, name, options, run))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricWriter.step`."""
        self._each(lambda writer: writer.step(step, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricWriter.evaluation`."""
        self._each(lambda writer: writer.evaluation(step, values))

    def close(self, *, in_haste: bool = False) -> None:
        """See `MetricWriter.close`. in_haste: the rank has failed, and others wait for its end."""
        for writer in self._open.values():  # all trackers deliver at the same time
            if isinstance(writer, _Apart):
                writer.begin_close(in_haste=in_haste)
        self._each(lambda writer: writer.close())
        self._open = {}

    def _each(self, act: Callable[[MetricWriter], None]) -> None:
        for name, writer in list(self._open.items()):
            self._try(name, functools.partial(act, writer))

    def _start(self, name: str, options: Mapping[str, Any], run: ExportedRun) -> None:
        exporter = EXPORTERS[name]
        if exporter.apart:
            self._open[name] = _Apart(name, options, run, hear=functools.partial(self._hear, name))
        else:
            self._open[name] = exporter.open(exporter.options(**options), run)

    def _hear(self, name: str, error: str) -> None:
        """A tracker's process has trouble, or none any more ("")."""
        if error:
            log.error("exporter %s: %s", name, error)
            self._on_failure(name, error)
        else:
            log.info("exporter %s has what it had missed", name)
            self._on_return(name)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            with EXPORTERS.guard(name, passing=OSError):
                act()
            self._full.discard(name)
        except Exception as error:  # noqa: BLE001 - of somebody else's code; it is named, and off
            is_full = isinstance(error, OSError) and error.errno in _FULL
            if not is_full:
                self._open.pop(name, None)
            if name not in self._full:
                text = f"{type(error).__name__}: {error}"
                log.error("exporter %s %s: %s", name, "has no room" if is_full else "is off", text)  # noqa: TRY400
                self._on_failure(name, text)
            if is_full:
                self._full.add(name)


SILENT_S = 30.0
"""A call into a tracker that takes longer is told."""
CLOSE_S = 20.0
"""For so long a tracker may deliver what is left when an attempt ends: with the 2 s more that rank 0 waits, less than
the 30 s from which on a step counts as hung."""
HASTE_S = 3.0
"""The same, for one that is in trouble already, and after a failure."""
LATER = "the next attempt sends them, but there is none after a run that has finished"
RESTARTS = 3
"""So often a tracker's process is started again, after one that was killed or crashed."""
RESTART_S = 10.0


class _Apart:
    """The process of a tracker, as rank 0 sees it. Nothing here waits for it, but `close`, for CLOSE_S at most."""

    def __init__(self, name: str, options: Mapping[str, Any], run: ExportedRun, *, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._folder = run.folder / "trackers"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._log = self._folder / f"{name}.log"
        told = dataclasses.asdict(run) | {"folder": str(run.folder), "metrics": str(run.metrics), "job": dict(run.job)}
        order = {"name": name, "options": dict(options), "run": told, "silent_s": SILENT_S, "haste_s": HASTE_S}
        self._order = self._folder / f"{name}.order"
        self._order.touch(mode=0o600)
        self._order.write_text(json.dumps(order), encoding="utf-8")
        self._close_by = 0.0
        self._starts = 0
        self._rest = b""
        self._log.unlink(missing_ok=True)  # of the attempt before
        self._start()

    def _start(self) -> None:
        code = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")]))
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gangline.exporter_process", str(self._order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        os.set_blocking(self._process.stdin.fileno(), False)
        self._starts += 1
        self._dead_since: float | None = None

    def step(self, _step: int, _values: Mapping[str, float]) -> None:
        """Hear how it goes: the figures are in metrics.jsonl."""
        self._listen()
        if self._process.poll() is None:
            return
        if self._dead_since is None:
            self._dead_since = time.monotonic()
            again = f"; it is started again in {RESTART_S:.0f} s" if self._starts <= RESTARTS else "; it stays away"
            self._hear(f"its process has ended with {self._process.returncode}{again}; see {self._log}")
        elif self._starts <= RESTARTS and time.monotonic() > self._dead_since + RESTART_S:
            self._end()
            self._start()

    evaluation = step

    def begin_close(self, *, in_haste: bool) -> None:
        """Tell it to deliver what is left."""
        patience_s = HASTE_S if in_haste else CLOSE_S
        self._close_by = time.monotonic() + patience_s + 2
        self._say(json.dumps({"close_s": patience_s, "failed": in_haste}).encode() + b"\n")

    def close(self) -> None:
        """End it. What it has not delivered comes with the next attempt."""
        try:
            self._process.wait(max(0.0, self._close_by - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            if not self._listen():
                self._hear(f"its process did not end in time, and was killed; it may lack figures: {LATER}")
        self._listen()
        self._end()

    def _say(self, words: bytes) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), words)
        except OSError:
            return  # it has ended, or hangs: the next look tells

    def _listen(self) -> int:
        """Hear what it says; how much that was."""
        assert self._process.stdout is not None
        try:
            while piece := os.read(self._process.stdout.fileno(), 1 << 14):
                self._rest += piece
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._hear(json.loads(line)["error"])
        return len(lines)

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _TensorBoard:
    """TensorBoard event files: another one after a disk was full, for a writer that has failed fails for ever."""

    def __init__(self, _options: NoOptions, run: ExportedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def step(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._writer is None:
                # by name: torch is at home in the worker, which is where this runs
                self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError:
            self._writer = None
            raise

    evaluation = step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _project(words: str) -> Any:
    """The option that names a project of a tracker."""
    pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
    return dataclasses.field(metadata={"help": words, "pattern": pattern, "examples": ["my-project"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbOptions:
    """Where Weights & Biases shows the run."""

    project: str = _project("Project on Weights & Biases to report to.")


class _Wandb:
    """Weights & Biases. The package is an extra on the head: gangline[wandb].

    Steps are a figure of their own: W&B's own counter takes none that is lower than the last, and a resumed run repeats
    some.
    """

    def __init__(self, options: WandbOptions, run: ExportedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=options.project,
            id=run.run_id,
            name=run.run_id,
            config=dict(run.job),
            dir=str(run.folder),
            resume="allow",
            # this process is not the one that trains: its output and its load say nothing about the run
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step, "time": point.time.timestamp()})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowOptions:
    """Where MLflow keeps the run."""

    uri: str = dataclasses.field(
        metadata={
            "help": "Address of the MLflow server, or sqlite:// with the absolute path of a file of the head. A user "
            "and a password belong into ~/.mlflow/credentials there.",
            "pattern": r"^(https?://[^@\s]{1,400}|sqlite:////[^@\s]{1,400})$",
            "examples": ["http://pc9:5000"],
        }
    )
    experiment: str = dataclasses.field(
        default="gangline",
        metadata={
            "help": "Experiment that has the run.",
            "pattern": r"^[^\s/][^/\n]{0,99}$",
            "examples": ["my-project"],
        },
    )


_MLFLOW_METRICS = 1000
_MLFLOW_PARAMS = 100
"""The most that MLflow's REST API takes in one request."""


class _Mlflow:
    """An MLflow server. The same run for all attempts, found by its tag."""

    def __init__(self, options: MlflowOptions, run: ExportedRun) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=options.uri)
        found = self._client.get_experiment_by_name(options.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(options.experiment)
        tag = "gangline.run"
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{tag}` = '{run.run_id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, run_name=run.run_id, tags={tag: run.run_id})
            self._id = made.info.run_id
        known = runs[0].data.params if runs else {}  # of a server that went away meanwhile: not all
        rows = [self._entities.Param(name, text[:500]) for name, text in _flat(run.job) if name not in known]
        for some in _parts(rows, _MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=some)

    def send(self, points: Sequence[Point]) -> None:
        rows = [
            self._entities.Metric(name, value, round(point.time.timestamp() * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _parts(rows, _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=some)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


def _flat(job: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a job with dots, and their values as text."""
    for key, value in job.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield re.sub(r"[^\w./ -]", "_", f"{above}{key}")[:250], str(value)


def _parts(rows: Sequence[Any], most: int) -> Iterator[list[Any]]:
    remaining = iter(rows)
    while some := list(itertools.islice(remaining, most)):
        yield some


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioOptions:
    """Where Trackio keeps the run."""

    project: str = _project("Project of Trackio on the head, in TRACKIO_DIR or its cache.")


class _Trackio:
    """Trackio's files on the head, which `trackio show` shows there."""

    def __init__(self, options: TrackioOptions, run: ExportedRun) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=options.project,
            name=run.run_id,
            config=dict(run.job),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - it knows no state of a run
        self._run.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """Where Prometheus finds the figures of the last step: http://127.0.0.1:PORT/metrics, on the head only."""

    port: int = dataclasses.field(
        metadata={
            "help": "Port of 127.0.0.1 on the head.",
            "least": 1024,
            "most": 65535,
            "examples": [9464],
        }
    )


class _Prometheus:
    """The last figures as text, for a Prometheus that runs on the head, or comes there through ssh."""

    def __init__(self, options: PrometheusOptions, run: ExportedRun) -> None:
        http = importlib.import_module("http.server")  # slow, and of this exporter only
        self._labels = f'run="{run.run_id}"'
        self._values: dict[str, float] = {"attempt": run.attempt}
        exporter = self

        class Answers(http.BaseHTTPRequestHandler):  # type: ignore[misc, name-defined]
            timeout = 10

            def do_GET(self) -> None:  # noqa: N802 - its name there
                # a page of the browser that has made a name of its own stand for 127.0.0.1 shall read nothing
                is_local = self.headers.get("Host", "").rpartition(":")[0] in _LOCAL
                status = 403 if not is_local else 404 if self.path != "/metrics" else 200
                body = exporter.text().encode() if status == 200 else b""
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing: stderr is the rank's log."""

        self._server = http.ThreadingHTTPServer(("127.0.0.1", options.port), Answers)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {**self._values, **values, "step": step}

    evaluation = step

    def text(self) -> str:
        """The figures in Prometheus's text format."""
        rows: dict[str, list[str]] = {}
        for name, value in self._values.items():
            metric, labels = _metric(name)
            rows.setdefault(metric, []).append(f"{metric}{{{','.join([self._labels, *labels])}}} {float(value)!r}")
        return "".join(_HEAD.format(metric) + "\n".join(lines) + "\n" for metric, lines in rows.items())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_HEAD = "# HELP {0} Of the last step or evaluation (docs/metrics.md).\n# TYPE {0} gauge\n"
_LOCAL = frozenset({"127.0.0.1", "localhost"})
_RANK = re.compile(r"rank(\d+)/(.+)")
_UNITS = ((re.compile(r"(?<=_per_)s$"), "second"), (re.compile(r"(?<=_)s$"), "seconds"))


def _metric(name: str) -> tuple[str, list[str]]:
    """Our name of a figure -> Prometheus's, and its labels: rank3/data_s -> gangline_rank_data_seconds, rank="3"."""
    match = _RANK.fullmatch(name)
    words, labels = (f"rank_{match[2]}", [f'rank="{match[1]}"']) if match else (name, [])
    for ending, unit in _UNITS:
        words = ending.sub(unit, words)
    return "gangline_" + re.sub(r"[^a-zA-Z0-9_]", "_", words), labels


_FILES = "Write TensorBoard files into the run's folder."
_PORT = "Show the last figures to Prometheus, at http://127.0.0.1:PORT/metrics of the head; `none`: do not."
_PROJECT = "Project on Weights & Biases to report to; `none`: do not."
_SERVER = "Address of an MLflow server to report to; `none`: do not."
_TRACKIO_PROJECT = "Project of Trackio on the head to report to; `none`: do not."

EXPORTERS: Table[Exporter] = Table(
    "gangline.exporters",
    {
        "tensorboard": Exporter(open=_TensorBoard, help=_FILES, default=True, modules=("torch.utils.tensorboard",)),
        "wandb": Exporter(
            open=_Wandb,
            apart=True,
            help=_PROJECT,
            options=WandbOptions,
            package="wandb",
            secret=Secret(
                variable="WANDB_API_KEY",
                netrc="api.wandb.ai",
                off=("WANDB_MODE=offline", "WANDB_MODE=disabled"),
                how="copy it from https://wandb.ai/authorize: export WANDB_API_KEY=...",
            ),
        ),
        "mlflow": Exporter(open=_Mlflow, apart=True, help=_SERVER, options=MlflowOptions, package="mlflow-skinny"),
        "trackio": Exporter(
            open=_Trackio, apart=True, help=_TRACKIO_PROJECT, options=TrackioOptions, package="trackio"
        ),
        "prometheus": Exporter(open=_Prometheus, help=_PORT, options=PrometheusOptions),
    },
    read=instance_of(Exporter),
)
"""Every exporter by its name below `report` in job.yaml."""
