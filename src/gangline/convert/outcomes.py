"""What becomes of one key of another tool's file: four verdicts, and the rules that give them. Pure.

A table of a tool maps each of its keys to a `Rule`. A rule looks at the value (and, where keys belong together, at
their neighbours in `Foreign`) and gives an `Outcome`:

    same        the job says the same
    equivalent  the job computes the same from other words, or differs by rounding or by the drawing of random numbers
    dropped     no number changes without it
    refused     numbers would change, and gangline cannot do it (yet): the missing feature is named
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Verdict = Literal["same", "equivalent", "dropped", "refused"]
VERDICTS: tuple[Verdict, ...] = ("refused", "equivalent", "same", "dropped")
"""In the order in which a reader wants to know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one key becomes."""

    verdict: Verdict
    job: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the job, and their values."""
    reason: str = ""
    """Why it was dropped, what differs, or which feature is missing."""
    settled_by: tuple[str, ...] = ()
    """Of a refused key: keys of the job that, given on the command line, say what the file leaves open."""


Neighbours = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign file: its values by dotted key, and what the person who converts it knows besides."""

    values: Mapping[str, Any]
    """Dotted key -> value; items of a list of mappings have their number as a part: `datasets.0.path`."""
    world_size: int = 1
    """Processes that each got a batch of their own where the file was used."""
    prefix: str = ""
    """"deepspeed.", for instance, where a table reads the part of another tool."""
    template: str | None = None
    """The file with the chat template that the file names, as it is to stand in the job; None: nobody has it."""
    folder_has: Callable[[str], bool] = lambda _path: False
    """Whether a path in the file leads to a file or folder of this computer."""
    data_sets: Mapping[str, Any] = field(default_factory=dict)
    """Data sets that the file calls by name, with what another file says of each (dataset_info.json)."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is missing or has no value."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def number(self, key: str, default: float) -> float:
        """The value of a key as a number; `default` where it is none."""
        value = as_number(self.get(key))
        return default if value is None else value

    def count(self, key: str, default: int) -> int:
        """The value of a key as a whole number; `default` where it is none."""
        return int(self.number(key, default))

    def says(self, key: str) -> bool:
        """Whether a key is switched on."""
        return not is_off(self.get(key))

    def items(self, key: str) -> list[dict[str, Any]]:
        """A list of mappings, put together again: `datasets`."""
        found: dict[int, dict[str, Any]] = {}
        start = f"{self.prefix}{key}."
        for name, value in self.values.items():
            number, dot, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and dot and number.isdigit():
                found.setdefault(int(number), {})[rest] = value
        return [found[number] for number in sorted(found)]

    def below(self, prefix: str) -> Foreign:
        """The same file, as the table of another tool reads its part."""
        return replace(self, prefix=f"{prefix}.")


