"""listen, reach and free-port: what hosts try on each other. On loopback, with the agent's own program."""

import contextlib
import errno
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gangline.agent import machine_leases
from gangline.agent.host_facts import interfaces
from gangline.agent.netprobe import free_ports, path, reach

TOKEN = "0123456789abcdef" * 2
HERE = "127.0.0.1"


def program(verb, *argv):
    return [sys.executable, "-m", "gangline.agent", verb, *argv]


def run(verb, request, *argv):
    """The agent's program to its end."""
    return subprocess.run(program(verb, *argv), input=json.dumps(request).encode(), capture_output=True, timeout=30)


@contextlib.contextmanager
def started(verb, request):
    """The agent's program, which stays."""
    with subprocess.Popen(
        program(verb), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def listening(**request):
    asked = {
        "token": TOKEN,
        "host": "pc1",
        "addresses": [HERE],
        "ports": [0, 0],
        "udp": True,
        "any": False,
        "seconds": 20,
    }
    with started("listen", {**asked, **request}) as process:
        yield json.loads(process.stdout.readline())


def ask(first, **request):
    ports = [{"kind": "ephemeral", "address": port["address"], "port": port["port"]} for port in first["ports"]]
    target = {"host": "pc1", "instance": first["instance"], "ports": ports, "udp": first["udp"].get(HERE)}
    return reach.ask_all({"token": TOKEN, "targets": [target], "timeout_s": 1.0, **request})[0]


def closed_port():
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        return sock.getsockname()[1]


# --- the listener


def test_what_is_open_is_said_at_once_and_then_a_beat_until_the_end():
    done = run("listen", {"token": TOKEN, "host": "pc1", "addresses": [HERE], "ports": [0], "seconds": 0.5})
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["host"] == "pc1"
    assert lines[0]["own"]
    assert [sock["asked"] for sock in lines[0]["ports"]] == [0]
    assert abs(lines[0]["time"] - time.time()) < 20
    assert lines[1:]
    assert all(set(line) == {"beat"} for line in lines[1:])
    assert done.returncode == 0


def test_it_ends_when_nobody_reads_any_more():
    with started(
        "listen", {"token": TOKEN, "host": "pc1", "addresses": [HERE], "ports": [0], "seconds": 100}
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "words",
    [b"", b"GET /index.html HTTP/1.1\r\nHost: example\r\n\r\n", b"gangline " + b"0" * 32 + b"\n", b"x" * 100_000],
    ids=["nothing", "http", "another token", "a flood"],
)
def test_a_stranger_gets_no_answer(words):
    with listening() as first, socket.create_connection((HERE, first["ports"][0]["port"])) as sock:
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            sock.sendall(words)
            assert sock.recv(100) == b""  # after a moment, or at once


def test_of_a_stranger_42_bytes_are_read():
    assert len(path.hello(TOKEN)) == 42
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        path.hello("a token\n")


def test_udp_without_the_token_gets_no_answer():
    with listening() as first, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((HERE, first["udp"][HERE]))
        sock.settimeout(0.3)
        for packet in (b"x" * 100, path.question("f" * 32, 1, 100), path.question(TOKEN, 1, 20)):
            sock.send(packet)
        with pytest.raises(TimeoutError):
            sock.recv(100)
        sock.send(path.question(TOKEN, 7, 100))
        assert path.ACK.unpack(sock.recv(100)) == (7, 100)


def test_a_port_that_is_taken_is_said_and_the_next_of_a_range_is_opened():
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with listening(ports=[port, [port, port + 20]]) as first:
            one, other = first["ports"]
            assert (one["code"], other["asked"]) == ("EADDRINUSE", [port, port + 20])
            assert port < other["port"] <= port + 20


def test_a_port_that_was_handed_out_to_a_run_is_left_to_it(tmp_path):
    claims = {"claims": str(tmp_path), "hold_s": 60}
    asked = [29700, 29720]
    taken = free_ports.free({"address": HERE, "range": asked, **claims})["port"]
    with listening(ports=[asked], **claims) as first:
        assert first["ports"][0]["port"] > taken


def test_an_address_that_is_not_the_hosts_is_said():
    with listening(addresses=["192.0.2.77"], ports=[0]) as first:
        assert not first["own"]
        assert first["ports"][0]["code"] == "EADDRNOTAVAIL"


def test_behind_an_address_translation_it_listens_all_the_same():
    with listening(addresses=["192.0.2.77"], ports=[0], any=True) as first:
        assert not first["own"]
        target = {"host": "pc1", "instance": first["instance"], "udp": None}
        port = {"kind": "ephemeral", "address": HERE, "port": first["ports"][0]["port"]}
        said = reach.ask_all({"token": TOKEN, "targets": [{**target, "ports": [port]}]})
        assert said[0]["tries"][0]["outcome"] == "ok"


# --- the other side


def test_an_open_way_is_measured():
    with listening() as first:
        said = ask(first, measure=["time", "packets", "burst", "throughput"], seconds=0.2)
    assert [attempt["outcome"] for attempt in said["tries"]] == ["ok", "ok"]
    assert (said["source_address"], said["interface"]) == (HERE, "lo")
    assert 0 < said["latency_min_s"] <= said["latency_median_s"] < 1
    assert abs(said["ahead_s"]) < 1
    assert said["full_segment"] is True
    assert said["largest_packet"] == 9000
    assert (said["packets_sent"], said["packets_answered"]) == (200, 200)
    assert said["burst_mbps"] > 10
    assert said["throughput_mbps"] > 10
    assert said["retransmits"] is not None


def carry(source, target, delay_s):
    """What comes from one socket goes to the other, later."""
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            time.sleep(delay_s)
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def distance(port, delay_s):
    """A port that leads to another one far away."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                near, _ = sock.accept()
                far = socket.create_connection((HERE, port))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    carriers.append(threading.Thread(target=carry, args=(*pair, delay_s)))
                    carriers[-1].start()

    ends, carriers = [], []
    with socket.create_server((HERE, 0)) as sock:
        thread = threading.Thread(target=serve)
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()
    for each in carriers:
        each.join()
    for end in ends:
        end.close()


def test_a_host_that_is_far_away_is_seen_to_be_so():
    with listening(ports=[0]) as first, distance(first["ports"][0]["port"], 0.006) as port:
        first["ports"][0]["port"] = port
        said = ask(first, measure=["time"])
    assert 0.012 <= said["latency_min_s"] < 1


class Queue:
    """A way in which something stands for the first answers."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def ask_time(self):
        seconds = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return {"round_trip_s": seconds, "ahead_s": seconds}


def test_the_quickest_round_trip_counts_and_after_a_slow_one_there_is_a_pause(monkeypatch):
    pauses = []
    monkeypatch.setattr(path.time, "sleep", pauses.append)
    assert path.round_trips(Queue(0.03, 0.03, 0.0002)) == {
        "latency_min_s": 0.0002,
        "latency_median_s": 0.0002,
        "ahead_s": 0.0002,
    }
    assert pauses == [path.PAUSE_S] * 2
    assert path.round_trips(Queue(0.02))["latency_min_s"] == 0.02


def test_only_what_was_asked_for_is_measured():
    with listening() as first:
        assert set(ask(first)) == {"target", "tries", "source_address", "interface", "neighbour"}


def test_a_closed_port_is_refused_after_a_second_try():
    said = ask(
        {"ports": [{"address": HERE, "port": closed_port()}], "udp": {}, "instance": "x"}, measure=["time", "packets"]
    )
    assert (said["tries"][0]["outcome"], said["tries"][0]["tries"]) == ("refused", 2)
    assert "latency_min_s" not in said


def test_another_host_that_answers_is_named():
    with listening() as first:
        said = ask({**first, "instance": "of somebody else"})
    assert {(attempt["outcome"], attempt["answered_by"]) for attempt in said["tries"]} == {("other", "pc1")}


@contextlib.contextmanager
def server(behave):
    """Something that is not ours."""
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        listener.settimeout(0.1)
        ending = threading.Event()

        def serve():
            while not ending.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        behave(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield {"ports": [{"address": HERE, "port": listener.getsockname()[1]}], "udp": {}, "instance": "x"}
        ending.set()
        thread.join()


@pytest.mark.parametrize(
    "words",
    [b"", b"SSH-2.0-x\r\n", b"[1]\n", b'{"op": 1}\n', b"\xff\xfe\n", b"[" * 5000],
    ids=lambda words: repr(words[:8]),
)
def test_a_server_of_somebody_else_is_a_stranger(words):
    with server(lambda connection: connection.sendall(words)) as first:
        assert ask(first)["tries"][0]["outcome"] == "stranger"


def test_a_server_that_says_nothing_is_left_after_the_time_limit():
    def hear(connection):
        while connection.recv(1 << 16):
            pass

    with server(hear) as first:
        said = ask(first, timeout_s=0.2, tries=1)
    assert said["tries"][0]["outcome"] == "timed out"


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ECONNREFUSED, "refused"),
        (errno.EHOSTUNREACH, "no route"),
        (errno.ENETUNREACH, "no route"),
        (errno.ETIMEDOUT, "timed out"),
        (errno.EPERM, "error"),
    ],
)
def test_every_failure_has_a_word(number, outcome):
    assert reach._outcome(OSError(number, "why"))["outcome"] == outcome


