"""The power limit of GPUs, what dnf has locked, and the restart of a host that is waited for."""

import itertools
from types import SimpleNamespace

import pytest

from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable
from gangline.prepare import host_restart
from gangline.prepare.gpu_driver import ASKS, DRIVER_STEP, LOADED, VERSIONLOCK
from gangline.prepare.gpu_power import LIMITS, PATH, SYSTEMD
from gangline.prepare.host_restart import BOOT_ID, FIRST_PROCESS, restart
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

HOST = Host(name="pc1", workdir="/w", python="", transport="ssh")
CARD = "/sys/bus/pci/devices/0000:01:00.0/vendor:0x10de\n/sys/bus/pci/devices/0000:01:00.0/class:0x030000\n"
TWO_CARDS = "0, 350.00, 100.00, 366.00\n1, 250.00, 100.00, 366.00"


def planned(
    *,
    watts=250,
    limits=TWO_CARDS,
    unit=None,
    systemd=(),
    loaded=b"NVRM version",
    manager="dnf5",
    locks="",
    installed="installed akmod-nvidia",
):
    reading = HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={
            **dict.fromkeys(ASKS.files, FileRead()),
            LOADED: FileRead(content=loaded),
            PATH: FileRead(content=unit),
        },
        folders={SYSTEMD: systemd},
        commands={"pci": CARD, LIMITS: limits, "driver rpm": installed, "versionlock": locks},
        programs={"nvidia-smi": "/usr/bin/nvidia-smi", "dnf": "/usr/bin/dnf", manager: f"/usr/bin/{manager}"},
    )
    view = StepView(
        host=HOST, cluster=Cluster(name="c", hosts=(HOST,)), reading=reading, readings={}, power_limit_w=watts
    )
    return DRIVER_STEP.plan(view)


LOCKED = "akmod-nvidia-3:580.82.07-1.fc42.*"


def commands(plan):
    return [change.argv for change in plan.changes if isinstance(change, CommandChange) and change.argv]


def test_each_card_gets_the_limit_now_and_at_each_start_and_its_own_one_back():
    plan = planned(locks=LOCKED)
    assert commands(plan)[-1] == ("nvidia-smi", "--id=0", "--power-limit=250")
    assert plan.changes[-1].undo == ("nvidia-smi", "--id=0", "--power-limit=350.00")
    assert plan.changes[-1].before == "350.00"  # each card has a state of its own
    (unit,) = [change for change in plan.changes if isinstance(change, FileChange)]
    assert b"ExecStart=/usr/bin/nvidia-smi --power-limit=250\n" in unit.content
    assert ("systemctl", "enable", "gangline-gpu-power.service") in commands(plan)
    after = "0, 250.00, 100.00, 366.00\n1, 250.00, 100.00, 366.00"
    assert planned(limits=after, unit=unit.content, locks=LOCKED).changes == ()
    other = planned(watts=200, limits=after, unit=unit.content, locks=LOCKED)
    assert ("systemctl", "enable", "gangline-gpu-power.service") not in commands(other)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"watts": 50}, "50 W is outside of what its cards take: GPU 0 100 to 366 W, GPU 1 100 to 366 W"),
        ({"limits": "0, [N/A], [N/A], [N/A]"}, "nvidia-smi shows no card whose power limit can be set"),
        ({"systemd": None}, "no systemd here; at each start: nvidia-smi --power-limit=250"),
    ],
)
def test_what_stands_in_the_way_of_a_limit_is_told(options, told):
    plan = planned(locks=LOCKED, **options)
    assert plan.remains == (told,)
    assert not any(isinstance(change, FileChange) for change in plan.changes)


def test_without_a_word_or_a_loaded_driver_no_limit_is_set():
    assert planned(watts=None, locks=LOCKED).changes == ()
    plan = planned(loaded=None, locks=LOCKED)
    assert plan.changes == ()
    assert plan.restart
    assert plan.remains[-1] == "--power-limit 250 counts once a driver is loaded: say it again then"


def test_a_driver_that_nothing_known_brought_is_left_alone_and_its_cards_get_the_limit():
    plan = planned(installed="")
    assert "it is left alone" in plan.remains[0]
    assert commands(plan)[-1][-1] == "--power-limit=250"


@pytest.mark.parametrize(
    "locks", [LOCKED, "# Added by 'versionlock add' command\nPackage name: akmod-nvidia\nevr = 3:1-1"]
)
def test_what_dnf_has_locked_is_not_locked_again(locks):
    assert commands(planned(watts=None, locks=locks)) == []
    assert commands(planned(watts=None, locks="kmod-nvidia-3:1-1.*"))[0][:3] == ("dnf", "versionlock", "add")


def test_without_a_lock_of_dnf_it_is_told():
    plan = planned(watts=None, manager="dnf4")
    assert plan.changes == ()
    assert "python3-dnf-plugin-versionlock" in plan.remains[0]
    assert VERSIONLOCK in ASKS.files


class RestartingHost:
    """A host that is away for some logins, and then is another start; None: for ever."""

    name = "pc1"

    def __init__(self, away, *, restarts=True, error=HostUnreachable("pc1 does not answer")):  # noqa: B008
        self.away, self.restarts, self.error, self.asked = away, restarts, error, 0

    def by(self, _transport):
        return self

    def restart(self):
        self.asked += 1

    def read(self, _asks):
        if self.asked and self.away:
            self.away -= 1
            raise self.error
        number = 900 if self.asked and self.restarts else 7
        stat = f"1 (a name) S 0 {' '.join(['0'] * 17)} {number} 0"
        return SimpleNamespace(
            files={BOOT_ID: FileRead(content=b"same\n"), FIRST_PROCESS: FileRead(content=stat.encode())}
        )


def restarted(host):
    ticks = itertools.count()
    return restart(host, lambda: "new", clock=lambda: float(next(ticks)), sleep=lambda _seconds: None)


def test_a_host_is_back_when_a_new_login_sees_another_start_even_with_the_same_kernel():
    host = RestartingHost(away=3)
    transport, seconds = restarted(host)
    assert (transport, host.asked, host.away) == ("new", 1, 0)
    assert seconds == 5.0


def test_a_host_that_ends_in_the_middle_of_an_answer_is_waited_for_and_another_key_is_not():
    assert restarted(RestartingHost(away=2, error=GanglineError("pc1: its agent ended")))[0] == "new"
    with pytest.raises(HostKeyRefused):
        restarted(RestartingHost(away=2, error=HostKeyRefused("pc1 has another key")))


@pytest.mark.parametrize(
    ("host", "seen"),
    [
        (RestartingHost(away=10_000), "pc1 does not answer"),
        (RestartingHost(away=0, restarts=False), "it answers, and has not restarted"),
    ],
    ids=["away", "not restarted"],
)
def test_a_host_that_does_not_come_back_is_told_with_the_screen_of_its_firmware(host, seen):
    with pytest.raises(GanglineError, match=r"pc1 is not back after 15 min") as caught:
        restarted(host)
    assert caught.value.seen == seen
    assert "MOK" in caught.value.fix
    assert host_restart.LIMIT_S == 900
