"""A Python on every host that ranks run with, wherever it comes from; and whether they are the same everywhere.

It is the user's own (a path, conda, modules, an image), or a virtual environment that gangline builds from a lock: with
a Python of the host, wheels that were gathered here, and uv, which is brought along.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from gangline.errors import CheckFailed, RunFailed, UsageError
from gangline.inventory.facts import HIGHEST, LOWEST, BuildFacts, FoundPython, Inventory, why_not
from gangline.inventory.gather import environments_folder, read_building
from gangline.provision.ask import ask_agent, run_there
from gangline.provision.console import SILENT, Console, shown
from gangline.provision.images import ContainerImage, with_volumes
from gangline.provision.relay import Cargo, bring
from gangline.provision.requirements import Lock, lock_of
from gangline.provision.trees import Spot, here, is_shared, spot_on
from gangline.provision.wheelhouse import NoWheels, Platform, Wheelhouse, gather_wheels
from gangline.runs.cluster import ENGINES, Cluster, Host
from gangline.transport.fanout import in_parallel
from gangline.transport.ssh_options import understood
from gangline.transport.transport import Transport
from gangline.units import format_bytes, format_duration

PYTHON = "python3"
"""Behind a module system or inside an image, where none is named."""

CONDA = (
    'folder=$1; shift; PATH="$folder/bin:$PATH"; CONDA_PREFIX=$folder; '
    'LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder/lib"; '
    'export PATH CONDA_PREFIX LD_LIBRARY_PATH; exec "$@"'
)
"""What activating would do, without a shell that has been set up for it."""

MODULES = (
    'names=(); while [ "$1" != -- ]; do names+=("$1"); shift; done; shift; '
    'if ! type module >/dev/null 2>&1; then echo "there is no module system: no command module" >&2; exit 90; fi; '
    'module load "${names[@]}" >&2 || exit 91; exec "$@"'
)
"""In a login shell, for that is where a site defines `module`."""


def wrapped(host: Host, *, has_gpu: bool = False) -> Host:
    """The host with `python` and `prefix` for an environment that is there already; raises UsageError."""
    kind, path = host.environment.kind, host.environment.path
    if kind == "own":
        return dataclasses.replace(host, python=path or host.python)
    if kind == "modules":
        words = ("bash", "-lc", MODULES, "gangline-modules", *host.environment.modules, "--")
        return dataclasses.replace(host, prefix=words, python=host.python or PYTHON)
    if path is None:
        raise UsageError(
            f"{host.name}: environment {kind} without a path", seen="nothing", fix="write it in cluster.yaml"
        )
    if kind == "conda":
        words = ("sh", "-c", CONDA, "gangline-conda", path)
        return dataclasses.replace(host, prefix=words, python=str(PurePath(path) / "bin" / "python"))
    gpu = ("--nv",) if has_gpu else ()
    words = ("apptainer", "exec", *gpu, "--bind", host.workdir, path)
    return dataclasses.replace(host, prefix=words, python=host.python or PYTHON)


def seeing(host: Host, folders: Sequence[str]) -> Host:
    """The host whose image, if it works in one, sees these folders too."""
    hidden = [folder for folder in folders if PurePath(host.workdir) not in PurePath(folder).parents]
    if hidden and host.environment.kind in ENGINES:
        return with_volumes(host, hidden)
    if host.environment.kind != "apptainer" or not hidden:
        return host
    program, verb, *others = host.prefix
    binds = [word for folder in hidden for word in ("--bind", folder)]
    return dataclasses.replace(host, prefix=(program, verb, *binds, *others))


LOOK_S = 120.0
SLACK = 1.1
"""Folders and half-filled blocks take room, too."""

Packages = Mapping[str, Any]
"""Name -> [version, content] of everything in an environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One host, the Pythons that were found there, and the one that its environment is built with."""

    host: Host
    transport: Transport
    lock: Lock
    has_gpu: bool
    pythons: tuple[FoundPython, ...]
    """Those that an environment can be built with; one at least."""
    python: FoundPython
    built: tuple[str, ...]
    """Names of environments that are there already."""
    free_bytes: int | None

    @property
    def kind(self) -> Platform:
        """What wheels have to fit."""
        python = self.python
        return Platform(version=python.version, machine=python.machine, glibc=python.glibc, has_gpu=self.has_gpu)

    @property
    def folder(self) -> PurePath:
        """Where its environment is, or will be."""
        return environments_folder(self.host) / f"{self.lock.hash}-{self.kind.tag}"

    @property
    def located(self) -> Host:
        """The host with the Python of its environment."""
        return dataclasses.replace(self.host, python=str(self.folder / "bin" / "python"), prefix=())


Useless = frozenset[tuple[str, tuple[int, ...]]]
"""Hosts with versions of Python for which there are no wheels."""


def look_around(hosts: Sequence[Host], transports: Mapping[str, Transport], gpus: Mapping[str, bool]) -> list[Site]:
    """Every host with its Pythons; changes nothing. Raises CheckFailed for a host that has none of use."""
    return in_parallel(lambda host: _look(host, transports[host.name], has_gpu=gpus.get(host.name, False)), hosts)


def _look(host: Host, transport: Transport, *, has_gpu: bool) -> Site:
    lock, is_own = lock_of(host.environment), host.environment.path is None
    request = {"do": "look", "root": str(environments_folder(host))}
    answer = ask_agent(transport, "environment", request, timeout_s=LOOK_S)
    with understood(host.name, "the Pythons there"):
        there = read_building(answer, BuildFacts())
    fit = tuple(python for python in there.pythons if why_not(python, own_lock=is_own) is None)
    if not fit:
        low, high = (".".join(map(str, version)) for version in (LOWEST, HIGHEST))
        found = "; ".join(f"{python.path} ({why_not(python, own_lock=is_own)})" for python in there.pythons)
        raise CheckFailed(
            f"{host.name}: no Python to build an environment with",
            seen=f"expected CPython {low} to {high}; found {shown(found) or 'none'}",
            fix=f"on {host.name}: install Python 3.12; or name an environment of your own in cluster.yaml",
        )
    return Site(
        host=host,
        transport=transport,
        lock=lock,
        has_gpu=has_gpu,
        pythons=fit,
        python=fit[0],
        built=there.built,
        free_bytes=there.free_bytes,
    )


def choose(sites: Sequence[Site], *, without: Useless = frozenset()) -> list[Site]:
    """The sites with the Python to take: one that its environment is built with already, else the version that most
    hosts have, among these this computer's own, else the newest. A site that has none left is left out.
    """
    counts: dict[tuple[int, ...], int] = {}
    for site in sites:
        for version in {python.version[:2] for python in site.pythons}:
            counts[version] = counts.get(version, 0) + 1

    def rank(site: Site) -> tuple[bool, int, bool, tuple[int, ...]]:
        version = site.python.version[:2]
        return site.folder.name in site.built, counts[version], version == sys.version_info[:2], version

    chosen = []
    for site in sites:
        left = [python for python in site.pythons if (site.host.name, python.version[:2]) not in without]
        if left:
            chosen.append(max((dataclasses.replace(site, python=python) for python in left), key=rank))
    return chosen


def place_locked(
    found: Sequence[Site], *, home: Path, shared: Sequence[str] = (), console: Console = SILENT
) -> list[Host]:
    """Build what is not there yet and verify the rest; the hosts with their Python.

    Raises CheckFailed for an environment that was changed after it was built, NoWheels where a package has no wheel for
    any Python of a host, RunFailed where one cannot be built.
    """
    sites, there, houses = _prepare(found, home=home, console=console)
    lacking = [site for site in sites if site.host.name in houses]
    for site in lacking:
        _require_room(site, houses[site.host.name])
    _bring_wheels(lacking, houses, shared=shared, console=console)
    once: dict[tuple[str, PurePath], Site] = {}
    for site in lacking:
        once.setdefault(_place_of(site, shared), site)
    builders = _Builders([site.host.name for site in once.values()], console=console)
    built = in_parallel(lambda site: _build(site, houses[site.host.name], builders), list(once.values()))
    for line in _built_lines(list(zip(once.values(), built, strict=True)), builders.passed_s):
        console.report(line)
    made = dict(zip(once, built, strict=True))
    for site in lacking:
        there[site.host.name] = made[_place_of(site, shared)]
        wheels = _wheels(site, houses[site.host.name])
        if not wheels.is_here:  # nobody needs them any more, and they may be gigabytes
            run_there(wheels.transport, ("rm", "-rf", "--", str(wheels.path)))
    _require_equal(sites, there)
    _warn_of_idle_gpus(sites, there, console=console)
    return [site.located for site in sites]


def _prepare(
    found: Sequence[Site], *, home: Path, console: Console
) -> tuple[list[Site], dict[str, Packages], dict[str, Wheelhouse]]:
    """A Python for every host, what is in the environments that are there, and wheels for those that are not.

    Where a version of Python has no wheels, the host's next one is tried.
    """
    without: Useless = frozenset()
    while True:
        sites = choose(found, without=without)
        packages = in_parallel(_verified, sites)
        there = {site.host.name: each for site, each in zip(sites, packages, strict=True) if each is not None}
        groups: dict[tuple[str, str], list[Site]] = {}
        for site in sites:
            if site.host.name not in there:
                groups.setdefault((site.lock.hash, site.kind.tag), []).append(site)
        houses: dict[str, Wheelhouse] = {}
        for group in groups.values():
            kind = dataclasses.replace(group[0].kind, glibc=min(site.python.glibc for site in group))
            try:
                house = gather_wheels(group[0].lock, kind, home=home, console=console)
            except NoWheels as error:
                without |= {(site.host.name, site.python.version[:2]) for site in group}
                if len(choose(found, without=without)) < len(found):
                    raise
                console.report(f"{error.what}: another Python is tried")
                break
            houses |= {site.host.name: house for site in group}
        else:
            return sites, there, houses


def _verified(site: Site) -> Packages | None:
    """What an environment holds; None: it is not built yet."""
    if site.folder.name not in site.built:
        return None
    answer = ask_agent(site.transport, "environment", {"do": "verify", "folder": str(site.folder)})
    if answer["built"] and not answer["whole"]:
        raise CheckFailed(
            f"{site.host.name}: {site.folder} is not what gangline built",
            seen=shown(str(answer["why"])),
            fix=f"if no run uses it, on {site.host.name}: rm -r {site.folder}; it is built anew",
        )
    packages: Packages = answer["packages"]
    return packages if answer["whole"] else None


def _require_room(site: Site, house: Wheelhouse) -> None:
    carried = 0 if site.host.transport == "local" else house.tree.num_bytes
    needed = int(SLACK * (house.installed_bytes + carried))
    if site.free_bytes is not None and site.free_bytes < needed:
        raise CheckFailed(
            f"{site.host.name}: no room for the environment",
            seen=f"{format_bytes(needed)} are needed for a while, {format_bytes(site.free_bytes)} are free",
            fix="make room there, or give the host a `workdir` on a larger disk",
        )


def _bring_wheels(
    lacking: Sequence[Site], houses: Mapping[str, Wheelhouse], *, shared: Sequence[str], console: Console
) -> None:
    for house in {house.folder: house for house in houses.values()}.values():
        targets = [_wheels(site, house) for site in lacking if houses[site.host.name] is house]
        cargo = Cargo(what=f"packages for {house.python}", source=here(house.folder), tree=house.tree, kind=RunFailed)
        bring(cargo, [target for target in targets if not target.is_here], shared=shared, console=console)


def _wheels(site: Site, house: Wheelhouse) -> Spot:
    """Where a host finds the wheels: on this computer they are used where they are."""
    host = site.host
    path = house.folder if host.transport == "local" else PurePath(host.workdir) / "wheelhouse" / house.folder.name
    return spot_on(host, {host.name: site.transport}, path)


def _place_of(site: Site, shared: Sequence[str]) -> tuple[str, PurePath]:
    """Hosts with one work folder in a shared one have one environment, which one of them builds."""
    return ("" if is_shared(site.folder, shared) else site.host.name, site.folder)


class _Builders:
    """Hosts that build at the same time, in one line."""

    def __init__(self, names: Sequence[str], *, console: Console) -> None:
        self._at_work = dict.fromkeys(names, "")
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()
        self._console = console

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
                self._console.progress(self._line())

    def whole(self, name: str) -> None:
        """One of them is ready."""
        with self._lock:
            del self._at_work[name]
            if self._at_work:
                self._console.progress(self._line())

    def _line(self) -> str:
        waiting = [f"{name} ({shown(what)})" if "wait" in what else name for name, what in self._at_work.items()]
        return f"building the environment on {' '.join(waiting)}: {self.passed_s:.0f} s"


def _build(site: Site, house: Wheelhouse, builders: _Builders) -> Packages:
    name = site.host.name
    builders.at(name, "begun")
    request = {
        "do": "build",
        "folder": str(site.folder),
        "python": site.python.path,
        "wheels": str(_wheels(site, house).path),
        "requirements": house.requirements,
        "lock": site.lock.hash,
    }

    def on_progress(record: dict[str, Any]) -> None:
        builders.at(name, str(record.get("what")))

    answer = ask_agent(site.transport, "environment", request, on_progress=on_progress)
    builders.whole(name)
    packages: Packages = answer["packages"]
    return packages


def _built_lines(built: Sequence[tuple[Site, Packages]], passed_s: float) -> list[str]:
    """One line for all hosts whose environments are alike."""
    alike: dict[tuple[str, int], list[str]] = {}
    for site, packages in built:
        alike.setdefault((str(site.folder), len(packages)), []).append(site.host.name)
    return [
        f"environment built on {' '.join(names)}: {num_packages} packages in {format_duration(passed_s)}, {folder}"
        for (folder, num_packages), names in alike.items()
    ]


def _warn_of_idle_gpus(sites: Sequence[Site], there: Mapping[str, Packages], *, console: Console) -> None:
    for site in sites:
        version = str(there[site.host.name].get("torch", [""])[0])
        if site.has_gpu and version.endswith("+cpu"):
            console.report(
                f"{site.host.name} has a GPU and gets torch {shown(version)}, which cannot use it: pip on this "
                "computer finds no other build; name an index with one in pip's configuration or in a lock of your own"
            )


def _require_equal(sites: Sequence[Site], there: Mapping[str, Packages]) -> None:
    """Of one lock and one kind of host there is one environment; a pip that was set up anew may have found others."""
    first: dict[str, str] = {}
    for site in sites:
        name = site.host.name
        other = first.setdefault(site.folder.name, name)
        expected, found = there[other], there[name]
        changed = sorted(package for package in {*expected, *found} if expected.get(package) != found.get(package))
        if changed:
            raise CheckFailed(
                f"{other} and {name} have different environments of one lock",
                seen=f"different: {', '.join(map(shown, changed[:10]))}",
                fix=f"on the one that was built first, if no run uses it: rm -r {site.folder}",
            )


NEEDED = (
    "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "accelerate", "deepspeed", "trl", "axolotl",
    "bitsandbytes", "flash-attn",
)  # fmt: skip
"""Packages of which ranks need the same version: others may differ from host to host, or be missing, without harm."""
NONE = "none"
"""The version of what is not installed."""
CONTENTS_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a provider works with."""

    transports: Mapping[str, Transport]
    gpus: Mapping[str, bool]
    """Host -> whether it has a GPU."""
    home: Path
    """Folder of this computer for what is gathered."""
    shared: Sequence[str] = ()
    """Folders that are one and the same on all hosts."""

    @staticmethod
    def of(cluster: Cluster, inventory: Inventory, transports: Mapping[str, Transport], *, home: Path) -> Ground:
        """The ground of a cluster."""
        gpus = {facts.host: bool(facts.gpus) for facts in inventory.hosts}
        return Ground(transports=transports, gpus=gpus, home=home, shared=cluster.shared)


