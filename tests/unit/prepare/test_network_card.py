"""Step `nic`: power saving and Wake-on-LAN of a card. The outputs of ethtool are simulated: no card here has either."""

import json

import pytest

from gangline.prepare.network_card import NIC, PATH, SYSTEMD
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

HOST = Host(name="pc1", workdir="/w", python="", transport="ssh", address="192.168.1.11")
CARD = "Settings for eth0:\n\tSpeed: 1000Mb/s\n\tSupports Wake-on: pumbg\n\tWake-on: {now}\n"
EEE = "EEE settings for eth0:\n\tEEE status: {now}\n\tTx LPI: 17 (us)\n"
SLEEPY, SAVING = CARD.format(now="d"), EEE.format(now="enabled - active")


def reading(*, card=SLEEPY, eee=SAVING, name="eth0", unit=None, tool=True):
    link = {"ifname": name, "ifindex": 2, "mtu": 1500, "addr_info": [{"local": HOST.address, "prefixlen": 24}]}
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={PATH: FileRead(content=unit)},
        folders={SYSTEMD: ()},
        commands={"links": json.dumps([link]), f"card {name}": card, f"eee {name}": eee},
        programs={"ethtool": "/sbin/ethtool" if tool else None},
    )


def planned(own):
    cluster = Cluster(name="home", hosts=(HOST,))
    return NIC.plan(StepView(host=HOST, cluster=cluster, reading=own, readings={"pc1": own}))


def commands(plan):
    return [change.argv for change in plan.changes if isinstance(change, CommandChange) and change.argv]


def test_power_saving_goes_and_the_host_can_be_woken_now_and_after_each_boot():
    plan = planned(reading())
    eee, wol = ("ethtool", "--set-eee", "eth0", "eee"), ("ethtool", "-s", "eth0", "wol")
    assert commands(plan)[-2:] == [(*eee, "off"), (*wol, "g")]
    assert [change.undo for change in plan.changes[-2:]] == [(*eee, "on"), (*wol, "d")]
    (unit,) = [change for change in plan.changes if isinstance(change, FileChange)]
    text = unit.content.decode()
    assert "ExecStart=-/sbin/ethtool --set-eee eth0 eee off\nExecStart=-/sbin/ethtool -s eth0 wol g\n" in text
    assert plan.revert_s == 60.0
    card, eee = CARD.format(now="g"), EEE.format(now="disabled")
    assert planned(reading(card=card, eee=eee, unit=unit.content)).changes == ()


def test_what_one_setting_needs_leaves_the_other_in_the_unit():
    unit = b"[Service]\nExecStart=-/sbin/ethtool -s eth0 wol g\n"
    plan = planned(reading(card=CARD.format(now="g"), unit=unit))
    (written,) = [change for change in plan.changes if isinstance(change, FileChange)]
    assert written.content.decode().count("ExecStart=") == 2


@pytest.mark.parametrize(
    "own",
    [
        reading(card="Settings for eth0:\n\tLink detected: yes\n", eee=""),
        reading(card="", eee="EEE settings for eth0:\n\tEEE status: not supported\n"),
        reading(name="wlan0"),
    ],
)
def test_a_card_that_has_neither_is_left_alone(own):
    assert planned(own).changes == ()


def test_without_ethtool_it_says_so():
    assert "apt install ethtool" in planned(reading(tool=False)).remains[0]
    assert not NIC.root_asks(reading(tool=False))
    assert set(NIC.root_asks(reading()).commands) == {"eee eth0", "card eth0"}
