"""A YAML 1.2 file, or a hostfile, as plain values, with the line and column of every key and value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from gangline.config.fields import DESTINATION, NAME, SECRET, Section, Shorthand
from gangline.config.mistakes import KeyPath, Mistakes, Position, dotted, listed, nearest, printable, quote
from gangline.errors import SpecError

MAX_NODES = 100_000
"""Values in a file at the most: anchors that repeat each other grow without bound ("billion laughs")."""

_TAG = "tag:yaml.org,2002:"


@dataclass(slots=True)
class Document:
    """The values of a file, where each of them stands, and what is off already."""

    source: str
    """The file as the user named it."""
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[KeyPath, Position] = field(default_factory=dict)
    """Where each key (or list item) begins."""
    places: dict[KeyPath, Position] = field(default_factory=dict)
    """Where each value begins."""
    refused: set[KeyPath] = field(default_factory=set)
    """Values that a mistake was recorded for already."""
    named_keys: bool = True
    """False: a hostfile, whose words stand in a row and have no keys to name."""
    texts: dict[KeyPath, str] = field(default_factory=dict)
    """Each scalar as it was written: 007 and 1.10 are numbers in YAML and something else in a variable."""
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(""))

    def located(self, path: KeyPath) -> KeyPath:
        """The part of `path` that the user wrote.

        A shorthand leaves a key out: `model: ./path` stands for `model.path`. A missing key ends the path.
        """
        found: KeyPath = ()
        for part in path:
            if (*found, part) in self.places:
                found = (*found, part)
        return found

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Where the value of `path` (or its key) stands; the nearest thing around it where it was not written."""
        found = self.located(path)
        place = (self.keys if key else self.places).get(found)
        return place or Position(source=self.source, line=1, column=1)

    def shown(self, path: KeyPath) -> str:
        """A key as messages name it."""
        return dotted(path) if self.named_keys or self.from_command_line(path) else ""

    def mark(self, path: KeyPath, position: Position) -> None:
        """Say where a key stands whose value begins at the same place."""
        self.keys[path] = self.places[path] = position

    def from_command_line(self, path: KeyPath) -> bool:
        """Whether an override gave this value."""
        return self.position(path).override >= 0

    def add(self, path: KeyPath, *, seen: str, expected: str, fix: str) -> None:
        """Record a mistake in the value of `path`."""
        self.mistakes.add(self.position(path), key=self.shown(path), seen=seen, expected=expected, fix=fix)


def read_document(text: str, source: str) -> Document:
    """Read a YAML or JSON mapping. Repeated keys, tags and the like are recorded in `mistakes`.

    Raises SpecError where the text is not YAML at all.
    """
    document = Document(source=source, mistakes=Mistakes(source))
    root = _compose(text, source)
    if not isinstance(root, MappingNode):
        _refuse_root(root, source)
    else:
        value = _Builder(document).build(root, ())
        document.values = value if isinstance(value, dict) else {}
    return document


def read_value(text: str, source: str) -> Any:
    """One YAML value of the command line. Text that YAML cannot read (`*.jsonl`, `@home`) stands for itself.

    Raises SpecError for a list, a mapping or a quoted text that is not finished.
    """
    if not text.startswith(("[", "{", '"', "'")):
        tag = str(YAML(typ="rt", pure=True).resolver.resolve(ScalarNode, text, (True, False)))
        return _scalar(tag, text)
    document = read_document(f"value: {text}", source)
    document.mistakes.raise_if_any()
    return document.values["value"]


def _compose(text: str, source: str) -> Node | None:
    try:
        node: Node | None = YAML(typ="rt", pure=True).compose(text)
    except MarkedYAMLError as error:
        raise _syntax_error(text, source, error) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(
            f"{source}:{line}:{error.position - text.rfind(chr(10), 0, error.position)}",
            seen=f"the control character {error.character!r}; expected text".replace("'", ""),
            fix="delete this character; is it a text file at all?",
        ) from error
    except RecursionError as error:
        raise SpecError(
            source, seen="brackets within brackets without an end; expected a few levels", fix="close the brackets"
        ) from error
    return node