@contextlib.contextmanager
def answering(packet_is_answered):
    """A UDP responder that knows the token and answers as it likes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((HERE, 0))
        sock.settimeout(3)
        ending = threading.Event()

        def answer():
            with contextlib.suppress(OSError):
                while not ending.is_set():
                    packet, sender = sock.recvfrom(1 << 16)
                    number = path.ASK.unpack_from(packet)[1]
                    if packet_is_answered(number, len(packet)):
                        sock.sendto(path.ACK.pack(number, len(packet)), sender)

        thread = threading.Thread(target=answer)
        thread.start()
        yield sock.getsockname()[1]
        ending.set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(path.question(TOKEN, 0, 32), sock.getsockname())
        thread.join()


@pytest.mark.parametrize(
    ("limit", "mtu", "largest"), [(1472, 9000, 1500), (972, 1500, 1000), (8972, 9000, 9000), (0, 1500, None)]
)
def test_the_largest_packet_that_arrives(limit, mtu, largest):
    with answering(lambda _, length: length <= limit) as port:
        assert path.largest_packet(HERE, port, TOKEN, mtu) == {
            "own_mtu": mtu,
            "largest_packet": largest,
            "told_mtu": None,
        }


def test_a_packet_size_is_tried_more_than_once():
    seen = set()

    def second_time(number, _):
        again = number in seen
        seen.add(number)
        return again

    with answering(second_time) as port:
        assert path.largest_packet(HERE, port, TOKEN, 1500)["largest_packet"] == 1500


@pytest.fixture
def fewer_packets(monkeypatch):
    monkeypatch.setattr(path, "LOSS_PACKETS", 50)
    monkeypatch.setattr(path, "LOSS_GRACE_S", 0.3)


@pytest.mark.usefixtures("fewer_packets")
def test_lost_packets_are_counted_in_a_second_longer_look():
    with answering(lambda number, _: number % 10 != 3) as port:
        assert path.loss(HERE, port, TOKEN) == {"packets_sent": 100, "packets_answered": 90}


@pytest.mark.usefixtures("fewer_packets")
def test_a_slow_answer_is_not_a_lost_one():
    def slowly(number, _):
        if number % 40 == 0:
            time.sleep(0.2)
        return True

    with answering(slowly) as port:
        assert path.loss(HERE, port, TOKEN) == {"packets_sent": 50, "packets_answered": 50}


@pytest.mark.usefixtures("fewer_packets")
def test_udp_without_any_answer_is_told_as_it_is():
    with answering(lambda *_: False) as port:
        begun = time.monotonic()
        assert path.loss(HERE, port, TOKEN) == {"packets_sent": 50, "packets_answered": 0}
        assert time.monotonic() - begun < 10


def test_loopback_is_found_among_the_interfaces():
    assert interfaces.owners()[HERE] == "lo"
    assert interfaces.mtu_of("lo") > 1500
    assert interfaces.mtu_of("none0") is None
    assert interfaces.data_address("lo") == HERE
    assert interfaces.data_address("none0") is None
    assert all(len(mac) == 17 for mac in interfaces.macs())
    assert interfaces.neighbour("192.0.2.77") is None


# --- ports


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Leases of nobody else."""
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock").chmod(0o1777)
    monkeypatch.setattr(machine_leases, "PLACES", (str(tmp_path / "lock"),))


