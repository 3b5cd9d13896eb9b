"""A YAML 1.2 file as plain values, with the line and column of every key and value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from gangline.errors import SpecError
from gangline.spec.mistakes import KeyPath, Mistake, Mistakes, Position, dotted, printable, quote

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

    def add(self, path: KeyPath, *, seen: str, expected: str, fix: str, key: bool = False) -> None:
        """Record a mistake in the value of `path` (or in its key)."""
        self.mistakes.found.append(
            Mistake(position=self.position(path, key=key), key=self.shown(path), seen=seen, expected=expected, fix=fix)
        )


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
                merges.append(value)
            elif not isinstance(key, ScalarNode):
                self._refuse(path, "a list or mapping as a key", "keys are plain words")
            else:
                self._entry(values, key, value, path)
        for parent in (parent for merge in merges for parent in _merged(merge)):
            self._merge(values, parent, path)
        return values

    def _entry(self, values: dict[str, Any], key: ScalarNode, value: Node, parent: KeyPath) -> None:
        path = (*parent, key.value)
        here = _position(self.document.source, key.start_mark)
        if key.value in values:
            first = self.document.keys[path].line
            self.document.mistakes.found.append(
                Mistake(
                    position=here,
                    key=dotted(path),
                    seen=f"{quote(key.value)} for the second time, it stands in line {first} already",
                    expected="each key once",
                    fix="delete one of the two",
                )
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


def _merged(node: Node) -> Iterator[Node]:
    if isinstance(node, SequenceNode):
        yield from node.value
    else:
        yield node
