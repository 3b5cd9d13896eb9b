"""Step `address`: what each network service is told, and when it is told nothing. Facts in, changes out."""

import json

import pytest

from gangline.prepare.fixed_address import ADDRESS, NETPLAN, RESOLVERS
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

LAN = "/etc/NetworkManager/system-connections/lan.nmconnection"
DROP_IN = "/etc/systemd/network/10-lan.network.d/60-gangline.conf"
KEYFILE = "[connection]\nid=lan\n\n[ipv4]\nmethod=auto\nnever-default=true\n"
NETWORKD = {
    "networkd": "active",
    "networkd files": "/run/systemd/netif/links/2:NETWORK_FILE=/lib/systemd/network/10-lan.network",
}
MANAGER = {"NetworkManager": "active", "profiles": f"lo:u0:/run/x\neth0:u1:{LAN}"}
RESOLV = "# of resolved\nnameserver 127.0.0.53\nnameserver 192.168.1.1\nsearch lan\n"


def host(name, number, address=None):
    return Host(name=name, workdir="/w", python="", transport="ssh", address=address or f"192.168.1.{number}")


def reading(number, *, lease=True, mtu=1500, commands=None, files=None, netplan=None, programs=()):
    address = {
        "family": "inet",
        "local": f"192.168.1.{number}",
        "prefixlen": 24,
        **({"dynamic": True} if lease else {}),
    }
    link = {"ifname": "eth0", "ifindex": 2, "mtu": mtu, "address": "aa:bb:cc:00:00:01", "addr_info": [address]}
    route = {"dst": "default", "gateway": "192.168.1.1", "dev": "eth0"}
    said = {"links": json.dumps([{}, link]), "default routes": json.dumps([route]), **(commands or NETWORKD)}
    texts = {RESOLVERS[0]: RESOLV, **(files or {})}
    known = {
        path: FileRead() for path in (*RESOLVERS, DROP_IN, f"{NETPLAN}/99-gangline.yaml", f"{NETPLAN}/zz-gangline.yaml")
    }
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={**known, **{path: FileRead(content=text.encode()) for path, text in texts.items()}},
        folders={NETPLAN: netplan},
        commands=said,
        programs=dict.fromkeys(programs, "/usr/sbin/x"),
    )


def planned(own, *, others=(), address=None):
    hosts = (host("pc1", 11, address), *(host(f"pc{each}", 10 + each) for each in range(2, 2 + len(others))))
    readings = {each.name: found for each, found in zip(hosts, (own, *others), strict=True)}
    return ADDRESS.plan(
        StepView(host=hosts[0], cluster=Cluster(name="home", hosts=hosts), reading=own, readings=readings)
    )


def texts(plan):
    return {change.path: change.content.decode() for change in plan.changes if isinstance(change, FileChange)}


def commands(plan):
    return [change.argv or change.undo for change in plan.changes if isinstance(change, CommandChange)]


def test_a_fixed_address_is_left_alone():
    assert planned(reading(11, lease=False), others=(reading(12),)).changes == ()


def test_networkd_gets_a_drop_in_and_the_router_is_recommended_first():
    plan = planned(reading(11))
    assert texts(plan) == {
        DROP_IN: "# gangline prepare address\n[Network]\nDHCP=no\nAddress=192.168.1.11/24\nGateway=192.168.1.1\n"
        "DNS=192.168.1.1\nDomains=lan\n"
    }
    reload, reconfigure = ("networkctl", "reload"), ("networkctl", "reconfigure", "eth0")
    assert commands(plan) == [reconfigure, reload, reload, reconfigure]
    assert plan.revert_s == 60.0
    assert "reserve 192.168.1.11 for aa:bb:cc:00:00:01" in plan.remains[0]


def test_the_profile_of_network_manager_keeps_what_else_stands_there():
    plan = planned(reading(11, commands=MANAGER, files={LAN: KEYFILE}))
    text = texts(plan)[LAN]
    assert "[ipv4]\nnever-default=true\nmethod=manual\naddress1=192.168.1.11/24,192.168.1.1\ndns=192.168.1.1;\n" in text
    assert ("nmcli", "device", "reapply", "eth0") in commands(plan)


@pytest.mark.parametrize(
    ("profiles", "files", "told"),
    [
        (
            "eth0:u1:/run/NetworkManager/system-connections/Wired.nmconnection",
            {},
            "connection.autoconnect yes; then again",
        ),
        (f"eth0:u1:{LAN}", {LAN: "no section=1\n"}, "cannot be understood"),
    ],
)
def test_a_profile_that_is_in_no_file_is_not_changed(profiles, files, told):
    plan = planned(reading(11, commands={"NetworkManager": "active", "profiles": profiles}, files=files))
    assert plan.changes == ()
    assert told in plan.remains[1]


@pytest.mark.parametrize(
    ("names", "path"), [(("01-netcfg.yaml",), "99-gangline.yaml"), (("99-local.yaml", "a"), "zz-gangline.yaml")]
)
def test_netplan_gets_the_last_file(names, path):
    said = {**NETWORKD, "netplan eth0": "dhcp4: true"}
    plan = planned(reading(11, commands=said, netplan=names, programs=("netplan",)))
    assert texts(plan) == {
        f"{NETPLAN}/{path}": "# gangline prepare address\nnetwork:\n  version: 2\n  ethernets:\n    eth0:\n"
        '      dhcp4: false\n      addresses: ["192.168.1.11/24"]\n'
        '      routes: [{"to": "default", "via": "192.168.1.1"}]\n'
        '      nameservers: {"addresses": ["192.168.1.1"], "search": ["lan"]}\n'
    }
    assert commands(plan) == [("netplan", "apply")] * 2


def test_an_interface_that_netplan_defines_otherwise_is_left_to_the_user():
    plan = planned(reading(11, commands={"netplan eth0": "null"}, netplan=("a.yaml",), programs=("netplan",)))
    assert plan.changes == ()
    assert "netplan has no ethernets.eth0" in plan.remains[1]


def test_packets_become_no_larger_than_the_other_hosts_take():
    plan = planned(reading(11, lease=False, mtu=9000), others=(reading(12, mtu=1500), reading(13, mtu=9000)))
    assert texts(plan) == {DROP_IN: "# gangline prepare address\n[Link]\nMTUBytes=1500\n"}
    assert "eth0 sends up to 9000 bytes, another host takes 1500" in plan.reason
    assert planned(reading(11, lease=False), others=(reading(12, mtu=9000),)).changes == ()


def test_an_address_that_is_on_no_interface_is_said():
    assert "no interface here has 10.9.9.9" in planned(reading(11), address="10.9.9.9").remains[0]


def test_without_a_service_that_we_know_nothing_is_changed():
    plan = planned(reading(11, commands={"networkd": "inactive"}))
    assert plan.changes == ()
    assert "neither netplan, NetworkManager nor networkd" in plan.remains[1]


def test_it_asks_root_for_the_files_of_the_service_only():
    assert ADDRESS.root_asks(reading(11)).files == (DROP_IN,)
    assert ADDRESS.root_asks(reading(11, commands=MANAGER)).files == (LAN,)
    asks = ADDRESS.root_asks(reading(11, netplan=("a.yaml",), programs=("netplan",)))
    assert asks.commands == {"netplan eth0": ("netplan", "get", "ethernets.eth0")}
