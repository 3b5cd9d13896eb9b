"""Code and environment on every host: what its ranks run with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gangline.launch.registry import BACKENDS
from gangline.plugins import package_version
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.steps.keep import Keeping
from gangline.steps.keeper import ask_who_keeps, who_keeps
from gangline.steps.look import Sight
from gangline.steps.seams import Means
from gangline.sync.claim import claim_folders
from gangline.sync.code import foresee_code, place_code
from gangline.sync.environment import (
    compare_environments,
    foresee_environments,
    place_environments,
    require_equal,
)
from gangline.sync.tell import Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    """Every host with its Python and the folder of our code."""
    networks: Mapping[str, Mapping[str, str]]
    """Variables that name each host's network interfaces."""
    keeping: Callable[[], Keeping]
    """Says who looks after the run; raises RunFailed."""


def packages_of(cluster: Cluster, job: Job | None, tell: Tell) -> tuple[str, ...]:
    """The packages of the plug-ins that a cluster and a job use. Raises PluginError where one is not installed.

    Tells where another version is installed than the run began with.
    """
    versions = job.plugins if job is not None else {}
    for package, version in versions.items():
        now = package_version(package)
        if now != version:
            tell.say(f"plug-in    {package} is {now} now; the run began with {version}")
    launcher = BACKENDS.plugin(cluster.backend)
    return tuple({*versions, *([launcher.package] if launcher is not None else [])})


def claim(cluster: Cluster, means: Means) -> None:
    """Make the folders that are written to, and be sure that they are this user's alone; raises RunFailed."""
    claim_folders(means.home, cluster, means.transports)


def equip(sight: Sight, means: Means, *, job: Job | None = None) -> Ready:
    """Bring gangline's code, the plug-ins that the job uses, and the environment to every host that lacks them.

    Environments of the user's own are compared by content; raises CheckFailed where ranks would differ.
    """
    transports, tell = means.transports, means.talk
    cluster = place_code(sight.cluster, transports, packages=packages_of(sight.cluster, job, tell), tell=tell)
    keeping = ask_who_keeps(cluster, means)
    cluster = place_environments(cluster, sight.inventory, transports, home=means.home, tell=tell)
    if not cluster.is_one_machine:
        differences = compare_environments(cluster, transports)
        require_equal(differences)
        if differences:
            tell.say(f"environments differ, harmlessly: {'; '.join(each.line for each in differences[:3])}")
    return Ready(cluster=cluster, networks=sight.rank_variables, keeping=keeping)


def foresee(sight: Sight, means: Means, *, job: Job | None = None) -> Ready:
    """What `equip` would give; changes nothing."""
    cluster = foresee_code(sight.cluster, packages=packages_of(sight.cluster, job, means.talk))
    cluster = foresee_environments(cluster, sight.inventory, means.transports)
    return Ready(cluster=cluster, networks=sight.rank_variables, keeping=lambda: who_keeps(cluster, means))
