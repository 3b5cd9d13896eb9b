"""The bare machines themselves: as they come out of the shop, through a reboot, and seen exactly."""

import time
from pathlib import Path

import pytest

from tests.bare.clocks import CLOCKED, await_refused_step, clock_against_monotonic
from tests.lab.bare import LOGIN, PASSWORD, BareKind, BareLab, Snapshot, differences, plain_rules
from tests.lab.limits import processes_of
from tests.lab.namespaces import lab_id

FIREWALLS = ("ufw", "firewalld", "nftables")
LISTEN = """
import socket
with socket.create_server(("", 29500)) as server:
    print("listens", flush=True)
    while True:
        server.accept()[0].close()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"


def reaches(machine, address, port):
    return machine.run(["python3", "-c", CONNECT, address, str(port)]).returncode == 0


@pytest.mark.parametrize("firewall", FIREWALLS)
def test_a_machine_is_bare_and_comes_back_from_a_reboot(bare, firewall):
    lab = bare({"pc1": BareKind(firewall=firewall)})
    pc1 = lab["pc1"]
    assert pc1.check(["hostname"]).strip() == "ubuntu"
    assert "127.0.1.1\tubuntu" in pc1.read("/etc/hosts").decode()
    assert not lab.user.exists(".ssh/id_ed25519")
    assert not pc1.exists(f"/home/{LOGIN}/.ssh")
    for _ in range(2):
        assert lab.can_log_in(pc1)
        assert not lab.can_log_in(pc1, key=True)
        assert not lab.can_log_in(pc1, login="root")
        with pc1.popen(["python3", "-c", LISTEN], stdout=-1) as server:
            assert server.stdout.readline() == b"listens\n"
            assert reaches(lab.user, pc1.address, 22)
            assert not reaches(lab.user, pc1.address, 29500)
            assert reaches(pc1, pc1.address, 29500)
            pc1.reboot() if _ == 0 else server.kill()


def test_the_user_becomes_root_with_the_password_only(bare):
    lab = bare({"pc1": BareKind()})
    pc1 = lab["pc1"]
    assert lab.log_in(pc1, ["sudo", "-n", "id", "-u"]).returncode != 0
    done = lab.log_in(pc1, [f"echo '{PASSWORD}' | sudo -S -p '' id -u"])
    assert (done.stdout, done.returncode) == ("0\n", 0)


def test_systemd_is_real(bare):
    lab = bare({"pc1": BareKind(firewall="firewalld"), "pc2": BareKind()})
    pc1, pc2 = lab.hosts
    assert pc1.check(["cat", "/proc/1/comm"]) == "systemd\n"
    pc1.check(["hostnamectl", "set-hostname", "pc1"])
    assert pc1.read("/etc/hostname") == b"pc1\n"
    assert pc2.read("/etc/hostname") == b"ubuntu\n"
    assert pc1.check(["firewall-cmd", "--state"]).strip() == "running"
    assert "eth0" in pc1.check(["networkctl", "list", "--no-legend"])
    pc1.reboot()
    assert pc1.check(["hostname"]).strip() == "pc1"
    assert "Started" in pc1.check(["journalctl", "--boot", "--no-pager", "--unit", "ssh.service"])


def test_network_manager_gives_the_address(bare):
    lab = bare({"pc1": BareKind(network="NetworkManager", firewall="ufw")})
    pc1 = lab["pc1"]
    for _ in range(2):
        states = pc1.check(["nmcli", "--terse", "--fields", "DEVICE,STATE", "device"]).splitlines()
        assert [state for state in states if state.startswith("eth0:connect")], states
        assert pc1.run(["systemctl", "is-active", "systemd-networkd"]).stdout == "inactive\n"
        assert lab.can_log_in(pc1)
        pc1.reboot()


def test_the_same_machine_has_no_differences_and_every_change_is_seen(bare):
    lab = bare({"pc1": BareKind(firewall="nftables")})
    pc1 = lab["pc1"]
    pc1.check(["sh", "-c", "touch /etc/kept /etc/gone /home/alice/mine; chown alice /home/alice/mine"])
    before = pc1.snapshot()
    assert differences(before, pc1.snapshot()) == []
    changes = (
        "echo more >> /etc/hosts; chmod 600 /etc/hostname; chown alice /etc/kept; rm /etc/gone; touch ~/new; "
        'python3 -c \'import os; os.setxattr("/home/alice/mine", "user.note", b"x")\'; ln -sfn /nowhere /etc/localtime; '
        "hostname pc1; nft add rule inet filter input tcp dport 29500 accept"
    )
    pc1.check(["sh", "-ec", changes])
    seen = [line for line in differences(before, pc1.snapshot()) if not line.startswith("/etc/localtime: mode")]
    assert [line for line in seen if not line.startswith("firewall")] == [
        "/etc/gone: gone",
        "/etc/hostname: mode",
        "/etc/hosts: content",
        "/etc/kept: owner",
        "/etc/localtime: content",
        "/home/alice/mine: xattrs",
        f"{pc1.home}/new: new",
        "hostname: ubuntu -> pc1",
    ]
    (rule,) = [line for line in seen if line.startswith("firewall")]
    assert rule.startswith("firewall, new: ")
    assert "29500" in rule


def test_paths_that_may_differ_are_left_out():
    file = {"mode": "0o100644", "owner": [0, 0], "xattrs": {}, "content": "a"}
    before = Snapshot({"/etc/a": file, "/etc/a-": file}, "pc1", ())
    after = Snapshot({"/etc/a": file, "/etc/a-": {**file, "content": "b"}, "/etc/b": file}, "pc1", ())
    assert differences(before, after) == ["/etc/a-: content", "/etc/b: new"]
    assert differences(before, after, ignore=r".*-") == ["/etc/b: new"]


def test_rules_are_compared_without_counters():
    def rule(packets, handle, port=22):
        return {"rule": {"handle": handle, "expr": [{"counter": {"packets": packets}}, {"match": port}]}}

    assert plain_rules([rule(1, 2)]) == plain_rules([{"metainfo": {}}, rule(5, 7)])
    assert plain_rules([rule(1, 2)]) != plain_rules([rule(1, 2, port=23)])


def test_nobody_can_set_the_clock(bare):
    before = clock_against_monotonic()
    lab = bare({"pc1": CLOCKED})
    pc1 = lab["pc1"]
    lab.tell_time(1000.0)
    await_refused_step(pc1)
    for command in (
        ["date", "-s", "2031-01-01"],
        ["timedatectl", "set-time", "2031-01-01"],
        ["chronyc", "makestep"],
    ):
        assert pc1.run(command).returncode != 0, command
    assert b"chronyd\0-F\x001\0-x\0" in pc1.read(
        f"/proc/{pc1.check(['cat', '/run/chrony/chronyd.pid']).strip()}/cmdline"
    )
    inside = int(pc1.check(["sh", "-c", "sed -n 's/^CapBnd:\\t//p' /proc/1/status"]), 16)
    assert inside & (1 << 25) == 0
    assert abs(clock_against_monotonic() - before) < 1


def test_its_control_groups_are_its_own_and_nothing_is_left_of_it(bare):
    with BareLab({"pc1": BareKind(firewall="ufw"), "pc2": BareKind()}) as lab:
        lab["pc1"].reboot()
        assert lab.can_log_in(lab["pc1"])
        deadline = time.monotonic() + 15
        while True:  # a command that a test runs on a host is outside of its groups while it comes and goes
            pids = [pid for host in lab.hosts for pid in processes_of(host.pid)]
            assert len(pids) > 10
            shared = [(words_of(pid), line) for pid in pids for line in control_groups(pid) if is_shared(line)]
            if not shared:
                break
            assert time.monotonic() < deadline, shared
            time.sleep(0.2)
        pids += [host.space.pid for host in lab.hosts]
    deadline = time.monotonic() + 30
    while left := [*groups(), *(pid for pid in pids if Path(f"/proc/{pid}").exists())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_shared(line):
    return f"/{lab_id()}-" not in line


def words_of(pid):
    """The command line of a process, to name it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def control_groups(pid):
    """Where a process is in each hierarchy that this machine has mounted."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    names = [line.split(":", 2)[1].removeprefix("name=") or "unified" for line in lines]
    return [
        line for line, name in zip(lines, names, strict=True) if Path("/sys/fs/cgroup", name, "cgroup.procs").exists()
    ]


def groups():
    """The control groups of this machine that belong to labs of this process."""
    return [path for path in Path("/sys/fs/cgroup").rglob(f"{lab_id()}-*") if path.is_dir()]
