"""Virtual environments that gangline builds from a lock, offline, one for each host that lacks it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from gangline.errors import CheckFailed, RunFailed
from gangline.remote.transport import Transport
from gangline.runs.cluster import Host
from gangline.sync.ask import ask_agent
from gangline.sync.fanout import Cargo, bring
from gangline.sync.lock import Lock, load_lock
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.trees import Spot, here, spot_on
from gangline.sync.wheelhouse import Kind, NoWheels, Wheelhouse, gather_wheels
from gangline.units import format_bytes

LOWEST = (3, 10)
"""What gangline's worker, and torch, run with."""
HIGHEST = (3, 14)
"""The newest that the packages of gangline's own lock have wheels for."""
LOOK_S = 120.0
SLACK = 1.1
"""Folders and half-filled blocks take room, too."""

_T = TypeVar("_T")
_R = TypeVar("_R")


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


def place_locked(sites: Sequence[Site], *, home: Path, shared: Sequence[str] = (), tell: Tell = SILENT) -> list[Host]:
    """Build what is not there yet and verify the rest; the hosts with their Python.

    Raises CheckFailed for an environment that was changed after it was built, NoWheels where a package has no wheel for
    any Python of a host, RunFailed where one cannot be built.
    """
    without: frozenset[tuple[str, tuple[int, int]]] = frozenset()
    while True:
        choices = choose(sites, without=without)
        lacking = [choice for choice, whole in zip(choices, in_parallel(_is_whole, choices), strict=True) if not whole]
        try:
            houses = _gather(lacking, home=home, tell=tell)
            break
        except _Useless as useless:
            without |= useless.pairs
            if len(choose(sites, without=without)) < len(sites):
                raise useless.error from None
            tell.say(f"{useless.error.what}: another Python is tried")
    _build_all(lacking, houses, shared=shared, tell=tell)
    _require_equal(choices)
    return [choice.located for choice in choices]


class _Useless(Exception):
    """Hosts and the version of Python that has no wheels for them."""

    def __init__(self, pairs: frozenset[tuple[str, tuple[int, int]]], error: NoWheels) -> None:
        super().__init__()
        self.pairs = pairs
        self.error = error


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
    needs_venv = any("venv" in why for why in site.passed_over)
    return CheckFailed(
        f"{site.host.name}: no Python to build an environment with",
        seen=f"expected CPython {low} to {high} with its module venv; found {shown('; '.join(site.passed_over)) or 'none'}",
        fix=f"on {site.host.name}: {'apt install python3-venv' if needs_venv else f'install Python {LOWEST[0]}.12'}, or name "
        "an environment of your own in cluster.yaml",
    )


def _is_whole(choice: Choice) -> bool:
    if choice.folder.name not in choice.site.built:
        return False
    answer = ask_agent(choice.site.transport, "environment", {"do": "verify", "folder": str(choice.folder)})
    if answer["built"] and not answer["whole"]:
        raise CheckFailed(
            f"{choice.site.host.name}: {choice.folder} is not what gangline built",
            seen=shown(str(answer["why"])),
            fix=f"if no run uses it, on {choice.site.host.name}: rm -r {choice.folder}; it is built anew",
        )
    return bool(answer["whole"])


def _gather(lacking: Sequence[Choice], *, home: Path, tell: Tell) -> dict[str, Wheelhouse]:
    """A wheelhouse for every host that builds; raises _Useless."""
    houses: dict[str, Wheelhouse] = {}
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in lacking:
        groups.setdefault((choice.site.lock.hash, choice.site.kind(choice.python).tag), []).append(choice)
    for choices in groups.values():
        first = choices[0]
        oldest = min(choice.python.glibc for choice in choices)
        kind = dataclasses.replace(first.site.kind(first.python), glibc=oldest)
        try:
            house = gather_wheels(first.site.lock, kind, home=home, tell=tell)
        except NoWheels as error:
            pairs = frozenset((choice.site.host.name, choice.python.version[:2]) for choice in choices)
            raise _Useless(pairs, error) from None
        houses |= {choice.site.host.name: house for choice in choices}
    return houses


