"""`python -m gangline.worker talk URL`: talk with a model that an endpoint serves; and the loop of every chat.

Without torch. A line of stdin is a turn; `/save FILE` writes the chat, Ctrl-C ends an answer, Ctrl-D the chat. The key
of the endpoint is the variable OPENAI_API_KEY, as its clients have it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from gangline.errors import GanglineError, HostUnreachable, UsageError

Message = dict[str, str]
Write = Callable[[str], None]
Models = Sequence[tuple[str, "Answerer"]]
"""Who answers, each with the name that is shown; one alone has an empty name."""

KEY = "OPENAI_API_KEY"
SAVE = "/save"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERRUPTED = 130
ANSWER_S = 600.0
"""Between two words of an endpoint."""
# What could steer a terminal, line breaks and tabs excepted.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    max_tokens: int = 256
    temperature: float = 0.7
    """0: always the likeliest."""
    seed: int = 0


DEFAULT = Sampling()


class Interrupted(Exception):
    """Ctrl-C ended an answer; the text is what had been said."""


class Answerer(Protocol):
    """A model that answers, here or behind an endpoint."""

    def answer(self, messages: Sequence[Message], sampling: Sampling, write: Write) -> str:
        """Answer the last of `messages`, giving words to `write` as they come; the whole answer.

        Raises Interrupted, and GanglineError for what cannot be answered.
        """
        ...


def without_controls(text: str) -> str:
    """Text without what could steer a terminal."""
    return _CONTROLS.sub("", text)


def answer_once(models: Models, prompt: str, sampling: Sampling, *, answers: TextIO) -> int:
    """Stream the answer of each model to one prompt; the exit code."""
    write = _writer(answers)
    for name, model in models:
        write(_label(name))
        try:
            model.answer([{"role": "user", "content": prompt}], sampling, write)
        except Interrupted:
            return INTERRUPTED
        finally:
            write("\n")
    return 0


def chat(models: Models, sampling: Sampling, *, source: TextIO, answers: TextIO, talk: TextIO) -> int:
    """Answers per line of `source` until it ends; answers go to `answers`, everything else to `talk`.

    Every model has a chat of its own: it knows the questions, and its own answers.
    """
    write, say = _writer(answers), _writer(talk)
    say(f"Ctrl-C ends an answer, Ctrl-D the chat; {SAVE} FILE writes it.\n")
    chats: list[list[Message]] = [[] for _ in models]
    for line in _lines(source, say):
        if line.split()[0] == SAVE:
            say(f"{save(models, chats, line.removeprefix(SAVE).strip())}\n")
            continue
        for (name, model), messages in zip(models, chats, strict=True):
            write(_label(name))
            _turn(model, messages, line, sampling, write=write, say=say)
    return 0


def _turn(model: Answerer, messages: list[Message], line: str, sampling: Sampling, *, write: Write, say: Write) -> None:
    """One question and its answer, added to a chat; a question that cannot be answered is not added."""
    messages.append({"role": "user", "content": line})
    try:
        said = model.answer(messages, sampling, write)
    except Interrupted as stop:
        said = str(stop)
    except GanglineError as error:
        say(f"{error}\n")
        messages.pop()
        return
    write("\n")
    messages.append({"role": "assistant", "content": said})


def save(models: Models, chats: Sequence[Sequence[Message]], name: str) -> str:
    """Write a new file with the chat of each model as a row of training data in chat form; what to say of it."""
    if not name:
        return f"{SAVE} FILE: no file is named"
    path = Path(name).expanduser().absolute()
    rows = [{"messages": chat, **({"model": who} if who else {})} for (who, _), chat in zip(models, chats, strict=True)]
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    except OSError as error:
        return f"{path} is not written: {error.strerror}"
    return f"written: {path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModel:
    """A model behind an endpoint in OpenAI's form."""

    url: str
    """With /v1 at its end."""
    key: str
    model: str = ""

    def models(self) -> list[str]:
        """The names under which it answers. Raises GanglineError."""
        with self._open("/models", None) as answer:
            found = json.loads(answer.read())
        return [str(each["id"]) for each in found["data"]]

    def answer(self, messages: Sequence[Message], sampling: Sampling, write: Write) -> str:
        """See `Answerer.answer`."""
        asked = {"model": self.model, "messages": list(messages), "stream": True}
        drawn = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
        said = ""
        try:
            with self._open("/chat/completions", {**asked, **drawn}) as answer:
                for words in self._words(answer):
                    said += words
                    write(words)
        except KeyboardInterrupt:
            raise Interrupted(said) from None
        return said

    def _words(self, answer: Any) -> Iterator[str]:
        """The words of a stream of server-sent events. Raises GanglineError for an error in it, or its early end."""
        for line in answer:
            data = line.decode("utf-8", "replace").strip()
            if data == "data: [DONE]":
                return
            event = json.loads(data.removeprefix("data:")) if data.startswith("data:") else {}
            if "error" in event:
                raise _refused(self.url, event)
            for choice in event.get("choices") or []:
                if words := without_controls((choice.get("delta") or {}).get("content") or ""):
                    yield words
        raise _no_answer(self.url, "the stream ended before the answer did")

    @contextlib.contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - `endpoint` looked
        near = urllib.parse.urlsplit(self.url).hostname in LOOPBACK
        opener = urllib.request.build_opener(_NoRedirect(), *([urllib.request.ProxyHandler({})] if near else []))
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise _told(self.url, error) from None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            said = str(getattr(error, "reason", error)) or type(error).__name__
            raise _no_answer(self.url, without_controls(said)[:300]) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the address that was given, and no other one."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Every redirection is an error."""


