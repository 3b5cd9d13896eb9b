"""Rows as the model will see them, by a short process of a Python that has the packages. Nothing is written but a
temporary copy of the job.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import gangline
from gangline.decide.row_reader import host_of
from gangline.errors import UsageError
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.runs.cluster import Host
from gangline.runs.job import Job
from gangline.runs.layout import AGENT_NAMES
from gangline.runs.training_environment import training_python
from gangline.transport.local import LocalTransport

PACKAGES = ("tokenizers", "jinja2", "numpy")
"""What a look takes; parquet and the hub take more."""
SECONDS = 1.0
"""Time for rows: with the start of the processes, the answer is there in under three."""


def preview(job: Job, *, home: Path, rows: int, seconds: float = SECONDS) -> dict[str, Any]:
    """What becomes of the rows of `data.train`; see `worker.data.preview.look`.

    rows: so many are shown as text. seconds: time for the others; of more, the first ones are looked at. Raises
    UsageError where this computer has no Python for it, DataError, ModelError.
    """
    away = next((part.files[0] for part in job.data.train.parts if host_of(part)), None)
    if away is not None:
        raise UsageError(
            "gangline data looks at files of this computer",
            seen=f"{away} lies on a host",
            fix="gangline plan JOB looks at its rows there; or run gangline data on that host, or on a copy",
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing and training_python(home) == sys.executable:
        raise UsageError(
            "this Python cannot look at tokens",
            seen=f"expected the packages {', '.join(PACKAGES)}; {', '.join(missing)} is not installed",
            fix="gangline setup, or pip install 'gangline[train]'; or look at the rows alone: gangline plan JOB",
        )
    code = str(Path(gangline.__file__).parent.parent)
    here = Host(name="this computer", workdir="", python=sys.executable, code=code)
    host = trainer_here(home) if missing else here
    with tempfile.TemporaryDirectory(prefix="gangline-") as folder:
        path = Path(folder) / AGENT_NAMES["JOB"]
        job.save(path)
        words = ("preview", str(path), "--rows", str(rows), "--seconds", str(seconds))
        return ask_worker(host, LocalTransport(host), words)
