"""The server of `gangline ui`: an ASGI application on 127.0.0.1, and who may ask it.

A browser sends every page to whom it likes, so each request is judged: its Host header must name this computer (a name
that was pointed here must not do), its cookie must hold the secret of this server, and what changes something must
come from this page itself, with the key that only this page has. Nothing is loaded from elsewhere, and no script runs
that is not a file of ours.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, UsageError
from gangline.page.routes import Answers, PageRequest
from gangline.report.text_table import clean

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
KEY_HEADER = "x-gangline-key"
BODY_LIMIT_BYTES = 1 << 14
ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Every file that there is, by its path."""
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")
"""ssh may forward another port to ours."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def _secret() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class PageKeys:
    """The secrets of one server. A cookie goes to every port of this computer, so it alone changes nothing."""

    token: str = field(default_factory=_secret)
    """In the address that is printed."""
    cookie: str = field(default_factory=_secret)
    """What that address is exchanged for; with it everything can be read."""
    orders: str = field(default_factory=_secret)
    """What the page sends with an order, besides: it is kept for this address and port only."""

    @property
    def cookie_name(self) -> str:
        """Of this server only: another one on this computer would take the cookie away under the same name."""
        return f"gangline_ui_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"


class PageRefusal(Exception):
    """A request that is refused, with the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def make_app(answers: Answers, keys: PageKeys) -> Any:
    """The page as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def answered(request: Request) -> Response:
        path = request.url.path
        _require_host(request.headers)
        if path == "/" and "token" in request.query_params:
            return _log_in(request, keys)
        _require_cookie(request, keys)
        if request.method in {"GET", "HEAD"}:
            if path in ASSETS:
                return Response(_asset(path), media_type=ASSETS[path][1])
            _refuse_of_other_pages(request.headers)
            asked = PageRequest(path=path, query=dict(request.query_params))
            return JSONResponse(await run_in_threadpool(answers.read, asked))
        _require_own_page(request.headers, keys)
        asked = PageRequest(path=path, query={}, body=_json(await _body(request.stream)))
        return JSONResponse(await run_in_threadpool(answers.order, asked), status_code=202)

    async def page(request: Request) -> Response:
        try:
            response = await answered(request)
        except PageRefusal as refusal:
            response = _refused(request, refusal.status, {"what": refusal.message, "seen": "", "fix": ""})
        except UsageError as error:
            response = JSONResponse({"error": error.to_json()}, status_code=404)
        except GanglineError as error:
            response = JSONResponse({"error": error.to_json()}, status_code=502)
        except Exception as error:  # a bug: the answer must have our headers all the same
            log.exception("%s %s", request.method, clean(request.url.path)[:200])
            response = _refused(request, 500, _unexpected(error))
        response.headers.update(HEADERS)
        return response

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(
        routes=[Route("/{path:path}", page, methods=methods)],
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)],
    )


def _asset(path: str) -> bytes:
    return (resources.files("gangline.page") / "assets" / ASSETS[path][0]).read_bytes()


def _unexpected(error: Exception) -> dict[str, str]:
    return {
        "what": "gangline ui could not answer this: there is a mistake in gangline",
        "seen": clean(f"{type(error).__name__}: {error}")[:300],
        "fix": "try again; if it comes back, report it with the traceback in the terminal of gangline ui",
    }


def _refused(request: Any, status: int, told: dict[str, str]) -> Any:
    from starlette.responses import JSONResponse, PlainTextResponse

    if request.url.path in ASSETS:
        return PlainTextResponse("\n".join(filter(None, told.values())) + "\n", status_code=status)
    return JSONResponse({"error": told}, status_code=status)


# Who may ask.


def _require_host(headers: Any) -> None:
    host = headers.get("host", "")
    if not _HOST.fullmatch(host):
        raise PageRefusal(421, f"this page answers as 127.0.0.1 or localhost only, not as {host[:80]!r}")


def _log_in(request: Any, keys: PageKeys) -> Any:
    """The cookie for the token; the address without it takes the place of the one with it in the browser's history."""
    from starlette.responses import RedirectResponse

    if not _equal(request.query_params["token"], keys.token):
        raise PageRefusal(401, "the token is wrong: open the address that gangline ui prints")
    response = RedirectResponse(f"/#key={keys.orders}", status_code=303)
    response.set_cookie(keys.cookie_name, keys.cookie, httponly=True, samesite="strict", path="/")
    return response


def _require_cookie(request: Any, keys: PageKeys) -> None:
    if not _equal(request.cookies.get(keys.cookie_name, ""), keys.cookie):
        raise PageRefusal(401, "open the address that gangline ui prints: this browser has no cookie of it yet")


def _refuse_of_other_pages(headers: Any) -> None:
    """Other ports of this computer are the same site to a browser, but not the same origin."""
    if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        raise PageRefusal(403, "a page of another address asked, which gets nothing")
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{headers.get('host')}":
        raise PageRefusal(403, "a page of another address asked, which gets nothing")


def _require_own_page(headers: Any, keys: PageKeys) -> None:
    if headers.get("origin") != f"http://{headers.get('host')}":
        raise PageRefusal(403, "an order has to come from this page itself, and its Origin header says otherwise")
    _refuse_of_other_pages(headers)
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise PageRefusal(415, "an order is JSON")
    if not _equal(headers.get(KEY_HEADER, ""), keys.orders):
        raise PageRefusal(403, "this tab has no key for orders: open the address that gangline ui prints once more")


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


async def _body(stream: Callable[[], Any]) -> bytes:
    body = b""
    async for part in stream():
        body += part
        if len(body) > BODY_LIMIT_BYTES:
            raise PageRefusal(413, "the order is too long")
    return body


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        raise PageRefusal(400, "the order is no JSON") from None
    if not isinstance(value, dict):
        raise PageRefusal(400, "the order is no JSON object")
    return value


# The server.


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1 that listens; 0: on a port that is free. Raises UsageError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} cannot be had",
            seen=f"expected it to be free; {error}",
            fix="leave --port out for one that is free, or name another",
        ) from None
    return listener


def serve(home: Path, listener: socket.socket, keys: PageKeys) -> None:
    """Answer until the command is interrupted."""
    import uvicorn

    answers = Answers(home)
    config = uvicorn.Config(
        make_app(answers, keys), log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="off"
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        answers.close()
