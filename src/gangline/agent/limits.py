"""How much of everything this user's processes may have."""

from __future__ import annotations

import os
import resource
from typing import Any, Dict, Optional

UNLIMITED = -1
NUMBERS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}


def limits(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Soft and hard limits of a process here (-1: none), and the room in /dev/shm."""
    found: Dict[str, Any] = {}
    for name, number in NUMBERS.items():
        for kind, value in zip(("soft", "hard"), resource.getrlimit(getattr(resource, number))):
            found[f"{name}_{kind}"] = UNLIMITED if value == resource.RLIM_INFINITY else value
    return {**found, **_shared_memory()}


def _shared_memory() -> Dict[str, Optional[int]]:
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108 - only looked at
    except OSError:
        return {"shm_total_bytes": None, "shm_free_bytes": None}
    return {"shm_total_bytes": room.f_blocks * room.f_frsize, "shm_free_bytes": room.f_bavail * room.f_frsize}
