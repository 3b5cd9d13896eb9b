"""Who keeps a run: whether a host is this computer is asked of ssh."""

import dataclasses

import pytest

from gangline.control.supervision import choose_supervisor_host
from gangline.errors import RunFailed
from gangline.runs.cluster import Host
from tests.fakes.transport import FakeTransport
from tests.unit.control.test_keep import World, ssh_host


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_head_keeps_a_run_unless_one_of_the_hosts_is_this_computer(world):
    assert choose_supervisor_host(world.cluster, world.context).host == "pc1"
    laptop = Host(name="laptop", workdir="/home/laptop", python="python3")
    mixed = dataclasses.replace(world.cluster, hosts=(*world.cluster.hosts, laptop))
    keeping = choose_supervisor_host(mixed, world.context)
    assert keeping.host is None
    assert "laptop is this computer" in keeping.why_not[0]
    with pytest.raises(RunFailed, match="cannot supervise the run"):
        choose_supervisor_host(dataclasses.replace(mixed, supervisor="head"), world.context)


def test_hosts_take_over_from_each_other_only_if_all_of_them_reach_the_others(world):
    hosts = (*world.cluster.hosts, ssh_host("pc3"))
    world.transports["pc3"] = FakeTransport("pc3")
    three = dataclasses.replace(world.cluster, hosts=hosts)
    assert choose_supervisor_host(three, world.context).candidates == ()
    voting = dataclasses.replace(three, takeover="votes")
    assert choose_supervisor_host(voting, world.context).candidates == ("pc2", "pc3")

    def without_key(cluster, _remote):
        return ["pc1 lets no key of pc3 in"] if cluster.head.name == "pc3" else []

    deps = dataclasses.replace(world.deps, cannot_supervise=without_key)
    with pytest.raises(RunFailed, match="the hosts cannot take over from each other") as caught:
        choose_supervisor_host(voting, dataclasses.replace(world.context, deps=deps))
    assert caught.value.seen == "pc3 says: pc1 lets no key of pc3 in"
    two = dataclasses.replace(world.cluster, takeover="votes")  # as after `resume --without`
    assert choose_supervisor_host(two, dataclasses.replace(world.context, deps=deps)).candidates == ()
