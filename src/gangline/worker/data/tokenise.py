"""Words to token ids, with the tokenizer's own habits at both ends of a document.

BOS stands where the tokenizer puts one by itself, EOS at the end of every document if the tokenizer has one. Parts of
a document are tokenised on their own: a merge over the end of the prompt would show the model, in training, a token
that it never sees in use, and would put part of the answer beyond the loss. A special token that is written out in a
row (`</s>`) counts as that token, as it does in the tokenizer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gangline.worker.data.formats import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document, or a piece of a long text, as tokens."""

    document: Document
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

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """The documents as tokens, in order."""
        texts = [part.text for document in documents for part in document.segments]
        goes_on = [index > 0 or document.follows for document in documents for index in range(len(document.segments))]
        ids = iter(self._continued(texts, goes_on))
        return [self._assemble(document, [next(ids) for _ in document.segments]) for document in documents]

    def _assemble(self, document: Document, parts: list[list[int]]) -> Encoded:
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

    def _ends_open(self, document: Document, parts: list[list[int]]) -> bool:
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
