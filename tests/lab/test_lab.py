"""The lab itself: its hosts are separate computers, its faults do what they say, and it leaves nothing behind."""

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab import probe
from tests.lab.hosts import ROOT, Lab, lab_folders
from tests.lab.namespaces import LabFailed, end, lab_id
from tests.lab.network import Network

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 16):
                if data.endswith(b"!"):
                    connection.sendall(b"got it")
"""
# Prints "got it", or the error and after how many seconds.
CLIENT = """
import socket, sys, time
start = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as connection:
        connection.sendall(b"x" * int(sys.argv[4]) + b"!")
        print(connection.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""


@contextlib.contextmanager
def server(host, address=None, *, port=29500):
    argv = ["python3", "-I", "-c", SERVER, address or host.address, str(port)]
    process = host.popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    yield
    end(process)


def connect(host, peer, *, port=29500, num_bytes=1, timeout_s=1.0):
    words = [peer if isinstance(peer, str) else peer.address, str(port), str(timeout_s), str(num_bytes)]
    return host.check(["python3", "-I", "-c", CLIENT, *words]).strip()


def processes_in(spaces):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.joinpath("ns", "net").stat().st_ino in spaces:
                found.append(process.name)
    return found


def names_on_this_machine(lab_id):
    """Whatever a lab could leave a name of, outside its namespaces."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, text=True).stdout)
    return {
        "mounts": sorted(Path("/proc/self/mountinfo").read_text().splitlines()),
        "links": sorted(link["ifname"] for link in links),
        "namespaces": sorted(map(str, Path("/run/netns").glob("*"))),
        "folders": sorted(str(path) for path in Path(tempfile.gettempdir()).glob(f"{lab_id}*")),
        "groups": sorted(
            str(path) for path in Path("/sys/fs/cgroup").glob("**/gangline-lab-*") if path.name.startswith(lab_id)
        ),
    }


def test_hosts_are_separate_computers(three_hosts):
    h0, h1, h2 = three_hosts.hosts
    h1.write("/etc/motd", "only here")
    h1.write("/tmp/mine", "only here")
    h1.write("model/weights", "only here")
    with h2.popen(["sleep", "60"]):
        assert [host.check(["hostname"]).strip() for host in three_hosts.hosts] == ["h0", "h1", "h2"]
        assert [host.exists("/tmp/mine") for host in three_hosts.hosts] == [False, True, False]
        assert [host.exists("model/weights") for host in three_hosts.hosts] == [False, True, False]
        assert h1.read("/etc/motd") == b"only here"
        assert not Path("/tmp/mine").exists()
        assert [host.processes() for host in three_hosts.hosts] == [[], [], ["sleep 60"]]
        h2.check(["pkill", "sleep"])
    assert len({host.host_key for host in three_hosts.hosts}) == 3
    assert h0.check(["cat", "/etc/hosts"]).splitlines()[-1] == "10.77.0.12 h2"


def test_the_user_logs_in_to_every_host_with_pinned_keys(three_hosts):
    for host in three_hosts.hosts:
        seen = three_hosts.user.run(["ssh", "-o", "StrictHostKeyChecking=yes", host.name, "hostname; echo $HOME"])
        assert (seen.stdout.split(), seen.stderr) == ([host.name, str(host.home)], "")
        scanned = three_hosts.user.check(["ssh-keyscan", "-t", "ed25519", "-p", str(host.ssh_port), host.address])
        assert host.host_key in scanned


def test_a_host_that_was_installed_anew_shows_another_key(lab):
    small = lab(1)
    old = small["h0"].host_key
    assert small["h0"].new_host_key() != old
    argv = ["ssh", "-o", "BatchMode=yes", "h0", "true"]
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in small.user.run(argv).stderr


def where():
    import socket  # it runs there

    return socket.gethostname()


def test_a_function_of_the_tests_runs_on_the_users_computer(three_hosts):
    assert three_hosts.user.call("tests.lab.test_lab:where") == "desk"


def test_hosts_cannot_log_in_to_each_other_unless_they_are_meshed(lab, three_hosts):
    h0, h1, _ = three_hosts.hosts
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-p", str(h1.ssh_port)]
    refused = h0.run(["ssh", *options, "h1", "hostname"])
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr
    meshed = lab(2, meshed=True)
    assert meshed["h0"].run(["ssh", "-o", "BatchMode=yes", "h1", "hostname"]).stdout == "h1\n"


def test_the_user_has_the_repository_and_gangline_and_reaches_nothing_but_the_lab(three_hosts):
    user = three_hosts.user
    assert user.check(["gangline", "--version"]).startswith("gangline ")
    assert user.exists(ROOT / "pyproject.toml")
    cards = json.loads(user.check(["ip", "-json", "-4", "addr"]))
    assert [card["addr_info"][0]["local"] for card in cards] == ["127.0.0.1", "10.77.0.2"]
    assert [route["dst"] for route in json.loads(user.check(["ip", "-json", "route"]))] == ["10.77.0.0/24"]
    assert "SSH_AUTH_SOCK" not in user.check(["env"])


def test_a_host_has_nothing_of_ours_installed(three_hosts):
    host = three_hosts.hosts[0]
    for folder in lab_folders():
        assert host.run(["ls", folder]).stdout == ""
    assert host.run(["python3", "-c", "import gangline"]).returncode == 1
    assert host.check(["ls", host.home]) == ""


def test_ranks_can_be_given_the_venv_of_the_tests(lab):
    host = lab(1, binds=lab_folders()).hosts[0]
    assert host.check([sys.executable, "-c", "import gangline; print(gangline.__name__)"]) == "gangline\n"
    assert host.run(["touch", ROOT / "new"]).returncode == 1


def test_one_host_lacks_programs_and_modules(lab):
    both = lab(2, special={"h1": {"hide": ("rsync", "ensurepip", "/usr/bin/ssh-add")}})
    seen = [
        [
            host.run(["sh", "-c", "command -v rsync"]).returncode,
            host.run(["python3", "-c", "import ensurepip"]).returncode,
            host.run(["ls", "/usr/bin/ssh-add"]).returncode,
        ]
        for host in both.hosts
    ]
    assert seen[1] == [127, 1, 2]
    assert seen[0][2] == 0


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=pytest.mark.lab(f"python{each}")) for each in probe.PYTHONS]
)
def test_one_host_has_another_python(lab, version):
    user = lab(1, python=version).user
    assert user.check(["ssh", "h0", "python3", "--version"]).startswith(f"Python {version}.")


def test_a_hosts_file_in_the_manner_of_debian(lab):
    seen = lab(2, special={"h0": {"hosts_file": "debian"}, "h1": {"hosts_file": "own"}})
    assert seen["h0"].check(["getent", "ahostsv4", "h0"]).startswith("127.0.1.1")
    assert seen["h0"].check(["getent", "ahostsv4", "h1"]).startswith("10.77.0.11")
    assert seen["h1"].run(["getent", "ahostsv4", "h0"]).returncode == 2


def test_a_second_network_card_on_another_network(lab):
    h0, h1 = lab(2, nics=2).hosts
    with server(h1, "10.78.0.11"):
        assert connect(h0, "10.78.0.11") == "got it"
        h1.faults.unplug(nic=1)
        assert connect(h0, "10.78.0.11", timeout_s=0.3) == "TimeoutError"
    with server(h1):
        assert connect(h0, h1) == "got it"


def test_two_hosts_share_a_folder_and_one_has_another_at_that_place(lab):
    shared = lab(3, shared={"/data": "one"}, special={"h2": {"shared": {"/data": "other"}}})
    shared["h0"].check(["touch", "/data/model"])
    assert [host.check(["ls", "/data"]) for host in shared.hosts] == ["model\n", "model\n", ""]


def test_a_full_disk_is_full(lab):
    host = lab(1, disk="64m", shm="8m").hosts[0]
    script = "open('big', 'wb').write(bytes(int(50e6)))"
    assert host.run(["python3", "-c", script]).returncode == 0
    assert "No space left" in host.run(["python3", "-c", script.replace("big", "more")]).stderr
    assert "No space left" in host.run(["python3", "-c", script.replace("big", "/dev/shm/big")]).stderr
    host.check(["rm", "big"])
    host.fill_disk(leave_kb=100)
    assert "No space left" in host.run(["dd", "if=/dev/zero", "of=/tmp/x", "bs=200k", "count=1"]).stderr


def test_nobody_in_a_lab_can_set_the_clock(three_hosts):
    for script in ("date -s @0", "ssh h0 date -s @0"):
        done = three_hosts.user.run(["sh", "-c", script])
        assert "Operation not permitted" in done.stderr
    assert time.time() > 1e9


def test_settings_of_the_whole_machine_cannot_be_written(three_hosts):
    assert (
        "Read-only" in three_hosts.hosts[0].run(["sh", "-c", "echo 1 > /proc/sys/vm/swappiness"], as_root=True).stderr
    )


@pytest.mark.lab("nft")
def test_a_dropped_port_is_silent_and_a_rejected_one_answers(lab):
    h0, h1, h2 = lab(3).hosts
    with server(h0), server(h0, port=40000), server(h1):
        h0.faults.drop(port=29500, peer=h1.address)
        h0.faults.reject(port="30000-65535")
        assert connect(h1, h0, timeout_s=0.3) == "TimeoutError"
        assert connect(h2, h0) == "got it"
        assert connect(h0, h1) == "got it"
        assert connect(h2, h0, port=40000) == "ConnectionRefusedError"
        h0.faults.cut(h2.address)
        assert connect(h2, h0, timeout_s=0.3) == "TimeoutError"
        h0.faults.heal()
        assert [connect(host, h0) for host in (h1, h2)] == ["got it", "got it"]


def test_an_outsider_on_the_same_switch_has_no_key(lab):
    small = lab(1)
    h0 = small["h0"]
    with server(h0):
        assert connect(small.outsider, h0) == "got it"
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-p", str(h0.ssh_port)]
    assert "Permission denied" in small.outsider.run(["ssh", *options, h0.address, "true"]).stderr


def test_a_partitioned_host_is_silent_until_it_is_healed(lab):
    h0, h1 = lab(2).hosts
    with server(h1):
        h1.faults.unplug()
        assert connect(h0, h1, timeout_s=0.3) == "TimeoutError"
        h1.faults.heal()
        assert connect(h0, h1, timeout_s=10) == "got it"


@pytest.mark.lab("nft")
def test_a_black_hole_lets_small_packets_through(lab):
    h0, h1 = lab(2).hosts
    with server(h1):
        h1.faults.black_hole(1000)
        assert connect(h0, h1) == "got it"
        assert connect(h0, h1, num_bytes=5000) == "TimeoutError"
        h1.faults.heal()
    with server(h1, port=29501):
        assert connect(h0, h1, port=29501, num_bytes=5000) == "got it"


def test_jumbo_frames_on_one_host_only(lab):
    h0, _ = lab(2).hosts
    h0.faults.mtu(9000)
    assert "mtu 9000" in h0.check(["ip", "link", "show", "eth0"])
    h0.faults.heal()
    assert "mtu 1500" in h0.check(["ip", "link", "show", "eth0"])


def crashed_peer_is_noticed(lab, crash):
    """What a client of a host sees within a second after that host went away."""
    h0, h1 = lab(2).hosts
    script = "import socket, sys; c = socket.create_connection((sys.argv[1], 29500)); print('in', flush=True); c.settimeout(1)\n"
    script += "try:\n print(repr(c.recv(1)))\nexcept OSError as error:\n print(type(error).__name__)"
    with server(h1), h0.popen(["python3", "-c", script, h1.address], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "in\n"
        crash(h1)
        assert not h1.is_alive
        return client.stdout.readline().strip()


def test_a_crash_resets_connections(lab):
    assert crashed_peer_is_noticed(lab, lambda host: host.kill()) in {"ConnectionResetError", "b''"}


def test_a_power_loss_is_silent(lab):
    assert crashed_peer_is_noticed(lab, lambda host: host.power_off()) == "TimeoutError"


def test_dead_peers_are_noticed_soon_after_fewer_retries(lab):
    h0, _ = lab(2).hosts
    h0.faults.sysctl("net.ipv4.tcp_retries2", 3)
    assert h0.check(["cat", "/proc/sys/net/ipv4/tcp_retries2"]) == "3\n"
    assert Path("/proc/sys/net/ipv4/tcp_retries2").read_text() != "3\n"


@pytest.mark.lab("iperf3", "tbf")
def test_links_have_the_rate_they_are_given(lab):
    h0, h1 = lab(2, rate="100mbit").hosts
    assert 70 < measured_mbps(h0, h1) < 101
    h0.faults.rate(None)
    h1.faults.rate(None)
    assert measured_mbps(h0, h1) > 150
    h1.faults.rate("50mbit")
    assert 35 < measured_mbps(h0, h1) < 51
    assert 35 < measured_mbps(h1, h0) < 51


def measured_mbps(source, target):
    argv = ["iperf3", "--server", "--one-off", "--forceflush"]
    with target.popen(argv, stdout=subprocess.PIPE, text=True) as listening:
        while "listening" not in listening.stdout.readline():
            pass
        report = source.check(["iperf3", "--client", target.address, "--time", "1", "--json"])
    return json.loads(report)["end"]["sum_received"]["bits_per_second"] / 1e6


@pytest.mark.lab("nft")
def test_packets_are_lost(lab):
    h0, h1 = lab(2).hosts
    h1.faults.loss(50)
    script = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind((sys.argv[1], 29500))
receiver.settimeout(1)
print("listening", flush=True)
count = 0
while receiver.recv(100) != b"end":
    count += 1
print(count)
"""
    receiving = h1.popen(["python3", "-I", "-c", script, h1.address], stdout=subprocess.PIPE, text=True)
    assert receiving.stdout.readline() == "listening\n"
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); where = ('10.77.0.11', 29500)\n"
        # not connected: who has had enough may have left
        "for word in [b'one'] * 200 + [b'end'] * 50: s.sendto(word, where)"
    )
    h0.check(["python3", "-I", "-c", script])
    assert 50 < int(receiving.stdout.readline()) < 150


