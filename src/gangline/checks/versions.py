"""Are the packages there, new enough to be safe, the same everywhere, and made for the cards?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.catalog.cuda import driver_floor, has_kernels, needed_cuda, numbers, own_driver
from gangline.checks.rules import Adder, Evidence, Rule, Seen, adders, difference, differing_by, grouped
from gangline.inventory.facts import HIGHEST, LOWEST, HostFacts, Inventory, why_not
from gangline.runs.cluster import Cluster, Host
from gangline.runs.training_environment import runs_gangline
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


FLOORS = {"torch": "2.10", "transformers": "5.3.0"}
"""The lowest version of a package that is safe to use (shared facts: ux-security, finding 10)."""
CPU_BUILD_FIX = "in that environment: pip install torch --index-url https://download.pytorch.org/whl/cu128"

TRAINER: list[Rule] = []
"""Rules for gangline's own trainer; the user's own command needs no package of ours."""
trainer, _ = adders(TRAINER)
OWN_PROGRAM: list[Rule] = []
"""Rules for the user's own command alone."""
own_program, _ = adders(OWN_PROGRAM)
RULES: list[Rule] = []
"""Rules for every command."""
each_host, whole_cluster = adders(RULES)
same_everywhere = Adder(RULES, differing_by)
"""Rules for a value that should be the same on all hosts; the function says the value of one host."""