Rule = Callable[[Any, Foreign], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """What a tool does where its file is silent, and gangline would do something else."""

    job: str
    """Dotted key of the job."""
    value: Callable[[Foreign], Any]
    """The value to state; None: nothing to state for this file."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool whose files can be converted."""

    name: str
    keys: Mapping[str, Rule]
    """Dotted key -> rule. `*` stands for the number of a list's item, or at the end for everything below."""
    defaults: tuple[Default, ...] = ()
    parts: Mapping[str, Mapping[str, Rule]] = field(default_factory=dict)
    """Keys whose value is the configuration of another tool, with that tool's table."""
    null_counts: frozenset[str] = frozenset()
    """Keys where `null` is a value of its own; elsewhere it stands for the default."""
    world_size: Callable[[Foreign], int | None] = lambda _foreign: None
    """The world size, where the file says it."""
    missing: Callable[[Foreign], Mapping[str, Outcome]] = lambda _foreign: {}
    """Keys that are not in the file, and without which it says too little."""
    template: Callable[[Foreign], str | None] = lambda _foreign: None
    """The name of the tool's own chat template that the rows go through; None: the model's own."""
    template_text: Callable[[str], str | None] = lambda _name: None
    """The text of such a template, where gangline knows it."""


def judge(tool: Tool, key: str, value: Any, foreign: Foreign) -> Outcome:
    """What one key of a file becomes; an unknown key is refused, since it may change numbers."""
    if value is None and key not in tool.null_counts:
        return dropped(f"no value: the default of {tool.name} applies")
    for part, table in tool.parts.items():
        if key.startswith(f"{part}."):
            rule = find_rule(table, key.removeprefix(f"{part}."))
            foreign = foreign.below(part)
            break
    else:
        rule = find_rule(tool.keys, key)
    if rule is None:
        return refused(f"a key that is not known here, of {tool.name}: it may change numbers")
    try:
        return rule(value, foreign)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return refused(f"a value in a form that {tool.name} does not have there")


def find_rule(table: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule of a key: its own, that of a list's item, or the one of everything below a key."""
    parts = key.split(".")
    starred = [re.sub(r"[0-9]+", "*", part) if part.isdigit() else part for part in parts]
    for name in (key, ".".join(starred)):
        if name in table:
            return table[name]
    above = (".".join([*starred[:depth], "*"]) for depth in range(len(parts) - 1, 0, -1))
    return next((table[name] for name in above if name in table), None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a file with its dotted key. A list of plain values, and an empty mapping, is one value."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            yield from flatten({str(number): item for number, item in enumerate(value)}, f"{name}.")
        else:
            yield name, value


# The four verdicts.


def same(job: Mapping[str, Any], reason: str = "") -> Outcome:
    """The job says the same."""
    return Outcome(verdict="same", job=job, reason=reason)


def equivalent(job: Mapping[str, Any], reason: str) -> Outcome:
    """The job computes the same in other words; `reason` says what differs."""
    return Outcome(verdict="equivalent", job=job, reason=reason)


def dropped(reason: str) -> Outcome:
    """No number changes without it."""
    return Outcome(verdict="dropped", reason=reason)


def refused(feature: str, *, settled_by: tuple[str, ...] = ()) -> Outcome:
    """Numbers would change, and gangline lacks `feature`."""
    return Outcome(verdict="refused", reason=feature, settled_by=settled_by)


# Rules that many keys share.


def to(job: str) -> Rule:
    """The value under another name."""
    return lambda value, _foreign: same({job: plain(value)})


def number_to(job: str) -> Rule:
    """A number under another name, also where the file has it as a text (`"2e-5"`)."""

    def rule(value: Any, _foreign: Foreign) -> Outcome:
        number = as_number(value)
        return refused(f"a value that is no number: {value!r}") if number is None else same({job: number})

    return rule


def drop(reason: str) -> Rule:
    """Whatever the value is, no number changes."""
    return lambda _value, _foreign: dropped(reason)


def refuse(feature: str) -> Rule:
    """Whatever the value is, it asks for something that is missing."""
    return lambda _value, _foreign: refused(feature)


def off_or(feature: str) -> Rule:
    """Switched off it is as here; switched on it asks for something that is missing."""
    return lambda value, _foreign: dropped("off, as here") if is_off(value) else refused(feature)


def only(*values: Any, otherwise: str, reason: str = "as here") -> Rule:
    """One of some values is what gangline does anyway; any other asks for something that is missing."""

    def rule(value: Any, _foreign: Foreign) -> Outcome:
        return dropped(reason) if any(alike(value, each) for each in values) else refused(otherwise)

    return rule


def switch(job: str) -> Rule:
    """True or false under another name."""
    return lambda value, _foreign: same({job: not is_off(value)})


def where_on(rule: Rule) -> Rule:
    """A rule for values that switch something on; off they say nothing."""
    return lambda value, foreign: dropped("off") if is_off(value) else rule(value, foreign)


def each(rule: Rule, names: str) -> dict[str, Rule]:
    """The same rule for many keys, which stand in one text with spaces between them."""
    return dict.fromkeys(names.split(), rule)


# Values as the other tools read them.


def is_off(value: Any) -> bool:
    """Whether a value switches nothing on: YAML 1.1 also has `no` and `off`."""
    if isinstance(value, str):
        return value.strip().lower() in {"", "no", "off", "false", "none", "null"}
    return value is None or value is False or value == 0 or value in ([], {})


def as_number(value: Any) -> float | None:
    """A number, also out of a text; whole numbers stay whole."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    try:
        return int(value) if re.fullmatch(r"[+-]?[0-9]+", str(value).strip()) else float(value)
    except (TypeError, ValueError):
        return None


def alike(value: Any, other: Any) -> bool:
    """Whether two values mean the same to a tool that reads YAML 1.1: `1` and `1.0`, `no` and `false`."""
    if isinstance(other, bool):
        return other is not is_off(value) and (not other or str(value).lower() in {"true", "yes", "on", "1"})
    number, wanted = as_number(value), as_number(other)
    if number is not None and wanted is not None:
        return number == wanted
    return bool(value == other)


def plain(value: Any) -> Any:
    """A value as it is to stand in the job: a text that YAML 1.1 reads as true or false is one."""
    if isinstance(value, str) and value.strip().lower() in {"yes", "on", "no", "off"}:
        return not is_off(value)
    return value
