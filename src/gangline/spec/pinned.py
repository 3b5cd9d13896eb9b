"""Host keys written into a cluster file that people wrote: nothing else in it changes, not a space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gangline.errors import SpecError
from gangline.spec.document import read_document
from gangline.spec.mistakes import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Characters from `start` to `end` become `text`."""

    start: int
    end: int
    text: str


def pin_keys(text: str, source: str, keys: Mapping[str, str]) -> str:
    """The text of a cluster file with these host keys (by the host's name) in it, changed or added.

    Raises SpecError for a host whose name does not stand at the host itself.
    """
    changes = dict(filter(None, (_change(text, item, keys) for item in _hosts(text))))
    missing = [name for name in keys if name not in changes]
    if missing:
        raise _by_hand(source, {name: keys[name] for name in missing}, seen=f"no `name:` of {listed(missing)}")
    pinned = text
    for change in sorted(changes.values(), key=lambda change: change.start, reverse=True):
        pinned = pinned[: change.start] + change.text + pinned[change.end :]
    if read_document(pinned, source).values != _expected(read_document(text, source).values, keys):
        raise _by_hand(
            source, keys, seen="hosts that share their keys in a way that a change would not be for one alone"
        )
    return pinned


def _hosts(text: str) -> Iterator[Node]:
    root = YAML(typ="rt", pure=True).compose(text)
    for key, value in root.value if isinstance(root, MappingNode) else ():
        if key.value == "hosts" and isinstance(value, SequenceNode):
            yield from value.value


def _change(text: str, item: Node, keys: Mapping[str, str]) -> tuple[str, _Change] | None:
    """The name of a host and what changes there; None where nothing does."""
    if isinstance(item, ScalarNode):
        quote = item.style or ""
        fields = f"{quote}name{quote}: {quote}{item.value}{quote}", f"{quote}host_key{quote}: {quote}"
        whole = f"{{{fields[0]}, {fields[1]}{keys.get(item.value)}{quote}}}"
        change = _Change(start=item.start_mark.index, end=item.end_mark.index, text=whole)
        return (item.value, change) if item.value in keys else None
    if not isinstance(item, MappingNode):
        return None
    entries = {key.value: (key, value) for key, value in item.value}
    if "name" not in entries or entries["name"][1].value not in keys:
        return None
    name = entries["name"][1].value
    if "host_key" in entries:
        return name, _replaced(text, *entries["host_key"], key=keys[name])
    return name, _added(text, item, *entries["name"], key=keys[name])


def _replaced(text: str, word: ScalarNode, value: Node, *, key: str) -> _Change:
    start, end = value.start_mark.index, value.end_mark.index
    if start == end:  # nothing stands there, and the mark is at what comes next
        start = end = text.index(":", word.end_mark.index) + 1
        return _Change(start=start, end=end, text=f" {key}")
    quote = (value.style if isinstance(value, ScalarNode) else None) or ""
    return _Change(start=start, end=end, text=f"{quote}{key}{quote}")


def _added(text: str, item: MappingNode, name: ScalarNode, value: ScalarNode, *, key: str) -> _Change:
    if item.flow_style:
        quote = name.style or ""
        word = f", {quote}host_key{quote}: {quote}{key}{quote}"
        return _Change(start=value.end_mark.index, end=value.end_mark.index, text=word)
    end = text.find("\n", value.end_mark.index)
    newline = "\r\n" if text[:end].endswith("\r") else "\n"
    place = len(text) if end < 0 else end - (newline == "\r\n")
    line = f"{newline}{' ' * name.start_mark.column}host_key: {key}"
    return _Change(start=place, end=place, text=line)


def _expected(values: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {**values, "hosts": [_with_key(host, keys) for host in values["hosts"]]}


def _with_key(host: Any, keys: Mapping[str, str]) -> Any:
    words: dict[str, Any] = host if isinstance(host, dict) else {"name": host}
    name = str(words.get("name"))
    return {**words, "host_key": keys[name]} if name in keys else host


def _by_hand(source: str, keys: Mapping[str, str], *, seen: str) -> SpecError:
    lines = "; ".join(f"{name}: `host_key: {key}`" for name, key in keys.items())
    return SpecError(f"{source}: the keys cannot be put in", seen=seen, fix=f"write them by hand: {lines}")
