"""A chat template rendered once, and the message that every stretch of the text belongs to.

A template is a program: it drops the thinking of earlier turns, trims, writes tool calls as JSON, looks at what comes
last. So nothing is learned from renderings of the first few messages. The whole conversation is rendered as it is, and
once more with marks:

- Every loop of the template reports the message that it is at. What is written between two reports belongs to that
  message. The calls are put into the syntax tree of the template, so the words around them stay as they are.
- Texts of the messages carry probes at both ends: their words must turn up where the loop says that they are.
- `{% generation %}` blocks report where they begin and end.

Marks are U+FDD0 ... U+FDD1, noncharacters that no text has. The second rendering without its marks must be the first
one, letter for letter, and no probe may lie in a stretch of somebody else; else the place of the answers is not proven
and `Unproven` is raised.

It needs jinja2 alone; torch and transformers are not imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]
ProbeKind = Literal["text", "thought", "call"]

OPEN, CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(r"(?:\ufdd0|\\ufdd0)([0-9:]+)(?:\ufdd1|\\ufdd1)")
"""Also as `tojson(ensure_ascii=true)` writes it."""
_ENTER, _LEAVE, _BEGIN, _END, _PROBE = range(1, 6)

THINK_TAGS = re.compile(r"</?(?:think|thinking|thought)>|\[/?THINK\]|◁/?think▷|<\|/?think\|>", re.IGNORECASE)
"""Between these a content has its thinking; probes stand inside, for templates look for the tags."""

FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may end with: it is a program, if one in a sandbox."""


class Unproven(Exception):
    """The template renders the conversation, but where a message stands in the text cannot be proven."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """text[start:end] was written while the template was at this message; None: outside of all loops over messages."""

    start: int
    end: int
    message: int | None


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Where one end of a text of a message turned up."""

    at: int
    message: int
    kind: ProbeKind
    opens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """One conversation as text."""

    text: str
    stretches: tuple[Stretch, ...]
    """In order; together they are the text."""
    probes: tuple[TextEnd, ...]
    """In the order of the text."""
    tagged: tuple[tuple[int, int], ...]
    """What `{% generation %}` blocks wrote."""
    missing: frozenset[tuple[int, ProbeKind]]
    """(message, kind) of texts that the template left out."""


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateError for one that is no template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: what templates are given besides the conversation: bos_token, eos_token and the like."""
        self.source = source
        self._variables = dict(variables)
        self._tracer = _Tracer()
        self._plain = _environment(_Untagged).from_string(source)
        self._traced: dict[bool, jinja2.Template] = {}
        blocks = _environment(_Tagged).parse(source).find_all(nodes.CallBlock)
        self.tagged = any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)
        """Whether it has `{% generation %}` blocks."""

    def text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as it is; `prompt`: with the words that ask for an answer. Raises what is in FAULTS."""
        return str(
            self._plain.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        )

    def render(self, messages: Sequence[Message], tools: Any = None) -> Rendering:
        """The conversation with the place of every message. Raises Unproven, and what is in FAULTS."""
        text = self.text(messages, tools)
        if OPEN in text or CLOSE in text:
            raise Unproven("it has the character U+FDD0 or U+FDD1, which stands for no letter")
        reason = ""
        for by_assignment in (False, True):
            for inside in (False, True):
                probed, placed = _probed(messages, inside=inside)
                found = self._marked(probed, placed, tools, by_assignment=by_assignment)
                if found is None or found.text != text:
                    reason = reason or "the template looks at letters of the messages, so their place is not proven"
                    continue
                stranger = _stranger(found, messages)
                if stranger is None:
                    return found
                reason = stranger
                break
        raise Unproven(reason)

    def _marked(
        self, probed: Sequence[Message], placed: Sequence[_Placed], tools: Any, *, by_assignment: bool
    ) -> Rendering | None:
        """The rendering with marks taken out again; None where the template ends with a fault because of them."""
        if by_assignment not in self._traced:
            self._traced[by_assignment] = _compile(self.source, self._tracer, by_assignment=by_assignment)
        with self._tracer.on(probed):
            try:
                marked = self._traced[by_assignment].render(
                    messages=list(probed), tools=tools, documents=None, add_generation_prompt=False, **self._variables
                )
            except FAULTS:
                return None
        return _read(marked, placed)


