"""`gangline prepare access`: hosts that know a user by a password only, and a user with a password for sudo."""

import json
import re
import subprocess
import sys

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.test_prepare import differences, snapshot
from tests.lab.typist import Typist

COMMAND = [sys.executable, "-m", "gangline.cli.main"]
PASSWORD = "canary-horse-7"
SSHD = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin no
PasswordAuthentication yes
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 100:30:200
Subsystem sftp /usr/lib/openssh/sftp-server
"""
CANARY = r"""
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            data = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError:
            continue
        if sys.argv[1].encode() in data and pid != str(os.getpid()):
            print(pid, name)
for top in sys.argv[2:]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and not os.path.islink(path) and sys.argv[1].encode() in open(path, "rb").read():
                    print(path)
            except OSError:
                pass
"""
SSH_FOLDER = ["sh", "-c", "cd .ssh && stat -c '%n %A %U' * && cat authorized_keys; cat config gangline.conf || true"]

pytestmark = pytest.mark.lab("sudo")


def bare(lab, num_hosts):
    """Hosts with an account alice, whose password opens ssh and sudo; no key of anybody."""
    hosts = lab(num_hosts, names=[f"pc{number + 1}" for number in range(num_hosts)], known=False)
    digest = subprocess.run(
        ["perl", "-e", "print crypt($ARGV[0], q($6$salt$))", PASSWORD], capture_output=True, text=True, check=True
    ).stdout
    for host in hosts.hosts:
        host.check(["useradd", "-m", "-s", "/bin/bash", "-p", digest, "alice"], as_root=True)
        host.write("/etc/sudoers.d/alice", "alice ALL=(ALL:ALL) ALL\n", 0o440)
        host.write("/etc/ssh/sshd_config", SSHD)
        host.check(["rm", "-rf", ".ssh/authorized_keys"])
        host.check(["sh", "-c", "pkill -HUP -f 'sshd: /usr/sbin/ss[h]d .listener.'"], as_root=True)
        host.check(["hostname", "debian"], as_root=True)
        host.write("/etc/hostname", "debian\n")
        host.write("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 debian.lan debian\n")
    return hosts


def gangline(hosts, *words, answers=(), code=0):
    """Each of `answers` (words, text) is typed when its words are shown."""
    with Typist(hosts.user, [*COMMAND, *words]) as typist:
        for question, answer in answers:
            typist.expect(question)
            typist.type(answer)
        assert typist.end() == code, typist.text
        return typist.text


@pytest.mark.timeout(400)
def test_from_passwords_to_a_cluster_and_back(lab):
    hosts = bare(lab, 2)
    desk, names = hosts.user, ["alice@pc1", "alice@pc2"]
    desk.check(["rm", "-f", ".ssh/id_ed25519", ".ssh/id_ed25519.pub"])
    before = {host.name: snapshot(host) for host in hosts.machines}
    shown = gangline(
        hosts,
        "prepare",
        "access",
        *names,
        answers=[
            ("trust 2 new keys? [y/N]", "y"),
            ("make 3 changes on 1 host?", "y"),
            ("password of alice on pc1 for ssh:", PASSWORD),
            ("password of alice on pc2 for ssh (Enter: the same as before):", ""),
            ("make 2 changes on 2 hosts?", "y"),
            ("write cluster.yaml with 2 hosts? [Y/n]", ""),
        ],
    )
    assert PASSWORD not in shown
    assert "you have no ssh key" in shown
    assert shown.count("access is done") == 2
    for host in hosts.hosts:
        keys = host.check(["cat", "/home/alice/.ssh/authorized_keys"], as_root=True)
        assert keys == desk.read(".ssh/gangline_ed25519.pub").decode()
        modes = host.check(
            ["stat", "-c", "%a %U", "/home/alice/.ssh", "/home/alice/.ssh/authorized_keys"], as_root=True
        )
        assert modes == "700 alice\n600 alice\n"
    keys = [" ".join(host.read("/etc/ssh/ssh_host_ed25519_key.pub").decode().split()[:2]) for host in hosts.hosts]
    assert [key in desk.read("cluster.yaml").decode() for key in keys] == [True, True]
    again = gangline(hosts, "prepare", "access")
    assert "nothing has to be changed" in again
    shown = gangline(
        hosts,
        "prepare",
        "names",
        answers=[
            ("make 6 changes on 2 hosts?", "y"),
            ("password of alice on pc1 for sudo:", "wrong"),
            ("password of alice on pc1 for sudo (Enter: the same as before):", PASSWORD),
            ("password of alice on pc2 for sudo (Enter: the same as before):", ""),
        ],
    )
    assert [host.check(["uname", "-n"]).strip() for host in hosts.hosts] == ["pc1", "pc2"]
    rows = gangline(hosts, "prepare", "--status", "pc1", answers=[("for sudo:", PASSWORD)])
    assert re.search(r"names +/etc/hosts .* alice\s+\(root@desk\) +as made", rows)
    for machine in hosts.machines:
        home = machine.home
        own = ("/etc", str(home), "/home", "/var/lib/gangline")
        homes = (f"{home}/.ssh", f"{home}/.local") if machine is desk else own
        found = machine.run(["/usr/bin/python3", "-c", CANARY, PASSWORD, "/tmp", *homes], as_root=True)
        assert found.stdout == "", f"{machine.name}: {found.stdout}"
    gangline(
        hosts,
        "prepare",
        "--undo",
        "all",
        "--yes",
        answers=[("on pc1 for sudo:", PASSWORD), ("on pc2 for sudo", "")],
    )
    left = [row for row in differences(hosts.machines, before) if not row[1].startswith("/home/alice/.local")]
    assert left == []
    assert gangline(hosts, "check", "cluster.yaml", code=4)


@pytest.mark.timeout(200)
def test_a_wrong_password_and_nobody_to_type_one_change_nothing(lab):
    hosts = bare(lab, 1)
    before = {"pc1": snapshot(hosts["pc1"])}
    shown = gangline(
        hosts,
        "prepare",
        "access",
        "alice@pc1",
        answers=[("trust 1 new key?", "y"), ("password of alice on pc1 for ssh:", "wrong")],
        code=4,
    )
    assert "pc1 refuses the password" in shown
    done = hosts.user.run([*COMMAND, "prepare", "access", "alice@pc1", "--yes", "--json"], timeout_s=90)
    assert done.returncode == 2
    assert "nobody is here to type the password" in done.stderr
    assert differences([hosts["pc1"]], before) == []


@pytest.mark.timeout(200)
def test_a_key_that_is_there_is_taken(lab):
    hosts = bare(lab, 1)
    shown = gangline(
        hosts,
        "prepare",
        "access",
        "alice@pc1",
        answers=[
            ("trust 1 new key?", "y"),
            ("password of alice on pc1 for ssh:", PASSWORD),
            ("make 1 change on 1 host?", "y"),
            ("write cluster.yaml with 1 host? [Y/n]", "n"),
        ],
    )
    assert hosts.user.run(["ls", "cluster.yaml"]).returncode != 0
    assert "you have no ssh key" not in shown
    assert json.dumps(hosts.user.read(".ssh/id_ed25519.pub").decode().split()[1])[1:-1] in shown


@pytest.mark.timeout(400)
def test_each_host_gets_a_key_for_the_others_that_opens_only_gangline_and_gives_it_back(lab):
    hosts = lab(3, binds=lab_folders())
    desk, head, *others = hosts.user, *hosts.hosts
    gangline(hosts, "init", *(host.name for host in hosts.hosts), "--yes")
    before = [host.check(SSH_FOLDER) for host in hosts.hosts]
    first, second = "make 9 changes on 3 hosts?", "make 6 changes on 3 hosts?"
    shown = gangline(hosts, "prepare", "--between-hosts", answers=[(first, "y"), (second, "y")])
    assert f"{head.name} can look after runs; this computer may be off meanwhile" in shown
    assert not head.exists(f"{head.home}/~")  # code is placed below the home folder, not in one called ~
    for host in hosts.machines:
        host.check(["sh", "-c", f"ssh-keyscan -t ed25519 {' '.join(each.address for each in hosts.hosts)} > known"])
    login = ["ssh", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=known"]
    for source in hosts.hosts:
        for target in hosts.hosts:
            if source is target:
                continue
            lines = target.read(".ssh/authorized_keys").decode().splitlines()
            (line,) = [line for line in lines if line.endswith(f"gangline-{source.name}")]
            assert line.startswith(f'restrict,from="{source.address}",command="')
            done = source.run([*login, target.address, "echo in"])
            assert (done.returncode, done.stdout) == (96, "")
            assert "this key opens gangline's agent" in done.stderr
            copied = source.run(["scp", *login[1:], f"{target.address}:.ssh/authorized_keys", "stolen"])
            assert copied.returncode != 0
    # the same key from elsewhere opens nothing
    stolen = head.read(".ssh/gangline_between")
    desk.write("stolen", stolen.decode(), 0o600)
    alone = [*login, "-F", "/dev/null", "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none", "-i", "stolen"]
    tried = desk.run([*alone, others[0].address, "echo in"])
    assert tried.returncode == 255
    assert "Permission denied" in tried.stderr
    desk.check(["rm", "stolen"])
    assert "nothing has to be changed" in gangline(hosts, "prepare", "between")
    # a gate that knows another gangline is brought up to date
    others[0].check(["sed", "-i.old", "s/^ADMITTED.*/ADMITTED = ()/", ".ssh/gangline_gate.py"])
    shown = gangline(hosts, "prepare", "between", head.name, answers=[("make 1 change on 1 host?", "n")], code=2)
    assert "-ADMITTED = ()" in shown
    others[0].check(["mv", ".ssh/gangline_gate.py.old", ".ssh/gangline_gate.py"])
    gangline(hosts, "prepare", "--undo", "between", "--yes")
    assert head.run([*login, others[0].address, "echo in"]).returncode == 255
    assert [host.check(SSH_FOLDER) for host in hosts.hosts] == before
