"""JSON files of a host agent: written whole or not at all, and read by others at any time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, Mapping

from gangline.agent import layout_names

DISK_S = 60.0
"""How long a last word waits for room on the disk."""


def stamped(value: Mapping[str, Any]) -> Dict[str, Any]:
    """A record as it is written: with the version of all records of a run."""
    return dict(value, schema_version=layout_names.SCHEMA_VERSION)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Write a record, with its version, so that it survives a power cut; raises OSError."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as stream:
        json.dump(stamped(value), stream)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def write_at_last(path: Path, value: Mapping[str, Any]) -> None:
    """Write, and try again while the disk is full: what filled it may just have been ended. Raises OSError."""
    deadline = time.monotonic() + DISK_S
    while True:
        try:
            return write_whole(path, value)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def read(path: Path) -> Dict[str, Any]:
    """A JSON object; {} where there is none, or it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
