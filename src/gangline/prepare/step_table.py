"""The table of steps, in the order in which they are done. A new step is a module with its row here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from gangline.errors import UsageError
from gangline.prepare.firewall_rules import FIREWALL
from gangline.prepare.fixed_address import ADDRESS
from gangline.prepare.gpu_containers import CONTAINER
from gangline.prepare.gpu_driver import DRIVER_STEP
from gangline.prepare.host_python import PYTHON_STEP
from gangline.prepare.hostnames import NAMES
from gangline.prepare.keys_between import BETWEEN
from gangline.prepare.network_card import NIC
from gangline.prepare.nfs_share import SHARE
from gangline.prepare.no_suspend import SLEEP
from gangline.prepare.prepare_step import PrepareStep
from gangline.prepare.resource_limits import LIMITS
from gangline.prepare.shared_account import USER_STEP
from gangline.prepare.ssh_access import ACCESS
from gangline.prepare.ssh_hardening import SSHD
from gangline.prepare.time_service import CLOCK
from gangline.runs.cluster import Cluster, Host

STEPS: tuple[PrepareStep, ...] = (
    ACCESS,
    BETWEEN,
    USER_STEP,
    ADDRESS,
    NIC,
    NAMES,
    CLOCK,
    SLEEP,
    LIMITS,
    PYTHON_STEP,
    DRIVER_STEP,
    CONTAINER,
    FIREWALL,
    SHARE,
    SSHD,
)


def machines_for(words: Sequence[str], cluster: Cluster) -> tuple[Host, ...]:
    """The hosts, and the witness where all steps that the words name are for it, too."""
    named = [step for step in STEPS if step.name in words]
    return cluster.reached if named and all(step.on_witness for step in named) else cluster.hosts


def chosen(words: Sequence[str], machines: Sequence[Host]) -> tuple[tuple[PrepareStep, ...], tuple[str, ...]]:
    """The steps and the hosts that the words name; no step, or no host, stands for all. Raises UsageError."""
    steps = {step.name: step for step in STEPS}
    hosts = [host.name for host in machines]
    if strange := [word for word in words if word not in steps and word not in hosts]:
        near = difflib.get_close_matches(strange[0], [*steps, *hosts], n=1)
        raise UsageError(
            f"{strange[0]!r} is neither a step nor a host of the cluster",
            seen=f"steps: {', '.join(steps)}; hosts: {', '.join(hosts)}",
            fix=f"did you mean {near[0]!r}?"
            if near
            else "gangline prepare without words does what gangline check found",
        )
    named = tuple(step for step in STEPS if step.name in words)
    every = tuple(step for step in STEPS if not step.only_by_name)
    return named or every, tuple(name for name in hosts if name in words) or tuple(hosts)
