"""The package that does a strategy, such as DeepSpeed: it has to be in the environment of every host before a start."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.errors import UsageError
from gangline.inventory.facts import Inventory
from gangline.planning.plan import Plan
from gangline.runs.cluster import Cluster, Host
from gangline.sync.lock import load_lock


def require_engine(plan: Plan, cluster: Cluster, inventory: Inventory) -> None:
    """Raise UsageError, naming every host whose ranks would not find what does the plan's strategy."""
    package = plan.half.capabilities.package
    if not package:
        return
    locked = [
        host.name for host in cluster.hosts if host.environment.kind == "locked" and not _is_pinned(host, package)
    ]
    bare = [
        host.name for host in cluster.hosts if host.environment.kind != "locked" and not _has(host, inventory, package)
    ]
    if locked:
        raise _lacking(
            plan.strategy,
            package,
            locked,
            seen=f"their environment is built from a lock without {package}: it comes as source alone, and gangline "
            "carries wheels",
            fix=f"pip wheel --no-deps {package}, and a lock of yours with that folder as --find-links and its version; "
            f"or an environment of your own with pip install 'gangline[{package}]'; or write strategy: fsdp",
        )
    if bare:
        raise _lacking(
            plan.strategy,
            package,
            bare,
            seen=f"{package} is not among the packages of their Python",
            fix=f"pip install 'gangline[{package}]' into it on each, or write strategy: fsdp",
        )


def _lacking(kind: str, package: str, hosts: Sequence[str], *, seen: str, fix: str) -> UsageError:
    return UsageError(f"strategy: {kind} needs {package}, which {' '.join(hosts)} would not have", seen=seen, fix=fix)


def _is_pinned(host: Host, package: str) -> bool:
    return any(pin.name == package for pin in load_lock(host.environment.path).pins)


def _has(host: Host, inventory: Inventory, package: str) -> bool:
    facts = inventory.of(host.name)
    # of a Python that could not be asked nothing is known, and a rank says so
    return facts is None or facts.python_reason is not None or bool(facts.packages.get(package))
