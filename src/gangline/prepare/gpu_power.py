"""What the GPUs of a host may draw, as the user says: now, and at each start of the host. A part of the step `driver`.

nvidia-smi(1): `--power-limit` takes watts between the least and the most of the card; the driver forgets it when it is
loaded anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.prepare.prepare_step import (
    Asks,
    Change,
    CommandChange,
    FileChange,
    HostReading,
    activated,
)

UNIT = "gangline-gpu-power.service"
PATH = f"/etc/systemd/system/{UNIT}"
SYSTEMD = "/run/systemd/system"
LIMITS = "gpu power"
TEXT = """# gangline prepare driver --power-limit {watts}
[Unit]
Description=What each GPU of this host may draw: {watts} W
After=nvidia-persistenced.service

[Service]
Type=oneshot
ExecStart={nvidia_smi} --power-limit={watts}

[Install]
WantedBy=multi-user.target
"""
ASKS = Asks(
    files=(PATH,),
    folders=(SYSTEMD,),
    commands={
        LIMITS: (
            "nvidia-smi",
            "--query-gpu=index,power.limit,power.min_limit,power.max_limit",
            "--format=csv,noheader,nounits",
        )
    },
    programs=("nvidia-smi",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """Of one card, in watts."""

    index: str
    now: str
    """As nvidia-smi writes it: the undo says it again."""
    lowest_w: float
    highest_w: float


def power_changes(reading: HostReading, watts: int) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """The changes that give every card this limit; and what stands in the way, in words."""
    cards = _cards(reading.output(LIMITS))
    if not cards or not reading.has("nvidia-smi"):
        return (), ("nvidia-smi shows no card whose power limit can be set",)
    outside = [card for card in cards if not card.lowest_w <= watts <= card.highest_w]
    if outside:
        ranges = ", ".join(f"GPU {card.index} {card.lowest_w:g} to {card.highest_w:g} W" for card in outside)
        return (), (f"{watts} W is outside of what its cards take: {ranges}",)
    wanted = [
        CommandChange(
            argv=("nvidia-smi", f"--id={card.index}", f"--power-limit={watts}"),
            undo=("nvidia-smi", f"--id={card.index}", f"--power-limit={card.now}"),
            probe=("nvidia-smi", f"--id={card.index}", "--query-gpu=power.limit", "--format=csv,noheader,nounits"),
            before=card.now,
        )
        for card in cards
        if float(card.now) != watts
    ]
    if reading.folders[SYSTEMD] is None:
        again = f"no systemd here; at each start: nvidia-smi --power-limit={watts}"
        return tuple(wanted), (again,) if wanted else ()
    return (*_at_boot(reading, watts), *wanted), ()


def _cards(text: str) -> list[PowerLimit]:
    """Cards that say numbers; a laptop's says [N/A]."""
    found = []
    for line in text.splitlines():
        index, *values = (word.strip() for word in line.split(","))
        try:
            _, lowest_w, highest_w = (float(value) for value in values)
        except ValueError:
            continue
        found.append(PowerLimit(index=index, now=values[0], lowest_w=lowest_w, highest_w=highest_w))
    return found


def _at_boot(reading: HostReading, watts: int) -> tuple[Change, ...]:
    before = reading.files[PATH]
    text = TEXT.format(watts=watts, nvidia_smi=reading.programs["nvidia-smi"])
    if before.text == text:
        return ()
    file = FileChange(path=PATH, before=before.content, content=text.encode())
    enable = CommandChange(argv=("systemctl", "enable", UNIT), undo=("systemctl", "disable", UNIT))
    return (*activated((file,), ("systemctl", "daemon-reload")), *([enable] if before.content is None else []))
