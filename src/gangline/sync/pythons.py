"""The Pythons of the hosts, and which of them an environment is built with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gangline.errors import CheckFailed
from gangline.remote.transport import Transport
from gangline.runs.cluster import Host
from gangline.sync.ask import ask_agent
from gangline.sync.lock import Lock, load_lock
from gangline.sync.parallel import in_parallel
from gangline.sync.tell import shown
from gangline.sync.wheelhouse import Kind

LOWEST = (3, 10)
"""What gangline's worker, and torch, run with."""
HIGHEST = (3, 14)
"""The newest that the packages of gangline's own lock have wheels for."""
LOOK_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A Python that was found on a host."""

    path: str
    version: tuple[int, int, int]
    machine: str
    glibc: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One host, and what was found there."""

    host: Host
    transport: Transport
    lock: Lock
    has_gpu: bool
    pythons: tuple[Python, ...]
    """Those that an environment can be built with."""
    passed_over: tuple[str, ...]
    """The others, each with the reason."""
    built: tuple[str, ...]
    """Names of environments that are there already."""
    free_bytes: int | None

    def kind(self, python: Python) -> Kind:
        """What wheels have to fit."""
        return Kind(version=python.version, machine=python.machine, glibc=python.glibc, has_gpu=self.has_gpu)

    def folder(self, python: Python) -> PurePath:
        """Where its environment is, or will be."""
        return PurePath(self.host.workdir) / "environments" / f"{self.lock.hash}-{self.kind(python).tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A host with the Python that was chosen for it."""

    site: Site
    python: Python

    @property
    def folder(self) -> PurePath:
        """Where its environment is, or will be."""
        return self.site.folder(self.python)

    @property
    def located(self) -> Host:
        """The host with the Python of its environment."""
        return dataclasses.replace(self.site.host, python=str(self.folder / "bin" / "python"), prefix=())


def look_around(hosts: Sequence[Host], transports: Mapping[str, Transport], gpus: Mapping[str, bool]) -> list[Site]:
    """Every host with its Pythons; changes nothing. Raises CheckFailed for a host that has none of use."""
    sites = in_parallel(lambda host: _look(host, transports[host.name], has_gpu=gpus.get(host.name, False)), hosts)
    for site in sites:
        if not site.pythons:
            raise _no_python(site)
    return sites


def choose(sites: Sequence[Site], *, without: frozenset[tuple[str, tuple[int, int]]] = frozenset()) -> list[Choice]:
    """A Python for every host: one that its environment is built with already, else the version that most hosts have,
    among these this computer's own, else the newest. without: (host, version) that have proved useless.
    """
    counts: dict[tuple[int, int], int] = {}
    for site in sites:
        for version in {python.version[:2] for python in site.pythons}:
            counts[version] = counts.get(version, 0) + 1

    def rank(site: Site, python: Python) -> tuple[bool, int, bool, tuple[int, int]]:
        version = python.version[:2]
        built = site.folder(python).name in site.built
        return built, counts[version], version == sys.version_info[:2], version

    choices = []
    for site in sites:
        left = [python for python in site.pythons if (site.host.name, python.version[:2]) not in without]
        if left:
            choices.append(Choice(site=site, python=max(left, key=lambda python: rank(site, python))))
    return choices


def _look(host: Host, transport: Transport, *, has_gpu: bool) -> Site:
    root = PurePath(host.workdir) / "environments"
    answer = ask_agent(transport, "environment", {"do": "look", "root": str(root)}, timeout_s=LOOK_S)
    lock = load_lock(host.environment.path)
    judged = [(found, _why_not(found, own=host.environment.path is None)) for found in answer["pythons"]]
    return Site(
        host=host,
        transport=transport,
        lock=lock,
        has_gpu=has_gpu,
        pythons=tuple(_python(found) for found, why in judged if why is None),
        passed_over=tuple(f"{found['path']} ({why})" for found, why in judged if why is not None),
        built=tuple(answer["built"]),
        free_bytes=answer["free_bytes"],
    )


def _python(found: Mapping[str, Any]) -> Python:
    major, minor, patch = found["version"]
    glibc = str(found["libc"][1]).split(".")
    return Python(
        path=found["path"],
        version=(int(major), int(minor), int(patch)),
        machine=found["machine"],
        glibc=(int(glibc[0]), int(glibc[1])),
    )


def _why_not(found: Mapping[str, Any], *, own: bool) -> str | None:
    """Why no environment can be built with a Python; None: it can."""
    version = ".".join(map(str, found["version"]))
    minor = tuple(found["version"][:2])
    if found["implementation"] != "CPython" or found["free_threaded"]:
        return f"{found['implementation']} {version}{', free-threaded' if found['free_threaded'] else ''}"
    if minor < LOWEST or (own and minor > HIGHEST):
        return f"Python {version}"
    if found["libc"][0] != "glibc" or str(found["libc"][1]).count(".") != 1:
        return "not built with glibc, which the wheels need"
    return None if found["has_venv"] else f"Python {version} without its module venv"


def _no_python(site: Site) -> CheckFailed:
    low, high = (".".join(map(str, version)) for version in (LOWEST, HIGHEST))
    found = shown("; ".join(site.passed_over)) or "none"
    needs_venv = any("venv" in why for why in site.passed_over)
    install = "apt install python3-venv, or what that is called there" if needs_venv else "install Python 3.12"
    return CheckFailed(
        f"{site.host.name}: no Python to build an environment with",
        seen=f"expected CPython {low} to {high} with its module venv; found {found}",
        fix=f"on {site.host.name}: {install}; or name an environment of your own in cluster.yaml",
    )