@trainer.fail(
    "E-SW-01",
    title="{names} not installed",
    meaning="no rank can start there",
    fix="on this computer: gangline setup (or name other hosts: gangline init HOST ...); on another one: "
    "`environment: locked` in cluster.yaml; or in that environment: pip install 'gangline[train]'",
)
def _missing(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    """Our own code is brought to hosts over SSH, and found there before any other."""
    needed = [name for name in NEEDED if name != "gangline" or _is_installed_by_user(host)]
    absent = [name for name in needed if not facts.packages.get(name)]
    if facts.python_reason is None and absent:
        names = ", ".join(absent)
        yield f"{names} not among the packages of its Python {facts.python}", {"names": names}


def _is_installed_by_user(host: Host) -> bool:
    return host.code is None and runs_gangline(host)


@own_program.fail(
    "E-SW-16",
    title="torch is not installed",
    meaning="torchrun, which starts the ranks of your command, is part of torch",
    fix="name a Python that has torch: `python: PATH` of this host in cluster.yaml; or let gangline build one: "
    "`gangline setup` on this computer, `environment: locked` on another one",
)
def _no_torchrun(facts: HostFacts, _host: Host) -> Iterator[str]:
    if facts.packages and not facts.packages.get("torch"):
        yield f"torch not among the packages of its Python {facts.python}"


@trainer.fail(
    "E-SW-02",
    title="torch is older than 2.10 (CVE-2026-24747)",
    meaning="older versions can run code hidden in a checkpoint even when loaded with weights_only",
    fix="in that environment: pip install -U 'torch>=2.10'",
)
def _unsafe_torch(facts: HostFacts, _host: Host) -> Iterator[str]:
    return _below_floor("torch", facts)


@trainer.fail(
    "E-SW-03",
    title="transformers is older than 5.3.0 (CVE-2026-4372)",
    meaning="older versions can run code named in a model's config even with trust_remote_code off",
    fix="in that environment: pip install -U 'transformers>=5.3.0'",
)
def _unsafe_transformers(facts: HostFacts, _host: Host) -> Iterator[str]:
    return _below_floor("transformers", facts)


def _below_floor(package: str, facts: HostFacts) -> Iterator[str]:
    version = facts.packages.get(package)
    if version is not None and numbers(version) < numbers(FLOORS[package]):
        yield f"{package} {version}"


@trainer.warn(
    "E-SW-15",
    title="{package} is {older_or_newer} than the versions that gangline is tested with",
    meaning="it may run as well; where it has changed a name or a format, a rank stops and names it",
    fix="in that environment: pip install '{requirement}'; or go on, and try a short run first",
)
def _untested(facts: HostFacts, _host: Host) -> Iterator[Evidence]:
    """A version below a floor has a finding of its own."""
    for tested in TESTED:
        version = facts.packages.get(tested.package)
        word = tested.judge(version) if version else None
        if version and word and numbers(version) >= numbers(FLOORS.get(tested.package, "")):
            evidence = f"{tested.package} {version}; tested: {tested.lowest} to {tested.newest}"
            requirement = f"{tested.package}>={tested.lowest},<={tested.newest}"
            yield evidence, {"package": tested.package, "older_or_newer": word, "requirement": requirement}


@trainer.fail(
    "E-SW-11",
    title="the Python of its environment is older than 3.10",
    meaning="gangline's trainer does not run there",
    fix="set `python` of this host to a newer one, or `environment` to one that gangline builds",
)
def _old_python(facts: HostFacts, _host: Host) -> Iterator[str]:
    if facts.python and numbers(facts.python) < OLDEST_PYTHON:
        yield f"Python {facts.python}"


@each_host.fail(
    "E-SW-13",
    title="the Python of its environment does not run",
    meaning="no rank can start there",
    fix="set `python` or `environment` of this host to one that runs: try the words above there",
)
def _no_python(facts: HostFacts, host: Host) -> Iterator[str]:
    if host.python and facts.python_reason is not None:
        yield facts.python_reason


@whole_cluster.fail(
    "E-SW-04",
    title="different versions of {package}",
    meaning="ranks of different versions may disagree on numbers or on the layout of messages",
    fix="install one version of {package} on all hosts",
)
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


@same_everywhere.warn(
    "E-SW-05",
    title="different versions of Python",
    meaning="the same lock file gives other packages there, and pickled objects may not be readable",
    fix="use one version everywhere: install it, or name it as `python`; "
    "an environment that gangline builds takes, of those that a host has, the one that most hosts have",
)
def _python_minor(facts: HostFacts) -> str | None:
    """Of the ranks' Python; an environment that is yet to be built takes the one that is there."""
    return ".".join(map(str, numbers(facts.python or facts.system.agent_python or "")[:2])) or None


@same_everywhere.warn(
    "E-SW-09",
    title="torch is built for different versions of CUDA",
    meaning="kernels differ, so ranks round differently; NCCL may differ, too",
    fix="install one build of torch on all hosts, of a CUDA that every card and driver can use",
)
def _cuda(facts: HostFacts) -> str | None:
    """What CUDA the torch on a host with cards was built for."""
    return facts.torch.cuda if facts.gpus and facts.torch else None


@same_everywhere.warn(
    "E-SW-12",
    title="different kinds of processors",
    meaning="they have other packages and round differently; NCCL between them is untested",
    fix="train on hosts of one kind",
)
def _arch(facts: HostFacts) -> str | None:
    return facts.python_arch or facts.system.arch


@same_everywhere.fail(
    "E-SW-08",
    title="different versions of NCCL",
    meaning="NCCL refuses to start: `Mismatched NCCL version detected`",
    fix="install one torch on all hosts: NCCL comes with it",
)
def _nccl(facts: HostFacts) -> str | None:
    """The NCCL that torch's wheel brought along, where it will be used."""
    if not facts.gpus:
        return None
    found = [version for name, version in facts.packages.items() if name.startswith("nvidia-nccl-") and version]
    return found[0] if found else None


@each_host.fail(
    "E-SW-06",
    title="torch has no kernels for {architecture}",
    meaning="the first operation on that card ends with `no kernel image is available`",
    fix="install a torch that is built for CUDA {version} or newer, on all hosts",
)
def _no_kernels(facts: HostFacts, _host: Host) -> Iterator[Evidence]:
    cuda = _cuda(facts)
    for gpu in facts.gpus:
        capability = gpu.compute_capability
        if cuda and capability and has_kernels(cuda, capability) is False:
            sm = "sm_" + capability.replace(".", "")
            evidence = f"torch {facts.packages.get('torch')} is built for CUDA {cuda}; {gpu.name} is {sm}"
            yield evidence, {"architecture": sm, "version": needed_cuda(capability) or "a CUDA that knows it"}


@each_host.fail(
    "E-SW-07",
    title="the driver is too old for torch's CUDA",
    meaning="torch does not see the cards",
    fix="install a newer driver there, or a torch that is built for an older CUDA on all hosts",
)
def _driver_too_old(facts: HostFacts, _host: Host) -> Iterator[str]:
    cuda, driver = _cuda(facts), facts.gpu_driver.version
    floor = driver_floor(cuda) if cuda else None
    if cuda and driver and floor and numbers(driver) < numbers(floor) and not _has_compatibility(facts):
        yield f"driver {driver}; torch is built for CUDA {cuda}, which needs {floor}"


@each_host.warn(
    "E-SW-07",
    title="the driver is old for torch's CUDA",
    meaning="it runs by minor version compatibility only: what the driver does not know fails while it runs",
    fix="install a newer driver there",
)
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


@whole_cluster.fail(
    "E-SW-10",
    title="a torch without CUDA beside a GPU",
    meaning="its ranks run on the CPU, and cannot talk with those on the GPUs of the other hosts",
    fix=CPU_BUILD_FIX,
)
def _cpu_torch_among_others(inventory: Inventory, _cluster: Cluster) -> list[Seen]:
    return _cpu_torch(inventory) if any(map(_cuda, inventory.hosts)) else []


@whole_cluster.warn(
    "E-SW-10",
    title="a torch without CUDA beside a GPU",
    meaning="training runs on the CPU, many times slower than on the card",
    fix=CPU_BUILD_FIX,
)
def _cpu_torch_alone(inventory: Inventory, _cluster: Cluster) -> list[Seen]:
    return [] if any(map(_cuda, inventory.hosts)) else _cpu_torch(inventory)


def _cpu_torch(inventory: Inventory) -> list[Seen]:
    return [
        Seen(hosts=(facts.host,), evidence=f"torch {facts.packages.get('torch')} beside {facts.gpus[0].name}")
        for facts in inventory.hosts
        if facts.gpus and facts.torch and facts.torch.cuda is None and facts.torch.hip is None
    ]


# Can the environment that gangline builds from a lock be built on this host?


CPU_BYTES = 700_000_000
"""torch 2.13.0+cpu alone, unpacked."""
CPU_WHEEL_BYTES = 192_000_000
"""The same, packed."""
GPU_BYTES = 2_500_000_000
"""torch with what it needs of CUDA, rather less than it takes: packed, torch 2.11.0 for CUDA 13 has 2.7 GB by the sizes
that pip tells (torch 531 MB, cublas 423, cudnn 366, cufft 214, cusolver 201, nccl 197, triton 188, the rest 587)."""


@each_host.fail(
    "E-SW-14",
    title="no Python to build its environment with",
    meaning="no rank can start there: it takes {python_versions}",
    fix="there: install Python 3.12; or name an environment of your own in the cluster file",
    step="python",
)
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
                "python_versions": f"CPython {low} to {high}" if own_lock else f"CPython {low} or newer",
            },
        )


@each_host.fail(
    "E-DISK-13",
    title="no room for its environment",
    meaning="it cannot be built: torch {torch} alone takes {needed} for a while, the other packages come on top",
    fix="free some space there, or set `workdir` of this host to a larger disk",
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
