"""JSON Schema fragments and YAML values in words, for messages and for the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gangline.spec.fields import PATTERNS
from gangline.spec.mistakes import KeyPath, listed, quote

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


def _text(_: Schema, fragment: Schema) -> str:
    return PATTERNS.get(fragment.get("pattern", ""), "text")


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
    return "a mapping of names to texts"


_LOW = {"minimum": "of at least", "exclusiveMinimum": "above"}
_HIGH = {"maximum": "at most", "exclusiveMaximum": "below"}
_TYPES = {
    "string": _text,
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
