"""Which interface of each host the ranks talk through, and the variables that make them do so."""

from __future__ import annotations

from dataclasses import dataclass, field

from gangline.inventory.facts import HostFacts, Inventory, Nic
from gangline.runs.cluster import Cluster, Host


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """How the ranks of one host talk to the others."""

    interface: str | None
    """None: nothing was chosen, the libraries look for themselves."""
    reason: str
    """Why this interface."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the ranks. What the cluster file says in `env` has the last word."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each variable."""


def choose_nic(host: Host, facts: HostFacts) -> tuple[Nic | None, str]:
    """The interface that a host's ranks use, and why: the one that the cluster file names, else the one that has the
    host's address.
    """
    if host.interface is not None:
        return facts.nic(host.interface), f"cluster.yaml names {host.interface}"
    if (nic := facts.holder(host.address)) is not None:
        return nic, "it has the address of the host in cluster.yaml"
    for address in own_addresses(host, facts):
        if (nic := facts.holder(address)) is not None:
            return nic, f"it has the address {address} of {host.address}"
    return None, f"no interface of this host has the address {host.address}"


def own_addresses(host: Host, facts: HostFacts) -> tuple[str, ...]:
    """What the host's address means to itself where it is a name; a name often means loopback at home."""
    answer = facts.resolved(host.address)
    return tuple(text for text in answer.addresses if not text.startswith("127.") and text != "::1") if answer else ()


def rank_network(cluster: Cluster, inventory: Inventory) -> dict[str, NetworkChoice]:
    """For every host whose facts are known: its interface and the exact variables.

    NCCL reads its list of interfaces as beginnings of names, hence the "="; gloo takes one whole name. A GID index is
    never written down: it changes with addresses and firmware.
    """
    known = [(host, facts) for host in cluster.hosts if (facts := inventory.of(host.name)) is not None]
    if cluster.is_one_machine:
        return {host.name: _loopback() for host, _ in known}
    kind, why = _shared_kind([facts for _, facts in known])
    return {host.name: _choice(host, facts, _rdma(facts, kind, why)) for host, facts in known}


def _loopback() -> NetworkChoice:
    why = "all ranks are on this computer; its name may mean an address that no interface has"
    return NetworkChoice(
        interface="lo", reason=why, env={"GLOO_SOCKET_IFNAME": "lo"}, reasons={"GLOO_SOCKET_IFNAME": why}
    )


def _shared_kind(hosts: list[HostFacts]) -> tuple[str | None, str]:
    """InfiniBand or Ethernet (RoCE), where all hosts have ports of that kind; else why not."""
    if lacking := [facts.host for facts in hosts if not facts.rdma.active]:
        return None, f"no active port on {', '.join(lacking)}"
    layers = [{port.link_layer for port in facts.rdma.active} for facts in hosts]
    shared = set.intersection(*layers) if layers else set()
    # InfiniBand before RoCE: it needs no settings of the switch
    kind = next((layer for layer in ("InfiniBand", "Ethernet") if layer in shared), None)
    return kind, "not the same kind on all hosts"


def _choice(host: Host, facts: HostFacts, rdma: dict[str, tuple[str, str]]) -> NetworkChoice:
    nic, reason = choose_nic(host, facts)
    said: dict[str, tuple[str, str]] = {}
    if nic is not None:
        said["GLOO_SOCKET_IFNAME"] = (nic.name, f"gloo takes one interface; {reason}")
        said["NCCL_SOCKET_IFNAME"] = (f"={nic.name}", f"exactly {nic.name}, not every name that begins so; {reason}")
    said |= rdma
    for name in said.keys() & host.env.keys():
        said[name] = (host.env[name], "cluster.yaml says so")
    return NetworkChoice(
        interface=nic.name if nic else None,
        reason=reason,
        env={name: value for name, (value, _) in said.items()},
        reasons={name: why for name, (_, why) in said.items()},
    )


def _rdma(facts: HostFacts, kind: str | None, why: str) -> dict[str, tuple[str, str]]:
    """Whether NCCL uses InfiniBand or RoCE: only where every host can, or the ranks would wait for each other."""
    if not facts.rdma.active:
        return {"NCCL_IB_DISABLE": ("1", "this host has no active InfiniBand or RoCE port")}
    if kind is None:
        return {"NCCL_IB_DISABLE": ("1", f"all hosts have to go the same way: {why}")}
    usable = [port for port in facts.rdma.active if port.link_layer == kind]
    if len(usable) == len(facts.rdma.active):
        return {}
    names = ",".join(port.name if port.port is not None else port.device for port in usable)
    return {"NCCL_IB_HCA": (f"={names}", f"the {kind} ports, which all hosts have")}
