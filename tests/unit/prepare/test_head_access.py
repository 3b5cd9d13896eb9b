"""Step `between`: a key of the head's own for the other hosts. Facts in, changes out."""

import dataclasses

import pytest

from gangline.prepare.head_access import BETWEEN, FOLDER, KEY
from gangline.prepare.prepare_step import CommandChange, FileRead, HostReading, StepView
from gangline.prepare.ssh_access import AUTHORIZED, CONFIG, OWN_CONFIG
from gangline.runs.cluster import Cluster, Host

HOSTS = tuple(
    Host(name=f"pc{n}", workdir="/w", python="", transport="ssh", ssh=f"alice@pc{n}", address=f"192.168.1.1{n}")
    for n in (1, 2, 3)
)
PUBLIC = "ssh-ed25519 AAAAhead gangline-pc1\n"
LINE = 'restrict,from="192.168.1.11" ssh-ed25519 AAAAhead gangline-pc1'


def reading(folder=("id_ed25519", "id_ed25519.pub", "config"), **files):
    texts = {AUTHORIZED: None, CONFIG: None, OWN_CONFIG: None, f"{KEY}.pub": None, **files}
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={path: FileRead(content=None if text is None else text.encode()) for path, text in texts.items()},
        folders={FOLDER: folder},
        commands={},
        programs={},
    )


def planned(name, found, head=None, hosts=HOSTS):
    cluster = Cluster(name="home", hosts=hosts)
    return BETWEEN.plan(
        StepView(host=cluster.host(name), cluster=cluster, reading=found, readings={"pc1": head or found, name: found})
    )


def test_the_head_makes_a_key_and_uses_it_for_the_other_hosts_before_those_that_ssh_tried():
    key, config, own = planned("pc1", reading()).changes
    assert isinstance(key, CommandChange)
    assert key.argv[-2:] == ("-f", "/home/alice/.ssh/gangline_between")
    assert key.undo[2:] == ("/home/alice/.ssh/gangline_between", "/home/alice/.ssh/gangline_between.pub")
    assert b"Include ~/.ssh/gangline.conf" in config.content
    assert own.content.decode() == (
        "# BEGIN gangline prepare between\n"
        "Host 192.168.1.12 192.168.1.13\n"
        "    IdentityFile ~/.ssh/gangline_between\n"
        "    IdentityFile ~/.ssh/id_ed25519\n"
        "# END gangline prepare between\n"
    )


def test_the_other_hosts_take_it_from_the_heads_address_only():
    head = reading(**{f"{KEY}.pub": PUBLIC})
    (change,) = planned("pc2", reading(**{AUTHORIZED: "ssh-rsa AAAAother bob"}), head).changes
    assert change.content.decode() == f"ssh-rsa AAAAother bob\n{LINE}\n"
    assert (change.mode, change.scope) == (0o600, "user")


def test_a_head_that_moved_gets_a_line_in_place_of_the_old_one():
    head, old = reading(**{f"{KEY}.pub": PUBLIC}), LINE.replace("1.11", "1.99")
    (change,) = planned("pc2", reading(**{AUTHORIZED: f"{old}\nssh-rsa AAAAother bob\n"}), head).changes
    assert change.content.decode() == f"ssh-rsa AAAAother bob\n{LINE}\n"


def test_nothing_is_left_to_do_afterwards():
    after = {f"{KEY}.pub": PUBLIC, CONFIG: None, OWN_CONFIG: None}
    changes = planned("pc1", reading(**after)).changes
    after |= {"~" + each.path.removeprefix("/home/alice"): each.content.decode() for each in changes}
    assert planned("pc1", reading(**after)).changes == ()
    assert planned("pc2", reading(**{AUTHORIZED: f"{LINE}\n"}), reading(**after)).changes == ()


def test_without_the_heads_key_the_others_wait_for_it():
    plan = planned("pc2", reading(), reading())
    assert plan.changes == ()
    assert plan.remains == ("its line follows once pc1 has its key",)


@pytest.mark.parametrize("name", ["pc1", "pc2"])
def test_an_address_that_sshd_cannot_compare_is_told(name):
    hosts = (dataclasses.replace(HOSTS[0], address="pc1.lan"), *HOSTS[1:])
    plan = planned(name, reading(), hosts=hosts)
    assert plan.changes == ()
    assert "write `address` of pc1 in the cluster file in numbers" in plan.remains[0]


def test_a_head_that_is_this_computer_reaches_the_others_as_you_do():
    hosts = (dataclasses.replace(HOSTS[0], transport="local", ssh=None), *HOSTS[1:])
    assert planned("pc2", reading(), hosts=hosts).changes == ()


def test_one_host_needs_no_key():
    assert planned("pc1", reading(), hosts=HOSTS[:1]).changes == ()
