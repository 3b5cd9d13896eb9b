"""A Python on every host that ranks run with, wherever it comes from; and whether they are the same everywhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gangline.errors import CheckFailed
from gangline.inventory.facts import Inventory
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.sync.ask import ask_agent
from gangline.sync.locked import choose, look_around, place_locked
from gangline.sync.parallel import in_parallel
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.wrappers import wrapped

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

    def foresee(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """The hosts as `place` gives them back; changes nothing."""
        ...

    def place(self, hosts: Sequence[Host], ground: Ground, *, tell: Tell) -> list[Host]:
        """See to it that the Python is there; the hosts with `python` and `prefix`."""
        ...


class There:
    """An environment of the user's own, that is there already."""

    def foresee(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """See `Provider.foresee`."""
        return [wrapped(host, has_gpu=ground.gpus.get(host.name, False)) for host in hosts]

    def place(self, hosts: Sequence[Host], ground: Ground, *, tell: Tell) -> list[Host]:  # noqa: ARG002  (says nothing)
        """See `Provider.place`."""
        return self.foresee(hosts, ground)


class Locked:
    """A virtual environment from a lock."""

    def foresee(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """See `Provider.foresee`."""
        return [site.located for site in choose(look_around(hosts, ground.transports, ground.gpus))]

    def place(self, hosts: Sequence[Host], ground: Ground, *, tell: Tell) -> list[Host]:
        """See `Provider.place`."""
        tell.tick("looking for Pythons")
        sites = look_around(hosts, ground.transports, ground.gpus)
        return place_locked(sites, home=ground.home, shared=ground.shared, tell=tell)


PROVIDERS: Mapping[str, Provider] = {
    "own": There(),
    "conda": There(),
    "modules": There(),
    "apptainer": There(),
    "locked": Locked(),
}
"""By the kind that cluster.yaml names."""


def place_environments(
    cluster: Cluster,
    inventory: Inventory,
    transports: Mapping[str, Transport],
    *,
    home: Path,
    tell: Tell = SILENT,
) -> Cluster:
    """See to it that every host has its Python; the cluster with `python` and `prefix` set. See `compare_environments`.

    Raises CheckFailed, NoWheels, RunFailed or UsageError, each naming the host.
    """
    ground = Ground.of(cluster, inventory, transports, home=home)
    placed = {
        host.name: host
        for kind, hosts in _by_kind(cluster).items()
        for host in PROVIDERS[kind].place(hosts, ground, tell=tell)
    }
    return dataclasses.replace(cluster, hosts=tuple(placed[host.name] for host in cluster.hosts))


def foresee_environments(cluster: Cluster, inventory: Inventory, transports: Mapping[str, Transport]) -> Cluster:
    """The cluster as `place_environments` gives it back; looks at hosts and changes nothing."""
    ground = Ground.of(cluster, inventory, transports, home=Path())
    found = {
        host.name: host for kind, hosts in _by_kind(cluster).items() for host in PROVIDERS[kind].foresee(hosts, ground)
    }
    return dataclasses.replace(cluster, hosts=tuple(found[host.name] for host in cluster.hosts))


def _by_kind(cluster: Cluster) -> dict[str, list[Host]]:
    found: dict[str, list[Host]] = {}
    for host in cluster.hosts:
        found.setdefault(host.environment.kind, []).append(host)
    return found


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
