"""From a conversation to the text that the model sees, and the parts of it that the model learns (`data.learn`).

An assistant's turn begins where the prompt for an answer ends, and goes on to the last word that the template writes
for it: thinking, tool calls, the token that ends the turn and what follows it. The prompt itself is not learned: in use
it is given. Of the prompt only the name of the role counts; where it opens the thinking as well (`<think>`), that is
learned, for other prompts of the same model do not give it.

A template that marks the assistant's words with `{% generation %}` decides itself what a turn is.

Where something cannot be found for certain, the row is refused. Parts are tokenised on their own, as they are in use,
where the prompt ends before the answer exists.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from gangline.formats import GIVEN, RowError, Segment
from gangline.runs.job import LearnJob
from gangline.worker.data.chat_template import (
    FAULTS,
    ChatTemplate,
    Message,
    ProbeKind,
    Rendering,
    Unproven,
    dumped,
)

_OPENS_THINKING = re.compile(r"</?(?:think|thinking|thought)>|\[/?THINK\]|◁/?think▷|<\|/?think\|>|<\|channel\|?>")
_ENDS_THINKING = re.compile(
    r"(?:</(?:think|thinking|thought)>|\[/THINK\]|◁/think▷|<\|/think\|>|<channel\|>|<\|end\|>|<\|eom\|>"
    r"|<\|END_THINKING\|>)\s*"
)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as the model sees it."""

    segments: tuple[Segment, ...]
    open: bool = False
    """The last turn is learned to its end, and no token of the template ends it: the end-of-text token has to."""
    notes: tuple[str, ...] = ()
    """What the template left out, in words."""


