"""A wheelhouse: every wheel that a lock needs for one kind of host, gathered on this computer by its own pip."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from gangline.errors import GanglineError
from gangline.remote.local import LocalTransport, our_python
from gangline.remote.transport import Result
from gangline.runs.cluster import Host
from gangline.runs.files import write_atomic
from gangline.sync.gathering import Gathering, size_of
from gangline.sync.lock import Lock, Pin
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.trees import Tree, look
from gangline.sync.trees import here as spot_here
from gangline.sync.unused import delete_unused, mark_used
from gangline.units import format_bytes

DOWNLOAD_S = 4 * 3600.0
REQUIREMENTS = "requirements.txt"
WHOLE = "whole"
"""Written last."""
NO_CPU_BUILD = (
    "pip finds no CPU build of torch {version}: the one for GPUs is taken, which is larger by gigabytes; an "
    "extra-index-url with CPU builds (pip config) avoids that"
)
LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
"""Names that glibc versions had before they were called by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What wheels have to fit: hosts of one kind share a wheelhouse."""

    version: tuple[int, int, int]
    machine: str
    """As the host calls its processor: x86_64, aarch64."""
    glibc: tuple[int, int]
    """The oldest among the hosts."""
    has_gpu: bool

    @property
    def tag(self) -> str:
        """What environments for it are called by: cp311-x86_64-cpu."""
        return f"{self.python_tag}-{self.machine}-{'gpu' if self.has_gpu else 'cpu'}"

    @property
    def words(self) -> str:
        """The kind for people: Python 3.11 without a GPU."""
        return f"{self.python} {'with' if self.has_gpu else 'without'} a GPU"

    @property
    def python(self) -> str:
        """Its Python: Python 3.11."""
        return f"Python {self.version[0]}.{self.version[1]}"

    @property
    def python_tag(self) -> str:
        """As wheels spell it: cp311."""
        return f"cp{self.version[0]}{self.version[1]}"

    @property
    def platforms(self) -> list[str]:
        """Tags of wheels that run there, the newest first."""
        major, newest = self.glibc
        names: list[str] = []
        for minor in range(newest, 4, -1):
            names.append(f"manylinux_{major}_{minor}_{self.machine}")
            if legacy := LEGACY.get((major, minor)):
                names.append(f"{legacy}_{self.machine}")
        return [*names, f"linux_{self.machine}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheelhouse:
    """A folder of wheels on this computer."""

    folder: Path
    requirements: str
    """What pip installs from it."""
    tree: Tree
    pip: str
    """The wheel of pip itself."""
    python: str
    """What it is for: Python 3.11."""

    @property
    def installed_bytes(self) -> int:
        """What the wheels take once they are unpacked."""
        total = 0
        for path in self.folder.glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                total += sum(entry.file_size for entry in wheel.infolist())
        return total


class NoWheels(GanglineError):
    """For this kind of host there is a package without a wheel."""


def gather_wheels(lock: Lock, kind: Kind, *, home: Path, tell: Tell = SILENT) -> Wheelhouse:
    """Have pip on this computer download what is not there yet; the user's pip configuration counts.

    Hosts without a GPU get the CPU build of torch where pip finds one under that version. Raises NoWheels where a
    package has no wheel for this kind of host, GanglineError where pip cannot work.
    """
    name = f"{lock.hash}-{kind.python_tag}-{kind.machine}-glibc{kind.glibc[0]}.{kind.glibc[1]}"
    folder = home / "wheelhouse" / f"{name}-{'gpu' if kind.has_gpu else 'cpu'}"
    if not mark_used(folder / WHOLE):
        _gather(lock, kind, folder, tell=tell)
    delete_unused(folder.parent, WHOLE, tell=tell)
    tree = look(spot_here(folder, home=home))
    pip = next(path.name for path in sorted(folder.glob("pip-*.whl")))
    requirements = (folder / REQUIREMENTS).read_text("utf-8")
    return Wheelhouse(folder=folder, requirements=requirements, tree=tree, pip=pip, python=kind.python)


def _gather(lock: Lock, kind: Kind, folder: Path, *, tell: Tell) -> None:
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    try:
        pins = sorted(lock.pins_for(kind.version, kind.machine), key=lambda pin: pin.name != "torch")
        for choice in _choices(pins, kind):
            result = _download(choice, lock, kind, fresh, tell=tell)
            if result.returncode == 0:
                break
            if choice is pins or "torch==" not in _last_words(result) or _is_cut_off(result):
                raise _failed(result, kind)
            tell.say(NO_CPU_BUILD.format(version=choice[0].version.partition("+")[0]))
        (fresh / REQUIREMENTS).write_text("".join(f"{pin.line}\n" for pin in choice), encoding="utf-8")
        (fresh / WHOLE).touch()
        size = format_bytes(size_of(fresh))
        _keep(fresh, folder)
        tell.say(f"{len(choice)} packages for {kind.words} gathered: {size}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _choices(pins: list[Pin], kind: Kind) -> list[list[Pin]]:
    """What to ask pip for, the best first."""
    if kind.has_gpu or not any(pin.name == "torch" and "+" not in pin.version and not pin.hashes for pin in pins):
        return [pins]
    return [[_cpu_build(pin) if pin.name == "torch" else pin for pin in pins], pins]


def _cpu_build(pin: Pin) -> Pin:
    return Pin(requirement=Requirement(pin.at(f"{pin.version}+cpu")))


def _keep(fresh: Path, folder: Path) -> None:
    """Somebody else may have gathered the same at the same time: then that is as good."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        fresh.rename(folder)
    if not (folder / WHOLE).exists():
        raise GanglineError(f"{folder} cannot be written", fix="look at that folder, and start again")


