"""`init --discover`: the hosts of this computer's networks are offered, and a scan needs a yes."""

import ipaddress

import pytest

from gangline.discovery.search import Discovery, NetworkHost
from gangline.discovery.sources import OwnNetwork
from gangline.errors import UsageError
from gangline.init.describe import InitQuestion, init
from tests.unit.init.world import Talk, World, fingerprint, home_lan, key

LAN = ipaddress.IPv4Network("192.168.1.0/24")


def host(name, number, **more):
    line = key(name)
    return NetworkHost(
        **{
            "destination": name,
            "address": f"192.168.1.{number}",
            "port": 22,
            "names": (name,),
            "sources": ("neighbours",),
            "software": "SSH-2.0-OpenSSH_9.2p1",
            "key": line,
            "fingerprint": fingerprint(line),
            **more,
        }
    )


ROUTER = host("router", 1, is_router=True)


def world(*hosts, unscanned=()):
    network = OwnNetwork(interface="eno1", address=ipaddress.IPv4Interface("192.168.1.7/24"))
    found = Discovery(hosts=hosts, networks=(network,), scanned=(), unscanned=unscanned, elsewhere=("far",), gaps=())
    return World(hosts=home_lan(), found=found)


def described(tmp_path, there, answers):
    talk = Talk(answers=answers)
    asked = InitQuestion(home=tmp_path, output=tmp_path / "cluster.yaml", yes=True, discover=True)
    return init(asked, console=talk, deps=there.deps()), talk


def test_all_that_were_found_become_a_cluster(tmp_path):
    there = world(ROUTER, host("pc1", 10), host("pc2", 11))
    done, talk = described(tmp_path, there, ["all"])
    assert [each.name for each in done.cluster.hosts] == ["pc1", "pc2"]
    assert there.scans == [False]
    assert "router" not in talk.text
    assert "not asked, on none of this computer's networks: far" in talk.text


def test_some_are_chosen_by_name_or_address(tmp_path):
    done, _ = described(tmp_path, world(host("pc1", 10), host("pc2", 11), host("pc3", 12)), ["192.168.1.11, pc3"])
    assert [each.name for each in done.cluster.hosts] == ["pc2", "pc3"]


@pytest.mark.parametrize(("answer", "scans"), [("y", [False, True]), ("", [False]), ("n", [False])])
def test_a_scan_needs_a_yes(tmp_path, answer, scans):
    there = world(host("pc1", 10), unscanned=(LAN,))
    _, talk = described(tmp_path, there, [answer, "pc1"])
    assert there.scans == scans
    assert talk.questions[0] == "try port 22 of every address of 192.168.1.0/24 (254 addresses), too? [y/N]"


def test_nobody_is_taken_without_a_word(tmp_path):
    with pytest.raises(UsageError, match=r"no hosts are named") as refused:
        described(tmp_path, world(host("pc1", 10), host("pc2", 11), unscanned=(LAN,)), None)
    assert refused.value.fix == "gangline init pc1 pc2"
    with pytest.raises(UsageError, match=r"no hosts are named"):
        described(tmp_path, world(host("pc1", 10)), [""])


def test_an_empty_network_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=r"no host with sshd was found") as refused:
        described(tmp_path, world(ROUTER), ["y"])
    assert "192.168.1.0/24" in refused.value.seen
    assert "openssh-server" in refused.value.fix
