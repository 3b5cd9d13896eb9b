"""Text out of tokens while they come."""

import pytest

from gangline.worker.serving.words import StopTexts, WordsSoFar


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens, *, skip_special_tokens):
        assert skip_special_tokens
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["tea", "grün", "茶はいかが", "a\N{TEACUP WITHOUT HANDLE}b", ""])
def test_the_pieces_are_whole_characters_and_make_the_text(text):
    words = WordsSoFar(Bytes())
    pieces = [words.add(token) for token in text.encode()]
    assert "".join(pieces) + words.rest() == text
    assert {len(piece) for piece in pieces} <= {0, 1}


def test_an_answer_that_ends_within_a_character_shows_that():
    words = WordsSoFar(Bytes())
    assert [words.add(token) for token in "é".encode()[:1]] == [""]
    assert words.rest() == "\N{REPLACEMENT CHARACTER}"


def said(texts, pieces):
    stops, given = StopTexts(texts), ""
    for number, piece in enumerate(pieces, 1):
        text, over = stops.add(piece, last=number == len(pieces))
        given += text
        if over:
            return given, True
    return given, False


@pytest.mark.parametrize(
    ("texts", "pieces", "expected"),
    [
        ((), ["one ", "two"], ("one two", False)),
        (("END",), ["one E", "N", "D two"], ("one ", True)),
        (("END",), ["one E", "N", "O"], ("one ENO", False)),
        (("END",), ["one EN"], ("one EN", False)),
        (("two", "one"), ["a one two"], ("a ", True)),
        (("\n",), ["a", "\nb"], ("a", True)),
    ],
)
def test_a_text_that_ends_the_answer_is_left_out_of_it(texts, pieces, expected):
    assert said(texts, pieces) == expected


def test_no_more_is_kept_back_than_could_begin_the_end():
    assert StopTexts(("END",)).add("one E") == ("one ", False)