def download_argv(wanted: Path, kind: Kind, folder: Path) -> list[str]:
    """The command that fills a folder. wanted: a requirements file; an index may have a password in its address."""
    platforms = [word for name in kind.platforms for word in ("--platform", name)]
    abis = [word for name in (kind.python_tag, "abi3", "none") for word in ("--abi", name)]
    return [
        *our_python("pip", "download"), "--dest", str(folder), "--only-binary=:all:", "--no-input",
        "--progress-bar=off", "--disable-pip-version-check", "--implementation", "cp",
        "--python-version", ".".join(map(str, kind.version)), *abis, *platforms,
        "--requirement", str(wanted),
    ]  # fmt: skip


def wanted_texts(pins: Sequence[Pin], lock: Lock) -> list[str]:
    """What pip is asked for, in one go or two: where to look, the packages, and pip itself, which no lock hashes."""
    rows = [" ".join([pin.line, *(f"--hash={digest}" for digest in pin.hashes)]) for pin in pins]
    itself = [] if any(pin.name == "pip" for pin in pins) else ["pip"]
    goes = [rows, itself] if any(pin.hashes for pin in pins) else [[*rows, *itself]]
    return ["".join(f"{line}\n" for line in [*lock.options, *lines]) for lines in goes if lines]


def _download(pins: list[Pin], lock: Lock, kind: Kind, folder: Path, *, tell: Tell) -> Result:
    for text in wanted_texts(pins, lock):
        result = _run_pip(text, kind, folder, num_packages=len(pins), tell=tell)
        if result.returncode != 0:
            break
    return result


def _run_pip(text: str, kind: Kind, folder: Path, *, num_packages: int, tell: Tell) -> Result:
    here = LocalTransport(Host(name="this computer", workdir="", python=sys.executable))
    wanted, begun = folder.with_name(f"{folder.name}.txt"), folder.with_name(f"{folder.name}.begun")
    begun.mkdir(mode=0o700, exist_ok=True)  # pip would take /tmp, which may be memory, for gigabytes
    watch = Gathering(kind.words, begun, num_packages=num_packages, tell=tell)
    write_atomic(wanted, text.encode())
    try:
        with watch.beating():
            argv = download_argv(wanted, kind, folder)
            return here.run(argv, env={"TMPDIR": str(begun)}, timeout_s=DOWNLOAD_S, on_line=watch.hear)
    finally:
        wanted.unlink()
        shutil.rmtree(begun, ignore_errors=True)


def _last_words(result: Result) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip() and "[notice]" not in line]
    return "\n".join(lines[-15:])


def _is_cut_off(result: Result) -> bool:
    """Whether pip did not reach an index; what it then says of packages means nothing."""
    return "after connection broken by" in result.stderr


def _failed(result: Result, kind: Kind) -> GanglineError:
    words = _last_words(result)
    if "No module named pip" in words:
        return GanglineError(
            "the Python that runs gangline has no pip, which gathers the packages for the hosts",
            seen=f"{sys.executable}: {shown(words)}",
            fix=f"{sys.executable} -m ensurepip, or install pip into that environment",
        )
    said = [re.sub(r"<pip\._vendor[^>]*>: ", "", line) for line in words.splitlines()]
    seen = "pip says:\n" + "\n".join(f"    {shown(line)}" for line in said)
    if _is_cut_off(result):
        return GanglineError(
            "pip on this computer does not reach an index that it is told to use",
            seen=seen,
            fix="connect this computer, or tell pip where packages lie on it: pip config set global.find-links FOLDER",
        )
    if "DO NOT MATCH THE HASHES" in result.stderr:
        return GanglineError(
            "a package is not the one that the lock names",
            seen=seen,
            fix="find out why: it was replaced where it comes from, or the lock is old",
        )
    if "No matching distribution" in words or "ResolutionImpossible" in words:
        return NoWheels(
            f"not all packages have a wheel for {kind.words} on {kind.machine}",
            seen=seen,
            fix="see that pip on this computer finds these packages (pip config, or an --extra-index-url in your lock)",
        )
    return GanglineError(
        f"the packages for {kind.words} cannot be gathered", seen=seen, fix="put that right, and start again"
    )