def test_the_first_free_port_of_a_range():
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = free_ports.free({"address": HERE, "range": [port, port + 50], "avoid": [port + 1]})
        assert port + 1 < answer["port"] <= port + 50
        assert port in answer["taken"]
        assert answer["may_be_given_away"]
        assert free_ports.free({"address": HERE, "range": [port, port]})["port"] is None


def test_a_port_below_those_of_the_kernel_is_nobody_elses():
    low = interfaces.ephemeral_range()[0]
    assert not free_ports.free({"address": HERE, "range": [low - 200, low - 1]})["may_be_given_away"]


@pytest.mark.usefixtures("alone")
def test_a_port_that_was_handed_out_is_not_handed_out_again(tmp_path):
    asked = {"address": HERE, "range": [29500, 29999], "claims": str(tmp_path / "claims"), "hold_s": 60}
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: free_ports.free(asked)["port"], range(60)))
    assert len(set(found)) == 60


@pytest.mark.usefixtures("alone")
def test_a_claim_ends(tmp_path, monkeypatch):
    asked = {"address": HERE, "range": [29500, 29999], "claims": str(tmp_path / "claims"), "hold_s": 60}
    first = free_ports.free(asked)["port"]
    assert free_ports.free(asked)["port"] != first
    in_an_hour = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: in_an_hour)
    assert free_ports.free(asked)["port"] == first


