"""What the programs and files of this computer say of hosts nearby."""

import json

import pytest

from gangline.discovery import sources
from gangline.discovery.sources import HostHint

ADDRESSES = [
    {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8, "scope": "host"}]},
    {
        "ifname": "eno1",
        "flags": ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"],
        "addr_info": [
            {"family": "inet", "local": "192.168.1.7", "prefixlen": 24, "scope": "global"},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"},
        ],
    },
    {"ifname": "eno2", "flags": ["BROADCAST"], "addr_info": [{"family": "inet", "local": "10.1.0.1", "prefixlen": 24, "scope": "global"}]},
    {"ifname": "docker0", "flags": ["UP"], "addr_info": [{"family": "inet", "local": "172.17.0.1", "prefixlen": 16, "scope": "global"}]},
    {"ifname": "wg0", "flags": ["POINTOPOINT", "UP"], "addr_info": [{"family": "inet", "local": "10.9.0.2", "prefixlen": 24, "scope": "global"}]},
]  # fmt: skip
ROUTES = [{"dst": "default", "gateway": "192.168.1.1", "dev": "eno1"}]
NEIGHBOURS = [
    {"dst": "192.168.1.10", "dev": "eno1", "lladdr": "02:00:00:00:00:10", "state": ["STALE"]},
    {"dst": "192.168.1.11", "dev": "eno1", "state": ["FAILED"]},
    {"dst": "172.17.0.2", "dev": "docker0", "lladdr": "02:42:ac:11:00:02", "state": ["REACHABLE"]},
    {"dst": "fe80::10", "dev": "eno1", "lladdr": "02:00:00:00:00:10", "state": ["STALE"]},
]
PROC = """IP address       HW type     Flags       HW address            Mask     Device
192.168.1.10     0x1         0x2         02:00:00:00:00:10     *        eno1
192.168.1.11     0x1         0x0         00:00:00:00:00:00     *        eno1
"""
MACOS = """? (192.168.1.1) at a4:91:b1:0:1:2 on en0 ifscope [ethernet]
? (192.168.1.9) at (incomplete) on en0 ifscope [ethernet]
"""
AVAHI = r"""+;eth0;IPv4;pc1;_ssh._tcp;local
=;eth0;IPv4;pc1;_ssh._tcp;local;pc1.local;192.168.1.10;22;
=;eth0;IPv6;pc1;_ssh._tcp;local;pc1.local;fe80::10;22;
=;eth0;IPv4;alice\032s\032box;_ssh._tcp;local;box.local;192.168.1.12;2222;"a=b;c"
=;eth0;IPv4;pc3\032\091aa\058bb\093;_workstation._tcp;local;pc3.local;192.168.1.13;9;
=;eth0;IPv4;bad;_ssh._tcp;local;-oProxyCommand=x;192.168.1.14;22;
"""


def test_networks_with_neighbours_count_and_no_others():
    local = sources.networks_of(json.dumps(ADDRESSES), json.dumps(ROUTES))
    assert [(each.interface, str(each.network)) for each in local.networks] == [("eno1", "192.168.1.0/24")]
    assert local.gateways == {"192.168.1.1"}
    assert {"192.168.1.7", "127.0.0.1", "172.17.0.1"} <= local.own
    assert [local.has(each) for each in ("192.168.1.200", "192.168.2.1", "fe80::10", "pc1")] == [
        True,
        False,
        False,
        False,
    ]


def test_without_ip_the_networks_are_unknown():
    assert sources.read_networks(lambda argv: None) is None


def test_neighbours_that_answered_once():
    hints = sources.neighbours_of(json.dumps(NEIGHBOURS))
    assert [(hint.address, hint.hardware) for hint in hints] == [("192.168.1.10", "02:00:00:00:00:10")]


def test_neighbours_without_iproute2(tmp_path):
    (tmp_path / "arp").write_text(PROC)
    asked = []
    assert [hint.address for hint in sources.read_neighbours(asked.append, tmp_path / "arp")] == ["192.168.1.10"]
    assert len(asked) == 1
    said = {"arp": MACOS}
    assert [each.address for each in sources.read_neighbours(lambda argv: said.get(argv[0]), tmp_path / "x")] == [
        "192.168.1.1"
    ]
    assert sources.read_neighbours(lambda argv: None, tmp_path / "x") is None


def test_hosts_that_announce_themselves():
    found = [(hint.name, hint.address, hint.port) for hint in sources.announced(AVAHI)]
    assert found == [
        ("pc1.local", "192.168.1.10", 22),
        ("box.local", "192.168.1.12", 2222),
        ("pc3.local", "192.168.1.13", 22),
        ("", "192.168.1.14", 22),
    ]


def test_mdns_that_cannot_be_read_is_no_empty_answer():
    assert sources.read_announced(lambda argv: None) is None
    assert sources.read_announced(lambda argv: "" if "_ssh._tcp" in argv else None) == []


@pytest.mark.parametrize(
    ("line", "hints"),
    [
        ("pc1 ssh-ed25519 AAAA", [("pc1", "pc1", 22)]),
        ("pc1,192.168.1.10 ssh-ed25519 AAAA", [("pc1", "192.168.1.10", 22)]),
        ("192.168.1.10,192.168.1.11 ssh-ed25519 AAAA", [("", "192.168.1.10", 22), ("", "192.168.1.11", 22)]),
        ("[192.168.1.10]:2222 ssh-rsa AAAA", [("", "192.168.1.10", 2222)]),
        ("*.example.com,!pc? ssh-rsa AAAA", []),
        ("@cert-authority pc1 ssh-rsa AAAA", []),
        ("# pc1 ssh-rsa AAAA", []),
        ("pc1", []),
        ("-oProxyCommand=x ssh-rsa AAAA", []),
    ],
)
def test_hosts_whose_keys_the_user_knows(line, hints):
    found, num_hashed = sources.known_hosts_of(line + "\n")
    assert [(hint.name, hint.address, hint.port) for hint in found] == hints
    assert num_hashed == 0


def test_hashed_names_are_counted():
    assert sources.known_hosts_of("|1|abc=|def= ssh-ed25519 AAAA\npc1 ssh-ed25519 BBBB\n") == (
        [HostHint(source="known_hosts", name="pc1", address="pc1")],
        1,
    )


def test_names_of_the_internet_are_not_looked_up():
    names = ("pc1", "pc1.local", "nas.home.arpa", "github.com", "gpu.example.org")
    assert [sources.is_local_name(each) for each in names] == [True, True, True, False, False]