@pytest.mark.lab("cgroup")
def test_a_host_with_little_memory_kills_what_wants_more(lab):
    small = lab(1)
    host = small["h0"]
    host.limit(memory_mb=64, cpus=0.5)
    greedy = ["python3", "-c", "len('x' * 10**9)"]
    assert host.run(["python3", "-c", "len('x' * 10**6)"]).returncode == 0
    assert host.run(greedy).returncode == -9
    assert "137" in small.user.run(["ssh", "h0", f"{shlex.join(greedy)}; echo $?"]).stdout


def test_two_labs_at_once_have_no_names_here_and_leave_nothing_behind():
    before = names_on_this_machine(lab_id())
    with Lab(2, names=["a", "b"]) as one, Lab(2, nics=2) as two:
        assert one["a"].address == two["h0"].address
        assert names_on_this_machine(lab_id()) == before
        assert two.outsider.is_alive
        if not probe.capabilities()["cgroup"]:
            two["h1"].limit(memory_mb=500)
        two["h1"].popen(["setsid", "sleep", "100"])
        spaces = {space for lab in (one, two) for host in lab.machines if (space := namespace_of(host.pid))}
        assert len(spaces) == 7
        assert processes_in(spaces)
    assert processes_in(spaces) == []
    assert names_on_this_machine(lab_id()) == before


