"""Where the hosts reach each other, chosen from what they say of their network cards."""

import dataclasses

import pytest

from gangline.init.describe import addresses_of_ssh, shared_networks
from tests.unit.init.world import facts, home_lan, nic


def chosen(*hosts):
    """The addresses in the best shared network."""
    networks = shared_networks(hosts)
    return {name: place.address for name, place in networks[0].places.items()} if networks else None


def test_the_wired_network_of_a_home(tmp_path):
    (network,) = shared_networks(list(home_lan().values()))
    assert network.name == "192.168.1.0/24"
    assert {name: (place.address, place.interface) for name, place in network.places.items()} == {
        "pc1": ("192.168.1.10", "eno1"),
        "pc2": ("192.168.1.11", "enp3s0"),
        "pc3": ("192.168.1.12", "enp5s0"),
    }
    assert network.speed_mbps == 100


def test_the_fastest_wired_network():
    hosts = [facts(f"h{n}", nic("eno1", f"10.0.0.{n}/24"), nic("ens6", f"10.1.0.{n}/24", speed=100000)) for n in (1, 2)]
    assert chosen(*hosts) == {"h1": "10.1.0.1", "h2": "10.1.0.2"}


def test_the_slowest_card_counts():
    one = facts("h1", nic("eno1", "10.0.0.1/24", speed=2500), nic("ens6", "10.1.0.1/24", speed=100000))
    two = facts("h2", nic("eno1", "10.0.0.2/24", speed=2500), nic("ens6", "10.1.0.2/24", speed=1000))
    assert chosen(one, two) == {"h1": "10.0.0.1", "h2": "10.0.0.2"}


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (nic("eno1", speed=100), nic("wlan0", kind="wifi", speed=2400)),
        (nic("wlan0", kind="wifi", speed=None), nic("wg0", kind="tunnel", speed=None)),
        (nic("wg0", kind="tunnel", speed=None), nic("docker0", kind="bridge", speed=None)),
        (nic("ib0", kind="infiniband", speed=200000), nic("eno1", speed=1000)),
        (nic("bond0", kind="bond", speed=20000), nic("eno9", speed=10000)),
        (nic("eno1", speed=10), nic("eth0", kind="veth", speed=10000)),
        (nic("eno1"), nic("virbr0", kind="bridge")),
        (nic("eno1"), nic("br-0a1b2c3d4e5f", kind="bridge")),
    ],
)
def test_which_of_two_networks_is_taken(good, bad):
    def host(number):
        pair = [
            nic(each.name, f"10.{index}.0.{number}/24", kind=each.kind, speed=each.speed_mbps)
            for index, each in ((1, good), (0, bad))
        ]
        return facts(f"h{number}", *pair)

    assert chosen(host(1), host(2)) == {"h1": "10.1.0.1", "h2": "10.1.0.2"}


def test_ipv4_before_ipv6_but_ipv6_before_a_tunnel():
    def host(number, *more):
        return facts(f"h{number}", nic("eno1", f"2001:db8::{number}/64", "fe80::1/64"), *more)

    wireless = [host(n, nic("wlan0", f"10.0.0.{n}/24", kind="wifi")) for n in (1, 2)]
    tunnelled = [host(n, nic("tun0", f"10.0.0.{n}/24", kind="tunnel")) for n in (1, 2)]
    assert chosen(*wireless) == {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    assert chosen(*tunnelled) == {"h1": "2001:db8::1", "h2": "2001:db8::2"}


def test_a_bridge_is_as_good_as_the_card_in_it():
    def host(number):
        card = nic("eno1", speed=10000)
        return facts(
            f"h{number}",
            card,
            nic("br0", f"10.1.0.{number}/24", kind="bridge", speed=None, ports=("eno1", "vnet0")),
            nic("eno2", f"10.0.0.{number}/24"),
        )

    assert shared_networks([host(1), host(2)])[0].places["h1"].interface == "br0"


@pytest.mark.parametrize(
    "card",
    [
        nic("lo", "10.0.0.9/24", kind="loopback"),
        nic("docker0", "172.17.0.1/16", kind="bridge"),
        nic("eno1", "169.254.1.1/16"),
        nic("eno1", "fe80::1/64"),
        nic("eno1", "not an address"),
    ],
)
def test_networks_that_lead_nowhere(card):
    assert shared_networks([facts("h1", card), facts("h2", card)]) == []


def test_cards_without_a_cable_do_not_count():
    down = dataclasses.replace(nic("eno1", "10.0.0.1/24"), carrier=False)
    assert shared_networks([facts("h1", down), facts("h2", nic("eno1", "10.0.0.2/24"))]) == []


def test_what_is_virtual_is_better_than_nothing():
    hosts = [facts(f"h{n}", nic("eth0", f"10.0.0.{n}/24", kind="veth")) for n in (1, 2)]
    assert chosen(*hosts) == {"h1": "10.0.0.1", "h2": "10.0.0.2"}


def test_a_network_that_one_host_lacks_is_not_shared():
    one = facts("h1", nic("eno1", "10.0.0.1/24"), nic("ib0", "10.9.0.1/24", kind="infiniband", speed=200000))
    two = facts("h2", nic("eno1", "10.0.0.2/24"), nic("ib0", "10.9.0.2/24", kind="infiniband", speed=200000))
    three = facts("h3", nic("eno1", "10.0.0.3/24"))
    assert chosen(one, two, three) == {"h1": "10.0.0.1", "h2": "10.0.0.2", "h3": "10.0.0.3"}
    assert chosen(one, two) == {"h1": "10.9.0.1", "h2": "10.9.0.2"}


def test_without_a_shared_network_the_addresses_of_ssh_are_taken():
    one, two = facts("h1", nic("eno1", "10.0.0.1/24")), facts("h2", nic("eno1", "10.1.0.1/24"))
    assert chosen(one, two) is None
    places = addresses_of_ssh([one, two], {"h1": "10.0.0.1", "h2": "198.51.100.7"}).places
    assert (places["h1"].address, places["h1"].interface) == ("10.0.0.1", "eno1")
    assert (places["h2"].address, places["h2"].interface) == ("198.51.100.7", None)


def test_a_host_that_ssh_does_not_reach_gives_its_best_address():
    here = facts("desk", nic("wlan0", "10.9.0.1/24", kind="wifi"), nic("eno1", "10.0.0.1/24"))
    assert addresses_of_ssh([here], {}).places["desk"].address == "10.0.0.1"
    assert addresses_of_ssh([facts("bare")], {}).places["bare"].address == "127.0.0.1"
