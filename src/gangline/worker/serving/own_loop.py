"""The engine that is there wherever transformers is: answers join and leave a batch between two tokens.

A turn makes the next token of each answer, and takes a part of the prompts that wait, so that a long prompt holds up
the others for one part only. Every token goes through the model once. Adapters lie over one base; a turn goes through
the answers of one adapter before it switches to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from peft import PeftModel
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from gangline.errors import GanglineError, ModelError, RunFailed, UsageError, error_summary
from gangline.runs.job import ModelJob
from gangline.worker.generate import Speaker, form_of_folder, in_memory, loading, open_folder, open_run
from gangline.worker.serving.cache_plan import CachePlan, plan_cache
from gangline.worker.serving.engine import Engine, Piece, Question, QueueFull, Served
from gangline.worker.serving.passes import Passes, layer_shapes, open_passes
from gangline.worker.serving.words import StopTexts, WordsSoFar
from gangline.worker.tokenizer import load_tokenizer

CLOSE_S = 60.0
"""A forward pass that has begun is not interrupted."""
COLDEST = 1e-5
"""A temperature below this is 0: logits divided by it leave the range of fp32."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One name under which the model answers."""

    speaker: Speaker
    adapter: str | None = None
    """Its name in peft; None: the model without adapters."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Answer:
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
    slot: int | None = None
    """In the passes; None: it has not begun."""
    num_cached: int = 0
    """Tokens that went through the model."""
    cancelled: bool = False
    over: bool = False
    last_pass: int = 0
    """The number of the last pass that it took part in, where several are on their way."""

    @property
    def num_fresh(self) -> int:
        """Tokens that have to go through the model before the next one is known."""
        return len(self.tokens) - self.num_cached

    def next_tokens(self, share: int | None) -> list[int]:
        """Those of a pass that takes `share` of them at most."""
        return self.tokens[self.num_cached :][:share]


class OwnLoop:
    """Answers of one model and its adapters, made by one thread."""

    def __init__(
        self, voices: dict[str, Voice], *, passes: Passes, plan: CachePlan, num_waiting: int, alone_for: str = ""
    ) -> None:
        self._voices = voices
        self._passes, self._plan, self._alone_for = passes, plan, alone_for
        self._num_parallel, self._num_waiting = plan.num_parallel, num_waiting
        self._waiting: deque[Answer] = deque()
        self.active: list[Answer] = []
        """Answers that are made; others wait."""
        self._changed = threading.Condition()
        self._tokenizing = threading.Lock()  # a fast tokenizer refuses to be used by two threads at once
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def models(self) -> tuple[str, ...]:
        """See `Engine.models`."""
        return tuple(self._voices)

    @property
    def plan(self) -> dict[str, Any]:
        """See `Engine.plan`."""
        return {**self._plan.to_json(), "alone_for": self._alone_for}

    @property
    def broken(self) -> GanglineError | None:
        """See `Engine.broken`: it has nothing that could."""
        return None

    def ask(self, question: Question, give: Callable[[Piece], None]) -> Callable[[], None]:
        """See `Engine.ask`."""
        answer = self._prepare(question, give)
        with self._changed:
            if self._closed:
                raise _closing()
            if len(self._waiting) >= self._num_waiting + max(0, self._num_parallel - len(self.active)):
                raise QueueFull(
                    "too many requests wait",
                    seen=f"{len(self.active)} are answered, {len(self._waiting)} wait",
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

    def _prepare(self, question: Question, give: Callable[[Piece], None]) -> Answer:
        voice = self._voices[question.model]
        with self._tokenizing:
            tokens = _prompt(voice.speaker, question)
        limit = self._plan.context
        if len(tokens) >= limit:
            raise UsageError(
                "the prompt is too long for this model",
                seen=f"expected fewer than {limit} tokens, with room for an answer; seen {len(tokens)}",
                fix="shorten it, or leave out the oldest messages",
            )
        asked = question.max_tokens
        left = limit - len(tokens)
        return Answer(
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
                while not (self._closed or self.active or self._waiting):
                    self._changed.wait()
                if self._closed:
                    for answer in (*self.active, *self._waiting):
                        answer.give(Piece(error=_closing()))
                    self.active, self._waiting = [], deque()
                    return
                while self._waiting and len(self.active) < self._num_parallel:
                    self.active.append(self._waiting.popleft())
                self._waiting = deque(answer for answer in self._waiting if not answer.cancelled)
            self._turn()

    def _turn(self) -> None:
        """The next token of each answer, a part of the prompts that wait, and what has ended is taken out."""
        self.seat()
        going = [answer for answer in self.active if not answer.cancelled]
        share = self.prompt_share([answer for answer in going if answer.num_fresh > 1])
        over: set[Answer] = {answer for answer in self.active if answer.cancelled}
        for name in dict.fromkeys(answer.question.model for answer in going):
            with _speaking(self._voices[name]):
                mine = [each for each in going if each.question.model == name]
                for part in ([a for a in mine if a.num_fresh == 1], [a for a in mine if a.num_fresh > 1]):
                    over.update(self._pass(part, share))
        self.take_out(over)

    def seat(self) -> None:
        """Give a slot to each answer that begins."""
        for answer in self.active:
            if answer.slot is None and not answer.cancelled:
                answer.slot = self._passes.open()
                answer.give(Piece(num_prompt_tokens=answer.num_prompt))

    def prompt_share(self, in_prompt: Sequence[Answer]) -> int | None:
        """Tokens of each prompt that a pass takes; None: all."""
        limit = self._passes.chunk_tokens
        return None if limit is None or not in_prompt else max(1, limit // len(in_prompt))

    def take_out(self, over: Collection[Answer]) -> None:
        """Forget answers, and give their slots back."""
        for answer in over:
            if answer.slot is not None:
                self._passes.close(answer.slot)
        self.active = [answer for answer in self.active if answer not in over]

    def _pass(self, answers: list[Answer], share: int | None) -> list[Answer]:
        """Pass the next tokens of answers through the model, `share` of each at most; the answers that are over."""
        if not answers:
            return []
        if not self._passes.together and len(answers) > 1:  # if one fails, the others go on
            return [each for answer in answers for each in self._pass([answer], share)]
        part = [answer.next_tokens(share) for answer in answers]
        slots = [answer.slot for answer in answers if answer.slot is not None]
        try:
            with torch.inference_mode():
                logits = self._passes.step(answers[0].voice.speaker.model, slots, part)
                likeliest = logits.argmax(dim=-1).tolist()  # a GPU tells here what failed in the pass
        except Exception as error:  # out of memory, a model's own mistake: these answers fail, not all
            log.exception("answers failed")
            return self.fail(answers, error)
        return self.count_passed(answers, part, logits, likeliest)

    def fail(self, answers: list[Answer], error: Exception) -> list[Answer]:
        """End answers with an error, but for those that have ended; all of them."""
        for answer in answers:
            if not answer.over:
                answer.give(Piece(error=_failed(error)))
        return answers

    def count_passed(
        self, answers: list[Answer], part: list[list[int]], logits: torch.Tensor, likeliest: list[int]
    ) -> list[Answer]:
        """Count what went through the model, and draw where that was all; the answers that are over."""
        for answer, tokens in zip(answers, part, strict=True):
            answer.num_cached += len(tokens)
        whole = [number for number, answer in enumerate(answers) if answer.num_fresh == 0]
        return self._take([(answers[number], logits[number : number + 1], likeliest[number]) for number in whole])

    def _take(self, known: Sequence[tuple[Answer, torch.Tensor, int]]) -> list[Answer]:
        """Draw the next token of each answer, from its logits and the likeliest one; the answers that are over."""
        over = []
        for answer, logits, likeliest in known:
            try:
                with torch.inference_mode():
                    token = _draw(answer, logits, likeliest)
                answer.tokens.append(token)
                piece = self._said(answer, token)
            except Exception as error:  # a tokenizer's own mistake, numbers that are none
                log.exception("an answer failed")
                piece = Piece(error=_failed(error))
            answer.give(piece)
            if piece.finish or piece.error:
                over.append(answer)
        return over

    def _said(self, answer: Answer, token: int) -> Piece:
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
        if served.name == "base":
            raise UsageError(
                "an adapter cannot be served as base",
                seen="base is the name of the model below it",
                fix="give another name: --name",
            )
        voices["base"] = Voice(speaker=speaker)
    for number, (name, folder) in enumerate(served.adapters, 1):
        if name in voices:
            raise UsageError(f"--adapter {name}: the name is taken", seen=", ".join(voices), fix="give another name")
        speaker = _with_adapter(speaker, folder, name=f"served{number}")
        voices = {name: dataclasses.replace(each, speaker=_on(each.speaker, speaker)) for name, each in voices.items()}
        voices[name] = Voice(speaker=speaker, adapter=f"served{number}")
    return _open_loop(voices, served)


def _open_loop(voices: dict[str, Voice], served: Served) -> OwnLoop:
    """Plan the cache, take it, and try a batch."""
    speaker = voices[served.name].speaker
    with _speaking(voices[served.name]):
        shapes = layer_shapes(speaker.model)
        plan = plan_cache(
            speaker.model,
            token_bytes=sum(each.token_bytes for each in shapes.values()) if shapes else None,
            limit=speaker.context,
            context=served.context,
            num_parallel=served.num_parallel,
        )
        with in_memory("the cache does not fit into the memory here", "a shorter --context, or a smaller --parallel"):
            passes, alone_for = open_passes(
                speaker.model, num_rows=served.num_parallel, context=plan.context, shapes=shapes
            )
    return OwnLoop(voices, passes=passes, plan=plan, num_waiting=served.num_waiting, alone_for=alone_for)


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
    if not _is_greedy(question):
        if question.temperature != 1.0:
            steps.append(TemperatureLogitsWarper(question.temperature))
        if question.top_p < 1.0:
            steps.append(TopPLogitsWarper(question.top_p))
    return steps


def _is_greedy(question: Question) -> bool:
    return question.temperature < COLDEST


def _generator(speaker: Speaker, question: Question) -> torch.Generator | None:
    if question.seed is None or _is_greedy(question):
        return None
    return torch.Generator(device=speaker.model.device).manual_seed(question.seed)


def _draw(answer: Answer, logits: torch.Tensor, likeliest: int) -> int:
    """The next token. logits: (1, vocabulary); likeliest: their largest one, for which a GPU is asked once per pass."""
    if answer.drawing:
        so_far = torch.tensor([answer.tokens], device=logits.device)
        logits = answer.drawing(so_far, logits)
    if _is_greedy(answer.question):
        return int(logits.argmax(dim=-1)) if answer.drawing else likeliest
    drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=answer.generator)
    return int(drawn)


def _closing() -> GanglineError:
    return RunFailed("the endpoint is closing", seen="it was stopped", fix="start it again: gangline serve")


def _failed(error: Exception) -> GanglineError:
    if isinstance(error, GanglineError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            "the device has no memory left for this answer",
            seen=error_summary(error),
            fix="fewer answers at a time (--parallel), or shorter ones (max_tokens)",
        )
    return RunFailed("the answer failed", seen=error_summary(error), fix="the endpoint's log says more")
