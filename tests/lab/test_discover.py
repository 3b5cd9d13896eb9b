"""`gangline discover` on a switch with real hosts and real sshd: who is found by what, who is asked, and what is said."""

import json
import sys

import pytest

COMMAND = (sys.executable, "-m", "gangline.cli.main")
NAMES = ("pc1", "pc2", "pc3")
COUNT_CONNECTIONS = """
table inet count {
    counter asked { }
    chain out { type filter hook output priority 0; tcp flags syn / syn,ack counter name asked; }
}
"""


def discover(lab, *words):
    """What the user types on the desk, and the document."""
    done = lab.user.run([*COMMAND, "discover", *words, "--json"], timeout_s=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def forget_hosts(lab):
    """The user has never heard of the hosts."""
    lab.user.write(".ssh/config", "")
    lab.user.run(["rm", "-f", ".ssh/known_hosts"])


def num_connections(lab):
    """Connections that the desk has begun."""
    said = json.loads(lab.user.check(["nft", "--json", "list", "counters"], as_root=True))["nftables"]
    return next(row["counter"]["packets"] for row in said if "counter" in row)


def test_hosts_of_ssh_config_are_found_with_their_keys(lab):
    hosts = lab(3, names=NAMES, known=True)
    hosts["pc3"].kill()
    document, told = discover(hosts)
    found = {host["name"]: host for host in document["hosts"]}
    assert set(found) == {"pc1", "pc2"}
    for name in found:
        assert (found[name]["host_key"], found[name]["known"]) == (hosts[name].host_key, "known")
        assert found[name]["address"] == hosts[name].address
        assert set(found[name]["sources"]) >= {"ssh_config", "known_hosts"}
    assert "gangline discover --scan" in told
    assert told.splitlines()[-1].endswith("gangline init pc1 pc2")


def test_nobody_is_asked_whom_nothing_knows_until_a_scan(lab):
    hosts = lab(2, names=NAMES[:2], known=False)
    forget_hosts(hosts)
    hosts.user.check(["nft", "-f", "-"], stdin=COUNT_CONNECTIONS, as_root=True)
    document, _ = discover(hosts)
    assert document["hosts"] == []
    assert num_connections(hosts) == 0
    document, told = discover(hosts, "--scan")
    assert [host["address"] for host in document["hosts"]] == [host.address for host in hosts.hosts]
    assert [host["host_key"] for host in document["hosts"]] == [host.host_key for host in hosts.hosts]
    assert {host["known"] for host in document["hosts"]} == {"new"}
    assert "scanned port 22: 10.77.0.0/24 (254 addresses)" in told
    assert "desk" not in told
    assert [line for host in hosts.hosts for line in host.processes()] == []


def test_a_neighbour_is_asked_and_one_without_sshd_is_no_host(lab):
    hosts = lab(1, names=NAMES[:1], known=False)
    forget_hosts(hosts)
    for address in (hosts["pc1"].address, hosts.outsider.address):
        hosts.user.run(["ssh-keyscan", "-T", "1", address])
    document, _ = discover(hosts)
    assert [(host["address"], host["sources"]) for host in document["hosts"]] == [
        (hosts["pc1"].address, ["neighbours"])
    ]


def test_members_of_the_cluster_file_and_keys_that_changed_are_named(lab):
    hosts = lab(2, names=NAMES[:2], known=True)
    assert hosts.user.run([*COMMAND, "init", "pc1"], timeout_s=60).returncode == 0
    hosts["pc2"].new_host_key()
    done = hosts.user.run([*COMMAND, "discover"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert "known to your ssh" in rows["pc1"]
    assert rows["pc1"].split()[-1] == "pc1"
    assert "NOT the key that your ssh knows" in rows["pc2"]
    assert done.stderr.splitlines()[-1].endswith("gangline init --add pc2")


@pytest.mark.lab("nft")
def test_a_host_that_only_drops_costs_its_own_time_and_is_left_out(lab):
    hosts = lab(2, names=NAMES[:2], known=True)
    hosts["pc2"].faults.drop(port=22)
    document, _ = discover(hosts)
    assert [host["name"] for host in document["hosts"]] == ["pc1"]
