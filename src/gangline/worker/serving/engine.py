"""The seam between the endpoint and what answers: one question in, pieces of an answer out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gangline.errors import GanglineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one request asks of a model."""

    model: str
    messages: Sequence[Mapping[str, Any]] | None = None
    """A conversation, by the model's chat template; otherwise `text` is gone on with as it is."""
    text: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    """None: as long as the context lasts."""
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are left out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next part of an answer; the last one has `finish`, or `error`."""

    text: str = ""
    finish: str | None = None
    """`stop`, or `length` where the limit of tokens ended it."""
    error: GanglineError | None = None
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0


class Engine(Protocol):
    """Models that answer. Every method may be called from any thread."""

    @property
    def models(self) -> tuple[str, ...]:
        """The names under which it answers; the first one is the model, the others its adapters or its base."""
        ...

    @property
    def plan(self) -> Mapping[str, Any]:
        """Its memory, as `CachePlan` has it; `alone_for`: the reason why answers share no passes, "" if they do."""
        ...

    @property
    def broken(self) -> GanglineError | None:
        """Why it answers no more, once something that it needs has gone; the endpoint ends with that error."""
        ...

    def ask(self, question: Question, give: Callable[[Piece], None]) -> Callable[[], None]:
        """Have a question answered; the result ends the answer early, and may be called more than once.

        `give` gets the pieces, from a thread of the engine: first one without text as soon as the answer begins.
        Raises UsageError for a question that cannot be answered, QueueFull where too many wait.
        """
        ...

    def close(self) -> None:
        """End all answers, each with an error, and wait until nothing runs."""
        ...


class QueueFull(GanglineError):
    """More questions wait than the endpoint was told to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an engine is to serve, and within which limits."""

    name: str
    folder: Path | None = None
    """A model's or an adapter's folder; otherwise `run` and `part`, a checkpoint of a run."""
    run: Path | None = None
    part: Path | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    """Further names, each with the folder of an adapter over the same base."""
    num_parallel: int = 4
    """Answers that are made at the same time; each has a key-value cache."""
    context: int | None = None
    """Tokens of prompt and answer for which each has room; None: as many as the model takes and the memory has."""
    num_waiting: int = 256
    """Questions that may wait beyond those."""
    host: str = "this computer"
    """`stages`: the name of this host."""
    stages: tuple[StageAddress, ...] = ()
    """`stages`: the stages behind this one, in their order."""
    key: str = ""
    """`stages`: what the stages show each other that they know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """Where a stage of a pipeline waits for the others."""

    host: str
    address: str
    port: int


ENGINES: dict[str, tuple[str, str]] = {
    "transformers": ("gangline.worker.serving.own_loop", "open_engine"),
    "stages": ("gangline.worker.serving.staged_engine", "open_engine"),
}
"""Name -> module and function that take a `Served` and return an `Engine`. The contract test takes in every row."""


def open_engine(name: str, served: Served) -> Engine:
    """Load a model into an engine. Raises UsageError, ModelError, CheckpointError."""
    module, function = ENGINES[name]
    opened: Engine = getattr(importlib.import_module(module), function)(served)
    return opened
