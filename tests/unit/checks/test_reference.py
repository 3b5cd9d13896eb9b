"""`explain E-NET-07` and docs/errors.md say what the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.checks.judge import FAMILIES
from gangline.checks.reference import find_entry, page
from gangline.checks.rules import Rule
from gangline.errors import UsageError

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def test_the_page_has_the_rows_of_the_rules() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m gangline.checks.reference docs/errors.md"


def test_every_finding_can_be_read_by_itself() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| E-")]
    for row in rows:
        _, _name, severity, meaning, fix, _ = row.split("|")
        assert severity.strip().startswith(("fail", "warn", "info"))
        assert meaning.strip()
        assert fix.strip()
        assert "{" not in row


def test_a_finding_is_found_whatever_the_case() -> None:
    entry = find_entry("e-net-07")
    assert entry.id == "E-NET-07"
    assert entry.lines()[0] == "E-NET-07  warn; info"
    assert any("every step waits for the slowest link" in line for line in entry.lines())
    assert any("cable" in line for line in entry.lines())


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


def test_a_finding_of_a_plug_in_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(id="E-MINE-01", severity="info", title="t", meaning="m", fix="f {gap}", look=lambda *_: ())
    monkeypatch.setattr(FAMILIES, "load_all", lambda: ({"mine": (rule,)}, ()))
    assert find_entry("E-MINE-01").lines() == ["E-MINE-01  info", "  means  t: m", "  fix    f GAP"]
