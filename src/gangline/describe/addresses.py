"""Where do the hosts reach each other? Chosen from the networks that they say they are in. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gangline.inventory.facts import HostFacts
from gangline.inventory.hardware import Nic

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Quality(IntEnum):
    """How fit an interface is for the ranks' traffic, the best first."""

    WIRED = 0
    WIFI = 1
    OTHER = 2
    TUNNEL = 3
    VIRTUAL = 4


_QUALITY = {
    "ethernet": Quality.WIRED,
    "infiniband": Quality.WIRED,
    "bond": Quality.WIRED,
    "vlan": Quality.WIRED,
    "macvlan": Quality.WIRED,
    "wifi": Quality.WIFI,
    "tunnel": Quality.TUNNEL,
    "veth": Quality.VIRTUAL,
}
_OF_CONTAINERS = re.compile(r"docker|br-[0-9a-f]{6}|virbr|lxcbr|lxdbr|podman|cni|flannel|cali|vmnet|vboxnet")
"""Networks inside one machine: every machine has one with the same numbers, and they are not connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one host is reached by the others."""

    address: str
    interface: str | None
    """None: an address that ssh uses, and that no interface of the host has."""
    quality: Quality = Quality.OTHER
    speed_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network that every host has an address in."""

    name: str
    """As in 192.168.1.0/24; "" where the addresses have none in common."""
    places: Mapping[str, Place]
    """By host."""

    @property
    def quality(self) -> Quality:
        """That of its worst interface."""
        return max((place.quality for place in self.places.values()), default=Quality.OTHER)

    @property
    def speed_mbps(self) -> int | None:
        """That of its slowest interface, None if one does not say."""
        speeds = [place.speed_mbps for place in self.places.values()]
        known = [speed for speed in speeds if speed is not None]
        return min(known) if known and len(known) == len(speeds) else None


def shared_networks(hosts: Sequence[HostFacts]) -> list[Network]:
    """The networks that all hosts are in, the best for training first.

    Wired before wireless, IPv4 before IPv6, fast before slow; tunnels and what lies inside a machine come last.
    """
    found: dict[str, dict[str, Place]] = {}
    for facts in hosts:
        for name, place in _places(facts).items():
            found.setdefault(name, {})[facts.host] = place
    networks = [Network(name=name, places=places) for name, places in found.items() if len(places) == len(hosts)]
    return sorted(filter(_is_one_network, networks), key=_rank)


def addresses_of_ssh(hosts: Sequence[HostFacts], used: Mapping[str, str]) -> Network:
    """Where ssh reaches each host, for hosts that have no network in common; without ssh, a host's best address."""
    places = {}
    for facts in hosts:
        own = sorted(_places(facts).items(), key=lambda item: _rank(Network(name=item[0], places={"": item[1]})))
        best = own[0][1] if own else Place(address="127.0.0.1", interface=None)
        address = used.get(facts.host, best.address)
        same = [place for _, place in own if place.address == address]
        places[facts.host] = same[0] if same else Place(address=address, interface=None)
    return Network(name="", places=places)


def _rank(network: Network) -> tuple[bool, bool, Quality, int, str]:
    last_resort = network.quality >= Quality.TUNNEL
    return (last_resort, ":" in network.name, network.quality, -(network.speed_mbps or 0), network.name)


def _is_one_network(network: Network) -> bool:
    """Two hosts with one address are in two networks that look alike."""
    addresses = [place.address for place in network.places.values()]
    return len(set(addresses)) == len(addresses)


def _places(facts: HostFacts) -> dict[str, Place]:
    """Network -> the host's best interface in it."""
    best: dict[str, Place] = {}
    by_name = {nic.name: nic for nic in facts.nics}
    for nic in facts.nics:
        if nic.kind == "loopback" or nic.up is False or nic.carrier is False:
            continue
        quality, speed_mbps = _quality(nic, by_name)
        for interface in [seen for text in nic.addresses if (seen := _interface(text)) is not None]:
            place = Place(address=str(interface.ip), interface=nic.name, quality=quality, speed_mbps=speed_mbps)
            name = str(interface.network)
            other = best.setdefault(name, place)
            if (place.quality, -(place.speed_mbps or 0)) < (other.quality, -(other.speed_mbps or 0)):
                best[name] = place
    return best


def _quality(nic: Nic, others: Mapping[str, Nic]) -> tuple[Quality, int | None]:
    """A bridge is as good as the best card in it: on a host of virtual machines it has the host's own address."""
    if _OF_CONTAINERS.match(nic.name):
        return Quality.VIRTUAL, None
    if nic.kind != "bridge":
        return _QUALITY.get(nic.kind, Quality.OTHER), nic.speed_mbps
    cards = [others[port] for port in nic.ports if port in others and others[port].kind != "bridge"]
    ranked = sorted((_QUALITY.get(card.kind, Quality.OTHER), -(card.speed_mbps or 0)) for card in cards)
    quality, speed = ranked[0] if ranked else (Quality.VIRTUAL, 0)
    return quality, -speed or None


def _interface(text: str) -> Interface | None:
    """An address with its prefix, unless it is of use inside the host or on one cable only."""
    try:
        interface = ipaddress.ip_interface(text)
    except ValueError:
        return None
    ip = interface.ip
    return None if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified else interface
