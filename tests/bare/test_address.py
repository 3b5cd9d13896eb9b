"""`gangline prepare address`: a lease becomes a fixed address, by the service that the machine uses, and a lease again.

The leases come from a real DHCP server: another machine's networkd, which knows the first one by its card. netplan is
real, too, but for the udevadm that it calls: there is no udev in a namespace.
"""

import json
import sys
import time

import pytest

from tests.lab.bare import LEFT_BY_PREPARE, BareKind, differences
from tests.lab.typist import Typist

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
SERVER = """[Match]
Name=eth0

[Network]
Address={own}/24
DHCPServer=yes

[DHCPServer]
EmitDNS=yes
DNS=10.77.0.1
EmitRouter=yes
Router=10.77.0.1
DefaultLeaseTimeSec=600

[DHCPServerStaticLease]
MACAddress={mac}
Address={lent}
"""
NETWORKD = "[Match]\nName=eth0\n\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n\n[DHCPv4]\nClientIdentifier=mac\n"
NETPLAN = """network:
  version: 2
  renderer: networkd
  ethernets:
    eth0:
      dhcp4: true
      dhcp-identifier: mac
      link-local: []
"""
KEYFILE = """[connection]
id=lan
uuid=6b2f5f0e-9a0d-4d1c-8f5e-0d2a6a1f9c11
type=ethernet
interface-name=eth0

[ipv4]
method=auto
dhcp-client-id=mac

[ipv6]
method=disabled
"""
LAN = "/etc/NetworkManager/system-connections/lan.nmconnection"
SHORT = {"networkd"}


def address_of(host):
    """The address of eth0, and whether it is a lease."""
    rows = json.loads(host.check(["ip", "-j", "-4", "addr", "show", "dev", "eth0"]))
    found = [each for row in rows for each in row.get("addr_info", [])]
    return [(each["local"], each["prefixlen"], each.get("dynamic", False)) for each in found]


def until_address(host, wanted):
    deadline = time.monotonic() + 60
    while (found := address_of(host)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def lend_addresses(lab):
    """pc2 is the router of the house; pc1 takes its address from it, as it comes out of the shop."""
    pc1, pc2 = lab.hosts
    mac = pc1.check(["cat", "/sys/class/net/eth0/address"]).strip()
    pc2.write("/etc/systemd/network/10-lan.network", SERVER.format(mac=mac, own=pc2.address, lent=pc1.address))
    pc2.check(["networkctl", "reload"])


def by_lease(pc1, service):
    if service == "NetworkManager":
        pc1.write(LAN, KEYFILE, 0o600)
        pc1.check(["nmcli", "connection", "reload"])
        pc1.check(["nmcli", "connection", "up", "lan"])
    elif service == "netplan":
        pc1.write("/usr/local/sbin/udevadm", "#!/bin/sh\n", 0o755)  # simulated: it does nothing
        pc1.check(["rm", "/etc/systemd/network/10-lan.network"])
        pc1.write("/etc/netplan/01-netcfg.yaml", NETPLAN, 0o600)
        pc1.check(["netplan", "apply"])
    else:
        pc1.write("/etc/systemd/network/10-lan.network", NETWORKD)
        pc1.check(["networkctl", "reload"])


def answered(lab, *words):
    with Typist(lab.user, [*GANGLINE, "prepare", *words]) as screen:
        screen.expect("for sudo:")
        screen.type(lab.hosts[0].password)
        assert screen.end() == 0, screen.text
        return screen.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "service",
    [
        pytest.param(each, marks=[] if each in SHORT else pytest.mark.slow)
        for each in ("networkd", "NetworkManager", "netplan")
    ],
)
def test_a_lease_becomes_a_fixed_address_and_a_lease_again(bare, service):
    network = "NetworkManager" if service == "NetworkManager" else "networkd"
    lab = bare({"pc1": BareKind(network=network), "pc2": BareKind()})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", "pc1", "--yes"], timeout_s=90)
    lend_addresses(lab)
    by_lease(pc1, service)
    lease, fixed = [(pc1.address, 24, True)], [(pc1.address, 24, False)]
    until_address(pc1, lease)
    before = pc1.snapshot()
    assert "address" not in lab.user.run([*GANGLINE, "prepare", "--dry-run"], timeout_s=90).stdout

    text = answered(lab, "address", "pc1", "--yes")
    assert f"better than a change here: have the router reserve {pc1.address}" in text
    assert "takes it back by itself after 60 s, unless a new login works" in text
    until_address(pc1, fixed)
    assert "via 10.77.0.1 " in pc1.check(["ip", "route", "show", "default"])
    lab["pc2"].check(["systemctl", "stop", "systemd-networkd.service", "systemd-networkd.socket"])
    pc1.reboot()
    until_address(pc1, fixed)
    assert lab.can_log_in(pc1, key=True)
    lab["pc2"].check(["systemctl", "start", "systemd-networkd.service"])

    answered(lab, "--undo", "address", "pc1", "--yes")
    until_address(pc1, lease)
    assert differences(before, pc1.snapshot(), ignore=LEFT_BY_PREPARE) == []
