"""Can the environment that gangline builds from a lock be built on this host?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Evidence, Finding, Rule, apply, each
from gangline.inventory.facts import HIGHEST, LOWEST, HostFacts, Inventory, why_not
from gangline.runs.cluster import Cluster, Host
from gangline.units import format_bytes

CPU_BYTES = 700_000_000
"""torch 2.13.0+cpu alone, unpacked."""
CPU_WHEEL_BYTES = 192_000_000
"""The same, packed."""
GPU_BYTES = 2_500_000_000
"""torch with what it needs of CUDA, rather less than it takes: packed, torch 2.11.0 for CUDA 13 has 2.7 GB by the sizes
that pip tells (torch 531 MB, cublas 423, cudnn 366, cufft 214, cusolver 201, nccl 197, triton 188, the rest 587)."""


def check_pythons(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """A Python that the environment can be built with."""
    return apply((NO_PYTHON,), inventory, cluster)


def check_room(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Room for the environment, if it is not there yet."""
    return apply((NO_ROOM,), inventory, cluster)


def _no_python(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    building = facts.building
    if building is None or building.error is not None:
        return
    own_lock = host.environment.path is None
    reasons = {python.path: why_not(python, own_lock=own_lock) for python in building.pythons}
    if None not in reasons.values():
        found = "; ".join(f"{path} ({why})" for path, why in reasons.items())
        low, high = (".".join(map(str, version)) for version in (LOWEST, HIGHEST))
        yield (
            f"found {found or 'none'}",
            {
                "fit": f"CPython {low} to {high}" if own_lock else f"CPython {low} or newer",
            },
        )


def _no_room(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    building = facts.building
    if building is None or building.free_bytes is None or building.torch is None:
        return
    if building.is_built(has_gpu=bool(facts.gpus)):
        return
    needed = _least_bytes(facts, building.torch, carried=host.transport != "local")
    if building.free_bytes < needed:
        yield (
            f"{format_bytes(building.free_bytes)} free in {facts.workdir}",
            {"needed": format_bytes(needed), "torch": building.torch},
        )


def _least_bytes(facts: HostFacts, torch: str, *, carried: bool) -> int:
    """What torch takes at the very least. carried: its wheels are brought there, too.

    Only for x86_64 has every version a build for CUDA, and nobody gets one whose lock names a build for the CPU.
    """
    if facts.gpus and facts.system.arch == "x86_64" and not torch.endswith("+cpu"):
        return GPU_BYTES * (2 if carried else 1)
    return CPU_BYTES + (CPU_WHEEL_BYTES if carried else 0)


NO_PYTHON = Rule(
    id="E-SW-14",
    severity="fail",
    title="no Python to build its environment with",
    meaning="no rank can start there: it takes {fit}",
    fix="there: install Python 3.12; or name an environment of your own in the cluster file",
    look=each(_no_python),
)
NO_ROOM = Rule(
    id="E-DISK-13",
    severity="fail",
    title="no room for its environment",
    meaning="it cannot be built: torch {torch} alone takes {needed} for a while, the other packages come on top",
    fix="free some space there, or set `workdir` of this host to a larger disk",
    look=each(_no_room),
)
