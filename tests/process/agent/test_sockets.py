"""Sockets are found with who has them, and one that gets no answer is told from one that does."""

import json
import os
import socket
import subprocess
import sys

import pytest

from gangline.agent.netprobe import free_ports
from gangline.agent.supervise import left, processes
from gangline.runs.state import ProcessId


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def listener(request):
    family, address = request.param
    try:
        sock = socket.socket(family)
        sock.bind((address, 0))
    except OSError:
        pytest.skip(f"no {address} on this machine")
    with sock:
        sock.listen(1)
        yield sock


def ours(*states):
    return processes.of_processes([os.getpid()], processes.sockets(*states))


def test_who_listens_and_who_is_connected(listener):
    place = listener.getsockname()[:2]
    assert [each.remote[1] for each in ours(processes.LISTEN) if each.local == place] == [0]
    with socket.create_connection(place) as client:
        (found,) = [each for each in ours(processes.ESTABLISHED) if each.remote == place]
        assert found.local == client.getsockname()[:2]
    assert processes.of_processes([], processes.sockets(processes.LISTEN)) == []


def test_an_ipv4_peer_of_an_ipv6_socket_has_its_ipv4_address():
    with socket.socket(socket.AF_INET6) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            sock.bind(("::ffff:127.0.0.1", 0))
        except OSError:
            pytest.skip("no IPv6 on this machine")
        sock.listen(1)
        with socket.create_connection(("127.0.0.1", sock.getsockname()[1])), sock.accept()[0]:
            assert ("127.0.0.1", sock.getsockname()[1]) in {each.local for each in ours(processes.ESTABLISHED)}


def test_a_connection_without_an_answer_is_seen():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        clients = [socket.socket() for _ in range(3)]
        for client in clients:  # the queue of the listener is full, so the kernel drops the rest
            client.setblocking(False)
            client.connect_ex(place)
        assert place in {each.remote for each in ours(processes.SYN_SENT)}
        for client in clients:
            client.close()


def test_a_port_is_open_or_refused_or_silent(listener):
    place = listener.getsockname()[:2]
    assert free_ports.connect({"targets": [place]})["outcomes"] == ["open"]
    listener.close()
    assert free_ports.connect({"targets": [place, ("no.such.host.invalid", 1)]})["outcomes"][0] == "refused"


def test_a_port_that_drops_packets_times_out():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        clients = [socket.socket() for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert free_ports.connect({"targets": [full.getsockname()], "timeout_s": 0.3})["outcomes"] == ["timed out"]
        for client in clients:
            client.close()


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as door:
    print(door.getsockname()[1], flush=True)
    input()
"""


def test_what_is_left_of_a_run_is_found_by_its_tag_with_the_ports_it_listens_on(tmp_path):
    request = {"folder": str(tmp_path / "pc1"), "rank_files": str(tmp_path), "ranks": [0], "env": {}}
    env = {**os.environ, "GANGLINE_PART": request["folder"]}
    process = subprocess.Popen([sys.executable, "-c", LISTENS], env=env, stdin=-1, stdout=-1, text=True)
    port = int(process.stdout.readline())
    found = left.left_of([request], port=None)
    assert [(row["pid"], row["why"]) for row in found["processes"]] == [(process.pid, "tag")]
    assert found["ports"] == [port]
    process.communicate("\n")
    assert left.left_of([request], port=port) == {"processes": [], "ports": [], "leases": [], "gpus": []}


def test_a_rank_that_has_lost_its_tag_is_found_by_what_was_noted_of_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=-1, stdout=-1, text=True)
    process.stdout.readline()
    record = ProcessId.of(process.pid).to_json()
    (tmp_path / "rank-0.pid").write_text(json.dumps(record))
    request = {"folder": str(tmp_path / "pc1"), "rank_files": str(tmp_path), "ranks": [0], "env": {}}
    assert [row["why"] for row in left.left_of([request], port=None)["processes"]] == ["rank 0"]
    process.communicate("\n")
    assert left.left_of([request], port=None)["processes"] == []