# --- marks in the syntax tree


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the assistant says, by the word of the template."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own name and form

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call of `_write` with its words."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        raise NotImplementedError


class _Untagged(_Generation):
    def _write(self, caller: Macro) -> str:
        return str(caller())


class _Tagged(_Generation):
    def _write(self, caller: Macro) -> str:
        return f"{_mark(_BEGIN)}{caller()}{_mark(_END)}"


def _mark(*numbers: int) -> str:
    return f"{OPEN}{':'.join(map(str, numbers))}{CLOSE}"


class _Names(Namespace):
    """jinja's namespace, without names that begin with an underscore: templates come from strangers."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot write to the name {name!r}")
        super().__setitem__(name, value)


def _environment(extension: type[_Generation]) -> ImmutableSandboxedEnvironment:
    """As templates expect it: what transformers gives them, which vLLM and others do after it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[extension, LoopControls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - the user's clock
    environment.globals["namespace"] = _Names
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter would escape < and &
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Tracer:
    """The calls that the marked template makes: which loop is at which message."""

    def __init__(self) -> None:
        self._messages: dict[int, int] = {}
        self._loops: dict[int, bool] = {}

    @contextmanager
    def on(self, messages: Sequence[Message]) -> Iterator[None]:
        """Follow these very objects."""
        self._messages = {id(message): number for number, message in enumerate(messages)}
        self._loops = {}
        try:
            yield
        finally:
            self._messages = {}

    def enter(self, loop: int, *items: Any) -> str:
        """A loop has taken its next item."""
        for item in items:
            if (number := self._messages.get(id(item))) is not None:
                self._loops[loop] = True
                return _mark(_ENTER, loop, number)
        return self.leave(loop)

    def leave(self, loop: int) -> str:
        """A loop has ended."""
        return _mark(_LEAVE, loop) if self._loops.pop(loop, None) is not None else ""

    def assign(self, loop: int, value: Any) -> str:
        """Inside a loop over something else, a message got a name: the template is at that message from here on."""
        number = self._messages.get(id(value))
        if number is None or self._loops.get(loop):
            return ""
        self._loops[loop] = False
        return _mark(_ENTER, loop, number)


def _compile(source: str, tracer: _Tracer, *, by_assignment: bool) -> jinja2.Template:
    environment = _environment(_Tagged)
    environment.globals.update(gangline_enter=tracer.enter, gangline_leave=tracer.leave, gangline_assign=tracer.assign)
    tree = environment.parse(source)
    tree.body = _Marking(by_assignment).statements(tree.body, loop=None)
    tree.set_environment(environment)
    code: Any = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


class _Marking:
    """Puts the calls of the tracer into the statements of a template."""

    def __init__(self, by_assignment: bool) -> None:
        self._by_assignment = by_assignment
        self._num_loops = 0

    def statements(self, body: list[nodes.Node], *, loop: int | None) -> list[nodes.Node]:
        """The same statements with marks; `loop`: the number of the loop that they stand in."""
        found: list[nodes.Node] = []
        for node in body:
            inner = loop
            if isinstance(node, nodes.For):
                self._num_loops += 1
                inner = self._num_loops
            for part in ("body", "elif_", "else_"):
                if isinstance(statements := getattr(node, part, None), list):
                    setattr(node, part, self.statements(statements, loop=inner))
            found.append(node)
            if isinstance(node, nodes.For) and inner is not None:
                node.body.insert(0, _call("gangline_enter", node, inner, _names(node.target)))
                found.append(_call("gangline_leave", node, inner))
            elif isinstance(node, nodes.Assign) and loop is not None and self._by_assignment:
                found += [_call("gangline_assign", node, loop, [name]) for name in _names(node.target)]
        return found


def _names(target: nodes.Node) -> list[str]:
    parts = target.items if isinstance(target, nodes.Tuple) else [target]
    return [part.name for part in parts if isinstance(part, nodes.Name)]


def _call(function: str, near: nodes.Node, loop: int, names: Sequence[str] = ()) -> nodes.Node:
    arguments: list[nodes.Expr] = [nodes.Const(loop), *(nodes.Name(name, "load") for name in names)]
    call = nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)
    return nodes.Output([call]).set_lineno(near.lineno)


