"""The user's words against the model of a file: every mistake at once, in words."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gangline.spec.document import Document
from gangline.spec.fields import Section
from gangline.spec.mistakes import KeyPath, Mistake, Position, dotted, listed, nearest, printable, quote
from gangline.spec.words import (
    Schema,
    expected_words,
    fragment_at,
    kinds_for,
    kinds_of,
    section,
    seen_words,
    yaml_words,
)

_Words = TypeVar("_Words", bound=Section)
_ROUNDS = 6
"""Nested mistakes come to light in turns: a missing section first, then what its stand-in lacks."""


@dataclass(slots=True)
class Checked(Generic[_Words]):
    """The words of a file, as far as they can be understood, and the rules' way to report on them."""

    words: _Words
    """Where a value is off, its default stands; where a required one is off, an example."""
    document: Document
    faulty: frozenset[KeyPath]
    """What is off by its type already; a rule that reads it would report it a second time, or talk nonsense."""
    needs_data: bool = True
    """Whether files of data have to be there; False: nobody will read them."""

    def wrote(self, *path: str | int) -> bool:
        """Whether the user gave this key at all."""
        return self.document.located(path) == path

    def is_faulty(self, *path: str | int) -> bool:
        """Whether the value at `path`, or something around it, is a stand-in for what the user wrote."""
        return _covered(path, self.faulty)

    def report(self, path: KeyPath, *, seen: str, expected: str, fix: str, reads: tuple[KeyPath, ...] = ()) -> None:
        """Record a broken rule at `path`, unless one of the values that it reads is off by itself."""
        for key in (path, *reads):
            if any(key[: len(bad)] == bad or bad[: len(key)] == key for bad in self.faulty):
                return
        shown = self.document.located(path)
        key_path = shown if _is_shorthand(path, shown) else path
        self.document.mistakes.found.append(
            Mistake(
                position=self.document.position(path),
                key=self.document.shown(key_path),
                seen=seen,
                expected=expected,
                fix=fix,
            )
        )


def check(kind: type[_Words], document: Document, *, foreign: Mapping[str, str] | None = None) -> Checked[_Words]:
    """Validate a document. Mistakes are recorded in it; what is off is replaced so that rules can go on.

    `foreign`: names of keys in other programs, and what they are called here.
    """
    values = copy.deepcopy(document.values)
    faulty: set[KeyPath] = set()
    for turn in range(_ROUNDS):
        try:
            words = kind.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            schema = _schema(kind)
        else:
            return Checked(words=words, document=document, faulty=frozenset(faulty))
        for detail in details:
            path = document.located(detail["loc"]) if detail["type"] != "missing" else detail["loc"]
            if path not in document.refused and (turn == 0 or not _covered(path, faulty)):
                document.mistakes.found.append(_mistake(schema, document, detail, foreign or {}))
        for detail in details:
            faulty.add(_repair(values, schema, document, detail))
    document.mistakes.raise_if_any()
    raise AssertionError(f"the examples of {kind.__name__} do not pass its own rules")


@functools.cache
def _schema(kind: type[Section]) -> Schema:
    """Costs 30 ms, which files without mistakes do not pay."""
    return kind.model_json_schema()


def _covered(path: KeyPath, faulty: AbstractSet[KeyPath]) -> bool:
    return any(path[: len(bad)] == bad for bad in faulty)


def _is_shorthand(path: KeyPath, shown: KeyPath) -> bool:
    return len(shown) == len(path) - 1 and shown == path[:-1]


def _repair(values: dict[str, Any], schema: Schema, document: Document, detail: ErrorDetails) -> KeyPath:
    """Take what is off out of `values`, or put an example in where something is missing; returns where."""
    path: KeyPath = detail["loc"]
    if detail["type"] == "missing":
        fragment = fragment_at(schema, path) or {}
        holder = _walk(values, path[:-1])
        if isinstance(holder, dict):
            holder[str(path[-1])] = copy.deepcopy(fragment.get("examples", ["missing"])[0])
        return path
    path = document.located(path)
    examples = (fragment_at(schema, path[:-1]) or {}).get("examples")
    holder = _walk(values, path[:-1])
    if isinstance(holder, list) and isinstance(path[-1], int) and examples and isinstance(examples[0], list):
        holder[path[-1]] = copy.deepcopy(examples[0][0])
        return path
    if isinstance(holder, list):
        path = path[:-1]
        holder = _walk(values, path[:-1])
    if isinstance(holder, dict) and path:
        holder.pop(str(path[-1]), None)
    return path


