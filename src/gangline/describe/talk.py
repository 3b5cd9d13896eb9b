"""What `init` says to the user, and asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Talk(Protocol):
    """The user's terminal."""

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def tick(self, line: str) -> None:
        """How a long step is getting on; the next line takes its place."""
        ...

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows in columns."""
        ...

    def ask(self, question: str) -> str | None:
        """What the user answers; None where nobody is there to answer."""
        ...


def says_yes(answer: str) -> bool:
    """Whether an answer is a clear yes."""
    return answer.strip().lower() in {"y", "yes"}


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 key", "3 keys"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
