"""Small files of this host: read with an answer for a file that is missing, written whole or not at all.

PHASES, SCHEMA_VERSION and the names of files are those of gangline/runs/layout.py, which the agent does not import.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

PHASES = (
    "importing",
    "joining",
    "joined",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluate",
    "save",
    "ended",
    "compile",
)
AGENT_RECORD = "agent.json"
STATUS = "status.json"
EXIT = "exit.json"
RESTING = "resting.json"
NEXT = "next.json"
HANDED = "handed.json"
CONSOLE_LOG = "console.log"
SUPERVISOR_LOCK = "supervisor.lock"
STATE = "state.json"
JOB = "job.json"
SCHEMA_VERSION = "1.0"
DISK_S = 60.0
"""How long the exit record waits for room on the disk."""
TEXT_CHARACTERS = 1 << 20

AnyPath = Union[str, Path]


def read_text(path: AnyPath) -> Optional[str]:
    """The beginning of a text file without blanks at its end; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123  (a str is a path, too)
            return stream.read(TEXT_CHARACTERS).rstrip()
    except OSError:  # also where a driver does not know, such as the speed of an interface that is down
        return None


def read_number(path: AnyPath) -> Optional[int]:
    """A file that holds a whole number; None for any other."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def read_bytes(path: Path) -> bytes:
    """A whole file; b"" where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_link(path: AnyPath) -> Optional[str]:
    """The target of a symbolic link; None where there is none."""
    try:
        return os.readlink(str(path))  # noqa: PTH115  (Path.readlink is of Python 3.9)
    except OSError:
        return None


def read_record(path: Path) -> Dict[str, Any]:
    """A JSON object; {} where there is none, or it is damaged."""
    return as_record(read_bytes(path))


def as_record(data: bytes) -> Dict[str, Any]:
    """Bytes as a JSON object; {} for anything else."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def size_bytes(path: Path) -> int:
    """The size of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def stamped(value: Mapping[str, Any]) -> Dict[str, Any]:
    """A record as it is written: with the version of all records of a run."""
    return dict(value, schema_version=SCHEMA_VERSION)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut; readers see the old one or the new one. Raises OSError."""
    fresh = path.with_name(".{}.{}.tmp".format(path.name, os.getpid()))
    with fresh.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def write_record(path: Path, value: Mapping[str, Any], *, wait_s: float = 0.0) -> None:
    """Write a record with its version, as `write_whole` does.

    wait_s: how long it tries again while the disk is full; the process that filled it may just have ended.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return write_whole(path, json.dumps(stamped(value)).encode())
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.5)


def sync(path: Union[AnyPath, bytes]) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
