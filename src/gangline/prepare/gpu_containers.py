"""Step `container`: GPUs in containers of podman and docker (CDI), and apptainer where a host trains in an image."""

from __future__ import annotations

import re

from gangline.prepare.host_packages import NO_MANAGER, UNDONE, HostPackages, package_asks
from gangline.prepare.prepare_step import Asks, Change, CommandChange, PrepareStep, StepPlan, StepView

TOOLKIT = "nvidia-container-toolkit"
LOADED = "/proc/driver/nvidia/version"
SPECIFICATION = "/etc/cdi/nvidia.yaml"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
PACKAGES = package_asks("container", offered=(TOOLKIT, "apptainer"), patterns=(TOOLKIT, "apptainer"))
ASKS = PACKAGES.with_all_of(
    Asks(
        files=(LOADED,),
        folders=CDI_FOLDERS,
        commands={"docker": ("docker", "--version")},
        programs=("podman", "docker", "apptainer", "singularity", "nvidia-ctk"),
    )
)
DOCKER_WITH_CDI = (28, 2)
"""From this version on docker reads CDI by itself."""


def plan(view: StepView) -> StepPlan:
    """What this host needs so that its containers see the GPUs."""
    reading = view.reading
    packages = HostPackages("container", reading, PACKAGES)
    changes: list[Change] = []
    remains: list[str] = []
    wanted = []
    if view.host.environment.kind == "apptainer" and not (reading.has("apptainer") or reading.has("singularity")):
        wanted.append("apptainer")
    engines = [name for name in ("podman", "docker") if reading.has(name)]
    has_specification = any("nvidia.yaml" in (reading.folders[folder] or ()) for folder in CDI_FOLDERS)
    makes_one = bool(engines and reading.files[LOADED].text and not has_specification)
    if makes_one and not reading.has("nvidia-ctk"):
        wanted.append(TOOLKIT)
    missing = [name for name in wanted if name not in packages.offered]
    if wanted and packages.manager is None:
        return StepPlan(remains=(NO_MANAGER.format(" and ".join(wanted)),))
    remains += [f"no repository of this host offers {name}: {_SOURCES[name]}" for name in missing]
    names = [name for name in wanted if name not in missing]
    changes += packages.install(names) if names else ()
    if makes_one and TOOLKIT not in missing:
        changes.append(
            CommandChange(
                argv=("nvidia-ctk", "cdi", "generate", f"--output={SPECIFICATION}"),
                undo=("rm", "-f", SPECIFICATION),
                probe=("ls", SPECIFICATION),
                after=SPECIFICATION,
            )
        )
    if "docker" in engines and (version := re.search(r"(\d+)\.(\d+)", reading.output("docker"))) is not None:
        number = (int(version[1]), int(version[2]))
        if reading.files[LOADED].text and number < DOCKER_WITH_CDI:
            remains.append(
                'docker before 28.2 reads CDI only with {"features": {"cdi": true}} in /etc/docker/daemon.json'
            )
    return StepPlan(
        changes=tuple(changes),
        reason=f"{' and '.join(engines) or 'the image'} cannot use the GPU yet" if changes else "",
        risk=f"{UNDONE}; the list of GPUs is that of the loaded driver: after an upgrade, nvidia-ctk makes it anew"
        if changes
        else "",
        remains=tuple(remains),
    )


_SOURCES = {
    TOOLKIT: "add NVIDIA's repository of the container toolkit for this distribution",
    "apptainer": "Fedora and EPEL have it; for Ubuntu and Debian, packages of the apptainer project",
}

CONTAINER = PrepareStep(
    name="container",
    summary="GPUs in containers of podman and docker, apptainer for hosts that train in an image",
    asks=ASKS,
    plan=plan,
    only_by_name=True,
)
