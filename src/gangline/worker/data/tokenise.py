"""Text to token ids, with the tokenizer's own habits at both ends of a document.

BOS stands where the tokenizer puts one by itself, EOS at the end of every document if the tokenizer has one. Parts of
a document are tokenised on their own: a merge over the end of the prompt would show the model, in training, a token
that it never sees in use, and would put part of the answer beyond the loss. A special token that is written out in a
row (`</s>`) counts as that token, as it does in the tokenizer itself.

Conversations go through the tokenizer's chat template. A template that marks the assistant's words with
`{% generation %}` decides which part is learned. For any other, each assistant turn
is found by rendering the messages before it (with the prompt for the answer) and up to it: both must be prefixes of
the whole, or the row is refused. The rendering is cut there and the parts are tokenised on their own, as they are in
use, where the prompt ends before the answer exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gangline.errors import DataError
from gangline.formats import RowError, Segment
from gangline.worker.data.row_formats import Render, TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document, or a piece of a long text, as tokens."""

    document: TokenSpan
    ids: list[int]
    learned: bytearray
    """1 where the token is a target; as long as `ids`."""


class Encoder:
    """Encodes batches of documents with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            # a tokenizer.json may have been saved with both switched on: texts would be cut without a word
            self._backend.no_truncation()
            self._backend.no_padding()
        self._eos: int | None = tokenizer.eos_token_id
        self._head, self._tail = self._habits()
        self._joint = self._space_in_front()

    def encode(self, documents: Sequence[TokenSpan]) -> list[Encoded]:
        """The documents as tokens, in order."""
        texts = [part.text for document in documents for part in document.segments]
        goes_on = [index > 0 or document.follows for document in documents for index in range(len(document.segments))]
        ids = iter(self._continued(texts, goes_on))
        return [self._assemble(document, [next(ids) for _ in document.segments]) for document in documents]

    def _assemble(self, document: TokenSpan, parts: list[list[int]]) -> Encoded:
        ids: list[int] = []
        learned = bytearray()
        for part, tokens in zip(document.segments, parts, strict=True):
            ids += tokens
            learned += (b"\1" if part.learned else b"\0") * len(tokens)
        if document.templated:
            tail = [self._eos] if self._eos is not None and self._ends_open(document, parts) else []
        else:
            if not document.follows and ids[: len(self._head)] != self._head:
                ids[:0], learned[:0] = self._head, bytes(len(self._head))
            tail = [] if document.continues or ids[-1:] == [self._eos] else self._tail
        return Encoded(document=document, ids=ids + tail, learned=learned + b"\1" * len(tail))

    def _ends_open(self, document: TokenSpan, parts: list[list[int]]) -> bool:
        """Whether a conversation ends with an answer after which the template wrote no mark of the end."""
        for part, tokens in zip(reversed(document.segments), reversed(parts), strict=True):
            if part.learned:
                return self._eos not in tokens
            if part.text.strip():
                return False
        return False

    def _continued(self, texts: list[str], goes_on: list[bool]) -> list[list[int]]:
        """Ids of texts, some of which go on with the text before them, so that no space may be put in front."""
        if not self._joint:
            return self._plain(texts)
        joined = [f"\n{text}" if later else text for text, later in zip(texts, goes_on, strict=True)]
        width, found = len(self._joint), self._plain(joined)
        for index, later in enumerate(goes_on):
            if later and found[index][:width] == self._joint:
                found[index] = found[index][width:]
            elif later:
                found[index] = self._plain([texts[index]])[0]
        return found

    def _plain(self, texts: list[str]) -> list[list[int]]:
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _habits(self) -> tuple[list[int], list[int]]:
        bare = self._plain(["a"])[0]
        dressed = list(self._tokenizer("a")["input_ids"])
        starts = [at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare]
        at = starts[0] if starts else 0
        tail = dressed[at + len(bare) :] if starts else []
        if self._eos is not None and tail[-1:] != [self._eos]:
            tail = [*tail, self._eos]
        return dressed[:at], tail

    def _space_in_front(self) -> list[int]:
        """The ids of a line break, if the tokenizer puts a space in front of every text (SentencePiece); else none."""
        twice = self._plain(["a"])[0] * 2
        joins = self._tokenizer.decode(twice, clean_up_tokenization_spaces=False).lstrip() == "aa"
        return [] if joins else self._plain(["\n"])[0]


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