# --- probes in the messages


@dataclass(frozen=True, slots=True)
class _Placed:
    message: int
    kind: ProbeKind
    opens: bool
    shift: int
    """Letters between the probe and the end of its text."""


def _probed(messages: Sequence[Message], *, inside: bool) -> tuple[list[Message], list[_Placed]]:
    """Copies of the messages whose texts carry probes, at their ends or one letter further in."""
    placed: list[_Placed] = []
    found = []
    for number, message in enumerate(messages):
        writer = _ProbeWriter(number, placed, 1 if inside else 0)
        found.append(writer.message(message))
    return found, placed


@dataclass(slots=True)
class _ProbeWriter:
    number: int
    placed: list[_Placed]
    shift: int
    _thoughts: dict[str, str] = field(default_factory=dict)

    def message(self, message: Message) -> Message:
        """A copy with probes in contents, thinking, and the texts among arguments of tool calls."""
        copy = dict(message)
        for key in ("reasoning_content", "thinking"):
            if isinstance(message.get(key), str):
                copy[key] = self._thought(message[key])
        content = message.get("content")
        if isinstance(content, str):
            copy["content"] = self._content(content)
        elif isinstance(content, list):
            copy["content"] = [
                {**part, "text": self._content(part["text"])} if isinstance(part.get("text"), str) else dict(part)
                for part in content
            ]
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = [self._tool_call(call) for call in calls]
        return copy

    def _content(self, text: str) -> str:
        parts, at, inside = [], 0, False
        tags = [*THINK_TAGS.finditer(text)]
        # a thought may begin without a tag: its opening one was part of the prompt
        inside = bool(tags) and "/" in tags[0].group()
        for tag in tags:
            parts += [self._between(text[at : tag.start()], "thought" if inside else "text"), tag.group()]
            at, inside = tag.end(), "/" not in tag.group()
        return "".join([*parts, self._between(text[at:], "thought" if inside else "text")])

    def _thought(self, text: str) -> str:
        if text not in self._thoughts:  # the same thought under its two names
            self._thoughts[text] = self._between(text, "thought")
        return self._thoughts[text]

    def _between(self, text: str, kind: ProbeKind) -> str:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start >= end:
            return text
        shift = min(self.shift, (end - start) // 2)
        first, last = start + shift, end - shift
        return (
            text[:first]
            + self._probe(kind, True, shift)
            + text[first:last]
            + self._probe(kind, False, shift)
            + (text[last:])
        )

    def _probe(self, kind: ProbeKind, opens: bool, shift: int) -> str:
        self.placed.append(_Placed(self.number, kind, opens, shift))
        return _mark(_PROBE, len(self.placed) - 1)

    def _tool_call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": self._tool_call(function)}
        if "arguments" not in call:
            return dict(call)
        arguments = call["arguments"]
        if isinstance(arguments, str):
            return {**call, "arguments": self._arguments(arguments)}
        return {**call, "arguments": self._leaves(arguments)}

    def _arguments(self, text: str) -> str:
        try:
            values = json.loads(text)
        except ValueError:
            return text
        # only where the text would stay what it is
        return dumped(self._leaves(values)) if dumped(values) == text else text

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._between(value, "call")
        if isinstance(value, dict):
            return {key: self._leaves(each) for key, each in value.items()}
        return [self._leaves(each) for each in value] if isinstance(value, list) else value


def dumped(value: Any) -> str:
    """Arguments of a tool call as the text that templates put into their words."""
    return json.dumps(value, ensure_ascii=False)


# --- reading the marked text


def _read(marked: str, placed: Sequence[_Placed]) -> Rendering | None:
    reader = _Reader(placed)
    at = 0
    for mark in _MARK.finditer(marked):
        reader.words(marked[at : mark.start()])
        reader.mark([int(number) for number in mark.group(1).split(":")])
        at = mark.end()
    reader.words(marked[at:])
    return reader.rendering()


class _Reader:
    """Follows the marks of a text."""

    def __init__(self, placed: Sequence[_Placed]) -> None:
        self._placed = placed
        self._parts: list[str] = []
        self._at = 0
        self._loops: list[tuple[int, int]] = []
        """(loop, message) from the outermost to the innermost."""
        self._stretches: list[Stretch] = []
        self._probes: list[TextEnd] = []
        self._begun: list[int] = []
        self._tagged: list[tuple[int, int]] = []

    def words(self, text: str) -> None:
        """What stands between two marks."""
        if not text:
            return
        message = self._loops[-1][1] if self._loops else None
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.message == message:
            self._stretches[-1] = Stretch(last.start, self._at + len(text), message)
        else:
            self._stretches.append(Stretch(self._at, self._at + len(text), message))
        self._parts.append(text)
        self._at += len(text)

    def mark(self, numbers: list[int]) -> None:
        """One mark."""
        kind, *rest = numbers
        if kind == _PROBE:
            placed = self._placed[rest[0]]
            shift = -placed.shift if placed.opens else placed.shift
            self._probes.append(TextEnd(self._at + shift, placed.message, placed.kind, placed.opens))
        elif kind == _BEGIN:
            self._begun.append(self._at)
        elif kind == _END and self._begun:
            self._tagged.append((self._begun.pop(), self._at))
        elif kind in {_ENTER, _LEAVE}:
            loop = rest[0]
            known = [index for index, (each, _) in enumerate(self._loops) if each == loop]
            del self._loops[known[0] if known else len(self._loops) :]
            if kind == _ENTER:
                self._loops.append((loop, rest[1]))

    def rendering(self) -> Rendering:
        """All of it."""
        seen = {(probe.message, probe.kind, probe.opens) for probe in self._probes}
        missing = {
            (each.message, each.kind) for each in self._placed if (each.message, each.kind, each.opens) not in seen
        }
        return Rendering(
            text="".join(self._parts),
            stretches=tuple(_joined(self._stretches, "".join(self._parts))),
            probes=tuple(sorted(self._probes, key=lambda probe: probe.at)),
            tagged=_merged(self._tagged),
            missing=frozenset(missing),
        )


def _joined(stretches: list[Stretch], text: str) -> list[Stretch]:
    """White space that a look at another message left amid the words of one belongs to these words."""
    found: list[Stretch] = []
    for index, stretch in enumerate(stretches):
        before = found[-1] if found else None
        after = stretches[index + 1] if index + 1 < len(stretches) else None
        owner = stretch.message
        if before and after and before.message == after.message and not text[stretch.start : stretch.end].strip():
            owner = before.message
        if before and before.message == owner:
            found[-1] = Stretch(before.start, stretch.end, owner)
        else:
            found.append(Stretch(stretch.start, stretch.end, owner))
    return found


def _merged(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans in order, without those inside others and without empty ones."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if end > start and (not found or start >= found[-1][1]):
            found.append((start, end))
    return tuple(found)


def _stranger(rendering: Rendering, messages: Sequence[Message]) -> str | None:
    """The words of one message among those of another, where an assistant is one of the two; None if all is well."""
    stretches = iter(rendering.stretches)
    stretch = next(stretches, None)
    for probe in rendering.probes:
        # an opening probe belongs to the letter after it, a closing one to the letter before it
        at = probe.at if probe.opens else probe.at - 1
        while stretch is not None and stretch.end <= at:
            stretch = next(stretches, None)
        owner = stretch.message if stretch is not None else None
        said_by = messages[probe.message].get("role")
        among = messages[owner].get("role") if owner is not None else None
        if owner != probe.message and "assistant" in {said_by, among}:
            where = "outside of its loop over messages" if owner is None else f"among the words of message {owner + 1}"
            return f"the template writes message {probe.message + 1} {where}"
    return None
