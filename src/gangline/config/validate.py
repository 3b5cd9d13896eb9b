"""The user's words against the model of a file: every mistake at once, in words."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gangline.config.document import Document
from gangline.config.fields import PATTERNS, Section
from gangline.config.mistakes import KeyPath, Mistake, Position, dotted, listed, nearest, printable, quote

# JSON Schema fragments and YAML values in words, for messages and for the reference.


Schema = Mapping[str, Any]


def resolve(schema: Schema, fragment: Schema) -> Schema:
    """Follow `$ref` into the definitions of `schema`."""
    while "$ref" in fragment:
        fragment = schema["$defs"][fragment["$ref"].rpartition("/")[2]]
    return fragment


def section(schema: Schema, fragment: Schema) -> Schema | None:
    """The alternative of a fragment that is a mapping with keys of its own, if there is one."""
    fragment = resolve(schema, fragment)
    if "properties" in fragment:
        return fragment
    found = (section(schema, alternative) for alternative in fragment.get("anyOf", ()))
    return next((alternative for alternative in found if alternative), None)


def fragment_at(schema: Schema, path: KeyPath) -> Schema | None:
    """The schema of the value at `path`; None where there is no such key."""
    here: Schema = schema
    for part in path:
        inside = section(schema, here)
        if isinstance(part, str) and inside is not None:
            below = inside["properties"].get(part)
        else:
            below = _inner(schema, here, "items" if isinstance(part, int) else "additionalProperties")
        if below is None:
            return None
        here = below
    return here


def _inner(schema: Schema, fragment: Schema, key: str) -> Schema | None:
    """The schema of the items of a list, or of the values of a free mapping."""
    fragment = resolve(schema, fragment)
    if isinstance(fragment.get(key), dict):
        inner: Schema = fragment[key]
        return inner
    found = (_inner(schema, alternative, key) for alternative in fragment.get("anyOf", ()))
    return next((alternative for alternative in found if alternative), None)


def kinds_of(schema: Schema, fragment: Schema) -> list[Schema]:
    """The alternatives of a fragment, without `null`."""
    fragment = resolve(schema, fragment)
    if "anyOf" not in fragment:
        return [] if fragment.get("type") == "null" else [fragment]
    return [kind for alternative in fragment["anyOf"] for kind in kinds_of(schema, alternative)]


def kinds_for(schema: Schema, fragment: Schema, value: Any) -> list[Schema]:
    """The alternatives that `value` was probably meant to be: those of its own type, or all."""
    kinds = kinds_of(schema, fragment)
    return [kind for kind in kinds if _is_kind(kind, value)] or kinds


def _is_kind(kind: Schema, value: Any) -> bool:
    if "enum" in kind:
        return isinstance(value, str)
    if isinstance(value, bool):
        return kind.get("type") == "boolean"
    types: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "array": (list,),
        "object": (dict,),
    }
    return "const" not in kind and isinstance(value, types.get(str(kind.get("type")), ()))


def expected_words(schema: Schema, fragment: Schema, *, value: Any = None) -> str:
    """What may stand here: "a number above 0", "one of constant, linear, cosine".

    value: what stands there; alternatives of another type are not mentioned then.
    """
    kinds = kinds_of(schema, fragment) if value is None else kinds_for(schema, fragment, value)
    words = list(dict.fromkeys(_kind_words(schema, kind) for kind in kinds))
    if len(words) > 1:
        words = [word.partition(" with the keys")[0] for word in words]
    return ", or ".join(words)


def _kind_words(schema: Schema, kind: Schema) -> str:
    if "enum" in kind:
        return "one of " + ", ".join(str(choice) for choice in kind["enum"])
    if "const" in kind:
        return f"the word {kind['const']}"
    return _TYPES[kind.get("type", "string")](schema, kind)


def _number(_: Schema, fragment: Schema) -> str:
    kind = "a whole number" if fragment["type"] == "integer" else "a number"
    low = [f"{word} {fragment[key]:g}" for key, word in _LOW.items() if key in fragment]
    high = [f"{word} {fragment[key]:g}" for key, word in _HIGH.items() if key in fragment and fragment[key] < 1e9]
    return " ".join([kind, " and ".join(low + high)]).strip()


def _list(schema: Schema, fragment: Schema) -> str:
    size = fragment.get("minItems")
    if size and size == fragment.get("maxItems"):
        return f"a list of {size}, each {expected_words(schema, fragment['items'])}"
    if section(schema, fragment["items"]):
        return "a list of mappings"
    inside = expected_words(schema, fragment["items"])
    return "a list of texts" if inside == "text" else f"a list, each {inside}"


def _mapping(_: Schema, fragment: Schema) -> str:
    if "properties" in fragment:
        return f"a mapping with the keys {', '.join(fragment['properties'])}"
    values = fragment.get("additionalProperties", {})
    return f"a mapping of names to {'numbers' if values.get('type') in ('integer', 'number') else 'texts'}"


_LOW = {"minimum": "of at least", "exclusiveMinimum": "above"}
_HIGH = {"maximum": "at most", "exclusiveMaximum": "below"}
_TYPES = {
    "string": lambda _schema, fragment: PATTERNS.get(fragment.get("pattern", ""), "text"),
    "integer": _number,
    "number": _number,
    "boolean": lambda _schema, _fragment: "true or false",
    "array": _list,
    "object": _mapping,
}


def seen_words(value: Any) -> str:
    """What stands there: `the text "fast"`, "the number 3"."""
    if value is None:
        return "no value"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {quote(value)}" if value else "an empty text"
    if isinstance(value, dict):
        return f"a mapping with the keys {listed([str(key) for key in value])}" if value else "an empty mapping"
    return f"a list of {len(value)}" if value else "an empty list"


def yaml_words(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) or abs(value) >= 1e6 else f"{value:.1f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_words(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_words(entry) for entry in value) + "]"
    return json.dumps(value)


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
        key_path = shown if shown == path[:-1] else path  # a shorthand leaves the last key out
        position, name = self.document.position(path), self.document.shown(key_path)
        self.document.mistakes.add(position, key=name, seen=seen, expected=expected, fix=fix)


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
    if known is not None and " " in known:
        fix = known
    elif known == "":
        fix = "a key of other trainers, which means nothing here; `gangline convert FILE` says what becomes of theirs"
    elif len(elsewhere) > 1:
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
