"""What a row means: which words the model sees, and which it learns.

    text         text                        learns all of it
    completion   prompt, completion          learns the completion and the end-of-text token
    instruction  instruction, input, output  learns the output and the end-of-text token; input may be missing
    chat         messages                    learns what the assistant says (see `chat.py`)

prompt and completion follow each other as they are: a space or line break between them belongs to the row.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gangline.runs.job import DataJob
from gangline.worker.data.rows import PIECE_CHARS, Row, cut

ROLES: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
    "chat": ("messages",),
}
OPTIONAL_ROLES = frozenset({"input"})
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "text": ("content", "body", "document", "passage"),
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "completion": ("answer", "response", "output", "solution", "chosen"),
    "instruction": ("prompt", "question", "query"),
    "output": ("response", "answer", "completion"),
    "messages": ("conversations", "conversation", "chat", "dialog", "turns"),
}


class RowError(Exception):
    """A row cannot be used; the text is the reason, without the place."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a document that is tokenised on its own, so that no token spans what is learned and what is not."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What becomes one stretch of tokens. `follows` and `continues` join the pieces of a long text."""

    row: Row
    parts: tuple[Part, ...]
    follows: bool = False
    continues: bool = False
    templated: bool = False
    """The chat template has written the special tokens already."""


Render = Callable[[list[dict[str, Any]]], tuple[Part, ...]]
"""Messages -> the parts of the rendered conversation; raises RowError."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the rows of one job are read."""

    name: str
    fields: Mapping[str, str]
    """Role -> column, for every role of the format."""
    render: Render | None = None

    @staticmethod
    def of(data: DataJob, render: Render | None = None) -> Format:
        """The format of a job; `render` is needed for chats."""
        return Format(data.format, {role: data.fields.get(role, role) for role in ROLES[data.format]}, render)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read."""
        return frozenset(self.fields.values())

    def values(self, row: Row) -> dict[str, Any]:
        """The row's values by role; raises RowError for one that is missing or of the wrong type."""
        found = {}
        for role, column in self.fields.items():
            value = row.values.get(column)
            if value is None:
                if role not in OPTIONAL_ROLES:
                    raise RowError(_missing(role, column, row.values))
                value = ""
            found[role] = _messages(column, value) if role == "messages" else _text(column, value)
        return found

    def documents(self, row: Row, values: Mapping[str, Any]) -> Iterator[Document]:
        """The documents of a row: one, or the pieces of a long text; none for an empty text."""
        if self.name == "text":
            yield from _pieces(row, values["text"])
        elif self.name == "chat":
            assert self.render is not None
            yield Document(row=row, parts=self.render(values["messages"]), templated=True)
        else:
            prompt, answer = _prompt_and_answer(self.name, values)
            if not answer:
                raise RowError(f"{self.fields['output' if self.name == 'instruction' else 'completion']!r} is empty")
            yield Document(row=row, parts=(Part(prompt, False), Part(answer, True)))


def instruction_prompt(instruction: str, text: str = "") -> str:
    """The words before the output of an instruction row; what to type to a model tuned on such rows."""
    given = f"### Input:\n{text}\n\n" if text else ""
    return f"### Instruction:\n{instruction}\n\n{given}### Response:\n"


def _prompt_and_answer(name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    if name == "instruction":
        return instruction_prompt(values["instruction"], values["input"]), values["output"]
    return values["prompt"], values["completion"]


def _pieces(row: Row, text: str) -> Iterator[Document]:
    follows = row.follows
    while len(text) > PIECE_CHARS:
        at = cut(text, PIECE_CHARS)
        yield Document(row=row, parts=(Part(text[:at], True),), follows=follows, continues=True)
        text, follows = text[at:], True
    if text or follows or row.continues:
        yield Document(row=row, parts=(Part(text, True),), follows=follows, continues=row.continues)


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError(f"{column!r} is a {type(value).__name__}, not a text")
    if not value.isascii():
        _encodable(column, value)
    return value


def _encodable(column: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{column!r} has half a surrogate pair, which is no character") from None


def _messages(column: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{column!r} is not a list of messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {number} of {column!r} has no role; expected {{'role': ..., 'content': ...}}")
        if not isinstance(message.get("content"), str):
            raise RowError(f"message {number} of {column!r} has no content that is a text")
        _encodable(column, message["content"])
    if not any(message["role"] == "assistant" for message in value):
        raise RowError(f"{column!r} has no assistant message, so there is nothing to learn")
    return value


def _missing(role: str, column: str, values: Mapping[str, Any]) -> str:
    if column in values:
        return f"{column!r} is null"
    names = list(values)
    usual = [name for name in USUAL_NAMES.get(role, ()) if name in values]
    near = difflib.get_close_matches(column, names, n=1) or usual[:1]
    hint = f"; did you mean data.fields: {{{role}: {near[0]}}}?" if near else ""
    return f"no field {column!r}; there are {', '.join(map(repr, names[:12])) or 'none'}{hint}"
