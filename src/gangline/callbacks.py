"""Callbacks: code of the user's own in the training loop, which sees every figure and may have the run save or finish.

A callback is a row of a plug-in (`gangline.callbacks`); gangline itself has none. job.yaml names it below `callbacks`:

    callbacks:
      enough: {loss: 1.5}         # its options by name, or its first option, or `true`

It runs in rank 0, on the head, after every optimizer step and every evaluation. Its answer is an `Action`, which all
ranks follow at the end of the next step; it cannot change a number. What it raises ends it and not the run.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gangline.exporters import ExportedRun, NoOptions, require_row
from gangline.plugins import Table, instance_of

log = logging.getLogger(__name__)


class Action(enum.Enum):
    """What a callback may ask for."""

    save = "save"
    """A checkpoint at the end of the next step."""
    finish = "finish"
    """A checkpoint at the end of the next step, and the run is `finished` with it."""


class LoopCallback(Protocol):
    """An open callback. Each call is part of a training step on rank 0, so it must return quickly."""

    def on_step(self, step: int, values: Mapping[str, float]) -> Action | None:
        """After an optimizer step: figures by name, as exporters get them (train/loss, train/grad_norm and others)."""
        ...

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> Action | None:
        """After an evaluation: evaluation/loss and evaluation/perplexity."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """One callback: its options, and the function that opens it."""

    open: Callable[[Any, ExportedRun], LoopCallback]
    """Called with an instance of `options`, before the first step of every attempt."""
    options: type = NoOptions
    """A dataclass; see `exporters.Exporter.options`."""
    help: str = ""
    """What it does, in a sentence."""

    def __post_init__(self) -> None:
        require_row(self.open, self.options)


class Callbacks:
    """The callbacks of a job, opened; what they ask for is kept until the loop takes it."""

    def __init__(
        self, names: Mapping[str, Mapping[str, Any]], run: ExportedRun, *, on_failure: Callable[[str, str], None]
    ) -> None:
        """Open them.

        names: callback -> its options. on_failure: called once with the callback and its error in words.
        """
        self.wants: dict[Action, str] = {}
        """What is asked for -> the callback that asked first."""
        self._open: dict[str, LoopCallback] = {}
        self._on_failure = on_failure
        for name, options in names.items():
            opened = self._guarded(name, functools.partial(self._start, name, options, run))
            if opened is not None:
                self._open[name] = opened

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """See `LoopCallback.on_step`."""
        for name, callback in list(self._open.items()):
            self._keep(name, self._guarded(name, functools.partial(callback.on_step, step, values)))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `LoopCallback.on_evaluation`."""
        for name, callback in list(self._open.items()):
            self._keep(name, self._guarded(name, functools.partial(callback.on_evaluation, step, values)))

    def take(self, action: Action) -> str | None:
        """The callback that asks for this, once; None where none does."""
        return self.wants.pop(action, None)

    def _start(self, name: str, options: Mapping[str, Any], run: ExportedRun) -> LoopCallback:
        row = CALLBACKS[name]
        return row.open(row.options(**options), run)

    def _keep(self, name: str, answer: Any) -> None:
        if answer is None:
            return
        if not isinstance(answer, Action):
            self._fail(name, f"it answered {answer!r}; expected gangline.callbacks.Action or None")
        else:
            self.wants.setdefault(answer, name)

    def _guarded(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            with CALLBACKS.guard(name):
                return act()
        except Exception as error:  # noqa: BLE001 - of somebody else's code; it is named, and off
            self._fail(name, f"{type(error).__name__}: {error}")
            return None

    def _fail(self, name: str, text: str) -> None:
        self._open.pop(name, None)
        log.error("callback %s is off: %s", name, text)
        self._on_failure(name, text)


CALLBACKS: Table[Callback] = Table("gangline.callbacks", {}, read=instance_of(Callback))
"""Every callback by its name below `callbacks` in job.yaml; all of them are of plug-ins."""
