"""Step `nic`: the network card of the cluster does not save power, and wakes the host by Wake-on-LAN."""

from __future__ import annotations

import re

from gangline.prepare.fixed_address import ASKS as ADDRESS_ASKS
from gangline.prepare.fixed_address import link_of, links_of
from gangline.prepare.prepare_step import (
    REVERT_S,
    Asks,
    Change,
    CommandChange,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
)

UNIT = "gangline-nic.service"
PATH = f"/etc/systemd/system/{UNIT}"
SYSTEMD = "/run/systemd/system"
TEXT = """# gangline prepare nic
[Unit]
Description=The network card of a training cluster: no energy-efficient Ethernet, Wake-on-LAN
After=network.target

[Service]
Type=oneshot
{commands}
[Install]
WantedBy=multi-user.target
"""
EEE_ON = re.compile(r"EEE status: enabled")
CAN_WAKE = re.compile(r"Supports Wake-on: \w*g")
WAKES = re.compile(r"^\s*Wake-on: (\w+)", re.MULTILINE)
ASKS = Asks(
    files=(PATH,),
    folders=(SYSTEMD,),
    commands={name: ADDRESS_ASKS.commands[name] for name in ("links", "default routes")},
    programs=("ethtool",),
)


def root_asks(reading: HostReading) -> Asks:
    """What the drivers of the cards say; Wake-on-LAN is shown to root alone."""
    if not reading.has("ethtool"):
        return Asks()
    names = dict.fromkeys(link.name for link in links_of(reading) if _is_ethernet(link.name))
    return Asks(
        commands={
            **{f"eee {name}": ("ethtool", "--show-eee", name) for name in names},
            **{f"card {name}": ("ethtool", name) for name in names},
        }
    )


def _is_ethernet(name: str) -> bool:
    """By systemd's names, and the kernel's: wireless cards and bridges have others."""
    return name.startswith(("en", "eth"))


def plan(view: StepView) -> StepPlan:
    """Two settings of the card, now and at each boot; nothing where the card has neither."""
    reading = view.reading
    link = link_of(reading, view.host.address)
    if link is None or not _is_ethernet(link.name):
        return StepPlan()
    if not reading.has("ethtool"):
        return StepPlan(remains=(f"what {link.name} saves and wakes by is not known: sudo apt install ethtool",))
    card = reading.output(f"card {link.name}")
    saves = EEE_ON.search(reading.output(f"eee {link.name}")) is not None
    wakes_by = (WAKES.search(card) or ["", ""])[1]
    can_wake = CAN_WAKE.search(card) is not None and "g" not in wakes_by
    wanted = [
        *([_setting(("--set-eee", link.name, "eee"), "off", "on")] if saves else []),
        *([_setting(("-s", link.name, "wol"), "g", wakes_by or "d")] if can_wake else []),
    ]
    if not wanted:
        return StepPlan()
    if reading.folders[SYSTEMD] is None:
        return StepPlan(
            remains=(f"no systemd here; at each boot: {'; '.join(' '.join(each.argv) for each in wanted)}",)
        )
    reasons = [f"{link.name} sleeps between packets (EEE), which costs time at each"] if saves else []
    reasons += ["it cannot be woken over the network"] if can_wake else []
    return StepPlan(
        changes=(*_at_boot(reading, wanted), *wanted),
        reason="; ".join(reasons),
        risk="the link goes down for some seconds" if saves else "whoever is on this network can switch it on",
        revert_s=REVERT_S,
    )


def _setting(words: tuple[str, ...], new: str, old: str) -> CommandChange:
    return CommandChange(argv=("ethtool", *words, new), undo=("ethtool", *words, old))


def _at_boot(reading: HostReading, wanted: list[CommandChange]) -> tuple[Change, ...]:
    """A unit that makes the settings again, beside those that it makes already."""
    before = reading.files[PATH]
    known = [line for line in before.text.splitlines() if line.startswith("ExecStart=")]
    rows = [f"ExecStart=-{' '.join((str(reading.programs['ethtool']), *each.argv[1:]))}" for each in wanted]
    text = TEXT.format(commands="".join(f"{row}\n" for row in dict.fromkeys([*known, *rows])))
    if before.text == text:
        return ()
    return (
        *activated(
            (FileChange(path=PATH, before=before.content, content=text.encode()),), ("systemctl", "daemon-reload")
        ),
        CommandChange(argv=("systemctl", "enable", UNIT), undo=("systemctl", "disable", UNIT)),
    )


NIC = PrepareStep(
    name="nic",
    summary="a network card that saves no power between packets, and that wakes the host",
    asks=ASKS,
    plan=plan,
    root_asks=root_asks,
    only_by_name=True,
)
