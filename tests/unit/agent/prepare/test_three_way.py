"""A change is taken back line by line, and what others changed since stays."""

import pytest

from gangline.agent.prepare.three_way import merge

AFTER, BEFORE = b"a\nours\nb\n", b"a\nb\n"


@pytest.mark.parametrize(
    ("theirs", "merged"),
    [
        (AFTER, BEFORE),
        (BEFORE, BEFORE),
        (b"a\nours\nb\nnew\n", b"a\nb\nnew\n"),
        (b"new\na\nours\nb\n", b"new\na\nb\n"),
        (b"a\nours\nnew\nb\n", b"a\nnew\nb\n"),
        (b"a\nnew\nours\nb\n", b"a\nnew\nb\n"),
        (b"a\nours\n", b"a\n"),
        (b"a\n", b"a\n"),
        (b"", b""),
    ],
)
def test_lines_of_others_stay(theirs, merged):
    assert merge(AFTER, BEFORE, theirs) == merged


@pytest.mark.parametrize("theirs", [b"a\nours, edited\nb\n", b"edited\nedited\nb\n"])
def test_a_line_that_both_changed_is_a_conflict(theirs):
    assert merge(AFTER, BEFORE, theirs) is None


def test_a_block_in_which_others_wrote_is_a_conflict():
    assert merge(b"a\none\ntwo\n", b"a\n", b"a\none\nnew\ntwo\n") is None


def test_a_text_without_a_newline_at_its_end_comes_back():
    assert merge(b"a\nours\n", b"a", b"a\nours\nnew\n") == b"a\nnew\n"
