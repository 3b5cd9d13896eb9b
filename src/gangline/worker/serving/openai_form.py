"""OpenAI's form of requests, answers and errors, as plain data: https://platform.openai.com/docs/api-reference."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import GanglineError, UsageError
from gangline.worker.serving.engine import Piece, Question, QueueFull

# Keys that say nothing about the answer.
_SILENT = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}
_SHARED = {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
_CHAT = {*_SHARED, "messages", "max_completion_tokens", "tools", "tool_choice"}
_COMPLETION = {*_SHARED, "prompt"}
# Keys of the form that we have only in the way in which they change nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}
_COMPLETION_TOKENS = 16
"""The form's own length of a completion that names none."""
_CALL = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(kw_only=True, eq=False)  # not frozen: Python writes the traceback into an exception
class Refusal(Exception):
    """A request that gets an error: the status, and what OpenAI's clients read."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    def body(self) -> dict[str, Any]:
        """The error as the form has it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: GanglineError) -> Refusal:
    """The answer to a request for which an engine raised an error."""
    if isinstance(error, QueueFull):
        return Refusal(status=429, message=str(error), code="queue_full")
    if isinstance(error, UsageError):
        too_long = "too long" in error.what
        return Refusal(status=400, message=str(error), code="context_length_exceeded" if too_long else None)
    return Refusal(status=503 if "closing" in error.what else 500, message=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request that was read."""

    question: Question
    is_chat: bool
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


def read_request(body: bytes, models: Sequence[str], *, is_chat: bool) -> ApiRequest:
    """Read a request. Raises Refusal: 400, or 404 for a model that is not served."""
    try:
        data = json.loads(body)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refusal(status=400, message="the body has one half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(status=400, message=f"the body is no JSON that can be read: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(status=400, message="the body is no JSON object")
    data = {key: value for key, value in data.items() if value is not None and key not in _SILENT}
    _refuse_unknown(data, _CHAT if is_chat else _COMPLETION)
    model = _typed(data, "model", str, required=True)
    _require_served(model, models)
    stream_options = _typed(data, "stream_options", dict) or {}
    return ApiRequest(
        question=_chat(data, model) if is_chat else _completion(data, model),
        is_chat=is_chat,
        stream=bool(_typed(data, "stream", bool)),
        with_usage=bool(stream_options.get("include_usage")),
    )


def _refuse_unknown(data: Mapping[str, Any], known: set[str]) -> None:
    for key, value in data.items():
        if key in known or any(value == each for each in _NOTHING.get(key, ())):
            continue
        raise Refusal(status=400, message=f"{key[:100]!r} is not supported by this endpoint", param=key[:100])


def _chat(data: Mapping[str, Any], model: str) -> Question:
    messages = _typed(data, "messages", list, required=True)
    if not messages:
        raise Refusal(status=400, message="'messages' is empty", param="messages")
    choice = data.get("tool_choice", "auto")
    if choice not in {"auto", "none"} if isinstance(choice, str) else True:
        raise Refusal(status=400, message="'tool_choice' can be auto or none here", param="tool_choice")
    tools = _typed(data, "tools", list) if choice == "auto" else None
    limit = "max_completion_tokens" if "max_completion_tokens" in data else "max_tokens"
    return Question(
        model=model,
        messages=[_message(message, number) for number, message in enumerate(messages)],
        tools=tools,
        max_tokens=_whole(data, limit),
        **_drawing(data),
    )


def _completion(data: Mapping[str, Any], model: str) -> Question:
    text = _typed(data, "prompt", str, required=True)
    limit = _whole(data, "max_tokens")
    return Question(model=model, text=text, max_tokens=_COMPLETION_TOKENS if limit is None else limit, **_drawing(data))


def _message(message: Any, number: int) -> dict[str, Any]:
    place = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(status=400, message=f"{place} is no object with a role", param=place)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise Refusal(status=400, message=f"{place}: only parts of text can be read", param=place)
        content = "".join(map(str, parts))
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise Refusal(status=400, message=f"{place} has no content", param=place)
    kept = {key: value for key, value in message.items() if key in {"role", "name", "tool_call_id"}}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call, place) for call in calls]
    return {**kept, "content": content or ""}


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as data: templates write them as JSON themselves."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, ValueError):
        raise Refusal(status=400, message=f"{place}: a tool call cannot be read", param=place) from None


def _drawing(data: Mapping[str, Any]) -> dict[str, Any]:
    stop = data.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(each, str) and each for each in stop):
        raise Refusal(status=400, message="'stop' is up to 4 texts", param="stop")
    seed = _typed(data, "seed", int)
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise Refusal(status=400, message="'seed' has up to 64 bits", param="seed")
    return {
        "temperature": _between(data, "temperature", 0.0, 2.0),
        "top_p": _between(data, "top_p", 0.0, 1.0),
        "seed": seed,
        "stop": tuple(stop),
    }


def _between(data: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = data.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refusal(status=400, message=f"{key!r} is a number from {low:g} to {high:g}", param=key)
    return float(value)


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    value = _typed(data, key, int)
    if value is not None and value < 1:
        raise Refusal(status=400, message=f"{key!r} is at least 1", param=key)
    return value  # type: ignore[no-any-return]


def _typed(data: Mapping[str, Any], key: str, kind: type, *, required: bool = False) -> Any:
    value = data.get(key)
    if value is None and not required:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {str: "a text", list: "a list", dict: "an object", bool: "true or false", int: "a whole number"}
        raise Refusal(status=400, message=f"{key!r} is {words[kind]}", param=key)
    return value


def model_list(models: Sequence[str]) -> dict[str, Any]:
    """The answer to `/v1/models`."""
    return {"object": "list", "data": [model_entry(name, models) for name in models]}


def model_entry(name: str, models: Sequence[str]) -> dict[str, Any]:
    """The answer to `/v1/models/NAME`. Raises Refusal (404) for a model that is not served."""
    _require_served(name, models)
    return {"id": name, "object": "model", "created": 0, "owned_by": "gangline"}


def _require_served(name: str, models: Sequence[str]) -> None:
    if name not in models:
        message = f"the model {name[:200]!r} is not served; there is {', '.join(models)}"
        raise Refusal(status=404, message=message, code="model_not_found", param="model")


class AnswerForm:
    """The answer to one request, whole or as the parts of a stream."""

    def __init__(self, asked: ApiRequest) -> None:
        self._asked = asked
        self._id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """The answer that does not stream."""
        if not self._asked.is_chat:
            choice = {"index": 0, "text": text, "finish_reason": last.finish, "logprobs": None}
            return self._record("text_completion", [choice], usage=_usage(last))
        text, calls = self._calls(text)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else last.finish}
        return self._record("chat.completion", [choice], usage=_usage(last))

    def begin(self) -> list[dict[str, Any]]:
        """The parts before the text."""
        return [self._delta({"role": "assistant", "content": ""}, None)] if self._asked.is_chat else []

    def part(self, text: str) -> dict[str, Any]:
        """The next words."""
        if self._asked.is_chat:
            return self._delta({"content": text}, None)
        return self._record("text_completion", [{"index": 0, "text": text, "finish_reason": None, "logprobs": None}])

    def end(self, kept: str, last: Piece) -> list[dict[str, Any]]:
        """The parts at the end; `kept`: the text that was not given out, for it could have calls of tools."""
        parts: list[dict[str, Any]] = []
        if not self._asked.is_chat:
            choice = {"index": 0, "text": "", "finish_reason": last.finish, "logprobs": None}
            parts.append(self._record("text_completion", [choice]))
        else:
            text, calls = self._calls(kept)
            if text:
                parts.append(self._delta({"content": text}, None))
            if calls:
                numbered = [{"index": index, **call} for index, call in enumerate(calls)]
                parts.append(self._delta({"tool_calls": numbered}, None))
            parts.append(self._delta({}, "tool_calls" if calls else last.finish))
        if self._asked.with_usage:
            kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
            parts.append(self._record(kind, [], usage=_usage(last)))
        return parts

    def _delta(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return self._record("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": finish}])

    def _record(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        model = self._asked.question.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model, "choices": choices, **more}

    def _calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return read_calls(text) if self._asked.question.tools else (text, [])


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The calls of tools in an answer, as `<tool_call>` with JSON inside, and the text without them.

    Qwen, Hermes and many others write them so. A call that cannot be read stays in the text.
    """
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        try:
            said = json.loads(found[1])
            function = {"name": str(said["name"]), "arguments": json.dumps(said.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, AttributeError):
            return found[0]
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else rest), calls


def _usage(last: Piece) -> dict[str, int]:
    prompt, answer = last.num_prompt_tokens, last.num_answer_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
