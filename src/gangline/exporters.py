"""Exporters of metrics: where the figures of a run go besides its own metrics.jsonl.

An exporter is one row of `EXPORTERS`, or of a plug-in (`gangline.exporters`). job.yaml names it below `report`:

    report:
      tensorboard: true           # on, with its defaults; `false` or `none` switches an exporter off
      wandb: my-project           # its first option
      prometheus: 9464            # its port
      csv: {path: figures.csv}    # its options by name (a plug-in)

It runs in rank 0, on the head. An error of an exporter never ends a run: it is told once, and the exporter is off from
there on, except that a full disk is tried again.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    open: Callable[[Any, ExportedRun], MetricWriter]
    """Called with an instance of `options`, before the first step of every attempt."""
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
        self, names: Mapping[str, Mapping[str, Any]], run: ExportedRun, *, on_failure: Callable[[str, str], None]
    ) -> None:
        """Open them.

        names: exporter -> its options. on_failure: called once with the exporter and its error in words.
        """
        self._open: dict[str, MetricWriter] = {}
        self._on_failure = on_failure
        self._full: set[str] = set()
        for name, options in names.items():
            self._try(name, functools.partial(self._start, name, options, run))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricWriter.step`."""
        self._each(lambda writer: writer.step(step, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `MetricWriter.evaluation`."""
        self._each(lambda writer: writer.evaluation(step, values))

    def close(self) -> None:
        """See `MetricWriter.close`."""
        self._each(lambda writer: writer.close())
        self._open = {}

    def _each(self, act: Callable[[MetricWriter], None]) -> None:
        for name, writer in list(self._open.items()):
            self._try(name, functools.partial(act, writer))

    def _start(self, name: str, options: Mapping[str, Any], run: ExportedRun) -> None:
        exporter = EXPORTERS[name]
        self._open[name] = exporter.open(exporter.options(**options), run)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbOptions:
    """Where Weights & Biases shows the run."""

    project: str = dataclasses.field(
        metadata={
            "help": "Project on Weights & Biases to report to.",
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
            "examples": ["my-project"],
        }
    )


class _Wandb:
    """Weights & Biases. The package is an extra on the head: gangline[wandb]."""

    def __init__(self, options: WandbOptions, run: ExportedRun) -> None:
        self._run = importlib.import_module("wandb").init(
            project=options.project,
            id=run.run_id,
            name=run.run_id,
            config=dict(run.job),
            dir=str(run.folder),
            resume="allow",
        )

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    evaluation = step

    def close(self) -> None:
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

EXPORTERS: Table[Exporter] = Table(
    "gangline.exporters",
    {
        "tensorboard": Exporter(open=_TensorBoard, help=_FILES, default=True, modules=("torch.utils.tensorboard",)),
        "wandb": Exporter(
            open=_Wandb,
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
        "prometheus": Exporter(open=_Prometheus, help=_PORT, options=PrometheusOptions),
    },
    read=instance_of(Exporter),
)
"""Every exporter by its name below `report` in job.yaml."""
