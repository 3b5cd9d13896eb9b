"""What runs of other users have on this computer, as their leases say (gangline.agent.machine_leases)."""

from __future__ import annotations

from pathlib import Path

from gangline.errors import UsageError
from gangline.inventory.facts import OtherLease
from gangline.inventory.gather import read_leases
from gangline.runs.registry import run_ids
from gangline.transport.local import leases_of_others


def leases_here() -> tuple[OtherLease, ...]:
    """Leases of other users on this computer."""
    return read_leases(leases_of_others())


def refuse_of_another(prefix: str, *, home: Path) -> None:
    """Raises UsageError where `prefix` is no run of this user, and is one of another user on this computer."""
    if not prefix or any(run_id.startswith(prefix) for run_id in run_ids(home)):
        return
    for lease in leases_here():
        if lease.run.startswith(prefix):
            raise UsageError(
                f"{lease.run} is a run of {lease.user}, not yours",
                seen=f"it has {lease.what} of this computer {lease.seen}",
                fix=f"ask {lease.user}: only that user and root can end it",
            )
