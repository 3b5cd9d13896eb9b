"""Changes that lock out for good: with the revert timer each host comes back by itself, without it none does."""

import json
import re
import sys

import pytest

from tests.lab.namespaces import HERE
from tests.lab.test_prepare import COMMAND, types

MAIN = "/etc/ssh/sshd_config"
RELOAD = ["service", "ssh", "reload"]
REVERT_S, PATIENCE_S = 40.0, 50.0
"""ssh takes 15 s to give up a connection that the change itself cut; the promise is 90 s."""


def command(*argv, undo=()):
    """A change by a command; without one, only the way back."""
    return {"kind": "command", "argv": list(argv), "undo": list(undo)}


def file(path, before, content):
    return {"kind": "file", "path": path, "before": before, "content": content}


def sshd(line):
    """A line of sshd's own file, put into force."""

    def changes(host):
        before = host.read(MAIN).decode()
        return [command(undo=RELOAD), file(MAIN, before, f"{line}\n{before}"), command(*RELOAD)]

    return changes


def another_port(host):
    """Ports add up: the one that is there has to go."""
    before = host.read(MAIN).decode()
    after = re.sub(r"^Port .*$", "Port 2200", before, flags=re.MULTILINE)
    return [command(undo=RELOAD), file(MAIN, before, after), command(*RELOAD)]


def done(*changes):
    return lambda _host: list(changes)


def firewall(_host):
    rules = "table inet lock {\n chain input {\n type filter hook input priority 0; policy drop;\n }\n}\n"
    undo = ["nft", "delete", "table", "inet", "lock"]
    return [file("/etc/lock.nft", None, rules), command("nft", "-f", "/etc/lock.nft", undo=undo)]


def address(host):
    words = [f"{host.address}/24", "dev", "eth0"]
    return [command("ip", "addr", "del", *words, undo=["ip", "addr", "add", *words])]


def other_network(host):
    """The right address with a mask that leaves the desk outside."""
    wide, narrow = ([f"{host.address}/{bits}", "dev", "eth0"] for bits in (24, 32))
    return [
        command("ip", "addr", "del", *wide, undo=["ip", "addr", "add", *wide]),
        command("ip", "addr", "add", *narrow, undo=["ip", "addr", "del", *narrow]),
    ]


def no_keys(host):
    path = f"{host.home}/.ssh/authorized_keys"
    return [file(path, host.read(path).decode(), "")]


def no_route(host):
    desk = f"{host.desk}/32"
    return [command("ip", "route", "add", "blackhole", desk, undo=["ip", "route", "del", "blackhole", desk])]


LOCK_OUTS = {
    "keys": sshd("PubkeyAuthentication no"),
    "users": sshd("AllowUsers nobody"),
    "denied": sshd("DenyUsers root"),
    "root": sshd("PermitRootLogin no"),
    "port": another_port,
    "listen": sshd("ListenAddress 127.0.0.1"),
    "keyfile": sshd("AuthorizedKeysFile /etc/none"),
    "forced": sshd("ForceCommand /bin/false"),
    "kinds": sshd("PubkeyAcceptedAlgorithms ssh-rsa"),
    "ciphers": sshd("Ciphers 3des-cbc"),
    "emptied": no_keys,
    "stopped": done(command("service", "ssh", "stop", undo=["service", "ssh", "start"])),
    "address": address,
    "mask": other_network,
    "link": done(command("ip", "link", "set", "eth0", "down", undo=["ip", "link", "set", "eth0", "up"])),
    "route": no_route,
    "firewall": firewall,
    "modes": done(command("chmod", "0777", "/root", undo=["chmod", "0700", "/root"])),
    "shell": done(command("usermod", "-s", "/usr/sbin/nologin", "root", undo=["usermod", "-s", "/bin/bash", "root"])),
    "expired": done(command("usermod", "-e", "1", "root", undo=["usermod", "-e", "", "root"])),
    "locked": done(command("usermod", "-L", "root", undo=["usermod", "-U", "root"])),
}


@pytest.mark.slow
@pytest.mark.lab("nft", "root")
@pytest.mark.timeout(900)
def test_every_lock_out_comes_back_by_itself_and_without_the_timer_none_does(lab, record_testsuite_property):
    names = [f"h{number}" for number in range(len(LOCK_OUTS))]
    hosts = lab(len(names), names=names, ttl_s=1200)
    faults = dict(zip(names, LOCK_OUTS, strict=True))
    for host in hosts.hosts:
        host.desk = hosts.user.address
    # once: what the hosts say of themselves is the same before both rounds
    planned = {
        host.name: {"host_key": host.host_key, "changes": LOCK_OUTS[faults[host.name]](host)} for host in hosts.hosts
    }
    call = {"hosts": planned, "patience_s": PATIENCE_S}
    seen = called(hosts.user, "lock_out_all", revert_s=REVERT_S, **call)
    told = {faults[name]: row for name, row in seen.items()}
    assert [fault for fault, row in told.items() if row["out_s"] is None] == [], told
    assert [fault for fault, row in told.items() if row["back_s"] is None] == [], told
    seen = called(hosts.user, "lock_out_all", revert_s=None, **call)
    left = called(hosts.user, "who_logs_in", hosts={name: row["host_key"] for name, row in planned.items()})
    assert [faults[name] for name in left] == []
    record_testsuite_property("lock-outs, seconds", {fault: round(row["back_s"], 1) for fault, row in told.items()})


def called(desk, function, **arguments):
    """A function of the cases on the desk, which may take longer than `LabHost.call` waits."""
    argv = [sys.executable, "-m", "tests.lab.call", f"tests.lab.cases_prepare:{function}"]
    done = desk.run(argv, stdin=json.dumps(arguments), cwd=HERE.parents[1], timeout_s=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HARDENED = ("passwordauthentication no", "kbdinteractiveauthentication no", "permitrootlogin without-password")


@pytest.mark.timeout(300)
def test_passwords_are_switched_off_once_a_new_login_works(lab):
    hosts = lab(1, names=("pc1",))
    pc1 = hosts["pc1"]
    before = pc1.read(MAIN).decode()
    open_config = "Include /etc/ssh/sshd_config.d/*.conf\n" + before.replace("PasswordAuthentication no", "")
    pc1.write(MAIN, open_config)
    pc1.write("/etc/ssh/sshd_config.d/50-installer.conf", "PasswordAuthentication yes\nPermitRootLogin yes\n")
    pc1.check(RELOAD, as_root=True)
    types(hosts, "init", "pc1")
    assert "sshd" not in types(hosts, "prepare", "--dry-run").stdout
    done = types(hosts, "prepare", "sshd", "--yes")
    assert "takes it back by itself after 60 s" in done.stdout
    said = pc1.check(["sshd", "-T"], as_root=True).splitlines()
    assert [line for line in HARDENED if line not in said] == []
    assert types(hosts, "prepare", "sshd", "--yes").stdout == ""
    types(hosts, "prepare", "--undo", "sshd", "--yes")
    assert "passwordauthentication yes" in pc1.check(["sshd", "-T"], as_root=True).splitlines()
    assert not pc1.exists("/etc/ssh/sshd_config.d/00-gangline.conf")
    assert hosts.user.run([*COMMAND, "prepare", "--status"], timeout_s=60).stdout == "no change stands\n"
