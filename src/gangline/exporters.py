"""Exporters of metrics: where the figures of a run go besides its own metrics.jsonl.

An exporter is one row of `EXPORTERS`, or of a plug-in (`gangline.exporters`). job.yaml names it below `report`:

    report:
      tensorboard: true           # on, with its defaults; `false` or `none` switches an exporter off
      wandb: my-project           # its first option
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
    The metadata of a field may have `help`, `pattern` (of a str) and `examples`, for messages and for the reference."""
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


_FILES = "Write TensorBoard files into the run's folder."
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
    },
    read=instance_of(Exporter),
)
"""Every exporter by its name below `report` in job.yaml."""
