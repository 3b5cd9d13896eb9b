"""Who keeps a run: whether a host is this computer is asked of ssh."""

import dataclasses

import pytest

from gangline.control.supervision import choose_supervisor_host
from gangline.errors import RunFailed
from gangline.runs.cluster import Host
from tests.unit.control.test_keep import World


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