class Conversations:
    """Renders the conversations of a job."""

    def __init__(
        self, template: ChatTemplate, learn: LearnJob, *, eos: str | None, ending: Callable[[str], str | None]
    ) -> None:
        """ending: the special token that a text ends with, if it does."""
        self._template = template
        self._learn = learn
        self._eos = eos
        self._ending = ending

    def __call__(self, messages: Sequence[Message], tools: Any = None) -> Conversation:
        """The text in parts. Raises RowError for a row that the template or a rule of `data.learn` cannot take."""
        weights = [self._weight(number, message) for number, message in enumerate(messages)]
        unseen = {self._learn.weight_field, GIVEN}
        plain = [{key: each for key, each in message.items() if key not in unseen} for message in messages]
        given, rendering = self.rendered(plain, tools)
        spans = [span for number in range(len(given)) for span in self._turn(rendering, given, number, weights[number])]
        spans = _merged(spans)
        return Conversation(
            segments=_segments(rendering.text, spans),
            open=self._is_open(rendering, given, spans),
            notes=tuple(_notes(rendering, given)),
        )

    def _weight(self, number: int, message: Message) -> bool:
        field = self._learn.weight_field
        value = message.get(field) if field is not None else None
        if message.get(GIVEN):
            return False
        if value is None:
            return True
        if isinstance(value, (bool, int, float)) and value in {0, 1}:
            return bool(value)
        raise RowError(f"message {number + 1} has {field} {value!r}; a message is learned (1) or not (0)")

    # --- the form of the messages that the template takes

    def rendered(self, messages: list[Message], tools: Any) -> tuple[list[Message], Rendering]:
        """The first form of the messages of which the template writes all words and calls, else the best that it takes.

        Raises RowError where none is taken, or the places of one are not proven.
        """
        best: tuple[list[Message], Rendering] | None = None
        lost = 0
        refused: list[Exception] = []
        for given in _forms(messages):
            try:
                rendering = self._template.render(given, tools)
            except Unproven as error:
                raise RowError(
                    f"where the answers stand in the text is not certain: {error}; mark what the assistant says with "
                    "{% generation %} in the template (data.chat_template)"
                ) from error
            except FAULTS as error:
                refused.append(error)
                continue
            missing = sum(kind != "thought" for _, kind in rendering.missing)
            if (best is None or missing < lost) and not _prints_parts(rendering.text, given):
                best, lost = (given, rendering), missing
            if best is not None and not lost:
                return best
        if best is None:
            own = [each for each in refused if type(each) is jinja2.TemplateError]
            why = (own or refused)[0]
            raise RowError(f"the chat template refuses the messages: {str(why)[:200]!r}") from why
        return best

    # --- what is learned of a message

    def _turn(self, rendering: Rendering, messages: list[Message], number: int, weight: bool) -> list[Span]:
        role = messages[number]["role"]
        if not weight or role not in self._learn.roles:
            return []
        if role != "assistant":
            return self._words(rendering, number)
        found = self._tagged if self._template.tagged else self._written
        spans = found(rendering, messages, number)
        if not spans:
            return []
        spans = self._with_end(rendering, spans) if self._learn.end_token else self._without_end(rendering, spans)
        if self._learn.thinking == "none" or (self._learn.thinking == "last" and _is_earlier(messages, number)):
            spans = _minus(spans, _thinking(rendering, spans, number))
        return spans

    def _tagged(self, rendering: Rendering, messages: list[Message], number: int) -> list[Span]:
        """The blocks of a message; one outside of the loop (an end mark) belongs to the last answer before it."""
        found = []
        for start, end in rendering.tagged:
            owner = next((each.message for each in rendering.stretches if each.start <= start < each.end), None)
            if owner is None:
                before = [
                    each.message for each in rendering.stretches if each.end <= start and each.message is not None
                ]
                owner = next((each for each in reversed(before) if messages[each]["role"] == "assistant"), None)
            if owner == number:
                found.append((start, end))
        return found

    def _written(self, rendering: Rendering, messages: list[Message], number: int) -> list[Span]:
        """What the template wrote for an answer, without the prompt for it. Raises RowError for a prompt unlike it."""
        text = rendering.text
        spans = [
            (each.start, each.end)
            for each in rendering.stretches
            if each.message == number and text[each.start : each.end].strip()
        ]
        if not spans:
            return []
        (start, end), *others = spans
        header = next((each for each in self._habits.headers if text.startswith(each, start, end)), "")
        said = next((probe.at for probe in rendering.probes if probe.message == number), end)
        follows = number > 0 and messages[number - 1]["role"] in {"assistant", "tool"}
        if self._habits.headers and not (header or follows or not text[start:said].strip()):
            raise RowError(
                f"the template begins message {number + 1} with {text[start:said][:60]!r}, and asks for an answer with "
                f"{self._habits.headers[0]!r}; mark what the assistant says with {{% generation %}} in the template"
            )
        start += len(header)
        return [(start, end), *others] if start < end else others

    def _words(self, rendering: Rendering, number: int) -> list[Span]:
        """The words of a message that is no answer, and the end of its turn."""
        spans, start = [], None
        for probe in rendering.probes:
            if probe.message == number and probe.opens and start is None:
                start = probe.at
            elif probe.message == number and not probe.opens and start is not None:
                spans.append((start, probe.at))
                start = None
        if not spans or not self._learn.end_token:
            return spans
        end = next((each.end for each in rendering.stretches if each.start < spans[-1][1] <= each.end), spans[-1][1])
        closing = rendering.text[spans[-1][1] : end]
        return [*spans[:-1], (spans[-1][0], end)] if closing in self._habits.ends else spans

    def _with_end(self, rendering: Rendering, spans: list[Span]) -> list[Span]:
        """With the end-of-text token that stands right after an answer: the model must learn to stop."""
        start, end = spans[-1]
        if self._eos and rendering.text.startswith(self._eos, end):
            end += len(self._eos)
        return [*spans[:-1], (start, end)]

    def _without_end(self, rendering: Rendering, spans: list[Span]) -> list[Span]:
        """Without what ends the turn. Raises RowError where that cannot be told."""
        start, end = spans[-1]
        turn = rendering.text[start:end]
        ends = [each for each in self._habits.ends if each and turn.endswith(each)]
        if ends:
            return [*spans[:-1], (start, end - max(map(len, ends)))]
        last = max((probe.at for probe in rendering.probes if start <= probe.at <= end), default=end)
        if rendering.text[last:end].strip():
            raise RowError(f"learn.end_token: no end of a turn is known in {rendering.text[last:end][-60:]!r}")
        return spans

    def _is_open(self, rendering: Rendering, messages: list[Message], spans: list[Span]) -> bool:
        if not (self._learn.end_token and spans and self._eos) or messages[-1]["role"] != "assistant":
            return False
        start, end = spans[-1]
        if rendering.text[end:].strip() or self._eos in rendering.text[start:end]:
            return False
        said = max((probe.at for probe in rendering.probes if start <= probe.at <= end), default=start)
        return self._ending(rendering.text[said:end].rstrip()) is None

    @property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end a turn: where an answer in use is over."""
        return self._habits.stops(self._ending)

    @functools.cached_property
    def _habits(self) -> Habits:
        return Habits.of(self._template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a template does with every answer."""

    headers: tuple[str, ...] = ()
    """Beginnings of a turn that the prompt gives, the longest first."""
    ends: frozenset[str] = frozenset()
    """What may follow the last word of a turn."""

    @staticmethod
    def of(template: ChatTemplate) -> Habits:
        """Found with conversations of one word each; a template that refuses them has no habits."""
        headers: set[str] = set()
        ends: set[str] = set()
        for messages in _SAMPLES:
            prompt = _prompt(template, messages)
            headers |= {prompt, prompt.rstrip()} - {""}
            ends |= _ends(template, messages)
        return Habits(headers=tuple(sorted(headers, key=len, reverse=True)), ends=frozenset(ends))

    def stops(self, ending: Callable[[str], str | None]) -> tuple[str, ...]:
        """The tokens that end a turn: where an answer in use is over."""
        return tuple(sorted({token for token in map(ending, map(str.rstrip, self.ends)) if token}))


