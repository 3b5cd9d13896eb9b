"""Code and environment on every host: what its ranks run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gangline.runs.cluster import Cluster
from gangline.steps.look import Sight
from gangline.steps.seams import Means
from gangline.sync.code import foresee_code, place_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    """Every host with its Python and the folder of our code."""
    networks: Mapping[str, Mapping[str, str]]
    """Variables that name each host's network interfaces."""


def equip(sight: Sight, means: Means) -> Ready:
    """Bring gangline's code and the environment to every host that lacks them."""
    cluster = place_code(sight.cluster, means.transports, tell=means.talk)
    return Ready(cluster=cluster, networks=sight.rank_variables)


def foresee(sight: Sight, means: Means) -> Ready:
    """What `equip` would give; changes nothing."""
    return Ready(cluster=foresee_code(sight.cluster), networks=sight.rank_variables)
