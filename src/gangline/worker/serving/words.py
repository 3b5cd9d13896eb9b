"""Tokens as text while they come: whole characters only, and nothing beyond a text that ends the answer."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class WordsSoFar:
    """The text of an answer, token by token.

    A token is decoded after the ones before it, for many tokenizers write a space by what is on its left. Only the
    tokens since the last but one finished character are decoded again, so an answer costs its length.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._begin = 0
        self._given = 0

    def add(self, token: int) -> str:
        """The text that is certain with one token more; empty within a character."""
        self._tokens.append(token)
        whole = self._text(self._begin, None)
        return "" if whole.endswith(UNFINISHED) else self._take(whole)

    def rest(self) -> str:
        """What was kept back, at the end of an answer."""
        return self._take(self._text(self._begin, None))

    def _take(self, whole: str) -> str:
        before = self._text(self._begin, self._given)
        self._begin, self._given = self._given, len(self._tokens)
        return whole[len(before) :]

    def _text(self, begin: int, end: int | None) -> str:
        text: str = self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=True)
        return text


class StopTexts:
    """Texts that end an answer: text is kept back while one of them could begin in it."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._kept = ""

    def add(self, text: str, *, last: bool = False) -> tuple[str, bool]:
        """The text that may be given out, and whether the answer is over."""
        self._kept += text
        found = [place for each in self._texts if (place := self._kept.find(each)) >= 0]
        if found:
            return self._kept[: min(found)], True
        keep = 0 if last else self._beginning()
        given = self._kept[: len(self._kept) - keep]
        self._kept = self._kept[len(given) :]
        return given, False

    def _beginning(self) -> int:
        """The number of characters at the end with which one of the texts begins."""
        return max(
            (length for each in self._texts for length in range(1, len(each)) if self._kept.endswith(each[:length])),
            default=0,
        )
