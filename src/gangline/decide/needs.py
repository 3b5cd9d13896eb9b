"""What a job needs beyond the packages of every job: a package of its strategy, of a kernel, of an exporter, and a key.

Where gangline builds the environment from its own lock, it adds the package. Everywhere else a start without is refused
before anything is changed, and the plan says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gangline.context import Context
from gangline.errors import GanglineError, UsageError
from gangline.exporters import EXPORTERS, Secret
from gangline.inventory.facts import Inventory
from gangline.kernel_table import KERNELS
from gangline.provision.requirements import ADDED, lock_of
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import Job
from gangline.strategies.base import AUTO
from gangline.strategies.table import plan_half
from gangline.transport.transport import read_if_there

NETRC_BYTES = 1 << 16
_EXTRAS = {"deepspeed": "deepspeed", "wandb": "wandb", "mlflow-skinny": "mlflow", "trackio": "trackio"}
"""Packages that an extra of gangline brings -> the extra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededPackage:
    """A package that a job needs."""

    package: str
    why: str
    """The key of the job that asks for it, with its value."""
    otherwise: str
    """What to write where the package cannot be had."""
    head_only: bool = False

    def hosts(self, cluster: Cluster) -> Sequence[Host]:
        """Where it is needed."""
        return cluster.hosts[:1] if self.head_only else cluster.hosts


def needs_of(job: Job, *, strategy: str | None = None) -> tuple[NeededPackage, ...]:
    """What a job needs. strategy: the one of the plan, where the job leaves it open."""
    return tuple(_needs(job, strategy or job.strategy.kind))


def _needs(job: Job, strategy: str) -> Iterator[NeededPackage]:
    if strategy != AUTO and (package := plan_half(strategy).capabilities.package):
        yield NeededPackage(package=package, why=f"strategy: {strategy}", otherwise="strategy: fsdp")
    if job.method.kind == "qlora":
        yield NeededPackage(package="bitsandbytes", why="method: qlora", otherwise="method: lora")
    if job.optimizer.kind.endswith("8bit"):
        yield NeededPackage(
            package="bitsandbytes", why=f"optimizer: {job.optimizer.kind}", otherwise="optimizer: adamw"
        )
    if job.model.attention == "flash_attention_2":
        yield NeededPackage(
            package="flash-attn", why="model.attention: flash_attention_2", otherwise="model.attention: sdpa"
        )
    for name in named_kernels(job):
        if package := KERNELS[name].package:
            yield NeededPackage(package=package, why=f"kernels: {name}", otherwise="kernels: auto")
    for name in job.report.exporters:
        if package := EXPORTERS[name].package:
            yield NeededPackage(package=package, why=f"report.{name}", otherwise=f"report.{name}: none", head_only=True)


def with_packages(cluster: Cluster, job: Job) -> Cluster:
    """The cluster whose environments get what the job needs, where gangline builds them from its own lock."""
    return dataclasses.replace(cluster, hosts=tuple(_with_packages(host, cluster, job) for host in cluster.hosts))


def _with_packages(host: Host, cluster: Cluster, job: Job) -> Host:
    if host.environment.kind != "locked" or host.environment.path is not None:
        return host
    pinned = {pin.name for pin in lock_of(dataclasses.replace(host.environment, packages=())).pins}
    wanted = {need.package for need in needs_of(job) if host in need.hosts(cluster)} - pinned
    added = tuple(f"{name}=={ADDED[name]}" for name in sorted(wanted) if name in ADDED)
    return dataclasses.replace(host, environment=dataclasses.replace(host.environment, packages=added))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job needs on a cluster, and what of it is missing."""

    lines: tuple[str, ...] = ()
    """For the plan: what comes with an environment that gangline builds."""
    missing: tuple[UsageError, ...] = ()

    def require(self) -> None:
        """Raise one UsageError that names all that is missing."""
        if self.missing:
            raise UsageError(
                "\n".join(error.what for error in self.missing),
                seen="\n        ".join(dict.fromkeys(error.seen for error in self.missing)),
                fix="\n        ".join(dict.fromkeys(error.fix for error in self.missing)),
            )


def find_needs(job: Job, strategy: str, cluster: Cluster, inventory: Inventory, context: Context) -> Needs:
    """What a job with the strategy of its plan needs on these hosts."""
    needs = needs_of(job, strategy=strategy)
    lines: list[str] = []
    missing: list[UsageError] = []
    for need in needs:
        added = [
            host.name
            for host in need.hosts(cluster)
            if any(text.partition("==")[0] == need.package for text in host.environment.packages)
        ]
        if added:
            lines.append(f"needs      {need.package} ({need.why}): comes with the environment on {' '.join(added)}")
        missing += _without(need, cluster, inventory)
    missing += _without_gpu(job, cluster, inventory)
    missing += _by_module(job, strategy)
    secrets = {name: EXPORTERS[name].secret for name in job.report.exporters}
    missing += [
        _no_key(name, secret, cluster.head)
        for name, secret in secrets.items()
        if secret is not None and not _has_key(secret, cluster.head, context)
    ]
    return Needs(lines=tuple(lines), missing=tuple(missing))


def named_kernels(job: Job) -> tuple[str, ...]:
    """The kernels that a job may not do without."""
    return tuple(name for name in job.kernels if name in KERNELS)


def _without_gpu(job: Job, cluster: Cluster, inventory: Inventory) -> Iterator[UsageError]:
    """One error for each kernel that a job names and that hosts without a GPU cannot have."""
    known = {host.name: inventory.of(host.name) for host in cluster.hosts}
    bare = {
        name: facts.gpu_reason or "it shows none"
        for name, facts in known.items()
        if facts is not None and not facts.gpus and not facts.other_gpus
    }
    for name in named_kernels(job):
        if KERNELS[name].on_gpu and bare:
            yield UsageError(
                f"kernels: {name} needs a GPU, which {' '.join(bare)} would not have",
                seen="; ".join(f"{host}: {reason}" for host, reason in bare.items()),
                fix="write kernels: auto, which takes what works",
            )


def _by_module(job: Job, strategy: str) -> Iterator[UsageError]:
    """An error where the kernel `lora` is named, which reads weights that the plan's strategy does not show it."""
    if "lora" in named_kernels(job) and plan_half(strategy).capabilities.weights_by_module:
        yield UsageError(
            f"kernels: lora does not work with strategy: {strategy}",
            seen="it needs weights that stay while a layer runs; there each is whole while its own module runs",
            fix="write kernels: auto, which takes what works, or strategy: fsdp",
        )


