"""DeepSpeed, where a plan needs it: it has to be in the environment of every host before a run is made."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.errors import UsageError
from gangline.inventory.facts import Inventory
from gangline.planning.plan import Plan
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import ZERO
from gangline.sync.lock import load_lock

PACKAGE = "deepspeed"


def require_engine(plan: Plan, cluster: Cluster, inventory: Inventory) -> None:
    """Raise UsageError, naming every host whose ranks would not find what does the plan's strategy."""
    if plan.strategy not in ZERO:
        return
    locked = [host.name for host in cluster.hosts if host.environment.kind == "locked" and not _is_pinned(host)]
    bare = [host.name for host in cluster.hosts if host.environment.kind != "locked" and not _has(host, inventory)]
    if locked:
        raise _lacking(
            plan.strategy,
            locked,
            seen=f"their environment is built from a lock without {PACKAGE}: it comes as source alone, and gangline "
            "carries wheels",
            fix="pip wheel --no-deps deepspeed, and a lock of yours with that folder as --find-links and its version; "
            "or an environment of your own with pip install 'gangline[deepspeed]'; or write strategy: fsdp",
        )
    if bare:
        raise _lacking(
            plan.strategy,
            bare,
            seen=f"{PACKAGE} is not among the packages of their Python",
            fix="pip install 'gangline[deepspeed]' into it on each, or write strategy: fsdp",
        )


def _lacking(kind: str, hosts: Sequence[str], *, seen: str, fix: str) -> UsageError:
    return UsageError(
        f"strategy: {kind} is done by DeepSpeed, which {' '.join(hosts)} would not have", seen=seen, fix=fix
    )


def _is_pinned(host: Host) -> bool:
    return any(pin.name == PACKAGE for pin in load_lock(host.environment.path).pins)


def _has(host: Host, inventory: Inventory) -> bool:
    facts = inventory.of(host.name)
    # of a Python that could not be asked nothing is known, and a rank says so
    return facts is None or facts.python_reason is not None or bool(facts.packages.get(PACKAGE))
