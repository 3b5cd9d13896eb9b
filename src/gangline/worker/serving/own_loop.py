"""The engine that is there wherever transformers is: a key-value cache per answer, a token of each in turn.

No answer is padded to the length of another one, so each has the tokens that `generate` of transformers would give it
alone. Adapters lie over one base; a turn goes through the answers of one adapter before it switches to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from peft import PeftModel
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from gangline.errors import GanglineError, ModelError, RunFailed, UsageError, error_summary
from gangline.runs.job import ModelJob
from gangline.worker.generate import Speaker, form_of_folder, loading, open_folder, open_run
from gangline.worker.model import base_of
from gangline.worker.serving.engine import Engine, Piece, Question, QueueFull, Served
from gangline.worker.serving.words import StopTexts, WordsSoFar
from gangline.worker.tokenizer import load_tokenizer

CLOSE_S = 60.0
"""A forward pass that has begun is not interrupted."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One name under which the model answers."""

    speaker: Speaker
    adapter: str | None = None
    """Its name in peft; None: the model without adapters."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """One answer on its way."""

    question: Question
    voice: Voice
    give: Callable[[Piece], None]
    tokens: list[int]
    """Of the prompt, then of the answer."""
    num_prompt: int
    room: int
    ends: frozenset[int]
    words: WordsSoFar
    stops: StopTexts
    drawing: LogitsProcessorList
    generator: torch.Generator | None
    cache: DynamicCache | None = None
    num_cached: int = 0
    cancelled: bool = False


class OwnLoop:
    """Answers of one model and its adapters, made by one thread."""

    def __init__(self, voices: dict[str, Voice], *, num_parallel: int, num_waiting: int) -> None:
        self._voices = voices
        self._num_parallel, self._num_waiting = num_parallel, num_waiting
        self._waiting: deque[_Answer] = deque()
        self._active: list[_Answer] = []
        self._changed = threading.Condition()
        self._tokenizing = threading.Lock()  # a fast tokenizer refuses to be used by two threads at once
        self._closed = False
        model = next(iter(voices.values())).speaker.model
        known = inspect.signature(base_of(model).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def models(self) -> tuple[str, ...]:
        """See `Engine.models`."""
        return tuple(self._voices)

    def ask(self, question: Question, give: Callable[[Piece], None]) -> Callable[[], None]:
        """See `Engine.ask`."""
        answer = self._prepare(question, give)
        with self._changed:
            if self._closed:
                raise _closing()
            if len(self._waiting) >= self._num_waiting + max(0, self._num_parallel - len(self._active)):
                raise QueueFull(
                    "too many requests wait",
                    seen=f"{len(self._active)} are answered, {len(self._waiting)} wait",
                    fix="ask again later",
                )
            self._waiting.append(answer)
            self._changed.notify()

        def cancel() -> None:
            answer.cancelled = True

        return cancel

    def close(self) -> None:
        """See `Engine.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _prepare(self, question: Question, give: Callable[[Piece], None]) -> _Answer:
        voice = self._voices[question.model]
        with self._tokenizing:
            tokens = _prompt(voice.speaker, question)
        limit = voice.speaker.context
        if limit is not None and len(tokens) >= limit:
            raise UsageError(
                "the prompt is too long for this model",
                seen=f"expected fewer than {limit} tokens, with room for an answer; seen {len(tokens)}",
                fix="shorten it, or leave out the oldest messages",
            )
        asked = question.max_tokens
        left = (limit or 1 << 30) - len(tokens)
        return _Answer(
            question=question,
            voice=voice,
            give=give,
            tokens=tokens,
            num_prompt=len(tokens),
            room=left if asked is None else min(asked, left),
            ends=frozenset(voice.speaker.ends() or ()),
            words=WordsSoFar(voice.speaker.tokenizer),
            stops=StopTexts(question.stop),
            drawing=_drawing(voice.speaker, question),
            generator=_generator(voice.speaker, question),
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._active or self._waiting):
                    self._changed.wait()
                if self._closed:
                    for answer in (*self._active, *self._waiting):
                        answer.give(Piece(error=_closing()))
                    self._active, self._waiting = [], deque()
                    return
                while self._waiting and len(self._active) < self._num_parallel:
                    self._active.append(self._waiting.popleft())
                self._waiting = deque(answer for answer in self._waiting if not answer.cancelled)
            self._turn()

    def _turn(self) -> None:
        """One token of each answer, and what ends is taken out."""
        going: list[_Answer] = []
        for name in dict.fromkeys(answer.question.model for answer in self._active):
            with _speaking(self._voices[name]):
                mine = [each for each in self._active if each.question.model == name]
                going += [answer for answer in mine if not answer.cancelled and self._advance(answer)]
        self._active = going

    def _advance(self, answer: _Answer) -> bool:
        """Make the next token of an answer; whether there is another one to make."""
        try:
            with torch.inference_mode():
                piece = self._next(answer)
        except Exception as error:  # out of memory, a model's own mistake: one answer fails, not all
            log.exception("an answer failed")
            answer.give(Piece(error=_failed(error)))
            return False
        answer.give(piece)
        return piece.finish is None

    def _next(self, answer: _Answer) -> Piece:
        speaker = answer.voice.speaker
        if answer.cache is None:
            answer.cache = DynamicCache(config=speaker.model.config.get_text_config())
            answer.give(Piece(num_prompt_tokens=answer.num_prompt))
        fresh = torch.tensor([answer.tokens[answer.num_cached :]], device=speaker.model.device)
        output = speaker.model(input_ids=fresh, past_key_values=answer.cache, use_cache=True, **self._last_only)
        answer.num_cached = len(answer.tokens)
        token = _draw(answer, output.logits[:, -1].float())
        answer.tokens.append(token)
        return self._said(answer, token)

    def _said(self, answer: _Answer, token: int) -> Piece:
        num_answer = len(answer.tokens) - answer.num_prompt
        over = token in answer.ends
        finish = "stop" if over else "length" if num_answer >= answer.room else None
        with self._tokenizing:
            text = "" if over else answer.words.add(token)
            text += answer.words.rest() if finish else ""
        text, stopped = answer.stops.add(text, last=finish is not None)
        return Piece(
            text=text,
            finish="stop" if stopped else finish,
            num_prompt_tokens=answer.num_prompt,
            num_answer_tokens=num_answer,
        )


def open_engine(served: Served) -> Engine:
    """Load the model and its adapters. Raises UsageError, ModelError, CheckpointError."""
    if served.folder is not None:
        speaker = open_folder(served.folder)
    else:
        assert served.run is not None
        assert served.part is not None
        speaker = open_run(served.run, served.part)
    voices = {served.name: Voice(speaker=speaker, adapter="default" if _adapted(speaker.model) else None)}
    if _adapted(speaker.model):
        voices["base"] = Voice(speaker=speaker)
    for number, (name, folder) in enumerate(served.adapters, 1):
        if name in voices:
            raise UsageError(f"--adapter {name}: the name is taken", seen=", ".join(voices), fix="give another name")
        speaker = _with_adapter(speaker, folder, name=f"served{number}")
        voices = {name: dataclasses.replace(each, speaker=_on(each.speaker, speaker)) for name, each in voices.items()}
        voices[name] = Voice(speaker=speaker, adapter=f"served{number}")
    return OwnLoop(voices, num_parallel=served.num_parallel, num_waiting=served.num_waiting)


def _adapted(model: Any) -> bool:
    return isinstance(model, PeftModel)


def _on(speaker: Speaker, other: Speaker) -> Speaker:
    return dataclasses.replace(speaker, model=other.model)


def _with_adapter(speaker: Speaker, folder: Path, *, name: str) -> Speaker:
    """The same model with one adapter more, which has the form of prompts that it was trained with."""
    model, tokenizer = speaker.model, speaker.tokenizer
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(ModelJob(path=str(folder)))
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            raise ModelError(
                f"{folder} cannot be served beside others",
                seen=f"it brings tokens of its own: {len(tokenizer)}",
                fix="serve it alone: gangline serve FOLDER",
            )
    with loading(str(folder), None):
        if _adapted(model):
            model.load_adapter(str(folder), adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
    return Speaker(model=model.eval(), tokenizer=tokenizer, form=form_of_folder(folder, tokenizer))


@contextlib.contextmanager
def _speaking(voice: Voice) -> Iterator[None]:
    model = voice.speaker.model
    if not _adapted(model):
        yield
    elif voice.adapter is None:
        with model.disable_adapter():
            yield
    else:
        model.set_adapter(voice.adapter)
        yield


def _prompt(speaker: Speaker, question: Question) -> list[int]:
    if question.messages is None:
        return _some(speaker.text_tokens(question.text)[0].tolist())
    if speaker.form != "chat" and (question.tools or len(question.messages) > 1):
        raise UsageError(
            f"{question.model} takes one message at a time, and no tools",
            seen="its tokenizer has no chat template",
            fix="ask /v1/completions, or train with a chat template",
        )
    if question.tools and "tools" not in str(speaker.tokenizer.chat_template):
        raise UsageError(
            f"{question.model} takes no tools", seen="its chat template has none", fix="leave tools out of the request"
        )
    try:
        return _some(speaker.prompt_tokens(question.messages, tools=question.tools)[0].tolist())
    except TemplateError as error:
        raise UsageError(
            "the chat template of the model refuses these messages",
            seen=error_summary(error),
            fix="give the roles in the order that the model knows",
        ) from error


def _some(tokens: list[int]) -> list[int]:
    if not tokens:
        raise UsageError("the prompt has no tokens", seen="expected at least one", fix="write a prompt")
    return tokens


def _drawing(speaker: Speaker, question: Question) -> LogitsProcessorList:
    """What is done to the logits: the model's own penalty, as in `generate`, and what the request asks for."""
    steps = LogitsProcessorList()
    penalty = speaker.model.generation_config.repetition_penalty
    if penalty is not None and penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    if question.temperature > 0:
        if question.temperature != 1.0:
            steps.append(TemperatureLogitsWarper(question.temperature))
        if question.top_p < 1.0:
            steps.append(TopPLogitsWarper(question.top_p))
    return steps


def _generator(speaker: Speaker, question: Question) -> torch.Generator | None:
    if question.seed is None or question.temperature == 0:
        return None
    return torch.Generator(device=speaker.model.device).manual_seed(question.seed)


def _draw(answer: _Answer, logits: torch.Tensor) -> int:
    if answer.drawing:
        so_far = torch.tensor([answer.tokens], device=logits.device)
        logits = answer.drawing(so_far, logits)
    if answer.question.temperature == 0:
        return int(logits.argmax(dim=-1))
    drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=answer.generator)
    return int(drawn)


def _closing() -> GanglineError:
    return RunFailed("the endpoint is closing", seen="it was stopped", fix="start it again: gangline serve")


def _failed(error: Exception) -> GanglineError:
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            "the device has no memory left for this answer",
            seen=error_summary(error),
            fix="fewer answers at a time (--parallel), or shorter ones (max_tokens)",
        )
    return RunFailed("the answer failed", seen=error_summary(error), fix="the endpoint's log says more")