def _without(need: NeededPackage, cluster: Cluster, inventory: Inventory) -> Iterator[UsageError]:
    """One error for hosts with a lock of gangline or the user, one for hosts with environments that are there."""
    built = [host for host in need.hosts(cluster) if host.environment.kind == "locked"]
    locked = [host for host in built if not any(pin.name == need.package for pin in lock_of(host.environment).pins)]
    bare = [
        host
        for host in need.hosts(cluster)
        if host.environment.kind != "locked" and not _has(host, inventory, need.package)
    ]
    if own := [host.name for host in locked if host.environment.path is None]:
        yield _lack(
            need,
            own,
            seen="their environment is built from wheels alone, and there is no wheel of it for every host",
            fix=f"name an environment of your own that has it in cluster.yaml, or write {need.otherwise}",
        )
    if theirs := [host.name for host in locked if host.environment.path is not None]:
        version = f"=={ADDED[need.package]}" if need.package in ADDED else " with its version"
        yield _lack(
            need,
            theirs,
            seen="their environment is built from a lock of yours without it",
            fix=f"add {need.package}{version} to that lock, or write {need.otherwise}",
        )
    if bare:
        extra = _EXTRAS.get(need.package)
        words = f"'gangline[{extra}]'" if extra else need.package
        yield _lack(
            need,
            [host.name for host in bare],
            seen="it is not among the packages of their Python",
            fix=f"pip install {words} into it on each, or write {need.otherwise}",
        )


def _lack(need: NeededPackage, names: Sequence[str], *, seen: str, fix: str) -> UsageError:
    what = f"{need.why} needs {need.package}, which {' '.join(names)} would not have"
    return UsageError(what, seen=f"{' '.join(names)}: {seen}", fix=fix)


def _has(host: Host, inventory: Inventory, package: str) -> bool:
    facts = inventory.of(host.name)
    # the packages of a Python that did not answer are unknown, as those that an older agent does not ask for
    unknown = facts is None or facts.python_reason is not None or package not in facts.packages
    return unknown or bool(facts is not None and facts.packages[package])


def _has_key(secret: Secret, head: Host, context: Context) -> bool:
    shell = context.deps.variables
    seen = {**(shell if head.transport == "local" else {}), **head.env}
    if shell.get(secret.variable) or seen.get(secret.variable):
        return True
    if any(seen.get(name) == value for name, _, value in (setting.partition("=") for setting in secret.off)):
        return True
    transport = context.transports.get(head.name)
    if not secret.netrc or transport is None:
        return False
    try:
        netrc = read_if_there(transport, transport.home() / ".netrc", limit=NETRC_BYTES)
    except (GanglineError, OSError):
        return False
    return netrc is not None and secret.netrc.encode() in netrc


def _no_key(name: str, secret: Secret, head: Host) -> UsageError:
    also = f", nor {secret.netrc} in ~/.netrc of {head.name}" if secret.netrc else ""
    return UsageError(
        f"report.{name} needs a key",
        seen=f"{secret.variable} is not set in this shell{also}",
        fix=f"{secret.how}; or set {secret.off[0]} in `env` of {head.name}; or write report.{name}: none"
        if secret.off
        else f"{secret.how}; or write report.{name}: none",
    )
