"""Are the packages there, new enough to be safe, the same everywhere, and made for the cards?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gangline.catalog.cuda import driver_floor, has_kernels, needed_cuda, numbers, own_driver
from gangline.checks.rules import Evidence, Finding, Look, Rule, Seen, apply, difference, each, grouped
from gangline.inventory.facts import HIGHEST, LOWEST, HostFacts, Inventory, why_not
from gangline.runs.cluster import Cluster, Host
from gangline.tested import TESTED
from gangline.units import format_bytes

NEEDED = ("gangline", "torch", "transformers", "peft", "datasets", "safetensors", "tokenizers")
"""What a rank imports."""
EQUAL = ("gangline", "torch", "transformers", "peft", "safetensors", "numpy")
"""What must be the same version on every host: ranks of different builds can disagree on layouts and rounding, and on
the order of the samples, which every rank draws for itself with numpy."""
OLDEST_PYTHON = (3, 10)
LIVING_DRIVER = (535,)
"""Older series get no corrections any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The lowest version that is safe to use."""

    package: str
    version: str
    cve: str
    meaning: str
    id: str


FLOORS = (
    Floor(
        package="torch",
        version="2.10",
        cve="CVE-2026-24747",
        meaning="older versions can run code hidden in a checkpoint even when loaded with weights_only",
        id="E-SW-02",
    ),
    Floor(
        package="transformers",
        version="5.3.0",
        cve="CVE-2026-4372",
        meaning="older versions can run code named in a model's config even with trust_remote_code off",
        id="E-SW-03",
    ),
)
"""Floors with their reason (shared facts: ux-security, finding 10)."""


def check_versions(inventory: Inventory, cluster: Cluster, *, own_worker: bool = True) -> list[Finding]:
    """Missing packages, unsafe versions, differences between hosts, and builds that the cards cannot use.

    own_worker: whether gangline's trainer will run; the user's own command needs no package of ours.
    """
    return apply((*TRAINER, *RULES) if own_worker else RULES, inventory, cluster)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cu128" -> (2, 13, 0)."""
    return numbers(version)


