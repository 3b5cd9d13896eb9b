"""What test_compat asks of a process that has the libraries."""

from __future__ import annotations

import importlib.util

from gangline.errors import UsageError
from gangline.worker.compat import ROWS


def missing():
    """Private names that the installed libraries do not have."""
    found = []
    for row in ROWS:
        if row.on_instances or importlib.util.find_spec(row.library) is None:
            continue
        try:
            row.get()
        except UsageError as error:
            found.append(str(error))
    return found
