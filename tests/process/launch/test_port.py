"""A port that is free on the head, and is not given away twice."""

import socket
import sys

import pytest

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.poll import free_port
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from tests.fakes.transport import FakeTransport, Scripted


@pytest.fixture
def head(tmp_path):
    return Host(name="pc1", workdir=str(tmp_path), python=sys.executable)


def test_a_free_port_can_be_listened_on(head):
    port = free_port(Cluster(name="home", hosts=(head,)), LocalTransport(head))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_two_runs_that_start_at_the_same_time_get_different_ports(head):
    cluster = Cluster(name="home", hosts=(head,))
    assert free_port(cluster, LocalTransport(head)) != free_port(cluster, LocalTransport(head))


def test_a_range_without_a_free_port_is_an_error_that_names_the_range(head):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        cluster = Cluster(name="home", hosts=(head,), ports=(port, port))
        with pytest.raises(RunFailed, match=f"no port is free from {port} to {port}"):
            free_port(cluster, LocalTransport(head))


def test_a_head_that_does_not_get_on_is_named(head):
    slow = FakeTransport("pc1", answer=lambda _call: Scripted(duration_s=600.0))
    with pytest.raises(HostUnreachable, match="pc1: no port can be looked for"):
        free_port(Cluster(name="home", hosts=(head,)), slow)


@pytest.mark.parametrize("said", ["", "[1]", "7", "{}", '{"port": "x"}', '{"port": 1.5}', "[" * 10**5])
def test_a_head_that_does_not_say_a_port_is_named(head, said):
    lying = FakeTransport("pc1", answer=lambda _call: Scripted(stdout=said))
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
        free_port(Cluster(name="home", hosts=(head,)), lying)
