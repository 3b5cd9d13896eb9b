"""The start of an attempt: what will be started is written down, and somebody who looks after it starts it."""

from __future__ import annotations

import dataclasses

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import Request
from gangline.launch.program import Program
from gangline.remote.hostkeys import resolve
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState
from gangline.steps.equip import Ready
from gangline.steps.keep import Keeping, copy_records, hand_over
from gangline.steps.seams import Means
from gangline.sync.place import host_layout, place_gang, write_documents


def render(ready: Ready, gang: Gang, means: Means, *, program: Program | None = None, claim: bool = False) -> Request:
    """Exactly what would be started; the head says which port is free there. claim: keep it, for it will be used."""
    cluster, seams = ready.cluster, means.seams
    port = seams.free_port(cluster, means.transports[cluster.head.name], claim=claim)
    return seams.backend().render(cluster, gang, port=port, networks=ready.networks, program=program)


def start_attempt(layout: RunLayout, ready: Ready, gang: Gang, means: Means, *, program: Program | None = None) -> None:
    """Write down what will be started, and have a detached supervisor start it.

    The hosts are written down with the attempt; they become those of the run once the gang has been started.
    """
    cluster, number = ready.cluster, gang.attempt
    place_gang(cluster, means.transports, gang)
    layout.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    request = render(ready, gang, means, program=program, claim=True)
    documents = {"request": request.to_json(), "cluster": cluster.to_json()}
    write_documents(layout, {f"attempts/{number}/{name}": value for name, value in documents.items()})
    keeping = who_keeps(cluster, means)
    if keeping.why_not:
        means.talk.say(f"unattended: no, this computer has to look after the run: {'; '.join(keeping.why_not)}")
    elif keeping.unattended:
        means.talk.say(f"unattended: yes, {keeping.host} looks after the run; this computer may be turned off")
    try:
        if keeping.host is None:
            keeping.save(layout)
            means.seams.spawn(layout.folder, number, secrets=means.secrets)
        else:
            _spawn_there(layout, cluster, number, keeping, means)
    except RunFailed:
        state = RunState.load(layout)
        if state.phase == "failed" and state.error:
            raise GanglineError.from_json(state.error) from None  # its own words say more
        raise


def who_keeps(cluster: Cluster, means: Means) -> Keeping:
    """The head looks after the run if it can go on without this computer; else this computer does, and says so."""
    head = cluster.head
    if head.transport == "local":
        return Keeping()
    if cluster.supervisor == "here":
        return Keeping(why_not=("the cluster file says `supervisor: here`",))
    reasons = means.seams.cannot_supervise(seen_from_head(cluster), means.transports[head.name])
    if reasons and cluster.supervisor == "head":
        raise RunFailed(
            f"{head.name} cannot look after the run",
            seen="; ".join(reasons),
            fix="put that right, or write `supervisor: auto` in the cluster file",
        )
    return Keeping(host=None if reasons else head.name, why_not=tuple(reasons))


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


def _spawn_there(layout: RunLayout, cluster: Cluster, number: int, keeping: Keeping, means: Means) -> None:
    """Give the records to the head, as it sees the hosts, and have the supervisor come up there."""
    head = cluster.head
    keeper, there = means.transports[head.name], host_layout(head, layout.run_id)
    seen = seen_from_head(cluster).to_json()
    documents = {"cluster.json": seen, f"attempts/{number}/cluster.json": seen}
    hand_over(layout, there, keeper, attempt=number, documents=documents)
    keeping.save(layout)
    try:
        means.seams.spawn_there(head, keeper, there, number, secrets=means.secrets)
    finally:
        copy_records(layout, there, keeper)
        write_documents(layout, {"cluster": cluster.to_json()})
