"""Data formats: which columns a row has, which text the model sees, and which part of it the model learns.

    text         text                        learns all of it
    completion   prompt, completion          learns the completion and the end-of-text token
    instruction  instruction, input, output  learns the output and the end-of-text token; input may be missing
    chat         messages                    learns the assistant's messages, by the tokenizer's chat template

A format is one row of `FORMATS`, or of a plug-in (`gangline.formats`): job.yaml, the schema, the tokeniser and
`gangline chat` read the row and know no format by name. prompt and completion follow each other as they are: a space
or a line break between them belongs to the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.plugins import Table, instance_of


class RowError(Exception):
    """A row cannot be used; the text is the reason, without the place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a row's text. It is tokenised on its own: no token spans learned and other text."""

    text: str
    learned: bool


def read_text(column: str, value: Any) -> str:
    """The value of a text column. Raises RowError for another type, and for half a surrogate pair."""
    if not isinstance(value, str):
        raise RowError(f"{column!r} is a {type(value).__name__}, not a text")
    if not value.isascii():
        _check_encodable(column, value)
    return value


def read_messages(column: str, value: Any) -> list[dict[str, Any]]:
    """The value of a column of messages, each with a role and a content. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{column!r} is not a list of messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {number} of {column!r} has no role; expected {{'role': ..., 'content': ...}}")
        if not isinstance(message.get("content"), str):
            raise RowError(f"message {number} of {column!r} has no content that is a text")
        _check_encodable(column, message["content"])
    if not any(message["role"] == "assistant" for message in value):
        raise RowError(f"{column!r} has no assistant message, so there is nothing to learn")
    return value


def _check_encodable(column: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{column!r} has half a surrogate pair, which is no character") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """One data format. Exactly one of `segments` and `messages` is given; both get the row's values by role."""

    roles: tuple[str, ...]
    """The values that a row has. A role is the name of its column, unless `data.fields` of the job names another."""
    optional: frozenset[str] = frozenset()
    """Roles that a row may lack; their value is "" then."""
    readers: Mapping[str, Callable[[str, Any], Any]] = field(default_factory=dict)
    """Role -> function of (column, value) that checks a value and gives it back, or raises RowError. A role without
    one is a text."""
    segments: Callable[[Mapping[str, Any]], Sequence[Segment]] | None = None
    """The text of a row, and which stretches of it are learned. Raises RowError for a row that cannot be used."""
    messages: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None
    """The conversation of a row, as messages with `role` and `content` for the tokenizer's chat template."""
    answer: str | None = None
    """The role that is learned; a row where it is empty is refused."""
    whole: bool = False
    """Every token of a row is learned. Rows may be split over several samples (`data.overlong: split`) and may come
    from plain-text files, whose text is the role `text`."""
    prompt: Callable[[str], str] | None = None
    """How `gangline chat` puts a line of the user to a model that was trained on such rows; None: by the tokenizer's
    chat template where rows are `messages` or `whole` texts, else the line as it is."""

    def __post_init__(self) -> None:
        if not self.roles or not all(isinstance(role, str) for role in self.roles):
            raise ValueError("a data format needs roles, a tuple of texts")
        if (self.segments is None) == (self.messages is None):
            raise ValueError("a data format has either segments or messages")
        strange = {*self.optional, *self.readers, *filter(None, [self.answer])} - set(self.roles)
        if strange:
            raise ValueError(f"{', '.join(sorted(strange))}: not among the roles {', '.join(self.roles)}")


def instruction_prompt(instruction: str, text: str = "") -> str:
    """The words before the output of an instruction row; what to type to a model tuned on such rows."""
    given = f"### Input:\n{text}\n\n" if text else ""
    return f"### Instruction:\n{instruction}\n\n{given}### Response:\n"


def _answered(prompt: str, answer: str) -> tuple[Segment, ...]:
    return Segment(prompt, learned=False), Segment(answer, learned=True)


FORMATS: Table[DataFormat] = Table(
    "gangline.formats",
    {
        "text": DataFormat(
            roles=("text",),
            segments=lambda row: (Segment(row["text"], learned=True),),
            whole=True,
        ),
        "instruction": DataFormat(
            roles=("instruction", "input", "output"),
            optional=frozenset({"input"}),
            segments=lambda row: _answered(instruction_prompt(row["instruction"], row["input"]), row["output"]),
            answer="output",
            prompt=instruction_prompt,
        ),
        "completion": DataFormat(
            roles=("prompt", "completion"),
            segments=lambda row: _answered(row["prompt"], row["completion"]),
            answer="completion",
        ),
        "chat": DataFormat(
            roles=("messages",),
            readers={"messages": read_messages},
            messages=lambda row: list(row["messages"]),
        ),
    },
    read=instance_of(DataFormat),
)
"""Every data format by its name in job.yaml."""
