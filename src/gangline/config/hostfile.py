"""Hostfiles as DeepSpeed and MPI write them: `name slots=N [interface] [VARIABLE=value ...]`, one host a line.

`name:N` is MPI's other way to say `name slots=N`; a name may be `user@name`.
"""

from __future__ import annotations

import re
from typing import Any

from gangline.config.document import Document
from gangline.config.fields import DESTINATION, NAME
from gangline.config.mistakes import KeyPath, Mistakes, Position, quote

_WORD = re.compile(r"slots\s*=\s*\S+|\S+")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|https?_proxy|no_proxy")
_COUNTED = re.compile(r"([^\s:]+):([0-9]+)")
_HOST_LINE = re.compile(r"\s*[^\s:#\[{-][^\s:]*\s+slots\s*=")
_YAML_LINE = re.compile(r"\s*([\"']?[A-Za-z_]+[\"']?\s*:(\s|$)|[{\[#%-])")


def looks_like_hostfile(text: str, *, named_yaml: bool) -> bool:
    """Whether this is a hostfile and not YAML. `named_yaml`: the file's name says YAML; only `slots=` outweighs it."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if any(_HOST_LINE.match(line) for line in lines):
        return True
    return not named_yaml and not (lines and _YAML_LINE.match(lines[0]))


def parse_hostfile(text: str, source: str) -> Document:
    """The same document that a cluster.yaml with these hosts would give; mistakes are recorded in it."""
    document = Document(source=source, named_keys=False, mistakes=Mistakes(source))
    document.mark(("hosts",), Position(source=source, line=1, column=1))
    hosts: list[dict[str, Any]] = []
    document.values = {"hosts": hosts}
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.partition("#")[0]
        words = [
            ("".join(match.group().split()), Position(source=source, line=number, column=match.start() + 1))
            for match in _WORD.finditer(bare)
        ]
        if words:
            hosts.append(_host(document, len(hosts), words))
    if not hosts:
        _refuse(document, document.places["hosts",], seen="no host at all", fix="write `localhost slots=1`")
        document.mistakes.raise_if_any()
    return document


def _host(document: Document, index: int, words: list[tuple[str, Position]]) -> dict[str, Any]:
    path: KeyPath = ("hosts", index)
    (word, place), *rest = words
    counted = _COUNTED.fullmatch(word)
    destination = counted[1] if counted else word
    host: dict[str, Any] = {"name": name_of(destination)}
    document.mark(path, place)
    document.mark((*path, "name"), place)
    if host["name"] != destination:
        host["ssh"] = destination
        document.mark((*path, "ssh"), place)
    if counted:
        _slots(document, host, path, value=counted[2], position=place)
    for word, position in rest:
        key, equals, value = word.partition("=")
        if key == "slots":
            _slots(document, host, path, value=value, position=position)
        elif not equals:
            _interface(document, host, path, word=word, position=position)
        else:
            _variable(document, host, path, word=word, position=position)
    return host


def is_destination(text: str) -> bool:
    """Whether ssh may be told so: a name or an address, perhaps with a user in front."""
    return "\n" not in text and re.search(DESTINATION, text) is not None


def name_of(destination: str) -> str:
    """What a host is called that ssh reaches as `user@host`; an IPv6 address gets hyphens for its colons."""
    if not is_destination(destination):
        return destination
    host = destination.rpartition("@")[2].partition("%")[0]
    return "-".join(part for part in host.split(":") if part) if ":" in host else host


def _slots(document: Document, host: dict[str, Any], path: KeyPath, *, value: str, position: Position) -> None:
    if not (value.isascii() and value.isdigit() and int(value[:6]) > 0 and len(value) < 6):
        _refuse(document, position, seen=f"slots={value}", fix="write how many ranks run there, such as slots=8")
    elif "slots" in host:
        _refuse(document, position, seen="slots for the second time", fix="delete one of the two")
    else:
        host["slots"] = int(value)
        document.mark((*path, "slots"), position)


def _interface(document: Document, host: dict[str, Any], path: KeyPath, *, word: str, position: Position) -> None:
    if not re.fullmatch(NAME, word):
        _refuse(document, position, seen=quote(word), fix="write a network interface, such as ib0, or VARIABLE=value")
    elif "interface" in host:
        _refuse(document, position, seen=f"a second interface, {quote(word)}", fix="keep one of the two")
    else:
        host["interface"] = word
        document.mark((*path, "interface"), position)


def _variable(document: Document, host: dict[str, Any], path: KeyPath, *, word: str, position: Position) -> None:
    name, _, value = word.partition("=")
    if not _VARIABLE.fullmatch(name):
        fix = "write slots=N for the number of ranks; variables have names in capitals, such as NCCL_DEBUG=INFO"
        _refuse(document, position, seen=quote(name), fix=fix)
        return
    env = host.setdefault("env", {})
    if name in env:
        _refuse(document, position, seen=f"{name} for the second time", fix="delete one of the two")
        return
    env[name] = value
    document.mark((*path, "env"), position)
    document.mark((*path, "env", name), position)


def _refuse(document: Document, position: Position, *, seen: str, fix: str) -> None:
    expected = "`name slots=N [interface] [VARIABLE=value ...]`"
    document.mistakes.add(position, seen=seen, expected=expected, fix=fix)