def _syntax_error(text: str, source: str, error: MarkedYAMLError) -> SpecError:
    """The parser's words ("while scanning a quoted scalar") in those of somebody who does not write parsers."""
    problem, context = str(error.problem), str(error.context)
    place = _position(source, error.problem_mark or error.context_mark)
    lines = text.splitlines()
    line = lines[place.line - 1] if 0 < place.line <= len(lines) else ""
    value = printable(line[place.column - 1 :].strip())
    if "flow" in context or "quoted" in context:
        place = _position(source, error.context_mark)
        seen = f"a {'bracket' if 'flow' in context else 'quote'} that is opened here and not closed"
        fix = "close it" if "quoted" in context else "close it, and put commas between what stands in it"
    elif "\\t" in problem:
        seen, fix = "a tab", "indent with spaces; YAML does not allow tabs"
    elif "another document" in problem:
        seen, fix = "a second document (`---`)", "keep one; delete this line and what follows it"
    elif "undefined alias" in problem or "cannot start any token" in problem:
        seen, fix = f"{value}, which begins with a sign that YAML keeps for itself", f"put it in quotes: '{value}'"
    elif "mapping values" in problem:
        seen = "a colon where none can stand"
        fix = "indent the keys of one mapping equally; put a value that has `: ` in it in quotes"
    else:
        seen = f"something that is not YAML ({printable(problem, limit=200)})"
        fix = "look at this line and the one above: is a colon, a quote or an indentation missing?"
    return SpecError(str(place), seen=f"{seen}; expected `key: value` lines", fix=fix)


def _refuse_root(root: Node | None, source: str) -> None:
    kind = "a list" if isinstance(root, SequenceNode) else "a single value" if root else "an empty file"
    raise SpecError(
        f"{source}:1:1", seen=f"{kind}; expected `key: value` lines", fix="begin the file with a key, such as `name:`"
    )


def _position(source: str, mark: StreamMark | None) -> Position:
    if mark is None:
        return Position(source=source, line=1, column=1)
    return Position(source=source, line=mark.line + 1, column=mark.column + 1)