def namespace_of(pid):
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


ALONE = """
import json, sys
from tests.lab.hosts import Lab
lab = Lab(2, ttl_s=int(sys.argv[1]), shared={"/data": "one"})
lab.__enter__()
lab["h0"].popen(["setsid", "sleep", "100"])
print(json.dumps([host.pid for host in lab.machines]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["its time is over", "its maker is killed"])
def test_a_lab_ends_by_itself(end):
    argv = [sys.executable, "-c", ALONE, "4" if end == "its time is over" else "100"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        spaces = {namespace_of(pid) for pid in json.loads(maker.stdout.readline())}
        name = f"gangline-lab-{maker.pid}"
        assert len(processes_in(spaces)) >= 6
        if end == "its maker is killed":
            maker.kill()
        deadline = time.monotonic() + 20
        while (processes_in(spaces) or names_on_this_machine(name)["folders"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        maker.kill()
    assert processes_in(spaces) == []
    assert names_on_this_machine(name)["folders"] == []


def test_a_lab_that_cannot_be_built_says_why_and_leaves_nothing():
    before = names_on_this_machine(lab_id())
    with pytest.raises(LabFailed, match=r"desk|h0"), Lab(2, disk="no size"):
        pass
    assert names_on_this_machine(lab_id()) == before


@pytest.mark.lab("rootless")
def test_hosts_of_an_ordinary_user(lab):
    both = lab(2, rootless=True, special={"h1": {"hide": ("rsync",)}})
    h0, h1 = both.hosts
    assert both.user.check(["ssh", "h1", "hostname; id -un; ls ~"]) == "h1\nlab\n"
    assert h1.run(["sh", "-c", "command -v rsync"]).returncode == 127
    h1.write("/etc/motd", "only here")
    assert not h0.exists("/etc/motd") or h0.read("/etc/motd") != b"only here"
    with server(h0):
        assert connect(h1, h0) == "got it"
        h0.faults.drop(port=29500)
        assert connect(h1, h0, timeout_s=0.3) == "TimeoutError"


@pytest.mark.parametrize("num_hosts", [8, 50])
@pytest.mark.timeout(120)
def test_many_hosts_come_up(lab, num_hosts, capsys):
    start = time.monotonic()
    many = lab(num_hosts)
    up_s = time.monotonic() - start
    with capsys.disabled():
        print(f"\n{num_hosts} hosts up in {up_s:.2f} s")  # noqa: T201 a figure for people
    assert many.user.check(["ssh", many.hosts[-1].name, "hostname"]) == f"h{num_hosts - 1}\n"


def test_a_switch_that_does_not_come_up_is_told_and_leaves_no_process():
    mode = SimpleNamespace(switch_argv=lambda: ["sh", "-c", "echo no room >&2; exit 3"])
    with pytest.raises(LabFailed, match="switch does not come up: no room"):
        Network(mode, num_nics=1, env={})
