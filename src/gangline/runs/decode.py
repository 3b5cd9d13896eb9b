"""Plain data as dataclasses: the values that `dataclasses.asdict` gave, checked against the annotations.

Whatever does not fit is a DecodeError that names the key: `ranks[1].share: expected int, found 'two'`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
SHOWN_CHARS = 40


class DecodeError(ValueError, TypeError):
    """A value that its key does not take. The text names the key, the type that was expected, and what was found."""


def build(kind: type[T], data: Any) -> T:
    """Build a dataclass from plain data, with nested dataclasses, tuples and mappings; raises DecodeError."""
    return cast("T", _dataclass(kind, data, ""))


def known_part(kind: Any, data: Any) -> Any:
    """`data` without keys that `kind`, or a dataclass in it, does not have: those of a newer minor version."""
    if isinstance(data, Mapping) and hasattr(kind, "__dataclass_fields__"):
        hints = _hints(kind)
        return {
            key: known_part(hints[key], value) if _has_dataclass(hints[key]) else value
            for key, value in data.items()
            if key in hints
        }
    inner = [each for each in typing.get_args(kind) if _has_dataclass(each)]
    if not inner:
        return data
    if isinstance(data, list):
        return [known_part(inner[0], value) for value in data]
    if isinstance(data, Mapping) and _origin(kind) in _MAPPINGS:
        return {key: known_part(inner[-1], value) for key, value in data.items()}
    return known_part(inner[0], data)


@functools.cache
def _has_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_has_dataclass, typing.get_args(hint)))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    fields = {each.name for each in dataclasses.fields(kind)}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in fields}


@functools.cache
def _required(kind: Any) -> tuple[str, ...]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return tuple(each.name for each in fields if each.default is missing and each.default_factory is missing)


def _dataclass(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(path, f"the keys of {kind.__name__}", data)
    hints = _hints(kind)
    if unknown := sorted(str(key) for key in data if key not in hints):
        raise DecodeError(f"{path or kind.__name__}: unknown keys {', '.join(unknown)}"[:300])
    values = {key: _value(hints[key], value, _join(path, key)) for key, value in data.items()}
    for name in _required(kind):
        if name not in values:
            raise DecodeError(f"{_join(path, name)} is missing")
    try:
        return kind(**values)
    except DecodeError:
        raise
    except (ValueError, TypeError) as error:
        raise DecodeError(f"{path or kind.__name__}: {error}") from error


_MAPPINGS = (dict, Mapping, collections.abc.Mapping, collections.abc.MutableMapping)


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _value(hint: Any, value: Any, path: str) -> Any:
    return _reader(hint)(hint, value, path)


@functools.cache
def _reader(hint: Any) -> Callable[[Any, Any, str], Any]:
    """What reads a value of that type. `ps` reads thousands of values for each run."""
    return _dataclass if dataclasses.is_dataclass(hint) else _READERS.get(_origin(hint), _plain)


def _literal(hint: Any, value: Any, path: str) -> Any:
    if not any(value == each and type(value) is type(each) for each in typing.get_args(hint)):
        raise _wrong(path, f"one of {', '.join(map(repr, typing.get_args(hint)))}", value)
    return value


def _list(hint: Any, value: Any, path: str) -> list[Any]:
    each = next(iter(typing.get_args(hint)), Any)
    return [_value(each, item, f"{path}[{number}]") for number, item in enumerate(_items(value, path))]


def _one_of(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    first: DecodeError | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return _value(option, value, path)
        except DecodeError as error:
            first = first or error
    raise first or _wrong(path, "null", value)


def _tuple(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    arguments, items = typing.get_args(hint), _items(value, path)
    if not arguments or arguments[-1] is Ellipsis:
        each = arguments[0] if arguments else Any
        return tuple(_value(each, item, f"{path}[{number}]") for number, item in enumerate(items))
    if len(items) != len(arguments):
        raise _wrong(path, f"{len(arguments)} values", value)
    pairs = enumerate(zip(arguments, items, strict=True))
    return tuple(_value(each, item, f"{path}[{number}]") for number, (each, item) in pairs)


def _mapping(hint: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(path, "a mapping", value)
    arguments = typing.get_args(hint)
    each = arguments[1] if len(arguments) == 2 else Any
    return {key: _value(each, item, _join(path, str(key))) for key, item in value.items()}


def _plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        return value
    if kind in {int, float, str, bool} and type(value) is not kind:
        raise _wrong(path, kind.__name__, value)
    return value


def _items(value: Any, path: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _wrong(path: str, expected: str, value: Any) -> DecodeError:
    found = repr(value)
    shown = found if len(found) <= SHOWN_CHARS else f"{found[:SHOWN_CHARS]}..."
    return DecodeError(f"{path or 'the record'}: expected {expected}, found {shown}")


_READERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    typing.Union: _one_of,
    types.UnionType: _one_of,
    Literal: _literal,
    tuple: _tuple,
    list: _list,
    collections.abc.Sequence: _list,
    **dict.fromkeys(_MAPPINGS, _mapping),
}
