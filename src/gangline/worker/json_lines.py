"""The answers of a worker to its controller: JSON lines on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from gangline.errors import GanglineError


def write_line(kind: str, **values: Any) -> None:
    """Write one line in one write: ranks of a host share a pipe."""
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def error_document(error: GanglineError) -> dict[str, Any]:
    """An error as a line of kind "error"; its own kind is `error_kind`."""
    record = error.to_json()
    return {**record, "error_kind": record["kind"], "kind": "error"}
