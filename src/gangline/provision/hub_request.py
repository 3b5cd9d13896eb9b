"""One request over http, apart: what it imports costs other commands 40 ms, and asks macOS for its proxies."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any


def read(address: str, *, token: str, limit_bytes: int, limit_s: float) -> tuple[bytes, str]:
    """(at most `limit_bytes` of what lies at an address of https or http, the commit that the hub names for it or "").

    Raises HTTPError, OSError, HTTPException, ValueError.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "gangline"})  # noqa: S310 - its scheme is looked at
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(_Redirects).open(request, timeout=limit_s) as answer:
        return answer.read(limit_bytes), answer.headers.get("X-Repo-Commit") or ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to other addresses, never from https to http; the token stays with the host that it is for."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://" if req.full_url.startswith("https://") else ("https://", "http://")):
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request is not None and token and request.host == req.host and request.type == req.type:
            request.add_unredirected_header("Authorization", token)
        return request
