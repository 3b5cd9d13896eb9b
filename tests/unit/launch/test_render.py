"""Exactly what would be started, compared as a whole."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.launch.backend import Request
from gangline.launch.local import LocalBackend, free_port
from gangline.launch.registry import backend
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank

GOLDEN = Path(__file__).parents[2] / "golden"

CLUSTER = Cluster(
    name="home",
    hosts=(
        Host(name="pc1", workdir="/srv/pc1", python="/opt/gangline/bin/python", slots=2),
        Host(
            name="pc2",
            workdir="/srv/pc2",
            python="/opt/gangline/bin/python",
            interface="enp5s0",
            env={"HF_HOME": "/srv/hub", "OMP_NUM_THREADS": "3"},
        ),
    ),
)
RANKS = (GangRank(host="pc1", share=3), GangRank(host="pc1", share=2), GangRank(host="pc2", share=1))
GANG = Gang(run_id="calm-otter-7", attempt=2, ranks=RANKS)


def rendered(cluster=CLUSTER, num_cpus=12):
    return LocalBackend(num_cpus=num_cpus).render(cluster, GANG, port=29511)


def test_the_whole_request():
    golden = GOLDEN / "local_request.json"
    text = json.dumps(rendered().to_json(), indent=2, sort_keys=True) + "\n"
    assert text == golden.read_text(encoding="utf-8")


def test_a_request_survives_its_file():
    request = rendered()
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(12, "4"), (2, "1"), (7, "2")])
def test_the_cores_of_one_machine_are_dealt_to_its_ranks(num_cpus, num_threads):
    assert rendered(num_cpus=num_cpus).hosts[0].env["OMP_NUM_THREADS"] == num_threads


def test_what_the_cluster_file_says_of_a_host_has_the_last_word():
    assert rendered().hosts[1].env["OMP_NUM_THREADS"] == "3"


def test_several_machines_meet_at_the_address_of_the_head():
    far = tuple(
        replace(host, transport="ssh", address=f"192.168.1.{number}") for number, host in enumerate(CLUSTER.hosts, 10)
    )
    first, second = rendered(replace(CLUSTER, hosts=far)).hosts
    for part, local in ((first, "192.168.1.10"), (second, "192.168.1.11")):
        assert part.argv[part.argv.index("--master-addr") + 1] == "192.168.1.10"
        assert part.argv[part.argv.index("--local-addr") + 1] == local
    assert "GLOO_SOCKET_IFNAME" not in first.env
    assert first.env["OMP_NUM_THREADS"] == "1"


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_backends_have_names():
    assert isinstance(backend("local"), LocalBackend)
    with pytest.raises(UsageError, match="no backend is called 'slrm'"):
        backend("slrm")
