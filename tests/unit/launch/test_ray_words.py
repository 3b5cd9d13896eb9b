"""What is started under `backend: ray`, what its programs say, and what is said of errors of Ray."""

import json
from pathlib import PurePath

import pytest

from gangline.agent.supervise import ray_node
from gangline.errors import UsageError
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.ray import RayBackend
from gangline.runs.cluster import Cluster, Host
from tests.fakes.transport import FakeTransport


def launcher(env=None, devices=(), gpu=None):
    hosts = tuple(
        Host(name=name, address=address, workdir="/srv", python="/opt/py", transport="ssh", env=env or {}, gpu=gpu)
        for name, address in (("pc1", "10.0.0.1"), ("pc2", "10.0.0.2"))
    )
    parts = tuple(
        HostRequest(
            host=host.name,
            folder=f"/srv/{host.name}/a",
            rank_files="/srv/run",
            argv=(),
            env={},
            ranks=(0, 1),
            devices=devices,
        )
        for host in hosts
    )
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=parts)
    return RayBackend().launcher(Cluster(name="home", hosts=hosts), request)


def asked(argv):
    return json.loads(argv[-1])


def test_without_an_address_every_host_becomes_a_node_that_ends_with_its_agent():
    made = launcher()
    first, second = made.daemons
    assert made.argv[:-1] == ("/opt/py", "/srv/pc1/a/agent.pyz", "ray", "drive")
    assert (asked(made.argv)["address"], asked(made.argv)["node"]) == (None, "/srv/pc1/a/ray")
    assert [(each.host, each.serves) for each in made.daemons] == [("pc1", "/srv/run/ray"), ("pc2", "/srv/pc2/a")]
    assert (asked(first.argv)["address"], asked(second.argv)["address"]) == (None, "ADDRESS")
    assert [asked(each.argv)["ip"] for each in made.daemons] == ["10.0.0.1", "10.0.0.2"]
    assert {each.env["RAY_AUTH_MODE"] for each in made.daemons} == {"token"}
    assert {(part["ranks"], part["gpus"]) for part in asked(made.argv)["hosts"]} == {(0, 0)}


@pytest.mark.parametrize(("gpu", "room"), [(None, (2, 2)), ({}, (2, 0))])
def test_a_cluster_that_is_there_is_asked_for_a_cpu_or_a_gpu_for_each_rank(gpu, room):
    made = launcher({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "token", "OTHER": "1"}, (0, 1), gpu)
    assert (made.daemons, made.env) == ((), {"RAY_AUTH_MODE": "token"})
    assert asked(made.argv)["address"] == "10.0.0.1:6379"
    assert {(part["ranks"], part["gpus"]) for part in asked(made.argv)["hosts"]} == {room}


def test_the_address_of_a_client_is_refused():
    with pytest.raises(UsageError, match=r"expected HOST:PORT or auto, found ray://10\.0\.0\.1:10001"):
        launcher({"RAY_ADDRESS": "ray://10.0.0.1:10001"})


def test_a_lost_actor_and_an_error_of_the_program_are_told():
    made, head = launcher(), FakeTransport("pc1")
    log = PurePath("/srv/run/ray/launcher.log")
    head.write(log, b"(gcs) noise\nlost the actor on pc2: ActorDiedError: its node has died\n")
    lost = RayBackend().failure(made, head)
    assert (lost.what, lost.seen) == ("ray on pc1 has lost pc2", "pc2: ActorDiedError: its node has died")
    head.write(log, b'noise\n{"kind": "error", "what": "no nodes", "seen": "s", "fix": "f"}\n')
    assert RayBackend().failure(made, head) is None  # it has not ended
    head.write(PurePath("/srv/run/ray/ended.json"), b'{"returncode": 1}')
    failure = RayBackend().failure(made, head)
    assert (failure.what, failure.seen, failure.fix) == ("no nodes", "s", "f; then: gangline resume")


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.55.0
    Python: 3.11.7
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""
"""As Ray 2.60 has it."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(MISMATCH), "is of another version than this one"),
        (RuntimeError("Authentication token is missing or incorrect"), "it wants another token"),
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), "there is no cluster of Ray at"),
    ],
)
def test_errors_of_ray_are_explained(error, words):
    record = ray_node._explained("10.0.0.1:6379", error, "2.60.0").record
    assert words in record["what"]
    assert record["fix"]
