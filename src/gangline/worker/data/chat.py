"""Conversations through the tokenizer's chat template, and which part of them is learned.

A template that marks what the assistant says with `{% generation %}` is believed. For any other, each assistant turn
is found by rendering the messages before it (with the prompt for the answer) and up to it: both must be prefixes of
the whole, or the row is refused. The rendering is cut there and the parts are tokenised on their own, as they are in
use, where the prompt ends before the answer exists.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gangline.errors import DataError
from gangline.formats import RowError, Segment
from gangline.worker.data.formats import Render

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may end with: it is a program, if one in a sandbox."""

Spans = list[tuple[int, int]]


def chat_renderer(tokenizer: PreTrainedTokenizerBase, *, model: str) -> Render:
    """The function that renders conversations; raises DataError if the tokenizer has no template."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{model}: the tokenizer has no chat template, which rows of messages need",
            seen="expected chat_template.jinja in the model folder, or chat_template in tokenizer_config.json",
            fix="take the tokenizer of the chat version of the model, add a chat_template.jinja, "
            "or write the rows as prompt and completion (data.format: completion)",
        )
    template = tokenizer.get_chat_template()
    tagged = _GENERATION_TAG.search(template) is not None

    def render(messages: list[dict[str, Any]]) -> tuple[Segment, ...]:
        try:
            text, spans = (_tagged if tagged else _by_prefix)(tokenizer, template, messages)
        except FAULTS as error:
            raise RowError(f"the chat template refuses the messages: {str(error)[:200]!r}") from error
        return _parts(text, _with_end(text, spans, tokenizer.eos_token))

    return render


def _tagged(tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def _by_prefix(tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
    def text(until: int, *, prompt: bool) -> str:
        rendered = render_jinja_template(
            conversations=[messages[:until]],
            chat_template=template,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
        )
        return str(rendered[0][0])

    whole, spans = text(len(messages), prompt=False), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = text(index, prompt=True), text(index + 1, prompt=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise RowError(
                f"the chat template renders message {index + 1} differently when others follow, so its place is "
                "unknown; mark what the assistant says with {% generation %} in the template"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def _with_end(text: str, spans: Spans, eos: str | None) -> Spans:
    """Spans that take in the end-of-text token right after an answer: the model must learn to stop."""
    if not eos:
        return spans
    return [(start, end + len(eos) if text.startswith(eos, end) else end) for start, end in spans]


def _parts(text: str, spans: Spans) -> tuple[Segment, ...]:
    parts, done = [], 0
    for start, end in spans:
        parts += [Segment(text[done:start], learned=False), Segment(text[start:end], learned=True)]
        done = end
    parts.append(Segment(text[done:], learned=False))
    return tuple(part for part in parts if part.text)
