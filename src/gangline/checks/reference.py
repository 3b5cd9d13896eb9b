"""The rules for people: `gangline explain E-NET-07` prints those of an id, docs/errors.md has all of them.

python -m gangline.checks.reference docs/errors.md writes the rows of that page anew.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from gangline.checks.judge import FAMILIES, is_unreachable
from gangline.checks.rules import ORDER, Rule
from gangline.errors import UsageError

_ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|\n)(\| E-.*\n)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEntry:
    """All rules of one id, the worst first."""

    id: str
    severity: str
    """Of all rules: "fail; warn"."""
    meanings: tuple[str, ...]
    fixes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        means, fixes = (f"  means  {text}" for text in self.meanings), (f"  fix    {text}" for text in self.fixes)
        return [f"{self.id}  {self.severity}", *means, *fixes]


def entries(rules: Iterable[Rule]) -> dict[str, FindingEntry]:
    """The entries of rules by id."""
    ordered = sorted(rules, key=lambda rule: (rule.id, ORDER[rule.severity]))
    return {name: _entry(name, list(group)) for name, group in itertools.groupby(ordered, key=lambda rule: rule.id)}


def _entry(name: str, rules: list[Rule]) -> FindingEntry:
    """Rules with one meaning share it."""
    titles: dict[str, dict[str, None]] = {}
    for rule in rules:
        titles.setdefault(rule.meaning, {})[rule.title] = None
    return FindingEntry(
        id=name,
        severity="; ".join(dict.fromkeys(rule.severity for rule in rules)),
        meanings=tuple(_without_gaps(f"{'; '.join(group)}: {meaning}") for meaning, group in titles.items()),
        fixes=tuple(dict.fromkeys(map(_fix, rules))),
    )


def _without_gaps(text: str) -> str:
    """A text of a rule in which a gap, such as {interface}, is INTERFACE."""
    return re.sub(r"\{(\w+)\}", lambda gap: gap[1].replace("_", " ").upper(), text)


def find_entry(name: str) -> FindingEntry:
    """The finding of that id, in any case of letters, also of a plug-in; raises UsageError with the nearest ids."""
    known = entries(itertools.chain(*FAMILIES.built_in.values()))
    if name.upper() not in known:
        known |= entries(itertools.chain(*FAMILIES.load_all()[0].values()))
    if (entry := known.get(name.upper())) is not None:
        return entry
    near = _nearest(name.upper(), known)
    raise UsageError(
        f"no finding is called {name}",
        seen=f"the nearest are {', '.join(near[:6])}" if near else "ids look like E-NET-07",
        fix="docs/errors.md lists all of them",
    )


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """Nearest first: alike ids of its family, alike ids of others, then the rest of its family."""
    if members := [each for each in known if each.startswith(f"{name}-")]:
        return members  # it names a family
    family = name.rpartition("-")[0]
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    members = [each for each in known if each.rpartition("-")[0] == family]
    ordered = [*(each for each in alike if each in members), *alike, *members]
    return list(dict.fromkeys(ordered))


def page(text: str) -> str:
    """The text of docs/errors.md with the rows of today: one for each rule."""
    rules = itertools.chain(*FAMILIES.built_in.values())
    return _ROWS.sub("".join(map(_row, rules)).replace("\\", r"\\"), text, count=1)


def _row(rule: Rule) -> str:
    code = ", exit code 4" if is_unreachable(rule.id) else ""
    title, meaning = map(_without_gaps, (rule.title, rule.meaning))
    return f"| {rule.id} | {rule.severity}{code} | {title}: {meaning} | {_fix(rule)} |\n"


def _fix(rule: Rule) -> str:
    """What to do, and the step that does it."""
    return _without_gaps(rule.fix) + (f"; or: gangline prepare {rule.step}" if rule.step else "")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
