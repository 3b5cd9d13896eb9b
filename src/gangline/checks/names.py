"""Is every host a machine of its own, and do the hosts mean the same by a name?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Rule, Seen, adders, grouped, pairs
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.gather import is_address
from gangline.inventory.rank_interface import own_addresses
from gangline.runs.cluster import Cluster, Host

NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "beegfs", "ceph", "gpfs", "glusterfs", "fuse.sshfs", "9p")
LOOPBACK = ("127.", "::1")


RULES: list[Rule] = []
_, whole_cluster = adders(RULES)


def machine_of(facts: HostFacts) -> str | None:
    """What tells one machine from another: its running kernel and its network. A container is a machine, too."""
    machine = facts.system.machine
    return f"{machine.boot}/{machine.network}" if machine.boot and machine.network else None


@whole_cluster.fail(
    "E-NAME-01",
    title="the same work folder",
    meaning="their checkpoints and logs would overwrite each other",
    fix="give each host a `workdir` of its own, or make them one host with more slots",
)
def _same_folder(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    places: dict[tuple[str, str], tuple[str, ...]] = {}
    for facts in inventory.hosts:
        place = (_owner(facts), facts.workdir)
        places[place] = (*places.get(place, ()), facts.host)
    for (owner, workdir), hosts in places.items():
        if len(hosts) > 1:
            where = owner if " " in owner else next(facts.hostname for facts in inventory.hosts if facts.host in hosts)
            yield Seen(hosts=hosts, evidence=f"{workdir} on {where}")


def _owner(facts: HostFacts) -> str:
    """Whose disk the work folder is on: a file server's, or the machine's own."""
    folder = facts.work_folder
    if folder and folder.source and (folder.filesystem or "").startswith(NETWORK_FILESYSTEMS):
        return f"{folder.filesystem} {folder.source}"
    return machine_of(facts) or facts.hostname


@whole_cluster.warn(
    "E-NAME-02",
    title="several hosts have one hostname",
    meaning="libraries that know hosts by name take them for one machine, and logs cannot be told apart",
    fix="give each one its own name: sudo hostnamectl set-hostname NAME",
    step="names",
)
def _same_hostname(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for hostname, hosts in grouped(inventory, lambda facts: facts.hostname).items():
        machines = {machine_of(facts) for facts in inventory.hosts if facts.host in hosts}
        if len(hosts) > 1 and len(machines) > 1:
            yield Seen(hosts=hosts, evidence=f"all of them are called {hostname}")


@whole_cluster.warn(
    "E-NAME-03",
    title="its own name means loopback",
    meaning="programs that look up {hostname} give the other hosts 127.x, an address that does not lead back; "
    "gangline gives its ranks an interface instead",
    fix="in its /etc/hosts, write the address of the network beside {hostname}",
    step="names",
)
def _own_name_is_loopback(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    if len(cluster.hosts) < 2 or cluster.is_one_machine:
        return
    for facts in inventory.hosts:
        answer = facts.resolved(facts.hostname)
        if answer and answer.addresses and answer.addresses[0].startswith(LOOPBACK):  # gloo takes the first
            yield Seen(
                hosts=(facts.host,),
                evidence=f"{facts.hostname} is {', '.join(answer.addresses)} there",
                words={"hostname": facts.hostname},
            )


@whole_cluster.fail(
    "E-NAME-04",
    title="one machine is listed twice",
    meaning="ranks of both would take the same GPUs and the same CPUs",
    fix="keep one of them, with more slots",
)
def _one_machine_twice(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """Several local hosts are one machine on purpose."""
    local = {host.name for host in cluster.hosts if host.transport == "local"}
    for hosts in grouped(inventory, machine_of).values():
        if len(hosts) > 1 and not set(hosts) <= local:
            hostname = next(facts.hostname for facts in inventory.hosts if facts.host == hosts[0])
            yield Seen(hosts=hosts, evidence=f"the same running system with the same network, called {hostname}")


@whole_cluster.warn(
    "E-NAME-05",
    title="the name {name} leads to a wrong address",
    meaning="programs there that use the name connect to another machine, or to none",
    fix="correct {name} in its /etc/hosts or in your DNS; gangline itself uses addresses",
    step="names",
)
def _name_leads_elsewhere(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """What a host means by another's name has to be an address of that other host."""
    if cluster.is_one_machine:
        return
    for target, host in pairs(inventory, cluster):
        for name in dict.fromkeys((host.name, host.address)):
            for facts in inventory.hosts:
                answer = facts.resolved(name)
                if facts.host == host.name or is_address(name) or not answer or not answer.addresses:
                    continue
                if not any(_belongs(text, target, host) for text in answer.addresses):
                    evidence = f"{facts.host} takes {name} for {', '.join(answer.addresses)}; {_has(target, host)}"
                    yield Seen(hosts=(facts.host,), evidence=evidence, words={"name": name})


def _belongs(address: str, target: HostFacts, host: Host) -> bool:
    return address == host.address or (not address.startswith(LOOPBACK) and target.holder(address) is not None)


def _has(target: HostFacts, host: Host) -> str:
    texts = [text.partition("/")[0] for nic in target.nics if nic.kind != "loopback" for text in nic.addresses]
    held = [text for text in texts if not text.lower().startswith("fe80:")]
    return f"{host.name} has {', '.join(held[:4]) or 'no address'}"


@whole_cluster.fail(
    "E-NAME-06",
    title="no interface has the address of the cluster file",
    meaning="the ranks there cannot be reached at it",
    fix="write an address of that host into the cluster file: ip addr shows them there",
)
def _address_is_not_held(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    several = len(cluster.hosts) > 1 and not cluster.is_one_machine
    for facts, host in pairs(inventory, cluster):
        if not facts.nics or not several:
            continue
        if is_address(host.address) and host.address.startswith(LOOPBACK):
            yield Seen(hosts=(host.name,), evidence=f"{host.address} is loopback: every host means itself by it")
            continue
        wanted = (host.address,) if is_address(host.address) else own_addresses(host, facts)
        if wanted and not any(facts.holder(text) for text in wanted):
            yield Seen(hosts=(host.name,), evidence=f"address {', '.join(wanted)}; {_has(facts, host)}")
