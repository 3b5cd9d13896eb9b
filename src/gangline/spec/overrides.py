"""`key=value` on the command line, laid over a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gangline.errors import SpecError
from gangline.spec.document import Document, read_value
from gangline.spec.fields import SECRET, Section, Shorthand
from gangline.spec.mistakes import KeyPath, Mistake, Position, dotted, listed, nearest, printable, quote


def apply_overrides(document: Document, overrides: Sequence[str], kind: type[Section]) -> None:
    """Set each dotted key to its value, read as YAML 1.2; later ones win. Mistakes are recorded in the document.

    A shorthand in the file is written out when an override goes below it: `model: ./path` and `model.start=random`.
    """
    for index, override in enumerate(overrides):
        key, equals, text = override.partition("=")
        shown = f"{key}=..." if SECRET.search(key.rpartition(".")[2]) else override
        source = f"command line: {printable(shown, limit=200)}"
        position = Position(source=source, override=index)
        if not equals or not key or "" in key.split("."):
            _refuse(document, position)
            continue
        try:
            value = read_value(text, source)
        except SpecError as error:
            _report(document, position, seen=error.seen, fix=error.fix)
            continue
        path = _path(document.values, key.split("."))
        _set(document, path, value, position=position, kind=kind)
        document.texts[path] = text


def drop_rivals(document: Document, *, rivals: Iterable[str], within: str | None = None) -> None:
    """Of keys that exclude each other, the one on the command line wins over the one in the file.

    within: the key of the mapping that they are in; None: the file itself.
    """
    holder: Any = document.values if within is None else document.values.get(within)
    above = () if within is None else (within,)
    written = [name for name in rivals if name in holder] if isinstance(holder, dict) else []
    if any(document.from_command_line((*above, name)) for name in written):
        for name in written:
            if not document.from_command_line((*above, name)):
                del holder[name]
                _forget(document, (*above, name))


def _refuse(document: Document, position: Position) -> None:
    _report(
        document,
        position,
        seen="this is no override; expected key=value",
        fix="write a dotted key, an equals sign and a value, such as optimizer.learning_rate=1e-4",
    )


def _report(document: Document, position: Position, *, seen: str, fix: str) -> None:
    document.mistakes.found.append(Mistake(position=position, key="", seen=seen, expected="", fix=fix))


def _path(values: Any, parts: Sequence[str]) -> KeyPath:
    """The path of a dotted key; items of a list are chosen by number or by their name."""
    path: KeyPath = ()
    for part in parts:
        step: str | int = part
        if isinstance(values, list):
            names = [_item_name(item) for item in values]
            step = int(part) if part.isascii() and part.isdigit() else names.index(part) if part in names else part
            values = values[step] if isinstance(step, int) and step < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
        path = (*path, step)
    return path


def _set(document: Document, path: KeyPath, value: Any, *, position: Position, kind: type[Section]) -> None:
    holder: Any = document.values
    for depth, part in enumerate(path[:-1], start=1):
        inside = holder[part] if isinstance(holder, list) and isinstance(part, int) and part < len(holder) else None
        inside = holder.get(part) if isinstance(holder, dict) else inside
        if not isinstance(inside, dict | list):
            inside = _written_out(document, path[:depth], inside, kind=kind, position=position)
            if not isinstance(holder, dict):
                _report_list(document, position, path[:depth], items=holder)
                return
            holder[part] = inside
        holder = inside
    last = path[-1]
    if isinstance(holder, list) and not (isinstance(last, int) and last < len(holder)):
        _report_list(document, position, path, items=holder)
        return
    _forget(document, path)
    holder[last] = value
    document.mark(path, position)


def _report_list(document: Document, position: Position, path: KeyPath, *, items: list[Any]) -> None:
    part = str(path[-1])
    names = [name for name in map(_item_name, items) if isinstance(name, str)]
    meant = nearest(part, names)
    _report(
        document,
        position,
        seen=f"{dotted(path[:-1])} has no item {printable(part)}; expected "
        + (f"one of {listed(names)}" if names else f"a number below {len(items)}"),
        fix=f"did you mean {quote(meant)}?" if meant else f"give the whole list: {dotted(path[:-1])}=[...]",
    )


def _item_name(item: Any) -> Any:
    return item.get("name") if isinstance(item, dict) else item


def _written_out(
    document: Document, path: KeyPath, value: Any, *, kind: type[Section], position: Position
) -> dict[str, Any]:
    """The mapping that a bare value at `path` stands for, so that a key below it can be set."""
    shorthand = _shorthand(kind, path)
    if value is None or shorthand is None:
        document.mark(path, position)
        return {}
    expanded: dict[str, Any] = shorthand.expand(value)
    inner = (*path, next(iter(expanded)))
    document.mark(inner, document.places[path])
    return expanded


def _shorthand(kind: type[Section], path: KeyPath) -> Shorthand | None:
    found: Shorthand | None = None
    model: Any = kind
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return None
        found, model = _inner(field.metadata, field.annotation)
    return found


def _inner(metadata: Iterable[Any], annotation: Any) -> tuple[Shorthand | None, Any]:
    """The shorthand and the section of a field, through `Annotated` and `| None`."""
    found = next((item for item in metadata if isinstance(item, Shorthand)), None)
    if hasattr(annotation, "__metadata__"):
        return _inner([found, *annotation.__metadata__], annotation.__origin__)
    for argument in getattr(annotation, "__args__", ()):
        if argument is not type(None):
            return _inner([found], argument)
    return found, annotation


def _forget(document: Document, path: KeyPath) -> None:
    for table in (document.keys, document.places, document.texts):
        for key in [key for key in table if key[: len(path)] == path]:
            del table[key]