def _scalar(tag: str, text: str) -> Any:
    """The value of a scalar under the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema)."""
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        bare = text.replace("_", "").lower()
        prefixed = bare.lstrip("+-").startswith(("0x", "0o", "0b"))
        return int(bare, 0 if prefixed else 10)
    if kind == "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _whole(text: str) -> str | None:
    """JSON writes what is beyond 16 bits as two halves, which YAML leaves apart. None: a half is missing."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


class _Builder:
    """Walks the nodes once and fills a Document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: set[int] = set()
        self.num_nodes = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        """The plain value of a node."""
        self._count(node)
        if id(node) in self.open:
            return self._refuse(path, "an alias of something that it is itself part of", "write the value out")
        self.open.add(id(node))
        try:
            return self._value(node, path)
        finally:
            self.open.discard(id(node))

    def _value(self, node: Node, path: KeyPath) -> Any:
        tag = str(node.tag)
        if isinstance(node, MappingNode) and tag == f"{_TAG}map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and tag == f"{_TAG}seq":
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and tag.startswith(_TAG) and "/" not in tag:
            text = _whole(node.value)
            if text is None:
                return self._refuse(path, "half a character (a surrogate without the other)", "write it as it is")
            self.document.texts[path] = text
            try:
                return _scalar(tag, text)
            except ValueError:
                return text
        return self._refuse(path, f"the tag {printable(tag)}", "write the value without a tag")

    def _item(self, node: Node, path: KeyPath) -> Any:
        self.document.mark(path, _position(self.document.source, node.start_mark))
        return self.build(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merges: list[Node] = []
        for key, value in node.value:
            if str(key.tag) == f"{_TAG}merge":
                merges += value.value if isinstance(value, SequenceNode) else [value]
            elif not isinstance(key, ScalarNode):
                self._refuse(path, "a list or mapping as a key", "keys are plain words")
            else:
                self._entry(values, key, value, path)
        for parent in merges:
            self._merge(values, parent, path)
        return values

    def _entry(self, values: dict[str, Any], key: ScalarNode, value: Node, parent: KeyPath) -> None:
        path = (*parent, key.value)
        here = _position(self.document.source, key.start_mark)
        if key.value in values:
            first = self.document.keys[path].line
            self.document.mistakes.add(
                here,
                key=dotted(path),
                seen=f"{quote(key.value)} for the second time, it stands in line {first} already",
                expected="each key once",
                fix="delete one of the two",
            )
            return
        self.document.keys[path] = here
        empty = isinstance(value, ScalarNode) and value.start_mark == value.end_mark
        self.document.places[path] = here if empty else _position(self.document.source, value.start_mark)
        values[key.value] = self.build(value, path)

    def _merge(self, values: dict[str, Any], parent: Node, path: KeyPath) -> None:
        self._count(parent)
        if not isinstance(parent, MappingNode) or id(parent) in self.open:
            self._refuse(path, "`<<` without a mapping", "write `<<: *name`, where another mapping is marked `&name`")
            return
        for key, value in parent.value:
            if isinstance(key, ScalarNode) and str(key.tag) != f"{_TAG}merge" and key.value not in values:
                self._entry(values, key, value, path)

    def _count(self, node: Node) -> None:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise SpecError(
                str(_position(self.document.source, node.start_mark)),
                seen=f"more than {MAX_NODES} values; expected a short file",
                fix="write aliases (`*name`) out; they repeat each other too often",
            )

    def _refuse(self, path: KeyPath, seen: str, fix: str) -> None:
        self.document.refused.add(path)
        self.document.add(path, seen=seen, expected="plain values, lists and mappings", fix=fix)


# Host keys written into a cluster file that people wrote: nothing else in it changes, not a space.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Characters from `start` to `end` become `text`."""

    start: int
    end: int
    text: str


def pin_keys(text: str, source: str, keys: Mapping[str, str]) -> str:
    """The text of a cluster file with these host keys (by the host's or the witness's name) in it, changed or added.

    Raises SpecError for a host whose name does not stand at the host itself.
    """
    items = [*_items(text, "hosts"), *_items(text, "witness")]
    changes = dict(filter(None, (_change(text, item, keys) for item in items)))
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


def insert_hosts(text: str, source: str, hosts: Sequence[Iterable[str]]) -> str:
    """The text of a cluster file with more hosts behind its last one, each as its lines; all else stays as it is.

    Raises SpecError where the list of hosts is written in brackets, or is none.
    """
    items = list(_items(text, "hosts"))
    written = [[*lines] for lines in hosts]
    last = items[-1] if items else None
    dash = -1 if last is None else text.rfind("-", 0, last.start_mark.index)
    begin = text.rfind("\n", 0, max(dash, 0)) + 1
    if dash < 0 or text[begin:dash].strip() or text[dash + 1 : last.start_mark.index].strip():  # type: ignore[union-attr]
        flow = "; ".join(f"  - {{{', '.join(line.partition('  # ')[0] for line in lines)}}}" for lines in written)
        raise SpecError(
            f"{source}: hosts cannot be put in",
            seen="expected the hosts below each other, each behind a dash",
            fix=f"write them by hand: {flow}",
        )
    assert last is not None
    indent, newline = text[begin:dash], "\r\n" if "\r\n" in text else "\n"
    inner = " " * (last.start_mark.index - dash - 1)
    rows = [
        f"{indent}-{inner}{line}" if number == 0 else f"{indent} {inner}{line}"
        for lines in written
        for number, line in enumerate(lines)
    ]
    place = _end_of(text, last)
    before = text[:place] if text[:place].endswith("\n") else text[:place] + newline
    return before + "".join(row + newline for row in rows) + text[place:]


def _end_of(text: str, item: Node) -> int:
    """Where the line behind the last word of an item begins; comments behind it belong to what follows."""
    last = item
    while isinstance(last, (MappingNode, SequenceNode)) and not last.flow_style and last.value:
        last = last.value[-1][1] if isinstance(last, MappingNode) else last.value[-1]
    end = text.find("\n", last.end_mark.index)
    return len(text) if end < 0 else end + 1


def _items(text: str, wanted: str) -> Iterator[Node]:
    """What stands in a list of the file, or the one thing that stands there without one."""
    root = YAML(typ="rt", pure=True).compose(text)
    for key, value in root.value if isinstance(root, MappingNode) else ():
        if key.value == wanted:
            yield from value.value if isinstance(value, SequenceNode) else [value]


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
    witness = {"witness": _with_key(values["witness"], keys)} if "witness" in values else {}
    return {**values, "hosts": [_with_key(host, keys) for host in values["hosts"]], **witness}


def _with_key(host: Any, keys: Mapping[str, str]) -> Any:
    words: dict[str, Any] = host if isinstance(host, dict) else {"name": host}
    name = str(words.get("name"))
    return {**words, "host_key": keys[name]} if name in keys else host


def _by_hand(source: str, keys: Mapping[str, str], *, seen: str) -> SpecError:
    lines = "; ".join(f"{name}: `host_key: {key}`" for name, key in keys.items())
    return SpecError(f"{source}: the keys cannot be put in", seen=seen, fix=f"write them by hand: {lines}")


# `key=value` on the command line, laid over a file.


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
            fix = "write a dotted key, an equals sign and a value, such as optimizer.learning_rate=1e-4"
            document.mistakes.add(position, seen="this is no override; expected key=value", fix=fix)
            continue
        try:
            value = read_value(text, source)
        except SpecError as error:
            document.mistakes.add(position, seen=error.seen, fix=error.fix)
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
    document.mistakes.add(
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


# Hostfiles as DeepSpeed and MPI write them: `name slots=N [interface] [VARIABLE=value ...]`, one host a line. `name:N`
# is MPI's other way to say `name slots=N`; a name may be `user@name`.


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
