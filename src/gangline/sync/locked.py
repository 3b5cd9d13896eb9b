"""Virtual environments that gangline builds from a lock, offline, one for each host that lacks it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import CheckFailed, RunFailed
from gangline.runs.cluster import Host
from gangline.sync.ask import ask_agent, run_there
from gangline.sync.fanout import Cargo, bring
from gangline.sync.parallel import in_parallel
from gangline.sync.pythons import Choice, Site, choose
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.trees import Spot, here, spot_on
from gangline.sync.wheelhouse import NoWheels, Wheelhouse, gather_wheels
from gangline.units import format_bytes, format_duration

SLACK = 1.1
"""Folders and half-filled blocks take room, too."""

Packages = Mapping[str, Any]
"""Name -> [version, content] of everything in an environment."""


def place_locked(sites: Sequence[Site], *, home: Path, shared: Sequence[str] = (), tell: Tell = SILENT) -> list[Host]:
    """Build what is not there yet and verify the rest; the hosts with their Python.

    Raises CheckFailed for an environment that was changed after it was built, NoWheels where a package has no wheel for
    any Python of a host, RunFailed where one cannot be built.
    """
    choices, there, houses = _prepared(sites, home=home, tell=tell)
    lacking = [choice for choice in choices if choice.site.host.name not in there]
    for choice in lacking:
        _require_room(choice, houses[choice.site.host.name])
    _bring_wheels(lacking, houses, shared=shared, tell=tell)
    once: dict[tuple[str, PurePath], Choice] = {}
    for choice in lacking:
        once.setdefault(_place_of(choice, shared), choice)
    builders = _Builders([choice.site.host.name for choice in once.values()], tell=tell)
    built = in_parallel(lambda choice: _build(choice, houses[choice.site.host.name], builders), list(once.values()))
    for line in _built_lines(list(zip(once.values(), built, strict=True)), builders.passed_s):
        tell.say(line)
    made = dict(zip(once, built, strict=True))
    there |= {choice.site.host.name: made[_place_of(choice, shared)] for choice in lacking}
    _clear_wheels(lacking, houses)
    _require_equal(choices, there)
    _warn_of_idle_gpus(choices, there, tell=tell)
    return [choice.located for choice in choices]


def _prepared(
    sites: Sequence[Site], *, home: Path, tell: Tell
) -> tuple[list[Choice], dict[str, Packages], dict[str, Wheelhouse]]:
    """A Python for every host, what is in the environments that are there, and wheels for those that are not.

    Where a version of Python has no wheels, the host's next one is tried.
    """
    without: frozenset[tuple[str, tuple[int, int]]] = frozenset()
    while True:
        choices = choose(sites, without=without)
        found = zip(choices, in_parallel(_verified, choices), strict=True)
        there = {choice.site.host.name: packages for choice, packages in found if packages is not None}
        lacking = [choice for choice in choices if choice.site.host.name not in there]
        try:
            return choices, there, _gather(lacking, home=home, tell=tell)
        except _Useless as useless:
            without |= useless.pairs
            if len(choose(sites, without=without)) < len(sites):
                raise useless.error from None
            tell.say(f"{useless.error.what}: another Python is tried")


class _Useless(Exception):
    """Hosts and the version of Python that has no wheels for them."""

    def __init__(self, pairs: frozenset[tuple[str, tuple[int, int]]], error: NoWheels) -> None:
        super().__init__()
        self.pairs = pairs
        self.error = error


def _verified(choice: Choice) -> Packages | None:
    """What an environment holds; None: it is not built yet."""
    if choice.folder.name not in choice.site.built:
        return None
    answer = ask_agent(choice.site.transport, "environment", {"do": "verify", "folder": str(choice.folder)})
    if answer["built"] and not answer["whole"]:
        raise CheckFailed(
            f"{choice.site.host.name}: {choice.folder} is not what gangline built",
            seen=shown(str(answer["why"])),
            fix=f"if no run uses it, on {choice.site.host.name}: rm -r {choice.folder}; it is built anew",
        )
    packages: Packages = answer["packages"]
    return packages if answer["whole"] else None


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


def _bring_wheels(
    lacking: Sequence[Choice], houses: Mapping[str, Wheelhouse], *, shared: Sequence[str], tell: Tell
) -> None:
    for house in {house.folder: house for house in houses.values()}.values():
        targets = [_wheels(choice, house) for choice in lacking if houses[choice.site.host.name] is house]
        cargo = Cargo(what=f"packages for {house.python}", source=here(house.folder), tree=house.tree, kind=RunFailed)
        bring(cargo, targets, shared=shared, tell=tell)


def _clear_wheels(lacking: Sequence[Choice], houses: Mapping[str, Wheelhouse]) -> None:
    """They are not needed any more, and may be gigabytes."""
    for choice in lacking:
        spot = _wheels(choice, houses[choice.site.host.name])
        if not spot.is_here:
            run_there(spot.transport, ("rm", "-rf", "--", str(spot.path)))


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


class _Builders:
    """Hosts that build at the same time, in one line."""

    def __init__(self, names: Sequence[str], *, tell: Tell) -> None:
        self._at_work = dict.fromkeys(names, "")
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()
        self._tell = tell

    @property
    def passed_s(self) -> float:
        """How long they have been at it."""
        return time.monotonic() - self._begun_s

    def at(self, name: str, what: str) -> None:
        """One of them says what it does."""
        with self._lock:
            changed = self._at_work[name] != what
            self._at_work[name] = what
            first = next(iter(self._at_work)) == name
            if changed or first:
                self._tell.tick(self._line())

    def whole(self, name: str) -> None:
        """One of them is ready."""
        with self._lock:
            del self._at_work[name]
            if self._at_work:
                self._tell.tick(self._line())

    def _line(self) -> str:
        waiting = [f"{name} ({shown(what)})" if "wait" in what else name for name, what in self._at_work.items()]
        return f"building the environment on {' '.join(waiting)}: {self.passed_s:.0f} s"


def _built_lines(built: Sequence[tuple[Choice, Packages]], passed_s: float) -> list[str]:
    """One line for all hosts whose environments are alike."""
    alike: dict[tuple[str, int], list[str]] = {}
    for choice, packages in built:
        alike.setdefault((str(choice.folder), len(packages)), []).append(choice.site.host.name)
    return [
        f"environment built on {' '.join(names)}: {num_packages} packages in {format_duration(passed_s)}, {folder}"
        for (folder, num_packages), names in alike.items()
    ]


def _build(choice: Choice, house: Wheelhouse, builders: _Builders) -> Packages:
    name = choice.site.host.name
    builders.at(name, "begun")
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
        builders.at(name, str(record.get("what")))

    answer = ask_agent(choice.site.transport, "environment", request, on_progress=on_progress)
    builders.whole(name)
    packages: Packages = answer["packages"]
    return packages


def _warn_of_idle_gpus(choices: Sequence[Choice], there: Mapping[str, Packages], *, tell: Tell) -> None:
    for choice in choices:
        version = str(there[choice.site.host.name].get("torch", [""])[0])
        if choice.site.has_gpu and version.endswith("+cpu"):
            tell.say(
                f"{choice.site.host.name} has a GPU and gets torch {shown(version)}, which cannot use it: pip on this "
                "computer finds no other build; name an index with one in pip's configuration or in a lock of your own"
            )


def _require_equal(choices: Sequence[Choice], there: Mapping[str, Packages]) -> None:
    """Of one lock and one kind of host there is one environment; a pip that was set up anew may have found others."""
    first: dict[str, str] = {}
    for choice in choices:
        name = choice.site.host.name
        other = first.setdefault(choice.folder.name, name)
        expected, found = there[other], there[name]
        changed = sorted(package for package in {*expected, *found} if expected.get(package) != found.get(package))
        if changed:
            raise CheckFailed(
                f"{other} and {name} have different environments of one lock",
                seen=f"different: {', '.join(map(shown, changed[:10]))}",
                fix=f"on the one that was built first, if no run uses it: rm -r {choice.folder}",
            )
