"""`gangline prepare clock sleep` with a real systemd and a real chronyd, which may not set the clock; the laptop is a stand-in."""

import sys
from pathlib import Path

import pytest

from tests.bare.clocks import await_refused_step, clock_against_monotonic
from tests.lab.bare import LEFT_BY_PREPARE, BareKind, differences
from tests.lab.typist import Typist
from tests.lab.user import NewUser

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
SUPPLIES = "/sys/class/power_supply"
TARGETS = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target")


def answered(lab, *words):
    """`gangline WORDS`, with sudo's password; the screen."""
    with Typist(lab.user, [*GANGLINE, *words]) as screen:
        screen.expect("for sudo:")
        screen.type(lab.hosts[0].password)
        assert screen.end() == 0, screen.text
        return screen.text


def says(host, *argv):
    return host.run(argv).stdout.strip()


@pytest.mark.timeout(400)
def test_a_time_service_runs_and_a_laptop_stays_awake_until_both_are_undone(bare):
    if not Path(SUPPLIES).exists():
        pytest.skip(f"this machine has no {SUPPLIES} in whose place a laptop's can be put")
    lab = bare({"pc1": BareKind(clock=True)})
    pc1, clock = lab["pc1"], clock_against_monotonic()
    lab.tell_time(1000.0)
    pc1.check(["mount", "-t", "tmpfs", "supplies", SUPPLIES])
    pc1.check(["mkdir", f"{SUPPLIES}/BAT0"])
    lab.let_in_by_key()
    NewUser(lab.user).types("init", "pc1", "--yes")
    before = pc1.snapshot()
    shown = answered(lab, "prepare", "clock", "sleep", "--yes")
    assert "it is a laptop" in shown
    assert (says(pc1, "systemctl", "is-enabled", "chrony"), says(pc1, "systemctl", "is-active", "chrony")) == (
        "enabled",
        "active",
    )
    await_refused_step(pc1)
    assert {says(pc1, "systemctl", "is-enabled", target) for target in TARGETS} == {"masked"}
    assert pc1.run(["systemctl", "start", "suspend.target"]).returncode != 0
    pc1.reboot()
    assert says(pc1, "systemctl", "is-active", "chrony") == "active"
    answered(lab, "prepare", "--undo", "all", "--yes")
    assert differences(before, pc1.snapshot(), ignore=LEFT_BY_PREPARE) == []
    assert (says(pc1, "systemctl", "is-enabled", "chrony"), says(pc1, "systemctl", "is-active", "chrony")) == (
        "disabled",
        "inactive",
    )
    assert {says(pc1, "systemctl", "is-enabled", target) for target in TARGETS} == {"static"}
    assert abs(clock_against_monotonic() - clock) < 1.0, "no clock was set"
