"""Firewalls, broken paths, slow links, wrong interfaces."""

import subprocess

from tests.lab.planted.scenes import planted

PORTS = "29500-29509"
SSH = "tcp dport 22 accept"

# Answers on every port, as a router, a portal or a port forwarding does.
EVERYBODY = """
import socket
with socket.create_server(("", 9999), backlog=64) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        connection.settimeout(2)
        with connection:
            try:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\\r\\nServer: router\\r\\nConnection: close\\r\\n\\r\\n")
            except OSError:
                continue
"""


@planted("W01", num_hosts=3)
def a_firewall_drops_all_but_ssh(scene):
    h0, h1 = scene["h0"], scene["h1"]
    scene.firewall(h0, SSH, f"ip saddr {h1.address} drop")
    scene.firewall(h1, SSH, f"ip saddr {h0.address} drop")


@planted("W02")
def only_the_rendezvous_ports_are_open(scene):
    """`ufw allow 29500` on every host."""
    scene.file["ports"] = PORTS
    for host in scene.hosts:
        scene.firewall(host, SSH, "icmp type echo-request accept", f"tcp dport {PORTS} accept", "drop")


@planted("W03")
def the_rendezvous_ports_are_rejected(scene):
    scene.file["ports"] = PORTS
    scene.firewall(scene["h0"], f"tcp dport {PORTS} reject")


@planted("W04", num_hosts=3)
def one_direction_only(scene):
    scene.firewall(scene["h0"], SSH, f"ip saddr {scene['h2'].address} drop")


@planted("W05")
def another_machine_answers(scene):
    """An address was given out twice, and the other machine was faster."""
    h0, h1, other = scene["h0"], scene["h1"], scene.lab.outsider
    cards = {host.name: host.check(["cat", "/sys/class/net/eth0/address"]).strip() for host in (h1, other)}
    scene.shell(other, f"ip addr add {h1.address}/32 dev eth0")
    rule = f"ip daddr {h1.address} meta l4proto tcp redirect to :9999"
    table = f"table ip nat {{\n chain before {{\n type nat hook prerouting priority -100;\n {rule}\n }}\n}}\n"
    scene.shell(other, "nft -f -", stdin=table)
    server = other.popen(["python3", "-I", "-c", EVERYBODY], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listening\n"
    # Who asks first gets the one or the other; here it is settled who knows whom.
    for who, known in ((h0, other), (scene.desk, h1)):
        scene.shell(who, f"ip neigh replace {h1.address} lladdr {cards[known.name]} dev eth0 nud permanent")


@planted("W06")
def large_packets_vanish_on_the_way(scene):
    """A tunnel between the two rooms, and a firewall that swallows what would tell of it."""
    h0, h1 = scene["h0"], scene["h1"]
    rules = f"ip saddr {h0.address} meta length > 1400 drop", f"ip daddr {h0.address} meta length > 1400 drop"
    for chain, rule in zip(("input", "output"), rules, strict=True):
        head = f"type filter hook {chain} priority 0; policy accept;"
        text = f"table inet path-{chain} {{\n chain way {{\n {head}\n {rule}\n }}\n}}\n"
        scene.shell(h1, "nft -f -", stdin=text)


@planted("W07", num_hosts=3)
def jumbo_frames_on_one_host(scene):
    scene.shell(scene["h1"], "ip link set eth0 mtu 9000")


@planted("W08", num_hosts=3, rate="1gbit")
def one_slow_link(scene):
    scene["h1"].faults.rate("100mbit")
    scene.words += ["--tier", "full"]


@planted("W09")
def an_interface_that_is_not_there(scene):
    scene.entry("h1")["interface"] = "enp5s0"


@planted("W10", nics=2)
def an_interface_that_leads_elsewhere(scene):
    """h1 has a second card, to its storage; nobody else is in that network."""
    scene.shell(scene["h0"], "ip link del eth1")
    scene.entry("h1")["interface"] = "eth1"


@planted("W11")
def five_of_a_hundred_packets_are_lost(scene):
    scene["h1"].faults.loss(5)
    scene.words += ["--tier", "full"]


@planted("W12")
def a_host_on_wifi(scene):
    """The card is renamed, and its folder in /sys gets what a wireless one has; it goes on to be a cable."""
    scene.shell(scene["h1"], "ip link set eth0 down; ip link set eth0 name wlan0; ip link set wlan0 up")
    scene.shell(
        scene["h1"],
        "folder=$(readlink -f /sys/class/net/wlan0); mkdir -p /var/lib/wlan0/wireless /var/lib/wlan0/phy80211; cd $folder; "
        "for each in *; do [ ! -f $each ] || cat $each > /var/lib/wlan0/$each 2>/dev/null || true; done; "
        "cp -r statistics /var/lib/wlan0/ 2>/dev/null || true; cd /var/lib/wlan0; rm -f speed duplex; "
        "echo phy0 > phy80211/name; for each in link level noise status; do echo 0 > wireless/$each; done; "
        "{ echo DEVTYPE=wlan; cat $folder/uevent; } > uevent; mount --bind /var/lib/wlan0 $folder",
    )


@planted("W13")
def the_address_of_a_docker_bridge(scene):
    scene.everywhere("ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up")
    scene.entry("h1")["address"] = "172.17.0.1"


@planted("W14", num_hosts=3)
def one_host_speaks_another_protocol(scene):
    for host in scene.hosts:
        scene.shell(host, f"ip -6 addr add fd77::{host.number:x}/64 dev eth0 nodad")
    scene.entry("h1")["address"] = f"fd77::{scene['h1'].number:x}"


@planted("X01", spared=("h0",))
def the_ports_are_open_to_everybody(scene):
    """h0 lets its peers in, h1 everybody."""
    h0, h1 = scene["h0"], scene["h1"]
    scene.firewall(h0, SSH, f"ip saddr {h1.address} accept", "drop")
    scene.firewall(h1, "tcp dport { 22, 1024-65535 } accept", "icmp type echo-request accept", "drop")
