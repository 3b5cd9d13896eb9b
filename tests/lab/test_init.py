"""`gangline init` on real hosts with real sshd: from names to a cluster.yaml, and keys that change afterwards."""

import json
import sys

import pytest

from gangline.config.load import read_cluster_text
from tests.lab import gpus, pythons

COMMAND = (sys.executable, "-m", "gangline.cli.main")
NAMES = ("pc1", "pc2", "pc3")


def init(lab, *words, **options):
    """What the user types on the desk."""
    return lab.user.run([*COMMAND, "init", *words], timeout_s=60, **options)


def written(lab, tmp_path):
    """The cluster that the file on the desk means."""
    text = lab.user.read("cluster.yaml").decode()
    return read_cluster_text(text, tmp_path / "cluster.yaml", home=tmp_path)


def new_host_key(host):
    """The host was installed anew: another key, and an sshd that shows it."""
    path = "/etc/ssh/ssh_host_ed25519_key"
    host.check(["rm", "-f", path, f"{path}.pub"], as_root=True)
    host.check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], as_root=True)
    host.check(["sh", "-c", "kill -HUP $(pgrep -o -f 'sshd.*listener|/usr/sbin/sshd')"], as_root=True)
    return " ".join(host.check(["cat", f"{path}.pub"], as_root=True).split()[:2])


def test_three_names_become_a_cluster_file(lab, tmp_path):
    hosts = lab(3, names=NAMES, nics=2, known=False)
    done = init(hosts, *NAMES, "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "Next: gangline check cluster.yaml"
    cluster = written(hosts, tmp_path)
    for host in hosts.hosts:
        found = cluster.host(host.name)
        assert (found.transport, found.host_key, found.address, found.slots) == ("ssh", host.host_key, host.address, 1)
    assert "trusted without a question (--yes): pc1, pc2, pc3" in done.stderr
    assert "the best of 2 networks that all hosts share" in done.stderr
    nothing_left = [line for host in hosts.hosts for line in host.processes()]
    assert nothing_left == []


def test_keys_that_ssh_knows_need_no_word(lab, tmp_path):
    hosts = lab(2, names=("pc1", "pc2"), known=True)
    done = init(hosts, "pc1", "pc2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("known to your ssh") == 2


def test_without_a_word_nobody_is_trusted(lab):
    hosts = lab(2, names=("pc1", "pc2"), known=False)
    done = init(hosts, "pc1", "pc2")
    assert done.returncode == 2
    assert done.stderr.count("SHA256:") == 4
    assert not hosts.user.exists("cluster.yaml")


def test_the_desk_may_be_a_host(lab, tmp_path):
    hosts = lab(1, names=("pc1",))
    done = init(hosts, "pc1", "localhost", "--json")
    assert done.returncode == 0, done.stderr
    pc1, desk = json.loads(done.stdout)["cluster"]["hosts"]
    assert (desk["name"], desk["transport"], desk["host_key"]) == ("desk", "local", None)
    assert pc1["address"].rpartition(".")[0] == desk["address"].rpartition(".")[0]


def test_a_network_that_does_not_work_is_passed_over(lab, tmp_path):
    hosts = lab(2, names=("pc1", "pc2"), nics=2)
    # the first network carries ssh from the desk, but nothing between the hosts
    for host in hosts.hosts:
        others = [other.address for other in hosts.hosts if other is not host]
        for address in others:
            host.check(["ip", "route", "add", "blackhole", f"{address}/32"], as_root=True)
    done = init(hosts, "pc1", "pc2")
    assert done.returncode == 0, done.stderr
    assert "do not reach each other" in done.stderr
    first_network = {host.address.rpartition(".")[0] for host in hosts.hosts}
    assert {host.address.rpartition(".")[0] for host in written(hosts, tmp_path).hosts}.isdisjoint(first_network)


def test_a_host_that_is_off_is_named_and_left_out_by_force_only(lab, tmp_path):
    hosts = lab(3, names=NAMES)
    hosts["pc3"].kill()
    done = init(hosts, *NAMES)
    assert done.returncode == 4
    assert "pc3" in done.stderr
    assert not hosts.user.exists("cluster.yaml")
    assert init(hosts, *NAMES, "--force").returncode == 0
    assert [host.name for host in written(hosts, tmp_path).hosts] == ["pc1", "pc2"]


def test_a_changed_key_is_pinned_by_a_clear_word_only(lab, tmp_path):
    hosts = lab(2, names=("pc1", "pc2"))
    assert init(hosts, "pc1", "pc2").returncode == 0
    before = hosts.user.read("cluster.yaml").decode()
    old, new = hosts["pc2"].host_key, new_host_key(hosts["pc2"])
    refused = init(hosts, "--pin", "cluster.yaml")
    assert refused.returncode == 2
    assert "somebody is in between" in refused.stderr
    assert hosts.user.read("cluster.yaml").decode() == before
    trusted = init(hosts, "--pin", "cluster.yaml", "--yes")
    assert trusted.returncode == 0, trusted.stderr
    assert hosts.user.read("cluster.yaml").decode() == before.replace(old, new)


def test_a_key_that_ssh_knows_otherwise_ends_init_even_with_yes(lab):
    hosts = lab(2, names=("pc1", "pc2"), known=True)
    new_host_key(hosts["pc1"])
    done = init(hosts, "pc1", "pc2", "--yes")
    assert done.returncode == 4
    assert "another key than your ssh knows" in done.stderr
    assert not hosts.user.exists("cluster.yaml")


@pytest.mark.lab("gcc")
def test_slots_are_the_cards_and_simulated_ones_are_called_so(lab, tmp_path):
    hosts = lab(2, names=("pc1", "pc2"))
    gpus.install(hosts["pc1"], [gpus.RTX_3090, gpus.RTX_3090])
    done = init(hosts, "pc1", "pc2")
    assert done.returncode == 0, done.stderr
    assert "2 x NVIDIA GeForce RTX 3090 (simulated)" in done.stderr
    assert [host.slots for host in written(hosts, tmp_path).hosts] == [2, 1]


def test_a_host_without_python_is_named(lab):
    hosts = lab(2, names=("pc1", "pc2"), special={"pc2": {"hide": pythons.of_the_system()}})
    done = init(hosts, "pc1", "pc2")
    assert done.returncode == 4
    assert "pc2 has no Python 3.8 or newer" in done.stderr
