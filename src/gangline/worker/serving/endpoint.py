"""`python -m gangline.worker serve FOLDER | --run RUN --checkpoint PART`: a model at an address of this host.

The first line of stdin is a JSON object with the token that every request has to bring; the endpoint ends when stdin
ends, so it cannot outlive the one who started it. The first line of stdout says the port and the models. It listens on
127.0.0.1 and nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import importlib.util
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, UsageError
from gangline.worker.json_lines import write_line
from gangline.worker.serving.engine import ENGINES, Engine, Piece, Served, StageAddress, open_engine
from gangline.worker.serving.openai_form import (
    AnswerForm,
    ApiRequest,
    Refusal,
    model_entry,
    model_list,
    read_request,
    refusal_of,
)

LOOPBACK = "127.0.0.1"
ONE_MODEL = "/v1/models/"
BODY_LIMIT_BYTES = 4 << 20
BACKLOG = 1024
LOOK_S = 0.5
"""Time between two looks whether the client of an answer that does not stream is still there, and the engine whole."""
GOODBYE_S = 5
"""Time for streams to say that they end."""


def serve_main(argv: list[str]) -> int:
    """Read the command line, load the model, and answer until stdin ends."""
    words = _parse(argv)
    _require_packages()
    from gangline.worker.trained import hush_libraries

    line = sys.stdin.readline()
    token = read_secret(line, "token")
    listener = _listen(words.port)
    hush_libraries()
    engine = open_engine(words.engine, _served(words, read_secret(line, "stage_key") if words.stage else ""))
    write_line("serving", port=listener.getsockname()[1], models=list(engine.models), plan=dict(engine.plan))
    try:
        asyncio.run(_answer(engine, token, listener, until_eof=not words.stay))
    finally:
        engine.close()
    if engine.broken is not None:
        raise engine.broken
    return 0


async def _answer(engine: Engine, token: str, listener: socket.socket, *, until_eof: bool) -> None:
    import uvicorn

    config = uvicorn.Config(
        make_app(engine, token), log_level="warning", access_log=False, timeout_graceful_shutdown=GOODBYE_S
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def watch() -> None:
        sys.stdin.read()
        with contextlib.suppress(RuntimeError):  # the loop has ended before stdin has
            loop.call_soon_threadsafe(ended.set)

    if until_eof:
        threading.Thread(target=watch, daemon=True).start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task(_await_end(engine, ended))
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await asyncio.to_thread(engine.close)  # streams get their last line before the server ends
    server.should_exit = True
    await serving


async def _await_end(engine: Engine, ended: asyncio.Event) -> None:
    while engine.broken is None and not ended.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), LOOK_S)


def make_app(engine: Engine, token: str) -> Any:
    """The pages of the endpoint, as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def refuse(refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(), status_code=refusal.status)

    async def answered(request: Request, *, is_chat: bool) -> Response:
        asked = read_request(await _body(request), engine.models, is_chat=is_chat)
        pieces = _Pieces(engine)
        await pieces.ask(asked)
        if asked.stream:
            return StreamingResponse(_stream(asked, pieces), media_type="text/event-stream")
        return JSONResponse(await _whole(asked, pieces, request))

    async def page(request: Request) -> Response:
        try:
            _authorise(request.headers.get("authorization", ""), token)
            path, method = request.url.path, request.method
            if (method, path) == ("GET", "/v1/models"):
                return JSONResponse(model_list(engine.models))
            if method == "GET" and path.startswith(ONE_MODEL):
                return JSONResponse(model_entry(path.removeprefix(ONE_MODEL), engine.models))
            if method == "POST" and path in {"/v1/chat/completions", "/v1/completions"}:
                return await answered(request, is_chat="chat" in path)
            raise Refusal(status=404, message=f"there is no {method} {path[:200]} here", code="unknown_url")
        except Refusal as refusal:
            return refuse(refusal)
        except GanglineError as error:
            return refuse(refusal_of(error))

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", page, methods=methods)])


def _authorise(header: str, token: str) -> None:
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        message = "the token is missing or wrong: gangline serve printed it, as the API key"
        raise Refusal(status=401, message=message, code="invalid_api_key")


async def _body(request: Any) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT_BYTES:
            raise Refusal(status=413, message=f"the body is longer than {BODY_LIMIT_BYTES >> 20} MiB")
    return body


