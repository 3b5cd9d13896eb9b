"""Changes that lock out: for good where somebody makes them by hand, and not for long where `gangline prepare` does.

Each is a real one, on a real ufw, firewalld, nftables, networkd or PAM. The timer is shorter here than a user's 60 s.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.bare import LEFT_BY_PREPARE, NETWORKD, NFTABLES, BareKind, differences

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
DESK = "10.77.0.2"
REVERT_S = 8.0
FOR_GOOD_S = 2 * REVERT_S
BACK_S = 90.0
PUBLIC = """<?xml version="1.0" encoding="utf-8"?>
<zone>
  <short>Public</short>
  <service name="dhcpv6-client"/>
</zone>
"""


@dataclass(frozen=True)
class Lockout:
    """One way to lock oneself out."""

    firewall: str
    rows: tuple[dict, ...]
    """Changes: files with their text, commands with their reverse."""
    reload: tuple[str, ...] = ()
    """What puts files into force."""


def command(argv, undo):
    return {"argv": argv.split(), "undo": undo.split()}


def nftables(old, new):
    """A line of nftables.conf becomes another one."""
    assert old in NFTABLES
    row = {"path": "/etc/nftables.conf", "before": NFTABLES, "content": NFTABLES.replace(old, new)}
    return Lockout("nftables", (row,), ("systemctl", "reload", "nftables.service"))


def networkd(content):
    """The file by which eth0 has its address becomes another one."""
    row = {"path": "/etc/systemd/network/10-lan.network", "before": OWN_NETWORK, "content": content}
    return Lockout("", (row,), ("networkctl", "reload"))


OWN_NETWORK = NETWORKD.format(address="10.77.0.10")
GATEWAY = f"{OWN_NETWORK}\n[Route]\nDestination={DESK}/32\nGateway=10.77.0.99\n"
PAM = Path("/etc/pam.d/sshd")
REFUSED = {"path": str(PAM), "before": PAM.read_text(), "content": f"account required pam_deny.so\n{PAM.read_text()}"}
DROP_DESK = f'rule family="ipv4" source address="{DESK}" drop'
ZONE = {"path": "/etc/firewalld/zones/public.xml", "before": None, "content": PUBLIC}
CASES = {
    "nftables without a rule for ssh": nftables("\t\ttcp dport 22 accept\n", ""),
    "nftables drops the desk first": nftables(
        "\t\tct state established", f"\t\tip saddr {DESK} drop\n\t\tct state established"
    ),
    "nftables lets nothing out": nftables(
        "hook output priority filter; policy accept", "hook output priority filter; policy drop"
    ),
    "nftables lets ssh in for another network": nftables(
        "tcp dport 22 accept", "ip saddr 192.0.2.0/24 tcp dport 22 accept"
    ),
    "ufw without its rule for ssh": Lockout("ufw", (command("ufw delete allow 22/tcp", "ufw allow 22/tcp"),)),
    "ufw denies the desk first": Lockout(
        "ufw", (command(f"ufw prepend deny from {DESK}", f"ufw delete deny from {DESK}"),)
    ),
    "ufw rejects ssh of the network first": Lockout(
        "ufw",
        (
            command(
                "ufw prepend reject from 10.77.0.0/24 to any port 22 proto tcp",
                "ufw delete reject from 10.77.0.0/24 to any port 22 proto tcp",
            ),
        ),
    ),
    "firewalld's zone without ssh": Lockout("firewalld", (ZONE,), ("firewall-cmd", "--quiet", "--reload")),
    "firewalld's panic mode": Lockout("firewalld", (command("firewall-cmd --panic-on", "firewall-cmd --panic-off"),)),
    "firewalld drops the desk": Lockout(
        "firewalld",
        (
            {
                "argv": ["firewall-cmd", "--zone=public", f"--add-rich-rule={DROP_DESK}"],
                "undo": ["firewall-cmd", "--zone=public", f"--remove-rich-rule={DROP_DESK}"],
            },
        ),
    ),
}
CASES |= {
    "PAM refuses every account": Lockout("", (REFUSED,)),
    "a mask that leaves the desk outside": networkd(OWN_NETWORK.replace("/24", "/32")),
    "another machine's address": networkd(OWN_NETWORK.replace("10.77.0.10", "10.77.0.77")),
    "a gateway that is not there": networkd(GATEWAY),
    "an MTU too small for ssh": Lockout("", (command("ip link set eth0 mtu 68", "ip link set eth0 mtu 1500"),)),
}
SHORT = {"nftables drops the desk first", "ufw without its rule for ssh", "firewalld's zone without ssh"}


def by_hand(host, case, *, back=False):
    """Make the changes on the host's own console, or take them back."""
    for row in reversed(case.rows) if back else case.rows:
        if "argv" in row:
            host.check(row["undo" if back else "argv"])
        elif back and row["before"] is None:
            host.check(["rm", row["path"]])
        else:
            host.write(row["path"], row["before" if back else "content"], 0o755 if "nft" in row["path"] else 0o644)
    if case.reload:
        host.check(case.reload)


