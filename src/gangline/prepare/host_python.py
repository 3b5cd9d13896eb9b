"""Step `python`: a Python that gangline can build its environment with, where there is none.

gangline brings uv and all packages along; it takes an interpreter alone, not its pip or venv.
"""

from __future__ import annotations

import re

from gangline.inventory.facts import HIGHEST, LOWEST
from gangline.prepare.host_packages import NO_MANAGER, UNDONE, HostPackages, package_asks
from gangline.prepare.prepare_step import Asks, CommandChange, HostReading, PrepareStep, StepPlan, StepView

MINORS = (12, 13, 11, 14, 10)
"""Of Python 3, the best first."""
NAMES = tuple(name for minor in MINORS for name in (f"python3.{minor}", f"python3{minor}"))
"""As apt and dnf call it, and as zypper does."""
FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/conda/bin", "~/.local/bin")
UV_VERSION = "3.12"
UV_PYTHON = ("uv", "python", "install", UV_VERSION)
PACKAGES = package_asks("python", offered=NAMES, patterns=NAMES)
ASKS = PACKAGES.with_all_of(
    Asks(
        folders=FOLDERS,
        commands={"python3": ("python3", "--version"), "uv": ("uv", "python", "list", "--only-installed")},
        programs=("uv",),
    )
)


def plan(view: StepView) -> StepPlan:
    """The newest fitting package of the distribution; else one by uv, where uv is there."""
    if view.host.environment.kind != "locked":
        return StepPlan()
    reading = view.reading
    if _fits(reading):
        return StepPlan()
    low, high = (".".join(map(str, version)) for version in (LOWEST, HIGHEST))
    reason = f"there is no Python {low} to {high}, and gangline builds its environment with one (E-SW-14)"
    packages = HostPackages("python", reading, PACKAGES)
    name = next((name for name in NAMES if name in packages.offered), None)
    if name is not None:
        return StepPlan(changes=packages.install((name,)), reason=reason, risk=UNDONE)
    if reading.has("uv"):
        change = CommandChange(
            argv=UV_PYTHON,
            undo=("uv", "python", "uninstall", UV_VERSION),
            probe=ASKS.commands["uv"],
            before=reading.output("uv"),
            limit_s=600.0,
            scope="user",
        )
        return StepPlan(changes=(change,), reason=reason, risk="it comes from the internet, as uv fetches it")
    if packages.manager is None:
        return StepPlan(remains=(NO_MANAGER.format(f"Python {low} or newer"),))
    return StepPlan(remains=(f"no repository of this host offers Python {low} or newer: install uv there, then again",))


def _fits(reading: HostReading) -> bool:
    """Whether a Python of the right age lies where gangline looks for one."""
    names = [name for folder in FOLDERS for name in reading.folders[folder] or ()]
    found = [re.fullmatch(r"python3\.(\d+)", name) for name in names]
    found.append(re.match(r"Python 3\.(\d+)\.", reading.output("python3")))
    return any(match is not None and LOWEST <= (3, int(match[1])) <= HIGHEST for match in found)


PYTHON_STEP = PrepareStep(
    name="python",
    summary="a Python that gangline can build its environment with",
    asks=ASKS,
    plan=plan,
)
