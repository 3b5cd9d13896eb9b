"""The Pythons of a host, and whether an environment can be built with them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOWEST = (3, 10)
"""What gangline's worker, and torch, run with."""
HIGHEST = (3, 14)
"""The newest that the packages of gangline's own lock have wheels for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPython:
    """A Python that answered."""

    path: str
    version: tuple[int, ...]
    implementation: str
    machine: str
    libc: tuple[str, ...]
    """Name and version of the C library, such as "glibc", "2.39"."""
    free_threaded: bool

    @property
    def glibc(self) -> tuple[int, int]:
        """The version of its C library; only of one that is fit, see `why_not`."""
        major, minor = self.libc[1].split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What a host has to build its environment with."""

    lock: str = ""
    """Hash of the lock; the names of its environments begin with it."""
    torch: str | None = None
    """The version that the lock names; None: it names none."""
    pythons: tuple[FoundPython, ...] = ()
    built: tuple[str, ...] = ()
    """Names of environments that are there already."""
    free_bytes: int | None = None
    """Where the environment would be."""
    error: str | None = None
    """Why nobody can say."""

    def is_built(self, *, has_gpu: bool) -> bool:
        """Whether the environment of this lock is there already."""
        end = "-gpu" if has_gpu else "-cpu"
        return any(name.startswith(f"{self.lock}-") and name.endswith(end) for name in self.built)


def why_not(python: FoundPython, *, own_lock: bool) -> str | None:
    """Why no environment can be built with a Python; None: it can. own_lock: whether the lock is gangline's."""
    version = ".".join(map(str, python.version))
    if python.implementation != "CPython" or python.free_threaded or len(python.version) != 3:
        return f"{python.implementation} {version}{', free-threaded' if python.free_threaded else ''}"
    if python.version[:2] < LOWEST or (own_lock and python.version[:2] > HIGHEST):
        return f"Python {version}"
    if python.libc[:1] != ("glibc",) or not re.fullmatch(r"[0-9]+\.[0-9]+", "".join(python.libc[1:])):
        return "not built with glibc, which the wheels need"
    return None
