"""Data formats: which columns a row has, which text the model sees, and which part of it the model learns.

    text         text                          learns all of it
    completion   prompt, completion            learns the completion and the end-of-text token
    instruction  instruction, output           learns the output and the end-of-text token
                 (input, system, history)
    alpaca       instruction, output (input)   the same below the sentences of Stanford Alpaca, letter by letter
    chat         messages                      learns the assistant's messages, by the chat template
                 or prompt, completion         the same, of the completion only; both are texts or lists of messages
                 or instruction, output        the same, of an instruction row with the answers in its history
                 (tools, system, input, history)

Columns in brackets may be missing. A format is one row of `FORMATS`, or of a plug-in (`gangline.formats`): job.yaml,
the schema, the tokeniser and `gangline chat` read the row and know no format by name. In `completion`, prompt and
completion follow each other as they are: a space or a line break between them belongs to the row.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.plugins import Table, instance_of


class RowError(Exception):
    """A row cannot be used; the text is the reason, without the place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a row's text. It is tokenised on its own: no token spans learned and other text."""

    text: str
    learned: bool


def read_text(column: str, value: Any) -> str:
    """The value of a text column. Raises RowError for another type, and for half a surrogate pair."""
    if not isinstance(value, str):
        messages = isinstance(value, list) and value and isinstance(value[0], dict)
        hint = "; data.format: chat reads messages" if messages else ""
        raise RowError(f"{column!r} is a {type(value).__name__}, not a text{hint}")
    _check_encodable(column, value)
    if "\0" in value:
        raise RowError(f"{column!r} has a NUL character: it is no text, or in an encoding such as UTF-16")
    return value


def _check_encodable(column: str, value: str) -> None:
    if not _is_encodable(value):
        raise RowError(f"{column!r} has half a surrogate pair, which is no character")


def _is_encodable(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """One data format. Exactly one of `segments` and `messages` is given; both get the row's values by role."""

    roles: tuple[str, ...]
    """The values that a row has. A role is the name of its column, unless `data.fields` of the job names another."""
    optional: frozenset[str] = frozenset()
    """Roles that a row may lack; their value is "" then."""
    either: tuple[tuple[str, ...], ...] = ()
    """Optional roles of which a row has one group whole: the first that it has is read, the others are "" then."""
    conversations: frozenset[str] = frozenset()
    """Roles whose values are messages, or a text that stands for one. `data.fields` can rename `MESSAGE_KEYS` in them,
    and `data.roles` those who speak."""
    readers: Mapping[str, Callable[[str, Any], Any]] = field(default_factory=dict)
    """Role -> function of (column, value) that checks a value and gives it back, or raises RowError. A role without
    one is a text."""
    segments: Callable[[Mapping[str, Any]], Sequence[Segment]] | None = None
    """The text of a row, and which stretches of it are learned. Raises RowError for a row that cannot be used."""
    messages: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None
    """The conversation of a row, as messages with `role` and `content` for the tokenizer's chat template."""
    answer: str | None = None
    """The role that is learned; a row where it is empty is refused."""
    whole: bool = False
    """Every token of a row is learned. Rows may be split over several samples (`data.overlong: split`) and may come
    from plain-text files, whose text is the role `text`."""
    prompt: Callable[[str], str] | None = None
    """How `gangline chat` puts a line of the user to a model that was trained on such rows; None: by the tokenizer's
    chat template where rows are `messages` or `whole` texts, else the line as it is."""

    def __post_init__(self) -> None:
        if not self.roles or not all(isinstance(role, str) for role in self.roles):
            raise ValueError("a data format needs roles, a tuple of texts")
        if (self.segments is None) == (self.messages is None):
            raise ValueError("a data format has either segments or messages")
        named = {*self.optional, *self.readers, *self.conversations, *sum(self.either, ())}
        strange = {*named, *filter(None, [self.answer])} - set(self.roles)
        if strange:
            raise ValueError(f"{', '.join(sorted(strange))}: not among the roles {', '.join(self.roles)}")


def instruction_prompt(instruction: str, text: str = "") -> str:
    """The words before the output of an instruction row; what to type to a model tuned on such rows."""
    given = f"### Input:\n{text}\n\n" if text else ""
    return f"### Instruction:\n{instruction}\n\n{given}### Response:\n"


def alpaca_prompt(instruction: str, text: str = "") -> str:
    """The words of Stanford Alpaca before the output of a row, letter by letter."""
    given = ", paired with an input that provides further context" if text else ""
    task = f"Below is an instruction that describes a task{given}. "
    return (
        f"{task}Write a response that appropriately completes the request.\n\n{instruction_prompt(instruction, text)}"
    )


def _answered(prompt: str, answer: str) -> tuple[Segment, ...]:
    return Segment(prompt, learned=False), Segment(answer, learned=True)


def _instruction(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    """History is given, not learned: an answer in the middle of a text has no end-of-text token to learn."""
    said = "".join(f"{instruction_prompt(question)}{answer}\n\n" for question, answer in row["history"])
    system = f"{row['system']}\n\n" if row["system"] else ""
    return _answered(system + said + instruction_prompt(row["instruction"], row["input"]), row["output"])


# Conversations: many forms in rows, one form for the chat template.

Message = dict[str, Any]

MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
"""Keys of a message that `data.fields` can rename: {"role": "from", "content": "value"}."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which messages have the thinking before an answer; the first is the one that templates get."""
TOOL_CALLS = "tool_calls"
"""Beside roles of the chat template, what `data.roles` may say: the content is the JSON of an assistant's calls."""
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", TOOL_CALLS)
"""What `data.roles` makes of names in rows in most cases; a template may know others."""
USUAL_SPEAKERS: Mapping[str, str] = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "bard", "bing"), "assistant"),
    "observation": "tool",
    "function_response": "tool",
    "function_call": TOOL_CALLS,
}
"""Role under which data sets have it -> that of chat templates."""
ASSISTANT = ("assistant",)
"""Whose messages are learned, unless `data.learn.roles` names others."""
GIVEN = "gangline_given"
"""Key of a message that belongs to the prompt, whoever speaks: it is not learned, and no template sees the key."""


