"""Step `sleep`: a laptop, or a desktop with a screen, that must not suspend while it trains."""

from __future__ import annotations

from gangline.prepare.prepare_step import (
    Asks,
    Change,
    CommandChange,
    FileChange,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
)

TARGETS = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target")
DROP_IN = "/etc/systemd/logind.conf.d/60-gangline.conf"
CHASSIS = "/sys/class/dmi/id/chassis_type"
LAPTOPS = frozenset({"8", "9", "10", "11", "14", "30", "31", "32"})
"""Numbers of SMBIOS: portable, laptop, notebook, hand held, sub notebook, tablet, convertible, detachable."""
RELOAD = ("systemctl", "kill", "-s", "HUP", "systemd-logind.service")
CONTENT = """# gangline prepare sleep: a closed lid ends no training
[Login]
HandleLidSwitch=ignore
HandleLidSwitchExternalPower=ignore
HandleLidSwitchDocked=ignore
IdleAction=ignore
"""
ASKS = Asks(
    files=(CHASSIS, DROP_IN),
    folders=("/sys/class/power_supply", "/run/systemd/system"),
    commands={
        "desktop": ("systemctl", "is-active", "display-manager.service"),
        **{target: ("systemctl", "is-enabled", target) for target in TARGETS},
    },
)


def plan(view: StepView) -> StepPlan:
    """The sleep targets of systemd masked, and the lid switch ignored on a laptop."""
    reading = view.reading
    if reading.folders["/run/systemd/system"] is None:
        return StepPlan(remains=("no systemd here: keep it from sleeping by this system's own means",))
    laptop = _is_laptop(view)
    if not laptop and reading.output("desktop") != "active":  # Debian's default target is graphical on servers, too
        return StepPlan()
    changes: list[Change] = []
    awake = [target for target in TARGETS if reading.output(target) not in {"masked", ""}]
    changes += [_masked(target, reading.output(target)) for target in awake]
    before = reading.files[DROP_IN]
    if laptop and before.text != CONTENT:
        lid = FileChange(path=DROP_IN, before=before.content, content=CONTENT.encode())
        changes += activated((lid,), RELOAD)
    if not changes:
        return StepPlan()
    what = "a laptop" if laptop else "a computer with a desktop, which may suspend when nobody types"
    return StepPlan(
        changes=tuple(changes),
        reason=f"it is {what}: a host that sleeps is lost to the run",
        risk="it stays awake with its lid closed: not in a bag; it does not suspend on a low battery either"
        if laptop
        else "it does not suspend any more; a screen may still turn off",
    )


def _is_laptop(view: StepView) -> bool:
    names = view.reading.folders["/sys/class/power_supply"] or ()
    return view.reading.files[CHASSIS].text.strip() in LAPTOPS or any(name.startswith("BAT") for name in names)


def _masked(target: str, state: str) -> CommandChange:
    return CommandChange(
        argv=("systemctl", "mask", target),
        undo=("systemctl", "unmask", target),
        probe=("systemctl", "is-enabled", target),
        before=state,
        after="masked",
    )


SLEEP = PrepareStep(
    name="sleep", summary="no suspend on a laptop or a desktop, lid closed or not", asks=ASKS, plan=plan
)
