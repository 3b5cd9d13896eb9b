"""The data format `turns`: rows with `question` and `answer`, written as two labelled lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.formats import DataFormat, RowError, Segment


def prompt(question: str) -> str:
    """The text before an answer; `gangline chat` puts what the user types into it."""
    return f"Q: {question.strip()}\nA:"


def segments(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The model sees the question and learns the answer."""
    if row["question"].strip() == row["answer"].strip():
        raise RowError("the answer only repeats the question")
    return Segment(prompt(row["question"]), learned=False), Segment(f" {row['answer'].strip()}", learned=True)


TURNS = DataFormat(roles=("question", "answer"), segments=segments, answer="answer", prompt=prompt)