def read_messages(
    column: str, value: Any, fields: Mapping[str, str] | None = None, speakers: Mapping[str, str] | None = None
) -> list[Message]:
    """Messages with a role and a content, in the form that chat templates take. Raises RowError.

    Parts of a content are joined; a content is None only beside tool calls. JSON in a text is read, as csv has it.
    Keys that are null are left out, for tables of columns have them in every message.

    fields: `MESSAGE_KEYS` -> what they are called in the row.
    speakers: role in the row -> role of the chat template, or `TOOL_CALLS`.
    """
    names = {key: name for key in MESSAGE_KEYS if (name := fields.get(key, key)) != key} if fields else {}
    messages = _json(column, value, "a list of messages")
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{column!r} is not a list of messages")
    called = names.get("role", "role"), names.get("content", "content")
    speakers = speakers or {}
    return [
        _plain(message, *called, speakers) or _message(message, f"message {number} of {column!r}", names, speakers)
        for number, message in enumerate(messages, start=1)
    ]


def _json(column: str, value: Any, expected: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowError(f"{column!r} is a text, but not the JSON of {expected}") from None


def _plain(message: Any, role: str, content: str, speakers: Mapping[str, str]) -> Message | None:
    """A message that is a role and a text and nothing else, as most are; None for any other."""
    if type(message) is not dict or len(message) != 2:
        return None
    speaker, said = message.get(role), message.get(content)
    if type(speaker) is not str or type(said) is not str or not _is_encodable(said):
        return None
    speaker = speakers.get(speaker, speaker)
    return None if speaker == TOOL_CALLS else {"role": speaker, "content": said}


def _message(message: Any, where: str, names: Mapping[str, str], speakers: Mapping[str, str]) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{where} is a {type(message).__name__}; expected {{'role': ..., 'content': ...}}")
    found = {key: value for key, value in message.items() if value is not None}
    for key, name in names.items():
        value = found.pop(name, None)
        found.pop(key, None)
        if value is not None:
            found[key] = value
    role = found.get("role")
    if not isinstance(role, str):
        raise RowError(_no_role(message, where, names))
    found["role"] = role = speakers.get(role, role)
    if role == TOOL_CALLS:
        found |= {"role": "assistant", "tool_calls": found.pop("content", None)}
    _take_reasoning(found, where)
    _take_calls(found, where)
    content = found.get("content")
    if content is None:
        if "tool_calls" not in found:
            raise RowError(_no_content(message, where, names))
        found["content"] = None
    elif isinstance(content, str):
        _check_encodable(where, content)
    else:
        found["content"] = _joined(content, where, found)
    return found


def _no_role(message: Message, where: str, names: Mapping[str, str]) -> str:
    if names.get("role", "role") in message:
        return f"{where} has a role that is no text: {message[names.get('role', 'role')]!r}"[:200]
    hint = ""
    if {"from", "value"} <= set(message) and not names:
        hint = "; is it data.fields: {role: from, content: value} and data.roles: {human: user, gpt: assistant}?"
    return f"{where} has no role; it has {', '.join(map(repr, list(message)[:8])) or 'nothing'}{hint}"


def _no_content(message: Message, where: str, names: Mapping[str, str]) -> str:
    name = names.get("content", "content")
    if name in message:
        return f"{where} has null as its {name}, and no tool calls"
    return f"{where} has no {name}; it has {', '.join(map(repr, list(message)[:8]))}"


def _joined(content: Any, where: str, message: Message) -> str:
    """The text of a list of parts, as OpenAI's API has them; thinking goes to where templates look for it."""
    if not isinstance(content, list):
        raise RowError(f"{where} has a content that is a {type(content).__name__}, neither a text nor a list of parts")
    texts = []
    for part in content:
        given = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = given.get("type") or "text" if isinstance(given, dict) else type(part).__name__
        if kind in {"thinking", "reasoning"}:
            thought = given.get(kind) or given.get("text")
            if not isinstance(thought, str):
                raise RowError(f"{where} has a part of the type {kind!r} without a text")
            message[REASONING_KEYS[0]] = message.get(REASONING_KEYS[0], "") + thought
            continue
        if kind not in {"text", "input_text", "output_text"}:
            raise RowError(f"{where} has a part of the type {kind!r}; gangline trains on text")
        if not isinstance(given.get("text"), str):
            raise RowError(f"{where} has a part of the type 'text' without a text")
        _check_encodable(where, given["text"])
        texts.append(given["text"])
    return "".join(texts)


def _take_reasoning(message: Message, where: str) -> None:
    given = [message.pop(key) for key in REASONING_KEYS if key in message]
    for thought in given[:1]:
        if not isinstance(thought, str):
            raise RowError(f"{where} has reasoning that is a {type(thought).__name__}, not a text")
        _check_encodable(where, thought)
        message[REASONING_KEYS[0]] = thought


def _take_calls(message: Message, where: str) -> None:
    calls = message.pop("tool_calls", None)
    if calls is None and isinstance(message.get("function_call"), dict):  # before tools, OpenAI's API called functions
        calls = [message.pop("function_call")]
    calls = _json(f"tool_calls of {where}", calls, "a list of tool calls")
    if calls in (None, []):
        return
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise RowError(f"{where} has tool calls that are no list")
    message["tool_calls"] = [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{where} has a tool call without the name of a function: {call!r}"[:200])
    if not isinstance(function.get("arguments", {}), dict | str):
        raise RowError(f"{where} has a tool call whose arguments are neither an object nor its JSON")
    function = {"name": function["name"], "arguments": function.get("arguments", {})}
    outside = {key: value for key, value in call.items() if key not in {"function", "name", "arguments"}}
    return {"type": "function", **outside, "function": function}


def read_tools(column: str, value: Any) -> Any:
    """The tools that a conversation may use: a list of JSON schemas, or its JSON; "" for none. Raises RowError."""
    if value == "":
        return ""
    tools = _json(column, value, "a list of tools")
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{column!r} is not a list of tools")
    return tools or ""


def read_history(column: str, value: Any) -> Any:
    """Earlier turns of an instruction row: pairs of (instruction, output), or their JSON. Raises RowError."""
    turns = _json(column, value, "a list of pairs") if value != "" else []
    if not isinstance(turns, list):
        raise RowError(f"{column!r} is not a list of pairs")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(f"turn {number} of {column!r} is not a pair of texts: [instruction, output]")
        for text in turn:
            _check_encodable(column, text)
    return turns


def _conversation(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row of the format `chat`, whichever of its forms it has. Raises RowError."""
    if row["messages"]:
        messages = list(row["messages"])
    elif row["completion"]:
        prompt = [{**message, GIVEN: True} for message in _turn("user", row["prompt"])]
        messages = [*prompt, *_turn("assistant", row["completion"])]
    else:
        turns = [*row["history"], ("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"])]
        messages = [message for turn in turns for message in _pair(*turn)]
    if row["system"]:
        if messages[0]["role"] == "system":
            raise RowError("a system message, and a system column besides")
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def require_learned(messages: Sequence[Message], roles: Collection[str] = ASSISTANT) -> None:
    """Raise RowError for a conversation without words of those who are learned; roles: `data.learn.roles`."""
    learned = [message for message in messages if message.get("role") in roles and not message.get(GIVEN)]
    if not learned:
        spoken = list(dict.fromkeys(str(message.get("role")) for message in messages))
        renamed = ", ".join(f"{role}: {USUAL_SPEAKERS[role]}" for role in spoken if role in USUAL_SPEAKERS)
        raise RowError(
            f"no {' or '.join(roles)} message, so there is nothing to learn; roles are {', '.join(map(repr, spoken))} "
            f"(data.roles: {{{renamed or 'name: assistant'}}})"
        )
    if not any(message.get("content") or message.get("tool_calls") for message in learned):
        raise RowError(f"every {' or '.join(roles)} message is empty")


def _turn(role: str, value: Any) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _pair(question: str, answer: str) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


_CONTEXT = ("input", "history", "system", "tools")

FORMATS: Table[DataFormat] = Table(
    "gangline.formats",
    {
        "text": DataFormat(
            roles=("text",),
            segments=lambda row: (Segment(row["text"], learned=True),),
            whole=True,
        ),
        "instruction": DataFormat(
            roles=("instruction", "input", "output", "system", "history"),
            optional=frozenset({"input", "system", "history"}),
            readers={"history": read_history},
            segments=_instruction,
            answer="output",
            prompt=instruction_prompt,
        ),
        "alpaca": DataFormat(
            roles=("instruction", "input", "output"),
            optional=frozenset({"input"}),
            segments=lambda row: _answered(alpaca_prompt(row["instruction"], row["input"]), row["output"]),
            answer="output",
            prompt=alpaca_prompt,
        ),
        "completion": DataFormat(
            roles=("prompt", "completion"),
            segments=lambda row: _answered(row["prompt"], row["completion"]),
            answer="completion",
        ),
        "chat": DataFormat(
            roles=("messages", "prompt", "completion", "instruction", "output", *_CONTEXT),
            optional=frozenset(_CONTEXT),
            either=(("messages",), ("prompt", "completion"), ("instruction", "output")),
            conversations=frozenset({"messages", "prompt", "completion"}),
            readers={"history": read_history, "tools": read_tools},
            messages=_conversation,
        ),
    },
    read=instance_of(DataFormat),
)
"""Every data format by its name in job.yaml."""


# The values of a row by role. Pure: the controller reads rows before a start, and the tokeniser during one.

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("content", "body", "document", "passage"),
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "completion": ("answer", "response", "output", "solution", "chosen"),
    "instruction": ("prompt", "question", "query"),
    "output": ("response", "answer", "completion"),
    "messages": ("conversations", "conversation", "chat", "dialog", "turns"),
}
"""Role -> names under which data sets have it."""


def fields_of(name: str, renamed: Mapping[str, str]) -> dict[str, str]:
    """Role, or key of a message -> its name in the row, for all that a format reads. Raises UsageError, PluginError.

    renamed: `data.fields` of the job.
    """
    rules = FORMATS[name]
    keys = MESSAGE_KEYS if rules.conversations else ()
    return {role: renamed.get(role, role) for role in (*rules.roles, *keys)}


def expected_columns(name: str, fields: Mapping[str, str]) -> str:
    """The columns that a row has to have, for messages: `'prompt', 'completion'`."""
    rules = FORMATS[name]
    either = {role for group in rules.either for role in group}
    groups = rules.either or ((),)
    always = [role for role in rules.roles if role not in rules.optional | either]
    return ", or ".join(", ".join(repr(fields[role]) for role in (*group, *always)) for group in groups)


PREFERENCE = frozenset({"chosen", "rejected"})
"""Columns of a row of which one answer is preferred to another."""
MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Columns beside messages that have what a text stands for."""


def read_values(
    name: str, fields: Mapping[str, str], row: Mapping[str, Any], speakers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values of a row by role; raises RowError for one that is missing or of the wrong type.

    fields: see `fields_of`. speakers: `data.roles` of the job.
    """
    rules = FORMATS[name]
    if not PREFERENCE.isdisjoint(row) or (rules.conversations and not MEDIA.isdisjoint(row)):
        _refuse_others(rules, fields, row)
    unread = _unread(rules, fields, row)
    found: dict[str, Any] = {}
    for role in rules.roles:
        column = fields[role]
        value = None if role in unread else row.get(column)
        if value is None:
            if role not in rules.optional and role not in unread:
                raise RowError(_missing(name, fields, row, role))
            found[role] = ""
        elif role in rules.conversations and not _is_plain(role, value):
            found[role] = read_messages(column, value, fields, speakers)
        elif reader := rules.readers.get(role):
            with FORMATS.guard(name, passing=RowError):
                found[role] = reader(column, value)
        else:
            found[role] = read_text(column, value)
    return found


def _refuse_others(rules: DataFormat, fields: Mapping[str, str], row: Mapping[str, Any]) -> None:
    """Raise RowError for a row of preferences, and for a conversation about images, unless `data.fields` says how to
    read it: to train on the rest of it alone would be another job.
    """
    there = [column for column in row if row[column] and column not in fields.values()]
    if set(there) >= PREFERENCE:
        raise RowError(
            "a row of preferences ('chosen', 'rejected'), on which gangline does not train; "
            "to learn the chosen answers alone, map that column, as data.fields: {completion: chosen} does"
        )
    media = [column for column in there if column in MEDIA]
    if media and rules.conversations:
        raise RowError(f"{media[0]!r} belongs to the conversation; gangline trains on text, without the column")


def _is_plain(role: str, value: Any) -> bool:
    """Whether a prompt or a completion is a text for one message; in csv, messages are the JSON of a list."""
    return role != "messages" and isinstance(value, str) and not (value[:1] == "[" and _is_json(value))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _unread(rules: DataFormat, fields: Mapping[str, str], row: Mapping[str, Any]) -> frozenset[str]:
    """Roles of the groups that are not read."""
    if not rules.either:
        return frozenset()
    there = (group for group in rules.either if all(row.get(fields[role]) is not None for role in group))
    chosen = next(there, None)
    if chosen is None:
        chosen = max(rules.either, key=lambda group: sum(fields[role] in row for role in group))
    return _others(rules.either, chosen)


@functools.lru_cache
def _others(groups: tuple[tuple[str, ...], ...], chosen: tuple[str, ...]) -> frozenset[str]:
    return frozenset(role for group in groups for role in group) - frozenset(chosen)


def check_row(
    name: str,
    fields: Mapping[str, str],
    row: Mapping[str, Any],
    speakers: Mapping[str, str] | None = None,
    learned: Collection[str] = ASSISTANT,
) -> int:
    """The characters of a row; raises RowError for one that cannot be used, as far as no tokenizer has to say it.

    speakers, learned: `data.roles` and `data.learn.roles` of the job.
    """
    values, rules = read_values(name, fields, row, speakers), FORMATS[name]
    if rules.messages is not None:
        with FORMATS.guard(name, passing=RowError):
            require_learned(rules.messages(values), learned)
    if rules.answer is not None and not values[rules.answer]:
        raise RowError(f"{fields[rules.answer]!r} is empty")
    return sum(_characters(value) for value in values.values() if value)


def _characters(value: Any) -> int:
    """Of a text, of the contents of messages, or of what else a row has, as Python writes it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list) and isinstance(value[0], dict) and "content" in value[0]:
        return sum(len(message.get("content") or "") for message in value)
    return len(str(value))


def _missing(name: str, fields: Mapping[str, str], row: Mapping[str, Any], role: str) -> str:
    column = fields[role]
    if column in row:
        return f"{column!r} is null"
    renamed = ", ".join(f"{key}: {value}" for key, value in _guess(name, fields, row, role).items())
    hint = f"; did you mean data.fields: {{{renamed}}}?" if renamed else ""
    return f"no field {column!r}; there are {', '.join(map(repr, list(row)[:12])) or 'none'}{hint}"


def _guess(name: str, fields: Mapping[str, str], row: Mapping[str, Any], role: str) -> dict[str, str]:
    """`data.fields` that would give the row all that it has to have, or at least `role`."""
    guesses = _guesses(name, fields, row)
    return next((guess for guess in guesses if guess), None) or _guess_all((role,), fields, row) or {}


def _guesses(name: str, fields: Mapping[str, str], row: Mapping[str, Any]) -> list[dict[str, str] | None]:
    """For each group of columns that a row may have: the `data.fields` that would give it all of them, {} for none."""
    rules = FORMATS[name]
    either = {each for group in rules.either for each in group}
    required = tuple(each for each in rules.roles if each not in rules.optional | either)
    return [_guess_all((*group, *required), fields, row) for group in rules.either or ((),)]


def fitting_format(rows: Sequence[Mapping[str, Any]], *, preferred: str) -> str:
    """The words of a job that fit all of these rows, such as "data.format: completion or chat"; "" for none.

    They name the formats that read most of the columns, half of them at the least where some are renamed, and of these
    the ones that rename fewest; `preferred` alone where it is one of them.
    """
    found: dict[tuple[int, int, str], list[str]] = {}
    for name in FORMATS.built_in if rows else ():
        guesses = [guess for guess in _guesses(name, fields_of(name, {}), rows[0]) if guess is not None]
        if fits := [words for guess in guesses if (words := _fits(name, guess, rows))]:
            found.setdefault(max(fits, key=lambda words: words[:2]), []).append(name)
    if not found:
        return ""
    (_, _, renamed), names = max(
        reversed(found.items()), key=lambda item: (*item[0][:2], preferred in item[1], len(item[1]))
    )
    shown = [preferred] if preferred in names else [", ".join(names[:-1]), names[-1]]
    return f"data.format: {' or '.join(filter(None, shown))}{renamed}"


def _fits(name: str, renamed: dict[str, str], rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, str] | None:
    """(columns that are read, less names of them, the words for these); None if a row cannot be used."""
    fields, rules = fields_of(name, renamed), FORMATS[name]
    speakers = {}
    for row in rows:
        messages = row.get(fields.get("messages", ""))
        for message in messages if isinstance(messages, list) else ():
            said_by = message.get(fields["role"]) if isinstance(message, dict) else None
            if isinstance(said_by, str) and said_by in USUAL_SPEAKERS:
                speakers[said_by] = USUAL_SPEAKERS[said_by]
    try:
        for row in rows:
            check_row(name, fields, row, speakers)
    except RowError:
        return None
    read = {fields[role] for role in rules.roles if role not in _unread(rules, fields, rows[0])} & set(rows[0])
    if renamed and 2 * len(read) < len(rows[0]):
        return None
    parts = {"fields": renamed, "roles": speakers}
    said = [
        f"data.{key}: {{{', '.join(f'{a}: {b}' for a, b in value.items())}}}" for key, value in parts.items() if value
    ]
    return len(read), -len(renamed), f" with {' and '.join(said)}" if said else ""


def _guess_all(roles: Sequence[str], fields: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for role in roles:
        if fields[role] in row:
            continue
        free = [name for name in row if name not in found.values()]
        usual = [name for name in USUAL_NAMES.get(role, ()) if name in free]
        near = usual[0] if usual else _nearest(fields[role], tuple(free))
        if near is None:
            return None
        found[role] = near
    if "messages" in found and "role" in fields:
        found |= _share_gpt(row[found["messages"]])
    return found


@functools.lru_cache  # many rows lack the same column
def _nearest(column: str, names: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(column, names, n=1)), None)


def _share_gpt(value: Any) -> dict[str, str]:
    """The further names that messages in the manner of ShareGPT want."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"from", "value"} <= set(value[0]):
        return {"role": "from", "content": "value"}
    return {}


def has_conversations(name: str) -> bool:
    """Whether the rows of a format are messages, which a chat template turns into text."""
    return FORMATS[name].messages is not None