_CALL = {"id": "call000001", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
_TURNS: tuple[Message, ...] = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "w"})
_SAMPLES: tuple[tuple[Message, ...], ...] = (
    _TURNS,
    (*_TURNS, *_TURNS),
    ({"role": "system", "content": "s"}, *_TURNS),
    (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "look", "tool_call_id": "call000001", "content": "blue"},
        {"role": "assistant", "content": "w"},
    ),
)


def _prompt(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """The words that ask for the last answer, up to where they open the thinking; "" if the template has none."""
    for given in _forms([dict(each) for each in messages[:-1]]):
        try:
            rendering = template.render(given)
            asked = template.text(given, prompt=True)
        except (*FAULTS, Unproven):
            continue
        after = max((probe.at for probe in rendering.probes), default=0)
        if asked.startswith(rendering.text):
            prompt = asked[len(rendering.text) :]
        else:
            # something else stands at the end of a text without a prompt, such as the end-of-text token
            turn = max((each.end for each in rendering.stretches if each.message == len(given) - 1), default=after)
            prompt = asked[turn:] if asked.startswith(rendering.text[:turn]) else ""
            prompt = prompt.removesuffix(rendering.text[turn:])
        opened = _OPENS_THINKING.search(prompt)
        return prompt[: opened.start()] if opened else prompt
    return ""


def _ends(template: ChatTemplate, messages: Sequence[Message]) -> set[str]:
    """What follows the last word of every answer, in its own turn."""
    found = set()
    for given in _forms([dict(each) for each in messages]):
        try:
            rendering = template.render(given)
        except (*FAULTS, Unproven):
            continue
        for stretch in rendering.stretches:
            said = [probe for probe in rendering.probes if stretch.start < probe.at <= stretch.end]
            if said and said[-1].kind == "text" and given[said[-1].message]["role"] == "assistant":
                found.add(rendering.text[said[-1].at : stretch.end])
        return found
    return found


_NO_WORDS: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})
"""What a message without words has: first what transformers makes of null."""


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages as templates may want them.

    Words as text or as a list of parts, arguments of tool calls as values or as JSON, no words as in `_NO_WORDS`.
    """
    null = any(each.get("content") is None for each in messages)
    calls = any(each.get("tool_calls") for each in messages)
    for parts, as_json, empty in itertools.product(
        (False, True), (False, True) if calls else (False,), _NO_WORDS if null else _NO_WORDS[:1]
    ):
        yield [_formed(each, parts=parts, as_json=as_json, empty=empty) for each in messages]


def _formed(message: Message, *, parts: bool, as_json: bool, empty: dict[str, Any]) -> Message:
    # a key with null is a key that is not there; many templates ask only whether there is the key
    found = {key: value for key, value in message.items() if value is not None}
    if "content" not in found:
        found |= empty
    if parts and isinstance(found.get("content"), str):
        found["content"] = [{"type": "text", "text": found["content"]}]
    thought = next((found[key] for key in ("reasoning_content", "thinking", "reasoning") if found.get(key)), None)
    if thought is not None:  # templates read it under either name
        found |= {"reasoning_content": thought, "thinking": found.get("thinking") or thought}
    if found.get("tool_calls"):
        found["tool_calls"] = [_call(each, as_json=as_json) for each in found["tool_calls"]]
    else:
        found.pop("tool_calls", None)
    return found


def _call(call: Any, *, as_json: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {"type": "function", **call, "function": _call(function, as_json=as_json)}
    if "arguments" not in call:
        return dict(call)
    arguments = call["arguments"]
    if as_json:
        return {**call, "arguments": arguments if isinstance(arguments, str) else dumped(arguments)}
    return {**call, "arguments": _values(arguments) if isinstance(arguments, str) else arguments}


def _values(text: str) -> Any:
    try:
        values = json.loads(text)
    except ValueError:
        return text
    return values if isinstance(values, dict) else text


def _prints_parts(text: str, messages: Sequence[Message]) -> bool:
    """Whether a template that wants texts has printed a list of parts as one."""
    return isinstance(messages[-1].get("content"), list) and ("'type': 'text'" in text or '"type": "text"' in text)


def _is_earlier(messages: Sequence[Message], number: int) -> bool:
    """Whether the user says something after this message."""
    return any(each["role"] == "user" for each in messages[number + 1 :])


def _thinking(rendering: Rendering, spans: Sequence[Span], number: int) -> list[Span]:
    """The thinking of an answer with the tags around it. Raises RowError where its end cannot be told."""
    own = [probe for probe in rendering.probes if probe.message == number]
    found = []
    for index, probe in enumerate(own):
        if probe.kind != "thought" or not probe.opens:
            continue
        begin, end = next(((start, stop) for start, stop in spans if start <= probe.at <= stop), (probe.at, probe.at))
        before = [each.at for each in own[:index] if each.at >= begin]
        lead = rendering.text[before[-1] : probe.at] if before else ""
        opened = [*_OPENS_THINKING.finditer(lead)]
        start = begin if not before else before[-1] + opened[-1].start() if opened else probe.at
        last = next(each.at for each in own[index:] if each.kind == "thought" and not each.opens)
        next_words = next((each.at for each in own[index:] if each.at >= last and each.opens), end)
        closed = _ENDS_THINKING.search(rendering.text, last, max(next_words, last))
        if closed is None:
            raise RowError(
                f"learn.thinking: where the thinking of message {number + 1} ends in the template's text is not known"
            )
        found.append((start, closed.end()))
    return found


def _minus(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    found = list(spans)
    for low, high in others:
        found = [
            part
            for start, end in found
            for part in ((start, min(end, low)), (max(start, high), end))
            if part[0] < part[1]
        ]
    return found


def _merged(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _segments(text: str, spans: Sequence[Span]) -> tuple[Segment, ...]:
    parts, done = [], 0
    for start, end in spans:
        parts += [Segment(text[done:start], learned=False), Segment(text[start:end], learned=True)]
        done = end
    parts.append(Segment(text[done:], learned=False))
    return tuple(part for part in parts if part.text)


_LEFT_OUT: dict[ProbeKind, str] = {
    "text": "words of {role} messages",
    "thought": "thinking of earlier turns",
    "call": "tool calls",
}


def _notes(rendering: Rendering, messages: Sequence[Message]) -> Iterator[str]:
    seen = {_LEFT_OUT[kind].format(role=messages[number]["role"]) for number, kind in rendering.missing}
    yield from (f"the template leaves out {each}" for each in sorted(seen))
