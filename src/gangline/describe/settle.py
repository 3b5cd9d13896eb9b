"""From what was found to the cluster that is written down. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gangline.describe import tables
from gangline.describe.addresses import Network
from gangline.describe.cluster_file import Notes
from gangline.errors import UsageError
from gangline.inventory.facts import HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host
from gangline.spec.host import WORKDIR
from gangline.spec.named import NamedHost

NETWORK_DRIVES = {
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.glusterfs", "9p", "afs",
}  # fmt: skip
"""Kinds of file systems on which one folder is seen by several machines."""


def settled(
    named: Sequence[NamedHost], pinned: Sequence[Host], inventory: Inventory, network: Network
) -> tuple[Cluster, dict[str, Notes]]:
    """The cluster of the hosts that answered, and what is said beside the values."""
    with_slots = {each.host.name for each in named if each.has_slots}
    in_one_folder = one_folder(inventory.hosts)
    hosts: list[Host] = []
    notes: dict[str, Notes] = {}
    for host in pinned:
        facts = inventory.of(host.name)
        if facts is None:
            continue
        own_folder = host.transport == "ssh" and host.name in in_one_folder
        hosts.append(
            dataclasses.replace(
                host,
                address=network.places[host.name].address,
                slots=host.slots if host.name in with_slots else max(1, len(facts.gpus)),
                workdir=f"{WORKDIR}/{host.name}" if own_folder else host.workdir,
            )
        )
        notes[host.name] = _notes(facts, network)
    return Cluster(name="cluster", hosts=tuple(hosts)), notes


def _notes(facts: HostFacts, network: Network) -> Notes:
    return Notes(
        address=tables.link(network.places[facts.host]),
        slots=tables.slots_note(facts),
        workdir="its own: the home folder is one and the same on several hosts",
    )


def refuse_twins(inventory: Inventory) -> None:
    """Raise UsageError where two names lead to one machine: its ranks would be counted twice."""
    seen: dict[tuple[str, str], str] = {}
    for facts in inventory.hosts:
        machine = facts.system.machine
        if machine.boot is None or machine.network is None:
            continue
        other = seen.setdefault((machine.boot, machine.network), facts.host)
        if other != facts.host:
            raise UsageError(
                f"{other} and {facts.host} are one machine",
                seen=f"both call themselves {facts.hostname} and have been up since the same moment",
                fix="name it once; for more ranks on it write slots in the file",
            )


def one_folder(hosts: Sequence[HostFacts]) -> set[str]:
    """Hosts whose work folder, on a network drive, is that of another one, too."""
    places: dict[tuple[str | None, str | None], list[str]] = {}
    for facts in hosts:
        folder = facts.work_folder
        if folder is not None and folder.filesystem in NETWORK_DRIVES:
            places.setdefault((folder.source, folder.real_path), []).append(facts.host)
    return {name for names in places.values() if len(names) > 1 for name in names}
