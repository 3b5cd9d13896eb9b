"""The answers of a worker to its controller: JSON lines on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from gangline.errors import GanglineError, UsageError
from gangline.tested import BY_NAME


def write_line(kind: str, **values: Any) -> None:
    """Write one line in one write: ranks of a host share a pipe."""
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def error_document(error: GanglineError) -> dict[str, Any]:
    """An error as a line of kind "error"; its own kind is `error_kind`."""
    record = error.to_json()
    return {**record, "error_kind": record["kind"], "kind": "error"}


def lacking(error: ModuleNotFoundError) -> UsageError:
    """The error for a Python without the trainer's packages; raises the same again where it is another module."""
    package = (error.name or "").partition(".")[0]
    if package not in {*BY_NAME, "numpy", "pyarrow", "jinja2"}:
        raise error
    return UsageError(
        f"{package} is not installed, which gangline's trainer needs",
        seen=f"not among the packages of {sys.executable}",
        fix="on this computer: gangline setup; on another one: `environment: locked` in cluster.yaml; "
        "or into that Python: pip install 'gangline[train]'",
    )
