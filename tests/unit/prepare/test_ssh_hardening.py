"""Step `sshd`: no logins by password, in a drop-in of its own. Facts in, changes out."""

import pytest

from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.prepare.ssh_hardening import DROP_IN, MAIN, SSHD, SYSTEMD
from gangline.prepare.step_table import STEPS, chosen
from gangline.runs.cluster import Cluster, Host

HOST = Host(name="pc1", workdir="/w", python="", transport="ssh")
CLUSTER = Cluster(name="home", hosts=(HOST,))
OPEN = "passwordauthentication yes\nkbdinteractiveauthentication no\npermitrootlogin yes\n"


def planned(in_force=OPEN, *, main="Include /etc/ssh/sshd_config.d/*.conf\n", drop_in=None, systemd=(), programs=()):
    reading = HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={MAIN: FileRead(content=main.encode()), DROP_IN: FileRead(content=drop_in)},
        folders={SYSTEMD: systemd},
        commands={"in force": in_force, "sshd.service": "active"},
        programs=dict.fromkeys(programs, "/usr/sbin/x"),
    )
    return SSHD.plan(StepView(host=HOST, cluster=CLUSTER, reading=reading, readings={"pc1": reading}))


def test_what_is_open_is_closed_by_a_drop_in_that_sshd_checks_first():
    plan = planned()
    before, drop_in, check, reload = plan.changes
    assert isinstance(drop_in, FileChange)
    assert drop_in.content == b"# gangline prepare sshd\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    assert (check.argv, check.undo) == (("sshd", "-t"), ())
    assert reload.argv == before.undo == ("systemctl", "try-reload-or-restart", "sshd.service")
    assert plan.revert_s == 60.0


def test_what_is_stricter_stays():
    strict = "passwordauthentication no\nkbdinteractiveauthentication no\npermitrootlogin no\n"
    assert planned(strict).changes == ()


def test_without_systemd_the_script_of_the_service_reloads_it():
    *_, reload = planned(systemd=None, programs=("service",)).changes
    assert isinstance(reload, CommandChange)
    assert reload.argv == ("service", "ssh", "reload")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"in_force": ""}, "only root can see"),
        (
            {"main": "Match User bob\n  X11Forwarding no\nInclude /etc/ssh/sshd_config.d/*.conf\n"},
            "before its first Match",
        ),
        ({"systemd": None}, "no `service`"),
    ],
)
def test_what_is_left_to_the_user(how, told):
    plan = planned(**how)
    assert plan.changes == ()
    assert told in plan.remains[0]


def test_it_is_done_only_where_it_is_named():
    assert SSHD in STEPS
    assert SSHD not in chosen([], CLUSTER.hosts)[0]
    assert chosen(["sshd"], CLUSTER.hosts) == ((SSHD,), ("pc1",))
