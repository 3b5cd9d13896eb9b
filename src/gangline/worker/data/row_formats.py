"""The rows of one job read by their data format: values by role, then the documents that are tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gangline.formats import (
    ASSISTANT,
    FORMATS,
    PREFERENCE,
    DataFormat,
    RowError,
    Segment,
    fields_of,
    read_values,
    require_learned,
)
from gangline.row_files import PIECE_CHARS, SourceRow, cut
from gangline.runs.job import DataJob

if TYPE_CHECKING:
    from gangline.worker.data.conversations import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """What becomes one stretch of tokens. `follows` and `continues` join the pieces of a long text."""

    row: SourceRow
    segments: tuple[Segment, ...]
    follows: bool = False
    continues: bool = False
    whole: bool = False
    """All of it is learned; it may go on in the next sample."""
    templated: bool = False
    """The chat template has written the special tokens already."""
    open: bool = False
    """A conversation that the template left without an end: the end-of-text token ends it."""
    notes: tuple[str, ...] = ()
    """What the template left out, in words."""


Render = Callable[[list[dict[str, Any]], Any], "Conversation"]
"""Messages, tools -> the rendered conversation; raises RowError."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the rows of one job are read."""

    name: str
    rules: DataFormat
    fields: Mapping[str, str]
    """Role, or key of a message -> its name in the row; see `formats.fields_of`."""
    speakers: Mapping[str, str] = field(default_factory=dict)
    """Role of a message in the row -> role of the chat template."""
    render: Render | None = None
    learned: tuple[str, ...] = ASSISTANT
    """`data.learn.roles` of the job."""

    @staticmethod
    def of(data: DataJob, render: Render | None = None) -> Format:
        """The format of a job; `render` is needed for rows that are messages. Raises UsageError, PluginError."""
        rules = FORMATS[data.format]
        return Format(data.format, rules, fields_of(data.format, data.fields), data.roles, render, data.learn.roles)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read, of a table too: to see which rows are refused takes two more."""
        return PREFERENCE.union(self.fields[role] for role in self.rules.roles)

    def values(self, row: SourceRow) -> dict[str, Any]:
        """The row's values by role; raises RowError for one that is missing or of the wrong type."""
        return read_values(self.name, self.fields, row.values, self.speakers)

    def documents(self, row: SourceRow, values: Mapping[str, Any]) -> Iterator[TokenSpan]:
        """The documents of a row: one, or the pieces of a long text; none for an empty text."""
        rules = self.rules
        if rules.messages is not None:
            assert self.render is not None
            with FORMATS.guard(self.name, passing=RowError):
                messages = rules.messages(values)
                require_learned(messages, self.learned)
            said = self.render(messages, values.get("tools") or None)
            yield TokenSpan(row=row, segments=said.segments, templated=True, open=said.open, notes=said.notes)
        elif rules.whole:
            yield from _pieces(row, "".join(segment.text for segment in self._segments(values)))
        elif rules.answer is not None and not values[rules.answer]:
            raise RowError(f"{self.fields[rules.answer]!r} is empty")
        else:
            yield TokenSpan(row=row, segments=tuple(self._segments(values)))

    def _segments(self, values: Mapping[str, Any]) -> Sequence[Segment]:
        assert self.rules.segments is not None
        with FORMATS.guard(self.name, passing=RowError):
            segments = self.rules.segments(values)
            if not all(isinstance(segment, Segment) and isinstance(segment.text, str) for segment in segments):
                raise TypeError("segments gives something else than a sequence of gangline.formats.Segment")
            return segments


def _pieces(row: SourceRow, text: str) -> Iterator[TokenSpan]:
    follows = row.follows
    while len(text) > PIECE_CHARS:
        at = cut(text, PIECE_CHARS)
        segment = Segment(text[:at], learned=True)
        yield TokenSpan(row=row, segments=(segment,), whole=True, follows=follows, continues=True)
        text, follows = text[at:], True
    if text or follows or row.continues:
        segment = Segment(text, learned=True)
        yield TokenSpan(row=row, segments=(segment,), whole=True, follows=follows, continues=row.continues)