def seconds_until_login(lab, host):
    """How long it takes until somebody can log in again."""
    start = time.monotonic()
    while not lab.can_log_in(host, key=True):
        assert time.monotonic() - start < BACK_S, "locked out"
        time.sleep(0.5)
    return time.monotonic() - start


def prepare_lock_out(lab, host, case, *, revert_s):
    """The same by the engine of `gangline prepare`; what the user is told."""
    return lab.user.call(
        "tests.bare.cases_lockout:prepare",
        rows=case.rows,
        reload=case.reload,
        host=host.name,
        password=host.password,
        revert_s=revert_s,
    )


def until_as(before, host):
    """What is still not as before, once time has run out."""
    deadline = time.monotonic() + BACK_S
    while (left := differences(before, host.snapshot(), ignore=LEFT_BY_PREPARE)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in SHORT else pytest.mark.slow) for each in CASES]
)
def test_a_lock_out_by_hand_stays_and_one_by_prepare_is_taken_back(bare, name, record_property):
    case = CASES[name]
    lab = bare({"pc1": BareKind(firewall=case.firewall)})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", "pc1", "--yes"], timeout_s=90)
    before = pc1.snapshot()

    by_hand(pc1, case)
    start = time.monotonic()
    while time.monotonic() - start < FOR_GOOD_S:
        assert not lab.can_log_in(pc1, key=True)
    by_hand(pc1, case, back=True)
    assert lab.can_log_in(pc1, key=True)
    assert differences(before, pc1.snapshot()) == []

    seen = pc1.snapshot()
    told = prepare_lock_out(lab, pc1, case, revert_s=REVERT_S)
    assert told["failed"], told
    record_property("back_after_s", round(seconds_until_login(lab, pc1), 1))
    assert until_as(seen, pc1) == []
    status = lab.user.run([*GANGLINE, "prepare", "--status", "--json"], timeout_s=60)
    assert "lockout" not in status.stdout


@pytest.mark.timeout(300)
def test_a_host_that_is_restarted_before_the_answer_takes_the_change_back_at_boot(bare, record_property):
    """Its timer has ten minutes, and ends with the restart."""
    case = CASES["nftables without a rule for ssh"]
    lab = bare({"pc1": BareKind(firewall=case.firewall)})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", "pc1", "--yes"], timeout_s=90)
    before = pc1.snapshot()
    told = prepare_lock_out(lab, pc1, case, revert_s=600.0)
    assert told["failed"], told
    assert not lab.can_log_in(pc1, key=True)
    pc1.reboot()
    record_property("back_after_boot_s", round(seconds_until_login(lab, pc1), 1))
    assert until_as(before, pc1) == []
    pc1.reboot()
    assert pc1.run(["systemctl", "list-units", "--all", "--plain", "--no-legend", "gangline-*"]).stdout == ""
    status = lab.user.run([*GANGLINE, "prepare", "--status", "--json"], timeout_s=60)
    assert "lockout" not in status.stdout


@pytest.mark.timeout(200)
def test_a_change_that_lets_in_is_confirmed_by_a_new_login_and_stays(bare):
    lab = bare({"pc1": BareKind(firewall="ufw")})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    lab.user.check([*GANGLINE, "init", "pc1", "--yes"], timeout_s=90)
    rule = "allow 29500/tcp"
    told = lab.user.call(
        "tests.bare.cases_lockout:prepare",
        rows=[command(f"ufw {rule}", f"ufw delete {rule}")],
        reload=[],
        host="pc1",
        password=pc1.password,
        revert_s=REVERT_S,
    )
    assert (told["failed"], told["changed"]) == ({}, {"pc1": ["lockout"]})
    deadline = time.monotonic() + 2 * REVERT_S
    while time.monotonic() < deadline:
        assert f"ufw {rule}" in pc1.check(["ufw", "show", "added"])
        time.sleep(1.0)
