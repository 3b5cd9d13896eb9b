"""Text to token ids, with the tokenizer's own habits at both ends of a document.

BOS stands where the tokenizer puts one by itself, EOS at the end of every document if the tokenizer has one. Parts of
a document are tokenised on their own: a merge over the end of the prompt would show the model, in training, a token
that it never sees in use, and would put part of the answer beyond the loss. A special token that is written out in a
row (`</s>`) counts as that token, as it does in the tokenizer itself.

Conversations go through a chat template, which has written the special tokens already (`conversations`). Their text is
tokenised as a whole, as other trainers do, unless a token would stretch over the end of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from gangline.errors import DataError
from gangline.runs.job import DataJob, SourceJob
from gangline.worker.data.chat_template import ChatTemplate
from gangline.worker.data.conversations import Conversations
from gangline.worker.data.row_formats import TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document, or a piece of a long text, as tokens."""

    document: TokenSpan
    ids: list[int]
    learned: bytearray
    """1 where the token is a target; as long as `ids`."""


class Encoder:
    """Encodes batches of documents with one tokenizer."""

    def __init__(self, tokenizer: Any, *, learn_end: bool = True) -> None:
        """tokenizer: of transformers, or a `tokenizer_file.TokenizerFile`. learn_end: see `LearnJob.end_token`."""
        self._tokenizer = tokenizer
        self._learn_end = learn_end
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
        whole = self._conversations(documents)
        rest = [document for document, found in zip(documents, whole, strict=True) if found is None]
        texts = [part.text for document in rest for part in document.segments]
        goes_on = [index > 0 or document.follows for document in rest for index in range(len(document.segments))]
        ids = iter(self._continued(texts, goes_on))
        return [
            found or self._assemble(document, [next(ids) for _ in document.segments])
            for document, found in zip(documents, whole, strict=True)
        ]

    def _conversations(self, documents: Sequence[TokenSpan]) -> list[Encoded | None]:
        """Conversations whose whole text gives a token that ends wherever a learned part begins or ends.

        None for the others, and for other documents: their parts are tokenised on their own.
        """
        found: list[Encoded | None] = [None] * len(documents)
        chosen = [index for index, document in enumerate(documents) if document.templated]
        # a tokenizer that puts a space in front of every text would put one in front of every answer, too
        if self._backend is None or self._joint or not chosen:
            return found
        texts = ["".join(part.text for part in documents[index].segments) for index in chosen]
        for index, encoding in zip(chosen, self._backend.encode_batch(texts, add_special_tokens=False), strict=True):
            document = documents[index]
            marks = _marked(encoding.offsets, document)
            if marks is not None:
                found[index] = self._closed(document, list(encoding.ids), marks)
        return found

    def _assemble(self, document: TokenSpan, parts: list[list[int]]) -> Encoded:
        ids: list[int] = []
        learned = bytearray()
        for part, tokens in zip(document.segments, parts, strict=True):
            ids += tokens
            learned += (b"\1" if part.learned else b"\0") * len(tokens)
        if not (document.templated or document.follows) and ids[: len(self._head)] != self._head:
            ids[:0], learned[:0] = self._head, bytes(len(self._head))
        return self._closed(document, ids, learned)

    def _closed(self, document: TokenSpan, ids: list[int], learned: bytearray) -> Encoded:
        """With what ends the document."""
        if document.templated:
            tail = [self._eos] if self._eos is not None and document.open else []
        else:
            tail = [] if document.continues or ids[-1:] == [self._eos] else self._tail
        end = b"\1" if self._learn_end else b"\0"
        return Encoded(document=document, ids=ids + tail, learned=learned + end * len(tail))

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


def _marked(offsets: Sequence[tuple[int, int]], document: TokenSpan) -> bytearray | None:
    """1 for each token of a learned part; None where no token ends at the end of a part.

    offsets: (start, end) in letters; a tokenizer may leave white space out of them.
    """
    marks = bytearray()
    ended, end, tokens = 0, 0, iter(offsets)
    token = next(tokens, None)
    for part in document.segments:
        end += len(part.text)
        while token is not None and token[0] < end:
            marks.append(part.learned)
            ended = max(ended, token[1])
            token = next(tokens, None)
        if ended != end:
            return None
    return marks if token is None else None


def conversations_of(tokenizer: Any, data: DataJob, *, model: str) -> Conversations:
    """What turns rows of messages into text. Raises DataError without a template, and for one that is none."""
    source = data.chat_template.text if data.chat_template else template_of(tokenizer)
    if source is None:
        raise DataError(
            f"{model}: the tokenizer has no chat template, which rows of messages need",
            seen="expected chat_template.jinja in the model folder, or chat_template in tokenizer_config.json",
            fix="take the tokenizer of the chat version of the model, name a template (data.chat_template: chatml, or "
            "a file such as chat_template.jinja), or write the rows as prompt and completion (data.format: completion)",
        )
    try:
        template = ChatTemplate(source, special_tokens(tokenizer))
    except jinja2.TemplateError as error:
        place = f"data.chat_template: {data.chat_template.name}" if data.chat_template else f"{model}: chat template"
        raise DataError(
            f"{place} cannot be read",
            seen=f"{error} (line {getattr(error, 'lineno', '?')})",
            fix="mend the template, or name another one in data.chat_template",
        ) from error

    special = {str(token) for token in tokenizer.added_tokens_decoder.values()}

    def ending(text: str) -> str | None:
        return max((token for token in special if text.endswith(token)), key=len, default=None)

    return Conversations(template, data.learn, eos=tokenizer.eos_token, ending=ending)


def with_template(tokenizer: Any, data: DataJob) -> Any:
    """The tokenizer with the chat template of the job, for use and for an export."""
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template.text
    return tokenizer


def stop_ids(tokenizer: Any) -> list[int]:
    """Tokens besides the end-of-text one that end an answer by the tokenizer's chat template."""
    if template_of(tokenizer) is None:
        return []
    ends = conversations_of(tokenizer, DataJob(train=SourceJob(), format="chat"), model="the model").stops
    return [number for number, token in tokenizer.added_tokens_decoder.items() if str(token) in ends]


def template_of(tokenizer: Any) -> str | None:
    """The tokenizer's own chat template, the default one of several."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """bos_token, eos_token and the like by name, as templates are given them."""
    found = tokenizer.special_tokens_map
    return {name: str(token) for name, token in found.items() if not isinstance(token, (list, tuple))}
