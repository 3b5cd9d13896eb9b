"""Allocations of a batch system: a start inside one is refused until gangline supports that system."""

from __future__ import annotations

from collections.abc import Mapping

from gangline.errors import UsageError

ALLOCATIONS: Mapping[str, str] = {"SLURM_JOB_ID": "Slurm"}
"""The variable that a batch system sets inside an allocation -> its name."""


def require_no_allocation(variables: Mapping[str, str], *, backend: str) -> None:
    """Raise UsageError inside an allocation: the batch system could not end what this backend starts.

    variables: the user's environment.
    """
    for name, system in ALLOCATIONS.items():
        if job := variables.get(name):
            raise UsageError(
                f"gangline does not start anything inside a {system} allocation yet",
                seen=f"{name}={job}; {system} knows nothing of ranks that the backend `{backend}` starts: they would "
                "run on after the allocation has ended",
                fix="start from a shell outside of the allocation, on hosts that you reach by ssh; "
                "ps, logs, explain and the other verbs that read work here, too",
            )