def _build_all(
    lacking: Sequence[Choice], houses: Mapping[str, Wheelhouse], *, shared: Sequence[str], tell: Tell
) -> None:
    for choice in lacking:
        _require_room(choice, houses[choice.site.host.name])
    for house in {house.folder: house for house in houses.values()}.values():
        choices = [choice for choice in lacking if houses[choice.site.host.name] is house]
        cargo = Cargo(what=f"packages {house.folder.name}", source=here(house.folder), tree=house.tree, kind=RunFailed)
        bring(cargo, [_wheels(choice, house) for choice in choices], shared=shared, tell=tell)
    once = list({_place_of(choice, shared): choice for choice in reversed(lacking)}.values())
    in_parallel(lambda choice: _build(choice, houses[choice.site.host.name], tell=tell), once)
    for choice in lacking:
        spot = _wheels(choice, houses[choice.site.host.name])
        if not spot.is_here:
            spot.transport.run(("rm", "-rf", "--", str(spot.path)))


def _place_of(choice: Choice, shared: Sequence[str]) -> tuple[str, PurePath]:
    """Hosts with one work folder in a shared one have one environment, which one of them builds."""
    common = any(PurePath(folder) in choice.folder.parents for folder in shared)
    return ("" if common else choice.site.host.name, choice.folder)


def _wheels(choice: Choice, house: Wheelhouse) -> Spot:
    """Where a host finds the wheels: on this computer they are used where they are."""
    host = choice.site.host
    path = house.folder if host.transport == "local" else PurePath(host.workdir) / "wheelhouse" / house.folder.name
    return spot_on(host, {host.name: choice.site.transport}, path)


def _require_room(choice: Choice, house: Wheelhouse) -> None:
    carried = 0 if choice.site.host.transport == "local" else house.tree.num_bytes
    needed = int(SLACK * (house.installed_bytes + carried))
    if choice.site.free_bytes is not None and choice.site.free_bytes < needed:
        raise CheckFailed(
            f"{choice.site.host.name}: no room for the environment",
            seen=f"{format_bytes(needed)} are needed for a while, {format_bytes(choice.site.free_bytes)} are free",
            fix="make room there, or give the host a `workdir` on a larger disk",
        )


def _build(choice: Choice, house: Wheelhouse, *, tell: Tell) -> None:
    name = choice.site.host.name
    tell.tick(f"{name}: building the environment")
    request = {
        "do": "build",
        "folder": str(choice.folder),
        "python": choice.python.path,
        "wheels": str(_wheels(choice, house).path),
        "pip": house.pip,
        "requirements": house.requirements,
        "lock": choice.site.lock.hash,
    }

    def on_progress(record: dict[str, Any]) -> None:
        tell.tick(f"{name}: {record.get('what')}, {record.get('seconds')} s")

    answer = ask_agent(choice.site.transport, "environment", request, on_progress=on_progress)
    tell.say(f"environment built on {name}: {len(answer['packages'])} packages, {choice.folder}")


def _require_equal(choices: Sequence[Choice]) -> None:
    """Of one lock and one kind of host there is one environment; a pip that was set up anew may have found others."""
    manifests = in_parallel(_manifest, choices)
    first: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for choice, packages in zip(choices, manifests, strict=True):
        name, expected = first.setdefault(choice.folder.name, (choice.site.host.name, packages))
        changed = sorted(
            package for package in {*expected, *packages} if expected.get(package) != packages.get(package)
        )
        if changed:
            raise CheckFailed(
                f"{name} and {choice.site.host.name} have different environments of one lock",
                seen=f"different: {', '.join(map(shown, changed[:10]))}",
                fix=f"on the one that was built first, if no run uses it: rm -r {choice.folder}",
            )


def _manifest(choice: Choice) -> Mapping[str, Any]:
    answer = ask_agent(choice.site.transport, "environment", {"do": "verify", "folder": str(choice.folder)})
    packages: Mapping[str, Any] = answer["packages"]
    return packages


def in_parallel(act: Callable[[_T], _R], things: Sequence[_T]) -> list[_R]:
    """Do it for all at the same time; the first error is raised, and nobody waits for the others then."""
    if not things:
        return []
    pool = ThreadPoolExecutor(max_workers=min(32, len(things)))
    try:
        return list(pool.map(act, things))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
