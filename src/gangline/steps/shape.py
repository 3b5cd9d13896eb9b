"""The shape of a job's model, read from its config.json; weights are not needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline.catalog.models import known_config, suggest_models
from gangline.errors import ModelError
from gangline.runs.job import Job

CONFIG_BYTES = 4 << 20
"""More is no config.json."""


def find_config(job: Job, variables: Mapping[str, str]) -> tuple[dict[str, Any], str] | None:
    """The contents of the model's config.json, and where they are from; None where this computer has none.

    A folder's own file; for a name of the hub what an earlier download left in its cache, else the catalogue. Raises
    ModelError for a file that cannot be read.
    """
    folder = Path(job.model.path)
    if folder.is_absolute():
        return read_config(folder / "config.json"), str(folder / "config.json")
    for path in _cached(job, variables):
        return read_config(path), str(path)
    known = known_config(job.model.path)
    return None if known is None else (known, "catalogue")


def shape_unknown(name: str) -> str:
    """Why nothing is known of a model of the hub, and what to do."""
    near = ", ".join(suggest_models(name))
    return (
        f"neither the hub's cache on this computer nor the catalogue has {name}{f' (near: {near})' if near else ''}; "
        "its config.json in a folder is enough: gangline plan --model FOLDER"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as plain data; raises ModelError."""
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError(f"expected an object, found {type(data).__name__}")
    except (OSError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.path: {path} cannot be read",
            seen=f"expected the model's config.json; {error}",
            fix="copy it again from the model's page",
        ) from error
    return data


def config_digest(config: Mapping[str, Any]) -> str:
    """A name for a configuration by its content: what was counted or measured of it is kept under that."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _cached(job: Job, variables: Mapping[str, str]) -> list[Path]:
    """Files of the hub's cache: the revision that is meant, else any, newest first."""
    home = Path(variables.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(variables.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{job.model.path.replace('/', '--')}"
    revision = job.model.revision or "main"
    try:
        meant = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        meant = revision
    exact = folder / "snapshots" / meant / "config.json"
    if exact.is_file() or job.model.revision is not None:
        return [exact] if exact.is_file() else []
    found = list((folder / "snapshots").glob("*/config.json"))
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
