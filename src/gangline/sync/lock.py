"""A lock: every package of an environment with its version, as a requirements file; which of them a host needs."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import UsageError
from gangline.remote.once import once
from gangline.sync.markers import holds, linux_environment
from gangline.sync.tell import shown

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[A-Za-z0-9,._\s-]*\])?\s*===?\s*(?P<version>[A-Za-z0-9.!+_-]+)"
    r"\s*(?:;\s*(?P<marker>.*?))?\s*",
)
_OPTION = re.compile(
    r"(--index-url|--extra-index-url|--find-links|--trusted-host|-i|-f)([=\s]\s*)(\S+)|--no-index|--pre|--prefer-binary"
)
_HASHES = re.compile(r"\s--hash[=\s]\S+")
_HASH = re.compile(r"\s--hash[=\s]\s*([a-z0-9]+:[0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package."""

    name: str
    """As pip spells it: small letters, dashes."""
    version: str
    extras: str = ""
    marker: str = ""
    """Where it is needed; "": everywhere."""
    hashes: tuple[str, ...] = ()
    """What the wheel may be, such as "sha256:...": pip refuses others. If one package has some, all need them."""

    @property
    def line(self) -> str:
        """The requirement without its marker."""
        return f"{self.name}{self.extras}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """All packages, and where pip is told to look for them."""

    pins: tuple[Pin, ...]
    options: tuple[str, ...] = ()
    """Lines such as `--extra-index-url ...`, for pip on this computer; hosts do not see them."""

    @property
    def hash(self) -> str:
        """Of the pins and their hashes: the same packages are the same environment, wherever they come from."""
        rows = sorted(" ".join([f"{pin.line};{pin.marker}", *sorted(pin.hashes)]) for pin in self.pins)
        return hashlib.blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()

    def pins_for(self, version: tuple[int, int, int], machine: str) -> tuple[Pin, ...]:
        """What CPython of this version needs on a Linux host."""
        environment = linux_environment(version, machine)
        return tuple(pin for pin in self.pins if not pin.marker or holds(pin.marker, environment))


@once
def own_lock() -> Lock:
    """The lock that comes with gangline: what its constraints pin of gangline[train]."""
    text = importlib.resources.files("gangline").joinpath("sync/lock.txt").read_text(encoding="utf-8")
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
    pins: list[Pin] = []
    options: list[str] = []
    wrong: list[str] = []
    for number, line in _lines(text):
        if _OPTION.fullmatch(line):
            options.append(line)
        elif (found := _PIN.fullmatch(_HASHES.sub("", line))) and _is_marker(found["marker"]):
            pins.append(_pin(found, tuple(_HASH.findall(line))))
        else:
            wrong.append(f"{shown(name)}:{number}: {shown(line)}")
    if wrong or not pins:
        raise UsageError(
            "\n".join(wrong) or f"{shown(name)}: no packages",
            seen="expected a package with its version, such as torch==2.13.0",
            fix="have the file written by `pip freeze`, `pip-compile` or `uv pip compile`; packages come as wheels",
        )
    return Lock(pins=tuple(pins), options=tuple(options))


def _pin(found: re.Match[str], hashes: tuple[str, ...]) -> Pin:
    return Pin(
        name=canonical(found["name"]),
        version=found["version"],
        extras="".join((found["extras"] or "").split()),
        marker=(found["marker"] or "").strip(),
        hashes=hashes,
    )


def _is_marker(text: str | None) -> bool:
    if not text:
        return True
    try:
        holds(text, linux_environment((3, 12, 0), "x86_64"))
    except ValueError:
        return False
    return True


def canonical(name: str) -> str:
    """A name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


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
