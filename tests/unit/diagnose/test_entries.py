"""`explain E-NET-07` says what docs/errors.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.diagnose.entries import ROWS, entries, find_entry
from gangline.errors import UsageError

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def test_the_rows_are_those_of_the_page_word_by_word() -> None:
    """A row that changes there changes here: copy it."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| E-")]
    assert ROWS.strip().splitlines() == rows


def test_every_finding_can_be_read_by_itself() -> None:
    for entry in entries().values():
        assert entry.severity.startswith(("fail", "warn", "info"))
        assert entry.meaning
        assert not entry.fix.startswith("the same"), entry.id


def test_a_finding_is_found_whatever_the_case() -> None:
    entry = find_entry("e-net-07")
    assert entry.id == "E-NET-07"
    assert entry.lines()[0] == "E-NET-07  warn; info"
    assert "every step waits for it" in entry.lines()[1]
    assert "cable" in entry.lines()[2]


@pytest.mark.parametrize(("word", "near"), [("E-NET-99", "E-NET-09"), ("E-NTE-07", "E-NET-07"), ("E-GPU", "E-GPU-01")])
def test_an_unknown_finding_leads_to_the_nearest(word: str, near: str) -> None:
    with pytest.raises(UsageError, match="no finding") as caught:
        find_entry(word)
    assert near in caught.value.seen
    assert "docs/errors.md" in caught.value.fix


def test_a_word_that_is_like_none_says_what_ids_look_like() -> None:
    with pytest.raises(UsageError) as caught:
        find_entry("E-QQQQQQQQQQQQQQQQQQQ-1")
    assert "E-NET-07" in caught.value.seen
