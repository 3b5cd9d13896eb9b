"""Environment markers of requirements (PEP 508), answered for a host and not for the computer that reads them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping

_TOKEN = re.compile(r"\s*(?:(?P<text>\"[^\"]*\"|'[^']*')|(?P<op>===|~=|==|!=|<=|>=|<|>|\(|\))|(?P<word>[A-Za-z_.]+))")
_VERSIONS = frozenset({"python_version", "python_full_version", "implementation_version"})
_COMPARE: Mapping[str, Callable[[object, object], bool]] = {
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
}
_ORDER: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
}


def linux_environment(version: tuple[int, int, int], machine: str) -> dict[str, str]:
    """What markers may ask of CPython on a Linux host."""
    full = ".".join(map(str, version))
    return {
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "platform_release": "",
        "platform_version": "",
        "python_version": f"{version[0]}.{version[1]}",
        "python_full_version": full,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "implementation_version": full,
        "extra": "",
    }


def holds(marker: str, environment: Mapping[str, str]) -> bool:
    """Whether a marker is true there; raises ValueError for what is no marker."""
    tokens = list(_tokens(marker))
    value = _either(tokens, environment)
    if tokens:
        raise ValueError(f"{marker!r} is no marker")
    return value


def _tokens(marker: str) -> Iterator[str]:
    position = 0
    while marker[position:].strip():
        found = _TOKEN.match(marker, position)
        if found is None:
            raise ValueError(f"{marker!r} is no marker")
        position = found.end()
        yield found.group().strip()


def _either(tokens: list[str], environment: Mapping[str, str]) -> bool:
    value = _both(tokens, environment)
    while tokens and tokens[0] == "or":
        tokens.pop(0)
        value = _both(tokens, environment) or value
    return value


def _both(tokens: list[str], environment: Mapping[str, str]) -> bool:
    value = _one(tokens, environment)
    while tokens and tokens[0] == "and":
        tokens.pop(0)
        value = _one(tokens, environment) and value
    return value


def _one(tokens: list[str], environment: Mapping[str, str]) -> bool:
    if tokens and tokens[0] == "(":
        tokens.pop(0)
        value = _either(tokens, environment)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a bracket is not closed")
        return value
    try:
        left, word, right = tokens.pop(0), tokens.pop(0), tokens.pop(0)
        if word == "not":
            word, right = f"not {right}", tokens.pop(0)
    except IndexError:
        raise ValueError("a marker ends too early") from None
    return _compared(left, word, right, environment)


def _compared(left: str, word: str, right: str, environment: Mapping[str, str]) -> bool:
    one, other = _value(left, environment), _value(right, environment)
    if word in {"in", "not in"}:
        return (one in other) == (word == "in")
    if {left, right} & _VERSIONS:
        return _versions(one, word, other)
    if word in _COMPARE:
        return _COMPARE[word](one, other)
    raise ValueError(f"{left} {word} {right} compares texts")


def _value(token: str, environment: Mapping[str, str]) -> str:
    if token[0] in "\"'":
        return token[1:-1]
    if token not in environment:
        raise ValueError(f"{token} is no word of a marker")
    return environment[token]


def _versions(one: str, word: str, other: str) -> bool:
    if other.endswith(".*") and word in {"==", "!="}:
        prefix = _numbers(other[:-2])
        return (_numbers(one)[: len(prefix)] == prefix) == (word == "==")
    left, right = _numbers(one), _numbers(other)
    if word == "~=":
        return left >= right and left[: len(right) - 1] == right[:-1]
    if word not in _ORDER:
        raise ValueError(f"{word} compares no versions")
    width = max(len(left), len(right))
    return _ORDER[word](left + (0,) * (width - len(left)), right + (0,) * (width - len(right)))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    return tuple(int(part) for part in found[0].split("."))