@pytest.mark.usefixtures("alone")
def test_a_port_that_was_handed_out_to_one_folder_is_not_handed_out_to_another(tmp_path):
    """Two projects of one user, started in the same second."""
    asked = {"address": HERE, "range": [29500, 29999], "hold_s": 60}
    with ThreadPoolExecutor(10) as pool:
        found = list(
            pool.map(lambda n: free_ports.free({**asked, "claims": str(tmp_path / f"{n}")})["port"], range(30))
        )
    assert len(set(found)) == 30


def test_users_of_one_host_begin_at_ports_of_their_own():
    firsts = [next(free_ports.own_order(29500, 29999, uid)) for uid in (0, 1000, 1001, 1002, 1020)]
    assert firsts == [29500, 29500, 29537, 29574, 29740]
    assert sorted(free_ports.own_order(29500, 29509, 1001)) == list(range(29500, 29510))


def test_a_port_that_is_held_for_a_launcher_is_nobody_elses_and_the_launcher_can_listen_there():
    asked = {"address": HERE, "range": [29900, 29999]}
    port = free_ports.free(asked)["port"]
    with free_ports.reserve(port):
        assert free_ports.free(asked)["port"] != port
        with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
            free_ports.reserve(port)
        # where nothing else is left it is better than none
        assert free_ports.free({"address": HERE, "range": [port, port]})["port"] == port


def test_free_port_is_a_program():
    done = run("free-port", {"address": HERE, "range": [29500, 29999]})
    assert json.loads(done.stdout)["port"] >= 29500


# --- attached


def test_an_attached_command_gives_its_output_and_its_code():
    done = run("attached", {"argv": [sys.executable, "-c", "print('out'); raise SystemExit(3)"], "seconds": 30})
    assert (done.stdout, done.returncode) == (b"out\n", 3)
    assert run("attached", {"argv": ["/no/such/program"], "seconds": 5}).returncode == 127


def test_an_attached_command_beats_and_ends_in_time():
    done = run("attached", {"argv": ["sleep", "30"], "seconds": 1})
    assert done.returncode == 124
    assert all(set(json.loads(line)) == {"beat"} for line in done.stdout.splitlines())
    assert done.stderr == b"sleep did not end in time\n"


def test_an_attached_command_goes_with_its_reader():
    script = "import os, subprocess, time; print(os.getpid(), subprocess.Popen(['sleep', '50']).pid, flush=True); time.sleep(50)"
    with started("attached", {"argv": [sys.executable, "-c", script], "seconds": 60}) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.stdout.close()
        process.wait(timeout=10)
        deadline = time.monotonic() + 10
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
