"""The Pythons of the hosts, and which of them an environment is built with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gangline.errors import CheckFailed
from gangline.inventory.building import environments_folder, read_building
from gangline.inventory.pythons import HIGHEST, LOWEST, BuildFacts, FoundPython, why_not
from gangline.remote.said import understood
from gangline.remote.transport import Transport
from gangline.runs.cluster import Host
from gangline.sync.ask import ask_agent
from gangline.sync.lock import Lock, load_lock
from gangline.sync.parallel import in_parallel
from gangline.sync.tell import shown
from gangline.sync.wheelhouse import Kind

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
        return environments_folder(self.host) / f"{self.lock.hash}-{self.kind(python).tag}"


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
    request = {"do": "look", "root": str(environments_folder(host))}
    answer = ask_agent(transport, "environment", request, timeout_s=LOOK_S)
    lock = load_lock(host.environment.path)
    with understood(host.name, "the Pythons there"):
        there = read_building(answer, BuildFacts())
        judged = [(found, why_not(found, own_lock=host.environment.path is None)) for found in there.pythons]
        fit = tuple(_python(found) for found, why in judged if why is None)
    return Site(
        host=host,
        transport=transport,
        lock=lock,
        has_gpu=has_gpu,
        pythons=fit,
        passed_over=tuple(f"{found.path} ({why})" for found, why in judged if why is not None),
        built=there.built,
        free_bytes=there.free_bytes,
    )


def _python(found: FoundPython) -> Python:
    major, minor, patch = found.version
    glibc = found.libc[1].split(".")
    return Python(
        path=found.path,
        version=(major, minor, patch),
        machine=found.machine,
        glibc=(int(glibc[0]), int(glibc[1])),
    )


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
