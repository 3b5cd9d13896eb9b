"""The transport between real computers: their networks break, their keys change, their Pythons and programs differ."""

import json
import subprocess
import sys

import pytest

from tests.lab import pythons
from tests.lab.hosts import ROOT

CASES = "tests.lab.cases_transport"


def entry(host):
    return {"name": host.name, "host_key": host.host_key}


def do(lab, what, **arguments):
    return lab.user.call(f"{CASES}:{what}", **arguments)


def test_hosts_are_asked_under_the_names_of_ssh_config(three_hosts):
    for host in three_hosts.hosts:
        said = do(three_hosts, "look", host=entry(host))
        assert (said["hostname"], said["home"], said["verb"]) == (host.name, str(host.home), 0)
    assert do(three_hosts, "left") == []


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_host_may_have_an_old_python_or_a_new_one(lab, version):
    if not pythons.has(version):
        pytest.skip(f"no Python {version} on this machine")
    one = lab(1, python=version)
    said = do(one, "look", host=entry(one.hosts[0]))
    assert said["python"].startswith(f"{version}.")
    assert said["verb"] == 0


def test_without_rsync_there_large_trees_come_all_the_same(lab):
    two = lab(2, special={"h1": {"hide": ("rsync",)}})
    assert do(two, "copy", host=entry(two["h0"]), num_bytes=20 << 20) == {"ways": ["rsync", "rsync"], "equal": True}
    two.user.check(["rm", "-r", "tree", "back"])
    assert do(two, "copy", host=entry(two["h1"]), num_bytes=20 << 20) == {"ways": [], "equal": True}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_host_behind_another_one_is_reached_by_proxyjump(lab):
    """h1 lets nobody in but h0; commands, rsync and the look at its key go by way of it."""
    two = lab(2)
    h0, h1 = two.hosts
    h1.faults.drop(peer=two.user.address)
    assert "does not answer" in do(two, "error_of", host=entry(h1))["text"]
    config = two.user.read(".ssh/config").decode()
    two.user.write(".ssh/config", f"Host h1\n  ProxyJump h0\n{config}")
    assert do(two, "look", host=entry(h1))["hostname"] == "h1"
    assert do(two, "copy", host=entry(h1), num_bytes=20 << 20) == {"ways": ["rsync", "rsync"], "equal": True}
    assert do(two, "scan", host=entry(h1))["line"] == h1.host_key
    assert do(two, "left") == []
    h0.faults.unplug()
    assert do(two, "error_of", host=entry(h1))["kind"] == "HostUnreachable"


def test_a_jump_host_that_nobody_knows_is_not_passed(lab):
    two = lab(2, known=False)
    config = two.user.read(".ssh/config").decode()
    two.user.write(".ssh/config", f"Host h1\n  ProxyJump h0\n{config}")
    said = do(two, "error_of", host=entry(two["h1"]))
    assert said["kind"] == "HostKeyRefused"
    assert "a host on the way to it is not known" in said["text"]


def test_another_key_is_refused_and_both_are_named(lab):
    one = lab(1)
    (h0,) = one.hosts
    pinned = entry(h0)
    assert do(one, "look", host=pinned)["hostname"] == "h0"
    h0.new_host_key()
    said = do(one, "error_of", host=pinned)
    assert said["kind"] == "HostKeyRefused"
    assert said["text"].count("SHA256:") == 2
    assert do(one, "look", host=entry(h0))["hostname"] == "h0"


def test_the_users_own_known_hosts_are_consulted(lab):
    one = lab(1, known=True)
    assert do(one, "scan", host=entry(one.hosts[0])) == {"line": one.hosts[0].host_key, "known": True}
    one.hosts[0].new_host_key()
    assert do(one, "scan", host=entry(one.hosts[0])) == {"line": one.hosts[0].host_key, "known": False}


def test_what_keeps_us_from_a_host_is_said_in_time(lab):
    four = lab(4)
    refused, unplugged, dropped, off = four.hosts
    refused.faults.reject(port=22)
    unplugged.faults.unplug()
    dropped.faults.drop(port=22)
    off.power_off()
    said = do(four, "errors_of", hosts=[entry(host) for host in four.hosts])
    assert {one["kind"] for one in said.values()} == {"HostUnreachable"}
    assert "connection refused" in said[refused.name]["text"]
    assert said[refused.name]["seconds"] < 5
    for host in (unplugged, dropped, off):
        assert "does not answer" in said[host.name]["text"]
        assert said[host.name]["seconds"] < 15
    assert do(four, "left") == []


@pytest.mark.slow
def test_a_host_behind_a_black_hole_is_given_up_in_time(lab):
    one = lab(1)
    one.hosts[0].faults.black_hole()
    said = do(one, "error_of", host=entry(one.hosts[0]))
    assert said["kind"] == "HostUnreachable"
    assert said["seconds"] < 40
    assert do(one, "left") == []


def test_one_dead_host_costs_only_its_own_time_limit(lab):
    eight = lab(8)
    eight["h3"].faults.drop()
    said = do(eight, "ask_all", hosts=[entry(host) for host in eight.hosts], timeout_s=5)
    assert {name: value for name, (_, value, _) in said.items() if value} == {
        host.name: host.name for host in eight.hosts if host.name != "h3"
    }
    assert "no answer within 5 s" in said["h3"][2]
    assert 5 <= said["h3"][0] < 7
    assert max(seconds for name, (seconds, _, _) in said.items() if name != "h3") < 5


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_partition_is_noticed_and_outlasted(lab):
    """Nobody resets the connection: ssh itself has to notice. What ran there ends by itself, as nobody can end it."""
    one = lab(1)
    (h0,) = one.hosts
    argv = [sys.executable, "-m", "tests.lab.call", f"{CASES}:outlast"]
    with one.user.popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(json.dumps({"host": entry(h0)}))
        process.stdin.close()
        assert process.stdout.readline() == "running\n"
        h0.faults.unplug()
        assert process.stdout.readline() == "lost\n"
        h0.faults.heal()
        said = json.loads(process.stdout.read().splitlines()[-1])
    assert "h0: the connection was lost" in said["error"]
    assert said["lost_s"] < 22
    assert said["said"] == "again\n"
    assert said["again_s"] < 20
    assert do(one, "left") == []
    script = "for i in $(seq 90); do pgrep -f 'sleep 432[1]' >/dev/null || exit 0; sleep 1; done; exit 1"
    assert h0.run(["sh", "-c", script], timeout_s=100).returncode == 0
