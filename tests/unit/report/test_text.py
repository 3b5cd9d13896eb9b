"""No text from a host, a model or a data set steers the terminal."""

from __future__ import annotations

import pytest

from gangline.report.text_table import clean, wrapped

ESC = "\x1b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ESC}[31mred{ESC}[0m", "red"),
        (f"{ESC}[2J{ESC}[1;1Hgone", "gone"),
        (f"{ESC}]0;title\x07shown", "shown"),
        (f"{ESC}]52;c;cHduZWQ={ESC}\\shown", "shown"),
        (f"{ESC}]8;;http://example.org{ESC}\\link{ESC}]8;;{ESC}\\", "link"),
        (f"{ESC}Pq#0;2{ESC}\\after", "after"),
        (f"{ESC}cafter reset", "after reset"),
        ("half\rhidden", "halfhidden"),
        ("back\b\bspace\x07\x00\x7f", "backspace"),
        ("\x9b31mC1", "31mC1"),
        ("\u202eright to left\u2066\u200b", "right to left"),
        ("tab\there", "tab    here"),
        ("two\nlines", "two lines"),
        ("häßlich 日本語 🐕", "häßlich 日本語 🐕"),
        (f"cut off {ESC}]0;never ends", "cut off "),
        (f"cut off {ESC}", "cut off "),
    ],
)
def test_only_what_is_meant_to_be_read_is_left(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_lines_are_kept_where_they_are_wanted() -> None:
    assert clean(f"one\n{ESC}[1mtwo\r\n", keep_newlines=True) == "one\ntwo\n"


def test_no_control_character_survives() -> None:
    everything = "".join(map(chr, range(0x3000)))
    cleaned = clean(everything)
    assert not [character for character in cleaned if ord(character) < 32 or 0x7F <= ord(character) < 0xA0]


def test_a_long_line_is_broken_between_words_and_goes_on_below_its_text():
    line = "  fix   let the hosts of the cluster reach each other on all TCP ports; test every pair: gangline check"
    assert wrapped(line, 50) == [
        "  fix   let the hosts of the cluster reach each",
        "        other on all TCP ports; test every pair:",
        "        gangline check",
    ]
    assert wrapped(line, 200) == [line]
    assert wrapped("one two three", 8) == ["one two", "three"]
    assert wrapped("/a/very/long/path/that/no/terminal/has/room/for again", 20) == [
        "/a/very/long/path/that/no/terminal/has/room/for",
        "again",
    ]
