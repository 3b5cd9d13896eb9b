"""Step `driver`: the NVIDIA driver by the distribution's own means, held back, and ready after a restart.

Only where it is named: a driver is not undone to the last file. A runfile is never used, and none is replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gangline.prepare.gpu_power import ASKS as POWER_ASKS
from gangline.prepare.gpu_power import power_changes
from gangline.prepare.host_packages import NO_MANAGER, UNDONE, HostPackages, package_asks
from gangline.prepare.prepare_step import Asks, CommandChange, HostReading, PrepareStep, StepPlan, StepView

NVIDIA, AMD = "0x10de", "0x1002"
LOADED = "/proc/driver/nvidia/version"
KERNEL = "/proc/sys/kernel/osrelease"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
"""Its last byte is 1 where the firmware checks signatures."""
VERSIONLOCK = "/etc/dnf/plugins/versionlock.conf"
"""Of dnf's plugin; dnf5 has it built in."""
NO_LOCK = (
    "dnf holds nothing back without its plugin: sudo dnf install python3-dnf-plugin-versionlock, then gangline prepare "
    "driver again"
)
PERSISTENCE, FABRIC = "nvidia-persistenced.service", "nvidia-fabricmanager.service"
DRIVER = re.compile(
    r"nvidia-driver(-\d+)?(-server)?(-open)?|nvidia-headless-\d+\S*|akmod-nvidia\S*|kmod-nvidia\S*|nvidia-open\S*"
    r"|nvidia-(open-)?driver-G0\d\S*"
)
"""Packages that bring a driver."""
SETS = {
    "apt-get": (("nvidia-driver",),),
    "dnf": (("akmod-nvidia", "xorg-x11-drv-nvidia-cuda"), ("nvidia-open",)),
    "zypper": (("nvidia-open-driver-G06-signed-kmp-default", "nvidia-compute-utils-G06"),),
}
"""By package manager, the best first; Ubuntu has a tool that chooses. A set counts where all of it is offered."""
REPOSITORIES = {
    "apt-get": "Debian has it in non-free: add `contrib non-free non-free-firmware` to its sources, then apt update",
    "dnf": "Fedora: add RPM Fusion's nonfree repository; RHEL and its relatives: NVIDIA's own for this release",
    "zypper": "add NVIDIA's repository for this release: zypper install openSUSE-repos-Leap-NVIDIA",
}
FABRIC_PACKAGE = "nvidia-fabricmanager"
PACKAGES = package_asks(
    "driver",
    offered=(*dict.fromkeys(name for sets in SETS.values() for names in sets for name in names), FABRIC_PACKAGE),
    patterns=(
        "nvidia-driver*",
        "nvidia-headless*",
        "nvidia-fabricmanager*",
        "akmod-nvidia*",
        "kmod-nvidia*",
        "nvidia-open*",
    ),
)
DEVICES = "/sys/bus/pci/devices"
OF_DEVICES = ("(", "-name", "vendor", "-o", "-name", "class", ")", "-exec", "grep", "-H", ".", "{}", "+")
ASKS = PACKAGES.with_all_of(
    Asks(
        files=(LOADED, KERNEL, SECURE_BOOT, VERSIONLOCK),
        commands={
            "pci": ("find", "-L", DEVICES, "-maxdepth", "2", *OF_DEVICES),
            "ubuntu": ("ubuntu-drivers", "devices"),
            "gpgpu": ("ubuntu-drivers", "list", "--gpgpu"),
            "held": ("apt-mark", "showhold"),
            "versionlock": ("dnf", "--quiet", "versionlock", "list"),
            "locks": ("zypper", "--non-interactive", "--quiet", "locks"),
            **{unit: ("systemctl", "is-enabled", unit) for unit in (PERSISTENCE, FABRIC)},
        },
        programs=("ubuntu-drivers", "nvidia-uninstall", "dnf5"),
    )
).with_all_of(POWER_ASKS)
RISK = (
    f"{UNDONE}; before the restart programs that use the GPU may fail. What is held back gets no security updates "
    "until you upgrade it"
)
MOK = (
    "Secure Boot is on: a module that is built on this machine is not loaded until its key is enrolled (MOK). The "
    "installer then asks for a password, and the firmware asks for it on the screen at the next start: somebody has to "
    "sit there. Modules that the distribution has signed need none of it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevices:
    """What is on the bus."""

    num_gpus: int
    has_switch: bool
    """NVSwitch: no GPU works there without a fabric manager of the driver's own version."""
    has_amd: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPackages:
    """What is to be installed, and by which command if not the package manager's."""

    names: tuple[str, ...]
    argv: tuple[str, ...] = ()


def plan(view: StepView) -> StepPlan:
    """The driver where it is missing; where it is there: held back, kept loaded; and the power limit."""
    return _with_power(_driver_plan(view.reading), view)


def _driver_plan(reading: HostReading) -> StepPlan:
    bus = pci_devices(reading.output("pci"))
    packages = HostPackages("driver", reading, PACKAGES)
    why = _left_alone(reading, bus, packages)
    if why is not None:
        return StepPlan(remains=why)
    here = tuple(sorted(name for name in packages.installed if DRIVER.fullmatch(name)))
    if here:
        return _kept(reading, packages, here, bus)
    wanted = _wanted(reading, packages, bus)
    if isinstance(wanted, str):
        return StepPlan(remains=(wanted,))
    changes = [*packages.install(wanted.names, argv=wanted.argv), *_held(reading, packages, wanted.names)]
    changes += [_enabled(reading, FABRIC)] if bus.has_switch else []
    return StepPlan(
        changes=tuple(changes),
        reason=f"{bus.num_gpus} NVIDIA GPU{'s' if bus.num_gpus > 1 else ''}, and no driver",
        risk=f"{RISK}. {MOK}" if _is_secure(reading) else RISK,
        remains=(*_unheld(reading, packages), "then restart it: the new driver is loaded at the start"),
        restart=True,
    )


def _left_alone(reading: HostReading, bus: PciDevices, packages: HostPackages) -> tuple[str, ...] | None:
    """Why nothing is changed here, in words; None: something may be."""
    if "microsoft" in reading.files[KERNEL].text.lower():
        return ("the driver of WSL is that of Windows: install it there, and none here",)
    if not bus.num_gpus:
        return ("ROCm is not installed: gangline trains on NVIDIA GPUs only (E-GPU-11)",) if bus.has_amd else ()
    if reading.has("nvidia-uninstall"):
        fix = "sudo nvidia-uninstall, restart, then gangline prepare driver"
        return (f"its driver came from a runfile, which no upgrade of the kernel keeps working: {fix}",)
    if packages.manager is None:
        return (NO_MANAGER.format("the NVIDIA driver"),)
    if reading.files[LOADED].text and not any(map(DRIVER.fullmatch, packages.installed)):
        return ("a driver is loaded that none of the known packages brought: it is left alone",)
    return None


def pci_devices(text: str) -> PciDevices:
    """From lines of `path/vendor:0x10de` and `path/class:0x030000`."""
    words: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        path, _, value = line.partition("/vendor:")
        key = "vendor"
        if not value:
            path, _, value = line.partition("/class:")
            key = "class"
        words.setdefault(path, {})[key] = value.strip()
    rows = [(each.get("vendor", ""), each.get("class", "")) for each in words.values()]
    is_gpu = ("0x03", "0x12")
    return PciDevices(
        num_gpus=sum(vendor == NVIDIA and kind.startswith("0x03") for vendor, kind in rows),
        has_switch=any(vendor == NVIDIA and kind.startswith("0x0680") for vendor, kind in rows),
        has_amd=any(vendor == AMD and kind.startswith(is_gpu) for vendor, kind in rows),
    )


def _wanted(reading: HostReading, packages: HostPackages, bus: PciDevices) -> DriverPackages | str:
    """The packages of the driver; why there are none."""
    assert packages.manager is not None
    if reading.has("ubuntu-drivers"):
        return _of_ubuntu(reading, bus)
    extra = (FABRIC_PACKAGE,) if bus.has_switch else ()
    for names in SETS[packages.manager]:
        if {*names, *extra} <= packages.offered:
            return DriverPackages(names=(*names, *extra))
    what = " with its fabric manager" if bus.has_switch else ""
    return f"no repository of this host offers the driver{what}. {REPOSITORIES[packages.manager]}"


def _of_ubuntu(reading: HostReading, bus: PciDevices) -> DriverPackages | str:
    """What Ubuntu's own tool recommends; with NVSwitch its newest server driver, and the fabric manager of that."""
    if not bus.has_switch:
        found = re.search(r"driver\s*:\s*(nvidia-driver-\S+)\s.*\brecommended\b", reading.output("ubuntu"))
        if found is None:
            return "ubuntu-drivers recommends no driver: enable the component `restricted`, then sudo apt update"
        return DriverPackages(names=(found[1],), argv=("ubuntu-drivers", "install"))
    found_all = re.findall(r"nvidia-driver-(\d+)(-server(?:-open)?)\b", reading.output("gpgpu"))
    if not found_all:
        return (
            "ubuntu-drivers lists no server driver, and NVSwitch needs one: enable `restricted`, then sudo apt update"
        )
    number = max(int(number) for number, _ in found_all)
    kind = min(kind for each, kind in found_all if int(each) == number)
    return DriverPackages(names=(f"nvidia-driver-{number}{kind}", f"nvidia-fabricmanager-{number}"))


def _kept(reading: HostReading, packages: HostPackages, here: tuple[str, ...], bus: PciDevices) -> StepPlan:
    """A driver that is installed."""
    remains = [*_unheld(reading, packages)]
    if not reading.files[LOADED].text:
        remains.append(
            "the driver is installed and not loaded: restart it" + (f". {MOK}" if _is_secure(reading) else "")
        )
    fabric = tuple(sorted(name for name in packages.installed if name.startswith(FABRIC_PACKAGE)))
    if bus.has_switch and not fabric:
        numbers = re.findall(r"\d+", here[0])
        name = f"{FABRIC_PACKAGE}-{numbers[0]}" if numbers else FABRIC_PACKAGE
        remains.append(f"NVSwitch is here without its fabric manager: install {name}, of the driver's own version")
    changes = list(_held(reading, packages, (*here, *fabric)))
    if bus.has_switch and fabric and reading.output(FABRIC) == "disabled":
        changes.append(_enabled(reading, FABRIC))
    if reading.files[LOADED].text and reading.output(PERSISTENCE) == "disabled":
        changes.append(_enabled(reading, PERSISTENCE))
    return StepPlan(
        changes=tuple(changes),
        reason="an upgrade under a running system ends every use of the GPU until the next restart; a driver that is "
        "kept loaded starts programs faster"
        if changes
        else "",
        risk="what is held back gets no security updates until you upgrade it, and restart" if changes else "",
        remains=tuple(remains),
        restart=not reading.files[LOADED].text,
    )


def _with_power(kept: StepPlan, view: StepView) -> StepPlan:
    """The plan with the power limit that the user wants, once a driver is loaded."""
    if view.power_limit_w is None:
        return kept
    if not view.reading.files[LOADED].text:
        later = f"--power-limit {view.power_limit_w} counts once a driver is loaded: say it again then"
        return replace(kept, remains=(*kept.remains, later)) if kept.restart else kept
    changes, remains = power_changes(view.reading, view.power_limit_w)
    if not changes:
        return replace(kept, remains=(*kept.remains, *remains))
    return replace(
        kept,
        changes=(*kept.changes, *changes),
        reason="; ".join(filter(None, (kept.reason, f"you want its GPUs to draw {view.power_limit_w} W at most"))),
        risk="; ".join(filter(None, (kept.risk, "a GPU with less power is slower"))),
        remains=(*kept.remains, *remains),
    )


def _unheld(reading: HostReading, packages: HostPackages) -> tuple[str, ...]:
    """What is missing where nothing can be held back."""
    return (NO_LOCK,) if packages.manager == "dnf" and not _has_versionlock(reading) else ()


def _has_versionlock(reading: HostReading) -> bool:
    return reading.has("dnf5") or reading.files[VERSIONLOCK].content is not None


def _lock_words(reading: HostReading, packages: HostPackages) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """What lists locks, by its name in `ASKS`, and the commands that lock and unlock; no name where nothing does."""
    if packages.manager == "apt-get":
        return "held", ("apt-mark", "hold"), ("apt-mark", "unhold")
    if packages.manager == "zypper":
        return "locks", ("zypper", "addlock"), ("zypper", "removelock")
    if _has_versionlock(reading):
        return "versionlock", ("dnf", "versionlock", "add"), ("dnf", "versionlock", "delete")
    return "", (), ()


def _held(reading: HostReading, packages: HostPackages, names: tuple[str, ...]) -> tuple[CommandChange, ...]:
    """Packages that no upgrade takes along by itself."""
    held, hold, back = _lock_words(reading, packages)
    if not held:
        return ()
    text = reading.output(held)
    free = tuple(name for name in names if not re.search(rf"(?m)(^|[\s|]){re.escape(name)}($|[\s|]|-\d+:)", text))
    if not free:
        return ()
    return (CommandChange(argv=(*hold, *free), undo=(*back, *free), probe=ASKS.commands[held], before=text),)


def _enabled(reading: HostReading, unit: str) -> CommandChange:
    return CommandChange(
        argv=("systemctl", "enable", unit),
        undo=("systemctl", "disable", unit),
        probe=ASKS.commands[unit],
        before=reading.output(unit),
        after="enabled",
    )


def _is_secure(reading: HostReading) -> bool:
    return (reading.files[SECURE_BOOT].content or b"")[-1:] == b"\x01"


DRIVER_STEP = PrepareStep(
    name="driver",
    summary="the NVIDIA driver by the distribution's own means; only where it is named",
    asks=ASKS,
    plan=plan,
    only_by_name=True,
)
