"""A lock: every package of an environment with its version, as a requirements file; which of them a host needs."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import UsageError
from gangline.provision.console import shown
from gangline.runs.cluster import Environment
from gangline.tested import BY_NAME
from gangline.transport.fanout import once

if TYPE_CHECKING:  # importing packaging takes 40 ms, and most commands read no lock
    from packaging.requirements import Requirement

_OPTION = re.compile(
    r"(--index-url|--extra-index-url|--find-links|--trusted-host|-i|-f)([=\s]\s*)(\S+)|--no-index|--pre|--prefer-binary"
)
_CONDA = re.compile(r"^(?:@EXPLICIT|channels:|dependencies:)\s*$|^\s{0,4}(?:- )?manager:\s*conda\s*$", re.MULTILINE)
"""Of an explicit list, an environment.yml, a conda-lock.yml."""
_HASH = re.compile(r"\s--hash[=\s]\s*([a-z0-9]+:[0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package with its version."""

    requirement: Requirement
    hashes: tuple[str, ...] = ()
    """What the wheel may be, such as "sha256:...": pip refuses others. If one package has some, all need them."""

    @property
    def name(self) -> str:
        """Its normalised name: small letters, dashes."""
        from packaging.utils import canonicalize_name

        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """Its version, with the local part if the lock names one."""
        return next(iter(self.requirement.specifier)).version

    @property
    def line(self) -> str:
        """The requirement without its marker."""
        return self.at(self.version)

    def at(self, version: str) -> str:
        """The line of another version."""
        extras = f"[{','.join(sorted(self.requirement.extras))}]" if self.requirement.extras else ""
        return f"{self.name}{extras}=={version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """All packages, and where pip is told to look for them."""

    pins: tuple[Pin, ...]
    options: tuple[str, ...] = ()
    """Lines such as `--extra-index-url ...`, for pip on this computer; hosts do not see them."""

    @property
    def hash(self) -> str:
        """Of the pins and their hashes: the same packages are the same environment, wherever they come from."""
        rows = sorted(
            " ".join([f"{pin.line};{pin.requirement.marker or ''}", *sorted(pin.hashes)]) for pin in self.pins
        )
        return hashlib.blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()

    def pins_for(self, version: tuple[int, ...], machine: str) -> tuple[Pin, ...]:
        """What CPython of this version needs on a Linux host."""
        environment = linux_environment(version, machine)
        markers = ((pin, pin.requirement.marker) for pin in self.pins)
        return tuple(pin for pin, marker in markers if marker is None or marker.evaluate(environment))


ADDED: Mapping[str, str] = {
    "deepspeed": BY_NAME["deepspeed"].newest,
    "wandb": "0.31.0",
    "mlflow-skinny": "3.17.2",
    "trackio": "0.43.0",
}
"""Packages that gangline adds to its own lock where a job needs them -> their version. pip finds what they need in
turn, within the lock."""
SOURCE_ALONE = frozenset({"deepspeed"})
"""They come as source alone: pip on this computer makes their wheel."""


def lock_of(environment: Environment) -> Lock:
    """The lock of an environment that gangline builds, with what the job needs besides. Raises UsageError."""
    lock = load_lock(environment.path)
    return dataclasses.replace(lock, pins=(*lock.pins, *map(pin_of, environment.packages)))


@once
def own_lock() -> Lock:
    """The lock that comes with gangline: what its constraints pin of gangline[train]."""
    text = importlib.resources.files("gangline").joinpath("provision/lock.txt").read_text(encoding="utf-8")
    return read_lock(text, "gangline's own lock")


def load_lock(path: str | None) -> Lock:
    """The lock of a file on this computer; None: gangline's own. Raises UsageError."""
    if path is None:
        return own_lock()
    try:
        return read_lock(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the lock {shown(path)} cannot be read", seen=str(error), fix="name a requirements file"
        ) from error


def read_lock(text: str, name: str) -> Lock:
    """A requirements file in which every package has its version; raises UsageError naming every line that is not so.

    What `pip freeze`, `pip-compile` and `uv pip compile` write is understood, with hashes or without.
    """
    if _CONDA.search(text):
        raise UsageError(
            f"{shown(name)} is a file of conda, and gangline creates no conda environment",
            seen="expected a requirements file, in which every package has its version: torch==2.13.0",
            fix="create it on every host, in the same folder: conda create --prefix /opt/train --file LOCK (conda-lock "
            "install for a conda-lock.yml); then write `environment: {conda: /opt/train}`",
        )
    pins: list[Pin] = []
    options: list[str] = []
    wrong: list[str] = []
    for number, line in _lines(text):
        if _OPTION.fullmatch(line):
            options.append(line)
            continue
        try:
            pins.append(pin_of(_HASH.sub("", line), hashes=tuple(_HASH.findall(line))))
        except ValueError:
            wrong.append(f"{shown(name)}:{number}: {shown(line)}")
    if wrong or not pins:
        raise UsageError(
            "\n".join(wrong) or f"{shown(name)}: no packages",
            seen="expected a package with its version, such as torch==2.13.0",
            fix="have the file written by `pip freeze`, `pip-compile` or `uv pip compile`; packages come as wheels",
        )
    return Lock(pins=tuple(pins), options=tuple(options))


def linux_environment(version: tuple[int, ...], machine: str) -> dict[str, str]:
    """What markers may ask of CPython on a Linux host."""
    full = ".".join(map(str, version))
    return {
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "platform_release": "",
        "platform_version": "",
        "python_version": f"{version[0]}.{version[1]}",
        "python_full_version": full,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "implementation_version": full,
        "extra": "",
    }


def pin_of(text: str, *, hashes: tuple[str, ...] = ()) -> Pin:
    """A requirement of exactly one version; raises ValueError for anything else."""
    from packaging.requirements import Requirement

    found = Requirement(text)
    exact = [each for each in found.specifier if each.operator in {"==", "==="} and not each.version.endswith(".*")]
    if not len(exact) == len(found.specifier) == 1 or found.url is not None:
        raise ValueError(f"{text!r} does not name one version")
    return Pin(requirement=found, hashes=hashes)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and content of every line that says something; one that ends in a backslash goes on in the next."""
    whole, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun if whole else number
        whole += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if said := re.sub(r"(^|\s)#.*", "", whole).strip():
            yield begun, said
        whole = ""
