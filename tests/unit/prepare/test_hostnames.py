"""Step `names`: what becomes of hostnames and of /etc/hosts. Facts in, changes out."""

import dataclasses

import pytest

from gangline.prepare.hostnames import HOSTNAME, HOSTS, NAMES
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

DEBIAN = """127.0.0.1\tlocalhost
127.0.1.1\tdebian.lan\tdebian

# The following lines are desirable for IPv6 capable hosts
::1     localhost ip6-localhost ip6-loopback
"""
CLUSTER = Cluster(
    name="home",
    hosts=tuple(
        Host(name=f"pc{number}", workdir="/w", python="", transport="ssh", address=f"192.168.1.1{number}")
        for number in (1, 2)
    ),
)


def reading(nodename, hosts=DEBIAN, *, programs=("hostname",), hostname=None):
    text = f"{nodename}\n" if hostname is None else hostname
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={HOSTS: FileRead(content=hosts.encode()), HOSTNAME: FileRead(content=text.encode())},
        folders={},
        commands={"nodename": nodename},
        programs=dict.fromkeys(programs, "/usr/bin/x"),
    )


def planned(*readings, cluster=CLUSTER, host="pc1"):
    named = {each.name: found for each, found in zip(cluster.hosts, readings, strict=True)}
    view = StepView(host=cluster.host(host), cluster=cluster, reading=named[host], readings=named)
    return NAMES.plan(view)


def content(plan, path):
    """What a file becomes."""
    return next(each.content.decode() for each in plan.changes if isinstance(each, FileChange) and each.path == path)


def done(found, plan):
    """The host after the changes."""
    files = {each.path: FileRead(content=each.content) for each in plan.changes if isinstance(each, FileChange)}
    names = [each.after for each in plan.changes if isinstance(each, CommandChange)]
    return dataclasses.replace(
        found, files={**found.files, **files}, commands={"nodename": (names or [found.output("nodename")])[-1]}
    )


def test_what_announces_the_name_on_the_network_starts_again_after_it_and_after_an_undo():
    found = reading("debian")
    announcing = dataclasses.replace(found, commands={**found.commands, "mdns": "active"})
    again = ("systemctl", "restart", "avahi-daemon.service")
    plan = planned(announcing, reading("tower"))
    first, _, named, last, *_ = plan.changes
    assert (first.argv, first.undo) == ((), again)
    assert named.argv == ("hostname", "pc1")
    assert (last.argv, last.undo) == (again, ())
    assert "by mDNS it becomes pc1.local" in plan.reason
    later = dataclasses.replace(
        announcing, programs={}
    )  # the name counts after a restart, and so does what is announced
    assert not any(isinstance(each, CommandChange) for each in planned(later, reading("tower")).changes)


def test_a_shared_hostname_and_the_trap_of_127_0_1_1():
    plan = planned(reading("debian"), reading("debian"))
    assert content(plan, HOSTNAME) == "pc1\n"
    (command,) = [each for each in plan.changes if isinstance(each, CommandChange)]
    assert (command.argv, command.undo) == (("hostname", "pc1"), ("hostname", "debian"))
    assert (command.before, command.after) == ("debian", "pc1")
    assert content(plan, HOSTS) == (
        "127.0.0.1\tlocalhost\n"
        "# gangline prepare names: 127.0.1.1\tdebian.lan\tdebian\n"
        "\n"
        "# The following lines are desirable for IPv6 capable hosts\n"
        "::1     localhost ip6-localhost ip6-loopback\n"
        "# BEGIN gangline prepare names\n"
        "192.168.1.11 pc1.lan pc1\n"
        "192.168.1.12 pc2\n"
        "# END gangline prepare names\n"
    )
    assert "the name of other hosts, too" in plan.reason
    assert "a fixed one" in plan.risk


def test_a_second_look_finds_nothing_to_change():
    first, second = reading("debian"), reading("debian")
    after = done(first, planned(first, second))
    other = done(second, planned(after, second, host="pc2"))
    assert planned(after, other).changes == ()
    assert planned(after, other, host="pc2").changes == ()


def test_a_hostname_that_says_something_stays_and_stands_beside_the_name():
    plan = planned(reading("tower", "127.0.0.1 localhost tower\n"), reading("box", "127.0.0.1 localhost\n"))
    assert [type(each) for each in plan.changes] == [FileChange]
    assert content(plan, HOSTS) == (
        "127.0.0.1 localhost\n"
        "# gangline prepare names: 127.0.0.1 localhost tower\n"
        "# BEGIN gangline prepare names\n"
        "192.168.1.11 tower pc1\n"
        "192.168.1.12 box pc2\n"
        "# END gangline prepare names\n"
    )


def test_a_wrong_address_of_a_host_becomes_a_comment():
    stale = "127.0.0.1 localhost\n192.168.1.99 pc2 printer\nfd00::2 pc2\n"
    plan = planned(reading("tower", stale), reading("box", stale))
    assert content(plan, HOSTS).splitlines()[1:4] == [
        "192.168.1.99 printer",
        "# gangline prepare names: 192.168.1.99 pc2 printer",
        "fd00::2 pc2",
    ]


def test_other_hosts_of_the_cluster_replace_the_block():
    first, second = reading("tower"), reading("box")
    after = done(first, planned(first, second))
    third = Host(name="pc3", workdir="/w", python="", transport="ssh", address="192.168.1.13")
    larger = dataclasses.replace(CLUSTER, hosts=(*CLUSTER.hosts, third))
    text = content(planned(after, second, reading("desk"), cluster=larger), HOSTS)
    assert text.count("BEGIN gangline") == 1
    assert "192.168.1.13 desk pc3\n" in text


def test_an_address_in_the_place_of_a_name_is_no_hostname():
    hosts = tuple(dataclasses.replace(host, name=host.address) for host in CLUSTER.hosts)
    plan = planned(reading("debian"), reading("debian"), cluster=Cluster(name="home", hosts=hosts), host="192.168.1.11")
    assert [each.path for each in plan.changes if isinstance(each, FileChange)] == [HOSTS]
    assert "192.168.1.11 debian.lan debian\n" in content(plan, HOSTS)


def test_without_the_program_the_running_name_is_set_by_systemd():
    plan = planned(reading("debian", programs=("hostnamectl",)), reading("box"))
    (command,) = [each for each in plan.changes if isinstance(each, CommandChange)]
    assert command.argv == ("hostnamectl", "set-hostname", "--transient", "pc1")


def test_one_machine_needs_no_names():
    one = Cluster(name="desk", hosts=(Host(name="pc1", workdir="/w", python=""),))
    assert planned(reading("debian"), cluster=one).changes == ()


@pytest.mark.parametrize("host", ["pc1", "pc2"])
def test_a_host_without_an_address_is_left_to_the_user(host):
    hosts = (CLUSTER.hosts[0], dataclasses.replace(CLUSTER.hosts[1], address="127.0.0.1"))
    plan = planned(reading("tower"), reading("box"), cluster=Cluster(name="home", hosts=hosts), host=host)
    assert plan.remains == ("pc2 has no address in cluster.yaml: 127.0.0.1",)
    assert "127.0.0.1 box" not in content(plan, HOSTS)