def _missing(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    """Our own code is brought to hosts over SSH, and found there before any other."""
    needed = [name for name in NEEDED if name != "gangline" or _is_installed_by_user(host)]
    absent = [name for name in needed if not facts.packages.get(name)]
    if facts.python_reason is None and absent:
        names = ", ".join(absent)
        yield f"{names} not among the packages of its Python {facts.python}", {"names": names}


def _is_installed_by_user(host: Host) -> bool:
    return host.transport == "local" and host.code is None


def _below(floor: Floor) -> Look:
    def look(facts: HostFacts, _host: Host) -> Iterator[str]:
        version = facts.packages.get(floor.package)
        if version is not None and release(version) < release(floor.version):
            yield f"{floor.package} {version}"

    return each(look)


def _untested(facts: HostFacts, _host: Host) -> Iterator[Evidence]:
    """A version below a floor has a finding of its own."""
    floors = {floor.package: release(floor.version) for floor in FLOORS}
    for each_package in TESTED:
        version = facts.packages.get(each_package.package)
        word = each_package.judge(version) if version else None
        if version and word and release(version) >= floors.get(each_package.package, ()):
            evidence = f"{each_package.package} {version}; tested: {each_package.lowest} to {each_package.newest}"
            requirement = f"{each_package.package}>={each_package.lowest},<={each_package.newest}"
            yield evidence, {"package": each_package.package, "word": word, "requirement": requirement}


def _old_python(facts: HostFacts, _host: Host) -> Iterator[str]:
    if facts.python and release(facts.python) < OLDEST_PYTHON:
        yield f"Python {facts.python}"


def _no_python(facts: HostFacts, host: Host) -> Iterator[str]:
    if host.python and facts.python_reason is not None:
        yield facts.python_reason


def _differing(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """The part after the + names the build; CUDA has a rule of its own."""
    ours = {host.name for host in cluster.hosts if not _is_installed_by_user(host)}
    for package in EQUAL:
        versions = {
            facts.host: version
            for facts in inventory.hosts
            if (version := facts.packages.get(package)) and not (package == "gangline" and facts.host in ours)
        }
        if len({version.partition("+")[0] for version in versions.values()}) > 1:
            groups = grouped(inventory, lambda facts, seen=versions: seen.get(facts.host))  # type: ignore[misc]
            yield from difference(groups, {"package": package})


def _all_differ_by(value: Callable[[HostFacts], str | None]) -> Look:
    return lambda inventory, _cluster: difference(grouped(inventory, value))


def _python_minor(facts: HostFacts) -> str | None:
    """Of the ranks' Python; an environment that is yet to be built takes the one that is there."""
    return ".".join(map(str, release(facts.python or facts.system.agent_python or "")[:2])) or None


def _cuda(facts: HostFacts) -> str | None:
    """What CUDA the torch on a host with cards was built for."""
    return facts.torch.cuda if facts.gpus and facts.torch else None


def _arch(facts: HostFacts) -> str | None:
    return facts.python_arch or facts.system.arch


def _nccl(facts: HostFacts) -> str | None:
    """The NCCL that torch's wheel brought along, where it will be used."""
    if not facts.gpus:
        return None
    found = [version for name, version in facts.packages.items() if name.startswith("nvidia-nccl-") and version]
    return found[0] if found else None


def _no_kernels(facts: HostFacts, _host: Host) -> Iterator[Evidence]:
    cuda = _cuda(facts)
    for gpu in facts.gpus:
        capability = gpu.compute_capability
        if cuda and capability and has_kernels(cuda, capability) is False:
            sm = "sm_" + capability.replace(".", "")
            evidence = f"torch {facts.packages.get('torch')} is built for CUDA {cuda}; {gpu.name} is {sm}"
            yield evidence, {"sm": sm, "cuda": needed_cuda(capability) or "a CUDA that knows it"}


def _driver_too_old(facts: HostFacts, _host: Host) -> Iterator[str]:
    cuda, driver = _cuda(facts), facts.gpu_driver.version
    floor = driver_floor(cuda) if cuda else None
    if cuda and driver and floor and numbers(driver) < numbers(floor) and not _has_compatibility(facts):
        yield f"driver {driver}; torch is built for CUDA {cuda}, which needs {floor}"


def _driver_limits(facts: HostFacts, _host: Host) -> Iterator[str]:
    cuda, driver = _cuda(facts), facts.gpu_driver.version
    if not cuda or not driver or numbers(driver) < numbers(driver_floor(cuda) or ""):
        return
    own = own_driver(cuda)
    if own and numbers(driver) < numbers(own) and numbers(driver) < LIVING_DRIVER:
        yield f"driver {driver}; torch is built for CUDA {cuda}, which came with {own}"


def _has_compatibility(facts: HostFacts) -> bool:
    """NVIDIA's compatibility libraries let data-centre cards run a newer CUDA on an older driver."""
    return any(row.name == "LD_LIBRARY_PATH" and "compat" in (row.value or "") for row in facts.variables)


def _cpu_torch(among_others: bool) -> Look:
    """Whether others can use their cards makes the difference between slow and impossible."""

    def look(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
        others = any(_cuda(facts) for facts in inventory.hosts)
        for facts in inventory.hosts:
            build = facts.torch
            if facts.gpus and build and build.cuda is None and build.hip is None and others == among_others:
                card = facts.gpus[0].name
                yield Seen(hosts=(facts.host,), evidence=f"torch {facts.packages.get('torch')} beside {card}")

    return look


TRAINER = (
    Rule(
        id="E-SW-01",
        severity="fail",
        title="{names} not installed",
        meaning="no rank can start there",
        fix="in that environment: pip install 'gangline[train]'",
        look=each(_missing),
    ),
    *(
        Rule(
            id=floor.id,
            severity="fail",
            title=f"{floor.package} is older than {floor.version} ({floor.cve})",
            meaning=floor.meaning,
            fix=f"in that environment: pip install -U '{floor.package}>={floor.version}'",
            look=_below(floor),
        )
        for floor in FLOORS
    ),
    Rule(
        id="E-SW-11",
        severity="fail",
        title="the Python of its environment is older than 3.10",
        meaning="gangline's trainer does not run there",
        fix="set `python` of this host to a newer one, or `environment` to one that gangline builds",
        look=each(_old_python),
    ),
    Rule(
        id="E-SW-15",
        severity="warn",
        title="{package} is {word} than the versions that gangline is tested with",
        meaning="it may run as well; where it has changed a name or a format, a rank stops and names it",
        fix="in that environment: pip install '{requirement}'; or go on, and try a short run first",
        look=each(_untested),
    ),
)
"""What only gangline's own trainer asks for."""
CPU_BUILD_FIX = "in that environment: pip install torch --index-url https://download.pytorch.org/whl/cu128"
RULES = (
    Rule(
        id="E-SW-04",
        severity="fail",
        title="different versions of {package}",
        meaning="ranks of different versions may disagree on numbers or on the layout of messages",
        fix="install one version of {package} on all hosts",
        look=_differing,
    ),
    Rule(
        id="E-SW-05",
        severity="warn",
        title="different versions of Python",
        meaning="the same lock file gives other packages there, and pickled objects may not be readable",
        fix="use one version everywhere: install it, or name it as `python`; "
        "an environment that gangline builds takes, of those that a host has, the one that most hosts have",
        look=_all_differ_by(_python_minor),
    ),
    Rule(
        id="E-SW-06",
        severity="fail",
        title="torch has no kernels for {sm}",
        meaning="the first operation on that card ends with `no kernel image is available`",
        fix="install a torch that is built for CUDA {cuda} or newer, on all hosts",
        look=each(_no_kernels),
    ),
    Rule(
        id="E-SW-07",
        severity="fail",
        title="the driver is too old for torch's CUDA",
        meaning="torch does not see the cards",
        fix="install a newer driver there, or a torch that is built for an older CUDA on all hosts",
        look=each(_driver_too_old),
    ),
    Rule(
        id="E-SW-07",
        severity="warn",
        title="the driver is old for torch's CUDA",
        meaning="it runs by minor version compatibility only: what the driver does not know fails while it runs",
        fix="install a newer driver there",
        look=each(_driver_limits),
    ),
    Rule(
        id="E-SW-08",
        severity="fail",
        title="different versions of NCCL",
        meaning="NCCL refuses to start: `Mismatched NCCL version detected`",
        fix="install one torch on all hosts: NCCL comes with it",
        look=_all_differ_by(_nccl),
    ),
    Rule(
        id="E-SW-09",
        severity="warn",
        title="torch is built for different versions of CUDA",
        meaning="kernels differ, so ranks round differently; NCCL may differ, too",
        fix="install one build of torch on all hosts, of a CUDA that every card and driver can use",
        look=_all_differ_by(_cuda),
    ),
    Rule(
        id="E-SW-10",
        severity="fail",
        title="a torch without CUDA beside a GPU",
        meaning="its ranks run on the CPU, and cannot talk with those on the GPUs of the other hosts",
        fix=CPU_BUILD_FIX,
        look=_cpu_torch(among_others=True),
    ),
    Rule(
        id="E-SW-10",
        severity="warn",
        title="a torch without CUDA beside a GPU",
        meaning="training runs on the CPU, many times slower than on the card",
        fix=CPU_BUILD_FIX,
        look=_cpu_torch(among_others=False),
    ),
    Rule(
        id="E-SW-12",
        severity="warn",
        title="different kinds of processors",
        meaning="they have other packages and round differently; NCCL between them is not tested by anybody",
        fix="train on hosts of one kind",
        look=_all_differ_by(_arch),
    ),
    Rule(
        id="E-SW-13",
        severity="fail",
        title="the Python of its environment does not run",
        meaning="no rank can start there",
        fix="set `python` or `environment` of this host to one that runs: try the words above there",
        look=each(_no_python),
    ),
)
"""What every command asks for."""


# Can the environment that gangline builds from a lock be built on this host?


CPU_BYTES = 700_000_000
"""torch 2.13.0+cpu alone, unpacked."""
CPU_WHEEL_BYTES = 192_000_000
"""The same, packed."""
GPU_BYTES = 2_500_000_000
"""torch with what it needs of CUDA, rather less than it takes: packed, torch 2.11.0 for CUDA 13 has 2.7 GB by the sizes
that pip tells (torch 531 MB, cublas 423, cudnn 366, cufft 214, cusolver 201, nccl 197, triton 188, the rest 587)."""


def check_pythons(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """A Python that the environment can be built with."""
    return apply((NO_PYTHON,), inventory, cluster)


def check_room(inventory: Inventory, cluster: Cluster) -> list[Finding]:
    """Room for the environment, if it is not there yet."""
    return apply((NO_ROOM,), inventory, cluster)


def _building_no_python(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    building = facts.building
    if building is None or building.error is not None:
        return
    own_lock = host.environment.path is None
    reasons = {python.path: why_not(python, own_lock=own_lock) for python in building.pythons}
    if None not in reasons.values():
        found = "; ".join(f"{path} ({why})" for path, why in reasons.items())
        low, high = (".".join(map(str, version)) for version in (LOWEST, HIGHEST))
        yield (
            f"found {found or 'none'}",
            {
                "fit": f"CPython {low} to {high}" if own_lock else f"CPython {low} or newer",
            },
        )


def _no_room(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    building = facts.building
    if building is None or building.free_bytes is None or building.torch is None:
        return
    if building.is_built(has_gpu=bool(facts.gpus)):
        return
    needed = _least_bytes(facts, building.torch, carried=host.transport != "local")
    if building.free_bytes < needed:
        yield (
            f"{format_bytes(building.free_bytes)} free in {facts.workdir}",
            {"needed": format_bytes(needed), "torch": building.torch},
        )


def _least_bytes(facts: HostFacts, torch: str, *, carried: bool) -> int:
    """What torch takes at the very least. carried: its wheels are brought there, too.

    Only for x86_64 has every version a build for CUDA, and nobody gets one whose lock names a build for the CPU.
    """
    if facts.gpus and facts.system.arch == "x86_64" and not torch.endswith("+cpu"):
        return GPU_BYTES * (2 if carried else 1)
    return CPU_BYTES + (CPU_WHEEL_BYTES if carried else 0)


NO_PYTHON = Rule(
    id="E-SW-14",
    severity="fail",
    title="no Python to build its environment with",
    meaning="no rank can start there: it takes {fit}",
    fix="there: install Python 3.12; or name an environment of your own in the cluster file",
    look=each(_building_no_python),
)
NO_ROOM = Rule(
    id="E-DISK-13",
    severity="fail",
    title="no room for its environment",
    meaning="it cannot be built: torch {torch} alone takes {needed} for a while, the other packages come on top",
    fix="free some space there, or set `workdir` of this host to a larger disk",
    look=each(_no_room),
)