class Provider(Protocol):
    """One source of Pythons."""

    def preview(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """The hosts as `place` gives them back; changes nothing."""
        ...

    def place(self, hosts: Sequence[Host], ground: Ground, *, console: Console) -> list[Host]:
        """See to it that the Python is there; the hosts with `python` and `prefix`."""
        ...


class ExistingEnvironment:
    """An environment of the user's own, that is there already."""

    def preview(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """See `Provider.preview`."""
        return [wrapped(host, has_gpu=ground.gpus.get(host.name, False)) for host in hosts]

    def place(self, hosts: Sequence[Host], ground: Ground, *, console: Console) -> list[Host]:  # noqa: ARG002  (says nothing)
        """See `Provider.place`."""
        return self.preview(hosts, ground)


class Locked:
    """A virtual environment from a lock."""

    def preview(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """See `Provider.preview`."""
        return [site.located for site in choose(look_around(hosts, ground.transports, ground.gpus))]

    def place(self, hosts: Sequence[Host], ground: Ground, *, console: Console) -> list[Host]:
        """See `Provider.place`."""
        console.progress("looking for Pythons")
        sites = look_around(hosts, ground.transports, ground.gpus)
        return place_locked(sites, home=ground.home, shared=ground.shared, console=console)


PROVIDERS: Mapping[str, Provider] = {
    **dict.fromkeys(("own", "conda", "modules", "apptainer"), ExistingEnvironment()),
    "locked": Locked(),
    **dict.fromkeys(ENGINES, ContainerImage()),
}
"""By the kind that cluster.yaml names."""


def place_environments(
    cluster: Cluster,
    inventory: Inventory,
    transports: Mapping[str, Transport],
    *,
    home: Path,
    console: Console = SILENT,
) -> Cluster:
    """See to it that every host has its Python; the cluster with `python` and `prefix` set. See `compare_environments`.

    Raises CheckFailed, NoWheels, RunFailed or UsageError, each naming the host.
    """
    ground = Ground.of(cluster, inventory, transports, home=home)
    return _by_provider(cluster, lambda provider, hosts: provider.place(hosts, ground, console=console))


def preview_environments(cluster: Cluster, inventory: Inventory, transports: Mapping[str, Transport]) -> Cluster:
    """The cluster as `place_environments` gives it back; looks at hosts and changes nothing."""
    ground = Ground.of(cluster, inventory, transports, home=Path())
    return _by_provider(cluster, lambda provider, hosts: provider.preview(hosts, ground))


def _by_provider(cluster: Cluster, act: Callable[[Provider, list[Host]], list[Host]]) -> Cluster:
    """The cluster with the hosts that each provider gives back for those that it is in charge of."""
    found: dict[str, Host] = {}
    for kind, provider in PROVIDERS.items():
        if hosts := [host for host in cluster.hosts if host.environment.kind == kind]:
            found |= {host.name: host for host in act(provider, hosts)}
    return dataclasses.replace(cluster, hosts=tuple(found[host.name] for host in cluster.hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A package that is not the same in all environments."""

    package: str
    versions: Mapping[str, tuple[str, ...]]
    """Version, or "none", -> hosts. One version only: its content differs."""
    severity: Literal["fail", "warn"]

    @property
    def line(self) -> str:
        """The difference for people."""
        if len(self.versions) == 1:
            return f"{shown(self.package)} {shown(next(iter(self.versions)))}: other files"
        said = "; ".join(f"{shown(version)} on {' '.join(hosts)}" for version, hosts in self.versions.items())
        return f"{shown(self.package)}: {said}"


def compare_environments(cluster: Cluster, transports: Mapping[str, Transport]) -> tuple[Difference, ...]:
    """What differs between the environments of the hosts, the worst first: every installed package, by version and by
    content as it was installed. Builds of one version (2.13.0+cpu, 2.13.0+cu128) may differ.

    Raises RunFailed where a host's Python cannot say what it holds.
    """
    answers = in_parallel(lambda host: _contents(host, transports[host.name]), cluster.hosts)
    by_host = {host.name: packages for host, packages in zip(cluster.hosts, answers, strict=True)}
    names = sorted({name for packages in by_host.values() for name in packages} - {"gangline"})
    found = [difference for name in names if (difference := _difference(name, by_host)) is not None]
    return tuple(sorted(found, key=lambda difference: difference.severity != "fail"))


def require_equal(differences: Sequence[Difference]) -> None:
    """Raise CheckFailed for those that ranks do not bear, naming the packages."""
    failed = [difference for difference in differences if difference.severity == "fail"]
    if failed:
        raise CheckFailed(
            f"the environments of the hosts differ: {', '.join(shown(difference.package) for difference in failed)}",
            seen="\n        ".join(difference.line for difference in failed[:10]),
            fix="install the same versions on all hosts, or write `environment: locked` in cluster.yaml",
        )


def _contents(host: Host, transport: Transport) -> dict[str, Any]:
    request = {"do": "contents", "argv": list(host.argv()), "env": {**host.code_env, **host.env}}
    answer = ask_agent(transport, "environment", request, timeout_s=CONTENTS_S)
    packages: dict[str, Any] = answer["packages"]
    return packages


def _difference(name: str, by_host: Mapping[str, Mapping[str, Any]]) -> Difference | None:
    versions: dict[str, list[str]] = {}
    contents = set()
    for host, packages in by_host.items():
        version, content = packages.get(name, (NONE, None))
        versions.setdefault(str(version), []).append(host)
        contents.add(content)
    if len(versions) == 1 and len(contents - {None}) <= 1:
        return None
    return Difference(
        package=name,
        versions={version: tuple(hosts) for version, hosts in versions.items()},
        severity="fail" if name in NEEDED and _is_harmful(name, versions) else "warn",
    )


def _is_harmful(name: str, versions: Iterable[str]) -> bool:
    public = {re.sub(r"\+.*", "", version) for version in versions} - (set() if name == "torch" else {NONE})
    return len(public) > 1