def _told(url: str, error: urllib.error.HTTPError) -> GanglineError:
    """What the body of an answer that is an error says, as far as it came."""
    text = ""
    with error, contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read(1 << 16).decode("utf-8", "replace")
    try:
        return _refused(url, json.loads(text))
    except ValueError:
        return _no_answer(url, f"{error.code} {error.reason}: {without_controls(text)[:200]}")


def _refused(url: str, said: Any) -> UsageError:
    error = said.get("error") if isinstance(said, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return UsageError(
        f"{url} refuses the request",
        seen=without_controls(str(text or said))[:400],
        fix=f"a wrong key: export {KEY}=... as gangline serve printed it; else change the request",
    )


def _no_answer(url: str, seen: str) -> HostUnreachable:
    return HostUnreachable(f"{url} does not answer", seen=seen, fix="look whether the endpoint still runs there")


def endpoint(url: str, key: str) -> EndpointModel:
    """The endpoint of an address as it was typed. Raises UsageError where the key would travel in the open."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in {"http", "https"} and parts.hostname and not (parts.query or parts.fragment)
        is_one = is_one and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        is_one = False
    if not is_one:
        raise UsageError(f"{url} is no address of an endpoint", seen="expected http://HOST:PORT/v1", fix="correct it")
    if key and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise UsageError(
            f"the key is not sent to {parts.hostname} over http",
            seen="everybody on the way could read it",
            fix=f"bring its port here (ssh -L), take https, or, where it wants no key: env -u {KEY} gangline chat ...",
        )
    return EndpointModel(url=url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1", key=key)


def talk_main(argv: list[str]) -> int:
    """Read the command line, ask which models there are, and answer once or chat."""
    words = _parse(argv)
    place = endpoint(words.url, os.environ.get(KEY, ""))
    known = place.models()
    names = [words.model or (known or [""])[0], *([words.against] if words.against else [])]
    if strangers := [name for name in names if name not in known]:
        raise UsageError(
            f"{place.url} has no model {strangers[0] or 'at all'}",
            seen=f"it has {', '.join(map(without_controls, known)) or 'none'}",
            fix="name one of them",
        )
    models = [
        (name if words.against else "", EndpointModel(url=place.url, key=place.key, model=name)) for name in names
    ]
    sampling = Sampling(max_tokens=words.max_tokens, temperature=words.temperature)
    if words.prompt is None:
        return chat(models, sampling, source=sys.stdin, answers=sys.stdout, talk=sys.stderr)
    return answer_once(models, words.prompt, sampling, answers=sys.stdout)


def _label(name: str) -> str:
    return f"[{name}] " if name else ""


def _lines(source: TextIO, say: Write) -> Iterator[str]:
    while True:
        say("> ")
        try:
            line = source.readline()
        except KeyboardInterrupt:
            say("\n")
            continue
        if not line:
            say("\n")
            return
        if line.strip():
            yield line.rstrip("\n")


def _writer(stream: TextIO) -> Write:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gangline.worker talk")
    parser.add_argument("url", help="http://HOST:PORT/v1")
    parser.add_argument("--model", help="its name there; by default the first one")
    parser.add_argument("--against", help="the name of another model there, which answers, too")
    parser.add_argument("--prompt", help="answer this prompt and exit")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT.max_tokens)
    parser.add_argument("--temperature", type=float, default=DEFAULT.temperature)
    return parser.parse_args(argv)