def _walk(values: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _mistake(schema: Schema, document: Document, detail: ErrorDetails, foreign: Mapping[str, str]) -> Mistake:
    path: KeyPath = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(schema, document, path, foreign)
    if detail["type"] == "missing":
        fragment = fragment_at(schema, path) or {}
        return Mistake(
            position=document.position(path, key=True),
            key=document.shown(path),
            seen="this key is missing",
            expected=expected_words(schema, fragment),
            fix=f"add it, such as `{_example(schema, path, fragment, position=document.position(path))}`",
        )
    path = document.located(path)
    fragment = fragment_at(schema, path) or {}
    value = _walk(document.values, path)
    kinds = kinds_for(schema, fragment, value)
    position = document.position(path)
    # as it was written: 1e3 is 1000.0, and a commit that has digits only would lose its leading zeros
    written = document.texts.get(path, str(value) if _is_figure(value) else "")
    return Mistake(
        position=position,
        key=document.shown(path),
        seen=f"the number {printable(written)}" if _is_figure(value) else seen_words(value),
        expected=expected_words(schema, fragment, value=value),
        fix=fragment.get("x-fix")
        or _fix(value, kinds, written=written)
        or f"write, for example, `{_example(schema, path, fragment, position=position)}`",
    )


def _unknown_key(schema: Schema, document: Document, path: KeyPath, foreign: Mapping[str, str]) -> Mistake:
    name = str(path[-1])
    parent = section(schema, fragment_at(schema, path[:-1]) or {}) or {}
    keys = list(parent.get("properties", ()))
    place = f"{dotted(path[:-1])} has" if len(path) > 1 else "the file has"
    known = foreign.get(name)
    elsewhere = [known] if known else [key for key in _all_keys(schema, schema) if key.rpartition(".")[2] == name]
    close = nearest(name, keys)
    if len(elsewhere) > 1:
        fix = f"did you mean one of {listed(elsewhere)}?"
    elif elsewhere or close:
        fix = f"did you mean {quote(elsewhere[0] if elsewhere else str(close))}?"
    else:
        fix = f"delete it; {place} the keys {listed(keys, limit=30)}"
    return Mistake(
        position=document.position(path, key=True),
        key=document.shown(path),
        seen="there is no such key",
        expected=f"a key of {dotted(path[:-1])}" if len(path) > 1 else "a key of this file",
        fix=fix,
    )


def _all_keys(schema: Schema, fragment: Schema, prefix: str = "") -> list[str]:
    keys = []
    for name, inside in fragment.get("properties", {}).items():
        keys.append(prefix + name)
        below = section(schema, inside)
        keys += _all_keys(schema, below, f"{prefix}{name}.") if below else []
    return keys


def _fix(value: Any, kinds: Sequence[Schema], *, written: str) -> str | None:
    """What to write in place of `value`, where it says so itself."""
    types = {kind.get("type") for kind in kinds}
    if value is None:
        return "write a value, or delete the key to get its default"
    if isinstance(value, str):
        return _fix_text(value, kinds, types)
    if isinstance(value, float) and value.is_integer() and "integer" in types and abs(value) < 1e18:
        return f"write it as a whole number: {int(value)}"
    plain_text = any(kind.get("type") == "string" and "enum" not in kind for kind in kinds)
    if _is_figure(value) and plain_text and not types & {"integer", "number"}:
        return f'put it in quotes: "{printable(written)}"'
    return None


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fix_text(value: str, kinds: Sequence[Schema], types: set[Any]) -> str | None:
    choices = [choice for kind in kinds for choice in kind.get("enum", ()) if isinstance(choice, str)]
    if close := nearest(value, choices):
        return f"did you mean {quote(close)}?"
    if choices:
        return f"choose one of them, such as {choices[0]}"
    if types & {"integer", "number"} and _is_number(value):
        return f"take the quotes away: {printable(value.strip())}"
    if "boolean" in types and value.lower() in _YES_NO:
        return f"write {_YES_NO[value.lower()]} (yes, no, on and off are plain text in YAML 1.2)"
    patterns = [kind["pattern"] for kind in kinds if "pattern" in kind]
    bare = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:63]
    if patterns and re.search(patterns[0], bare):
        return f"write, for example, {bare}"
    return None


_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _example(schema: Schema, path: KeyPath, fragment: Schema, *, position: Position) -> str:
    """One good line for a key, in the manner of a file or of the command line."""
    value = yaml_words(_example_value(schema, fragment))
    if position.override >= 0:
        return f"{dotted(path)}={value}"
    return f"{path[-1]}: {value}" if path and isinstance(path[-1], str) else value


def _example_value(schema: Schema, fragment: Schema) -> Any:
    if fragment.get("examples"):
        return fragment["examples"][0]
    inside = section(schema, fragment)
    if inside:
        name, first = next(
            ((name, inner) for name, inner in inside["properties"].items() if _has_value(inner)),
            next(iter(inside["properties"].items())),
        )
        return {name: _example_value(schema, first)}
    if _has_value(fragment):
        return fragment["default"]
    kinds = kinds_of(schema, fragment)
    return _EXAMPLES.get(str(kinds[0].get("type")) if kinds else "", "name")


def _has_value(fragment: Schema) -> bool:
    return fragment.get("default") not in (None, {}) or bool(fragment.get("examples"))


_EXAMPLES = {
    "integer": 100,
    "number": 0.5,
    "boolean": True,
    "array": ["name"],
    "object": {"name": "value"},
    "string": "value",
}
