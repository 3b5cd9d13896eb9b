"""Steps `clock` and `sleep`: services and targets of systemd. Facts in, changes out."""

import pytest

from gangline.prepare.no_suspend import CHASSIS, CONTENT, DROP_IN, SLEEP, TARGETS
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.prepare.time_service import CLOCK
from gangline.runs.cluster import Cluster, Host

HOST = Host(name="pc1", workdir="/w", python="", transport="ssh")


def planned(step, *, commands, files=None, folders=None, programs=("systemctl",)):
    reading = HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={
            CHASSIS: FileRead(),
            DROP_IN: FileRead(),
            **{path: FileRead(content=text.encode()) for path, text in (files or {}).items()},
        },
        folders={"/sys/class/power_supply": (), "/run/systemd/system": (), **(folders or {})},
        commands=commands,
        programs=dict.fromkeys(programs, "/usr/bin/x"),
    )
    cluster = Cluster(name="home", hosts=(HOST,))
    return step.plan(StepView(host=HOST, cluster=cluster, reading=reading, readings={"pc1": reading}))


def words(plan):
    return [change.argv for change in plan.changes if isinstance(change, CommandChange)]


def test_a_time_service_that_runs_is_left_alone():
    commands = {"enabled chrony": "enabled", "active chrony": "active"}
    assert planned(CLOCK, commands=commands).changes == ()


def test_one_that_is_installed_is_enabled_and_started():
    commands = {"enabled systemd-timesyncd": "disabled", "active systemd-timesyncd": "inactive"}
    plan = planned(CLOCK, commands=commands)
    unit = "systemd-timesyncd.service"
    assert words(plan) == [("systemctl", "enable", unit), ("systemctl", "start", unit)]
    assert [(each.before, each.after) for each in plan.changes] == [("disabled", "enabled"), ("inactive", "active")]
    assert "step a clock" in plan.risk
    again = planned(CLOCK, commands={"enabled systemd-timesyncd": "enabled", "active systemd-timesyncd": "active"})
    assert again.changes == ()


def test_one_that_is_enabled_and_failed_is_started():
    plan = planned(CLOCK, commands={"enabled chronyd": "enabled", "active chronyd": "failed"})
    assert words(plan) == [("systemctl", "start", "chronyd.service")]


@pytest.mark.parametrize(
    ("commands", "programs", "told"),
    [
        ({}, ("systemctl", "apt"), "apt install systemd-timesyncd"),
        ({}, ("systemctl", "dnf"), "dnf install chrony"),
        ({"enabled chrony": "masked"}, ("systemctl",), "systemctl unmask chrony.service"),
        ({}, (), "no systemd here"),
    ],
)
def test_what_is_left_to_the_user(commands, programs, told):
    plan = planned(CLOCK, commands=commands, programs=programs)
    assert plan.changes == ()
    assert told in plan.remains[0]


STATIC = dict.fromkeys(TARGETS, "static")


@pytest.mark.parametrize(
    "facts", [{"files": {CHASSIS: "10\n"}}, {"folders": {"/sys/class/power_supply": ("AC", "BAT0")}}]
)
def test_a_laptop_stays_awake_with_its_lid_closed(facts):
    plan = planned(SLEEP, commands=STATIC, **facts)
    assert [argv for argv in words(plan) if "mask" in argv] == [("systemctl", "mask", each) for each in TARGETS]
    (lid,) = [change for change in plan.changes if isinstance(change, FileChange)]
    assert "HandleLidSwitch=ignore" in lid.content.decode()
    first, *_, last = [change for change in plan.changes if "HUP" in (*change.lines()[0].split(), "")]
    assert first.argv == last.undo == ()
    assert first.undo == last.argv
    again = planned(
        SLEEP, commands=dict.fromkeys(TARGETS, "masked"), files={CHASSIS: "10\n", DROP_IN: CONTENT}, folders={}
    )
    assert again.changes == ()


def test_a_desktop_is_kept_from_sleeping_and_a_server_never_sleeps():
    plan = planned(SLEEP, commands={**STATIC, "desktop": "active"})
    assert len(plan.changes) == len(TARGETS)
    assert planned(SLEEP, commands={**STATIC, "desktop": "inactive"}).changes == ()


def test_without_systemd_it_is_left_to_the_user():
    plan = planned(SLEEP, commands={}, folders={"/run/systemd/system": None})
    assert plan.changes == ()
    assert "no systemd" in plan.remains[0]
