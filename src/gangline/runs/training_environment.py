"""The Python of this computer that trains: the environment that `gangline setup` built, else the one that runs us."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import RecordError
from gangline.runs.cluster import Host
from gangline.runs.record_versions import Record, load_if_there

FILE = "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment(Record):
    """training.json in the home: what `gangline setup` built."""

    python: str
    """Path of its Python."""
    lock: str
    """Hash of the lock that it was built from (`provision.requirements.Lock.hash`)."""


def training_python(home: Path) -> str:
    """The Python for ranks on this computer where a cluster file names none."""
    try:
        built = load_if_there(home / FILE, TrainingEnvironment)
    except RecordError:
        built = None
    return built.python if built is not None and Path(built.python).is_file() else sys.executable


def runs_gangline(host: Host) -> bool:
    """Whether a host's Python is the very one that runs us, so that it has our code; others are brought it."""
    return host.transport == "local" and host.python == sys.executable