class _Pieces:
    """The pieces of one answer, handed from the engine's thread to the server's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.cancel = lambda: None

    async def ask(self, asked: ApiRequest) -> None:
        """Raises GanglineError for a question that is refused at once."""
        self.cancel = await asyncio.to_thread(self._engine.ask, asked.question, self._give)

    async def next(self) -> Piece:
        """The next piece. Raises the error of an answer that failed."""
        piece = await self._queue.get()
        if piece.error is not None:
            raise piece.error
        return piece

    def _give(self, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)


async def _whole(asked: ApiRequest, pieces: _Pieces, request: Any) -> dict[str, Any]:
    text: list[str] = []
    try:
        while True:
            coming = asyncio.ensure_future(pieces.next())
            while not (await asyncio.wait({coming}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    coming.cancel()
                    raise Refusal(status=499, message="the client has gone")
            piece = coming.result()
            text.append(piece.text)
            if piece.finish:
                return AnswerForm(asked).whole("".join(text), piece)
            if await request.is_disconnected():
                raise Refusal(status=499, message="the client has gone")
    finally:
        pieces.cancel()


async def _stream(asked: ApiRequest, pieces: _Pieces) -> AsyncIterator[str]:
    """Server-sent events. With tools the text is kept until its end, for only then calls are known."""
    form, kept = AnswerForm(asked), ""
    try:
        for part in form.begin():
            yield _event(part)
        while True:
            piece = await pieces.next()
            if asked.question.tools:
                kept += piece.text
            elif piece.text:
                yield _event(form.part(piece.text))
            if piece.finish:
                break
        for part in form.end(kept, piece):
            yield _event(part)
        yield "data: [DONE]\n\n"
    except GanglineError as error:
        yield _event(refusal_of(error).body())
    finally:
        pieces.cancel()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)  # now: two sockets of one port may be bound, but only one of them listens
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} cannot be had",
            seen=f"expected it to be free; {error}",
            fix="leave --port out, or name another",
        ) from None
    return listener


def read_secret(line: str, name: str) -> str:
    """A secret of the first line of stdin. Raises UsageError where there is none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        secret = json.loads(line)[name]
        if isinstance(secret, str) and len(secret) >= 16:
            return secret
    raise UsageError(
        f"there is no {name}",
        seen=f'expected {{"{name}": "..."}} of 16 characters or more as the first line of stdin',
        fix="gangline serve gives it",
    )


def _require_packages() -> None:
    if lacking := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"{' and '.join(lacking)} cannot be imported, which gangline serve needs",
            seen=f"not among the packages of {sys.executable}",
            fix="into that Python: pip install 'gangline[serve]'",
        )


def _served(words: argparse.Namespace, key: str) -> Served:
    adapters = [each.partition("=") for each in words.adapter]
    if bad := [name for name, _, folder in adapters if not name or not folder]:
        raise UsageError(f"--adapter {bad[0]}", seen="expected NAME=FOLDER", fix="--adapter mine=some/folder")
    return Served(
        name=words.name,
        folder=words.folder,
        run=words.run,
        part=words.checkpoint,
        adapters=tuple((name, Path(folder)) for name, _, folder in adapters),
        num_parallel=words.parallel,
        context=words.context,
        num_waiting=words.waiting,
        host=words.host,
        stages=tuple(map(_stage, words.stage)),
        key=key,
    )


def _stage(text: str) -> StageAddress:
    host, _, place = text.partition("=")
    address, _, port = place.rpartition(":")
    if not host or not address or not port.isdecimal():
        raise UsageError(f"--stage {text}", seen="expected HOST=ADDRESS:PORT", fix="gangline serve writes it")
    return StageAddress(host=host, address=address.strip("[]"), port=int(port))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gangline.worker serve")
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder, or an adapter's")
    parser.add_argument("--run", type=Path, help="a run directory, instead of a folder")
    parser.add_argument("--checkpoint", type=Path, help="a part of a committed checkpoint of that run")
    parser.add_argument("--name", required=True, help="the name of the model")
    parser.add_argument("--adapter", action="append", default=[], help="NAME=FOLDER, as often as there are adapters")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="transformers")
    parser.add_argument("--host", default="this computer", help="the name of this host, before those of the stages")
    parser.add_argument("--stage", action="append", default=[], help="HOST=ADDRESS:PORT of each stage behind this one")
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument("--parallel", type=int, default=4, help="answers at the same time")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer for which each has room")
    parser.add_argument("--waiting", type=int, default=256, help="requests that may wait beyond those")
    parser.add_argument("--stay", action="store_true", help="go on when stdin ends: who started it ends it")
    words = parser.parse_args(argv)
    if bool(words.run) == bool(words.folder) or bool(words.run) != bool(words.checkpoint):
        raise UsageError(
            "serve needs one model",
            seen="expected FOLDER, or --run with --checkpoint",
            fix="python -m gangline.worker serve --help",
        )
    return words
