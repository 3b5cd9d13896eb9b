"""The config.json of a model on the hub: some 2 kB, which say its shape. Fetched once, and kept in the home."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import urllib.error
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gangline.inventory.measured import keep
from gangline.runs.files import json_object, read_json

ENDPOINT = "https://huggingface.co"
OFF = ("GANGLINE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that switch the hub off; the first is gangline's own."""
LIMIT_BYTES = 1 << 20
"""More is no config.json."""
LIMIT_S = 5.0
"""For all of it: names, connections, and an answer that comes drop by drop."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
REFUSED = {
    "GatedRepo": "{name} is gated: accept its terms on its page, and set HF_TOKEN where you type gangline",
    "RevisionNotFound": "it has no revision {revision} of {name}",
    "EntryNotFound": "it has no config.json for {name}",
    "RepoNotFound": "it has no model {name}, or shows it only to those who may see it (HF_TOKEN)",
}
"""What the hub says beside its status (X-Error-Code), in words."""
STATUS = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}
"""The same of hubs that say the status alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """A config.json as the hub gave it."""

    config: dict[str, Any]
    revision: str
    """The commit, as far as the hub said it, else what was asked for."""
    num_bytes: int
    endpoint: str
    fetched: bool
    """Just now; else by an earlier command."""


def kept_or_fetched(name: str, revision: str | None, variables: Mapping[str, str], home: Path) -> HubConfig | str:
    """The config.json of a model, or why there is none, in words. Asks once, and never a hub that is switched off.

    variables: HF_ENDPOINT says where the hub is, HF_TOKEN (or the file that `hf auth login` wrote) who asks.
    """
    if not NAME.fullmatch(name) or ".." in name:
        return f"{name} is no name of the hub"
    asked = revision or "main"
    file = home / "configs" / f"{name.replace('/', '--')}@{urllib.parse.quote(asked, safe='')}.json"
    endpoint = (variables.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    off = next((f"{key}={variables[key]}" for key in OFF if is_on(variables.get(key, ""))), "")
    if (kept := _kept(file)) is not None and (off or kept.endpoint == endpoint):
        return kept
    if off:
        return f"the hub was not asked ({off})"
    answer = _ask(endpoint, name, asked, _token(variables))
    if isinstance(answer, HubConfig):
        record = {"endpoint": endpoint, "revision": answer.revision, "bytes": answer.num_bytes, "config": answer.config}
        with contextlib.suppress(OSError):  # a home that cannot be written costs a question next time
            keep(file, record)
    return answer


def is_on(value: str) -> bool:
    """Whether a variable says yes, as huggingface_hub reads it."""
    return value.strip().lower() in {"1", "on", "yes", "true"}


def _kept(file: Path) -> HubConfig | None:
    try:
        record = read_json(file)
        return HubConfig(
            config=dict(record["config"]),
            revision=str(record["revision"]),
            num_bytes=int(record["bytes"]),
            endpoint=str(record["endpoint"]),
            fetched=False,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _token(variables: Mapping[str, str]) -> str:
    named = variables.get("HF_TOKEN") or variables.get("HUGGING_FACE_HUB_TOKEN")
    if named:
        return named.strip()
    home = variables.get("HF_HOME") or Path(variables.get("HOME") or Path.home()) / ".cache" / "huggingface"
    try:
        return Path(variables.get("HF_TOKEN_PATH") or Path(home) / "token").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=64)
def _ask(endpoint: str, name: str, revision: str, token: str) -> HubConfig | str:
    """One question per command, whatever the answer is; a thread of its own, because looking a name up has no limit."""
    told: list[HubConfig | str] = []
    address = f"{endpoint}/{name}/resolve/{urllib.parse.quote(revision, safe='')}/config.json"
    host = urllib.parse.urlsplit(endpoint).netloc or endpoint

    def ask() -> None:
        try:
            told.append(_get(address, name=name, revision=revision, token=token, endpoint=endpoint))
        except urllib.error.HTTPError as error:
            told.append(_refusal(error, name, revision))
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            told.append(f"could not be reached ({str(reason) or type(error).__name__})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    answer = told[0] if told else f"did not answer in {LIMIT_S:g} s"
    return answer if isinstance(answer, HubConfig) else f"the hub ({host}): {answer}"


def _get(address: str, *, name: str, revision: str, token: str, endpoint: str) -> HubConfig | str:
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
        return "HF_ENDPOINT is no address that begins with https:// or http://"
    from gangline.provision import hub_request

    text, commit = hub_request.read(address, token=token, limit_bytes=LIMIT_BYTES + 1, limit_s=LIMIT_S)
    if len(text) > LIMIT_BYTES:
        return f"its config.json of {name} is larger than 1 MB, which none is"
    config = json_object(text)
    if config is None:
        return f"its answer for {name} is no config.json (a proxy or a login page may be in between)"
    return HubConfig(config=config, revision=commit or revision, num_bytes=len(text), endpoint=endpoint, fetched=True)


def _refusal(error: urllib.error.HTTPError, name: str, revision: str) -> str:
    word = error.headers.get("X-Error-Code") or ""
    meant = word if word in REFUSED else STATUS.get(error.code)
    text = f"answered {error.code}" if meant is None else REFUSED[meant].format(name=name, revision=revision)
    error.close()
    return text
