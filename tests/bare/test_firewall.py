"""`gangline prepare firewall` on machines with ufw, firewalld and nftables: who is let in, who is not, and the way back."""

import itertools
import json
import sys

import pytest

from tests.lab.bare import LEFT_BY_PREPARE, BareKind, differences
from tests.lab.typist import Typist

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
KINDS = {"pc1": BareKind(firewall="ufw"), "pc2": BareKind(firewall="firewalld"), "pc3": BareKind(firewall="nftables")}
LISTEN = """
import socket
with socket.create_server(("", 29500)) as server:
    print("listens", flush=True)
    while True:
        server.accept()[0].close()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
OUTSIDERS = ("desk", "outsider")


def reached(lab, port):
    """Who reaches whom on a port."""
    machines = [*lab.hosts, lab.user, lab.outsider]
    return {
        (one.name, other.name)
        for one, other in itertools.product(machines, lab.hosts)
        if one is not other and one.run(["python3", "-c", CONNECT, other.address, str(port)]).returncode == 0
    }


def listen(lab):
    """What ranks do: a program on each host listens on a port."""
    servers = [host.popen(["python3", "-c", LISTEN], stdout=-1) for host in lab.hosts]
    assert [server.stdout.readline() for server in servers] == [b"listens\n"] * len(servers)


def prepare(lab, *words):
    """What the user types, with sudo's password once, and Enter for the other hosts; the screen."""
    with Typist(lab.user, [*GANGLINE, "prepare", *words]) as screen:
        for number, host in enumerate(lab.hosts):
            screen.expect("for sudo")
            screen.expect(": ")
            screen.type("" if number else host.password)
        code = screen.end()
        assert code == 0, screen.text
        assert lab.hosts[0].password not in screen.text
        return screen.text


@pytest.mark.timeout(400)
def test_the_other_hosts_are_let_in_and_nobody_else_until_it_is_undone(bare):
    lab = bare(KINDS)
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", *KINDS, "--yes"], timeout_s=90)
    before = {host.name: host.snapshot() for host in lab.hosts}
    pairs = {(one.name, other.name) for one, other in itertools.permutations(lab.hosts, 2)}
    listen(lab)
    assert reached(lab, 29500) == set()

    text = prepare(lab, "firewall", "--yes")
    assert "run   ufw prepend allow from 10.77.0.11 to any port 22,1024:65535 proto tcp comment gangline" in text
    assert "file  /etc/firewalld/policies/gangline.xml (new)" in text
    assert "ip saddr 10.77.0.10 tcp dport { 22, 1024-65535 } accept" in text
    assert reached(lab, 29500) == pairs
    assert {one for one, _ in reached(lab, 22)} == {"pc1", "pc2", "pc3", *OUTSIDERS}
    for host in lab.hosts:
        host.reboot()
    listen(lab)
    assert reached(lab, 29500) == pairs
    assert "nothing has to be changed" in prepare(lab, "firewall", "--yes")
    found = json.loads(lab.user.run([*GANGLINE, "check", "--only", "network", "--json"], timeout_s=90).stdout)
    assert [row["id"] for row in found["findings"] if row["severity"] != "info"] == []

    prepare(lab, "--undo", "firewall", "--yes")
    for host in lab.hosts:
        assert differences(before[host.name], host.snapshot(), ignore=LEFT_BY_PREPARE) == [], host
    assert reached(lab, 29500) == set()


@pytest.mark.timeout(300)
def test_check_says_who_is_not_let_in_and_who_comes_in_from_outside(bare):
    lab = bare({"pc1": BareKind(), "pc2": BareKind(firewall="nftables")})
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", "pc1", "pc2", "--yes"], timeout_s=90)
    found = json.loads(lab.user.run([*GANGLINE, "check", "--json"], timeout_s=90).stdout)["findings"]
    closed = [row for row in found if row["id"].startswith("E-NET-") and row["severity"] == "fail"]
    assert closed
    assert all("pc2" in json.dumps(row) and row["step"] == "firewall" for row in closed)
    assert [row["hosts"] for row in found if row["id"] == "E-SEC-04"] == [["pc1"]]
    dry = lab.user.run([*GANGLINE, "prepare", "firewall"], timeout_s=90)
    assert "no firewall is active here" in dry.stdout
    assert "only root can read the rules of nftables" in dry.stdout  # nobody is there to type sudo's password
