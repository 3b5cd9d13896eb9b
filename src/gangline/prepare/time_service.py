"""Step `clock`: a service keeps the clock right. gangline itself never sets one."""

from __future__ import annotations

from gangline.prepare.prepare_step import Asks, CommandChange, PrepareStep, StepPlan, StepView

SERVICES = ("chrony", "chronyd", "systemd-timesyncd", "ntpsec", "ntp", "ntpd")
"""The best first; Debian calls chrony's unit chrony, Fedora chronyd."""
STATES = ("systemctl", "is-enabled")
ASKS = Asks(
    commands={
        **{f"enabled {name}": (*STATES, f"{name}.service") for name in SERVICES},
        **{f"active {name}": ("systemctl", "is-active", f"{name}.service") for name in SERVICES},
    },
    programs=("systemctl", "apt", "dnf", "zypper", "pacman"),
)
PACKAGES = {
    "apt": "sudo apt install systemd-timesyncd",
    "dnf": "sudo dnf install chrony",
    "zypper": "sudo zypper install chrony",
    "pacman": "sudo timedatectl set-ntp true",
}
OFF = frozenset({"disabled", "masked", "masked-runtime", "static", "indirect", "enabled", "enabled-runtime"})
"""States of a unit that is installed."""


def plan(view: StepView) -> StepPlan:
    """Enable and start the time service that is installed, unless one is running."""
    reading = view.reading
    running = [name for name in SERVICES if reading.output(f"active {name}") == "active"]
    if running and reading.output(f"enabled {running[0]}") not in {"disabled", "masked"}:
        return StepPlan()
    if not reading.has("systemctl"):
        return StepPlan(remains=("no systemd here: start a time service (chrony) by this system's own means",))
    installed = [name for name in SERVICES if reading.output(f"enabled {name}") in OFF]
    name = next(iter(running or installed), None)
    if name is None:
        how = next((text for program, text in PACKAGES.items() if reading.has(program)), "install chrony")
        return StepPlan(remains=(f"no time service is installed: {how}",))
    unit, state = f"{name}.service", reading.output(f"enabled {name}")
    if state.startswith("masked"):
        return StepPlan(remains=(f"{unit} is masked, so somebody wants no time service here: systemctl unmask {unit}",))
    return StepPlan(
        changes=_switched_on(unit, state=state, active=reading.output(f"active {name}")),
        reason="no service keeps this clock right: times in logs cannot be compared, certificates look invalid",
        risk="the service may step a clock that is far off; programs that run then see the time jump",
    )


def _switched_on(unit: str, *, state: str, active: str) -> tuple[CommandChange, ...]:
    """Enabled for every boot, and started now; each as it was after an undo."""
    enable = CommandChange(
        argv=("systemctl", "enable", unit),
        undo=("systemctl", "disable", unit),
        probe=(*STATES, unit),
        before=state,
        after="enabled",
    )
    start = CommandChange(
        argv=("systemctl", "start", unit),
        undo=("systemctl", "stop", unit),
        probe=("systemctl", "is-active", unit),
        before=active,
        after="active",
    )
    return (*((enable,) if state == "disabled" else ()), *((start,) if active != "active" else ()))


CLOCK = PrepareStep(
    name="clock", summary="the time service that is installed, enabled and started", asks=ASKS, plan=plan
)
