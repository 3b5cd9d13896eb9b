"""Who looks after a run: its head, if it can go on without this computer, else this computer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gangline.errors import RunFailed
from gangline.remote.hostkeys import resolve
from gangline.runs.cluster import Cluster, Host
from gangline.steps.keep import Keeping
from gangline.steps.seams import Means


def ask_who_keeps(cluster: Cluster, means: Means) -> Callable[[], Keeping]:
    """Ask while other things are done, for it takes as long as they do; what gives the answer, or raises RunFailed."""
    if cluster.head.transport == "local":
        return Keeping
    pool = ThreadPoolExecutor(max_workers=1)
    answer = pool.submit(who_keeps, cluster, means)
    pool.shutdown(wait=False)
    return answer.result


def who_keeps(cluster: Cluster, means: Means) -> Keeping:
    """The head looks after the run if it can go on without this computer; else this computer does, and says so."""
    head = cluster.head
    if head.transport == "local":
        return Keeping()
    if cluster.supervisor == "here":
        return Keeping(why_not=("the cluster file says `supervisor: here`",))
    reasons = _why_not(cluster, means)
    if reasons and cluster.supervisor == "head":
        raise RunFailed(
            f"{head.name} cannot look after the run",
            seen="; ".join(reasons),
            fix="put that right, or write `supervisor: auto` in the cluster file",
        )
    if reasons:
        return Keeping(why_not=(f"{head.name} says: {'; '.join(reasons)}",))
    return Keeping(host=head.name)


def _why_not(cluster: Cluster, means: Means) -> list[str]:
    if here := [host.name for host in cluster.hosts if host.transport == "local"]:
        return [f"{', '.join(here)} is this computer, which is not reached by ssh"]
    return means.seams.cannot_supervise(seen_from_head(cluster), means.transports[cluster.head.name])


def seen_from_head(cluster: Cluster) -> Cluster:
    """The same cluster as the head reaches it: itself, and the others by user, address and port."""
    head, *others = cluster.hosts
    here = dataclasses.replace(head, transport="local", ssh=None, ssh_port=None)
    return dataclasses.replace(cluster, hosts=(here, *map(_from_elsewhere, others)))


def _from_elsewhere(host: Host) -> Host:
    """Names of this computer's ssh_config mean nothing on another one."""
    if host.transport == "local":
        return host
    found = resolve(host.ssh or host.name, host.ssh_port)
    return dataclasses.replace(host, ssh=f"{found.user}@{host.address}", ssh_port=found.port)
