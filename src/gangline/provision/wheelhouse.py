"""A wheelhouse: every wheel that a lock needs for one kind of host, and the uv that installs them there.

pip on this computer gathers the wheels: it can ask for wheels of another platform, and the user's pip configuration
counts. uv cannot download wheels without installing them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gangline.errors import GanglineError
from gangline.provision.console import SILENT, Console, shown
from gangline.provision.requirements import SOURCE_ALONE, Lock, Pin, pin_of
from gangline.provision.trees import Tree, look
from gangline.provision.trees import here as spot_here
from gangline.runs.cluster import Host
from gangline.runs.files import write_atomic
from gangline.tested import BY_NAME
from gangline.transport.local import LocalTransport, our_python
from gangline.transport.transport import CommandResult
from gangline.units import format_bytes

DOWNLOAD_S = 4 * 3600.0
BEAT_S = 1.0
KEPT_S = 30 * 86400.0
"""Far longer than gathering, bringing and building may take together: wheels that old are not in use."""
REQUIREMENTS = "requirements.txt"
UV = "uv"
WHOLE = "gathered"
"""Written last."""
NO_CPU_BUILD = (
    "pip finds no CPU build of torch {version}: the one for GPUs is taken, which is larger by gigabytes; an "
    "extra-index-url with CPU builds (pip config) avoids that"
)
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Names that versions of glibc 2 had before they were called by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What wheels have to fit: hosts of one kind share a wheelhouse."""

    version: tuple[int, ...]
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
        """Tags of wheels that run there, the newest first. `packaging.tags` knows those of this computer only."""
        major, newest = self.glibc
        names = [[f"manylinux_{major}_{minor}", *filter(None, [LEGACY.get(minor)])] for minor in range(newest, 4, -1)]
        return [f"{name}_{self.machine}" for row in [*names, ["linux"]] for name in row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheelhouse:
    """A folder of this computer with wheels and uv."""

    folder: Path
    requirements: str
    """What is installed from it: every wheel with its hash."""
    tree: Tree
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


def gather_wheels(lock: Lock, kind: Platform, *, home: Path, console: Console = SILENT) -> Wheelhouse:
    """Have pip on this computer download what is not there yet.

    Hosts without a GPU get the CPU build of torch where pip finds one under that version. Raises NoWheels where a
    package has no wheel for this kind of host, GanglineError where pip cannot work.
    """
    house = home / "wheelhouse"
    name = f"{lock.hash}-{kind.python_tag}-{kind.machine}-glibc{kind.glibc[0]}.{kind.glibc[1]}"
    folder = house / f"{name}-{'gpu' if kind.has_gpu else 'cpu'}"
    if not mark_used(folder):
        _gather(lock, kind, folder, console=console)
    delete_unused(house, console=console)
    requirements = (folder / REQUIREMENTS).read_text("utf-8")
    return Wheelhouse(folder=folder, requirements=requirements, tree=look(spot_here(folder)), python=kind.python)


def _gather(lock: Lock, kind: Platform, folder: Path, *, console: Console) -> None:
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    try:
        _build_wheels(lock, kind, fresh, console=console)
        _download_any(_choices(lock, kind), lock, kind, fresh, console=console)
        _add_uv(lock, kind, fresh, console=console)
        rows = [_row(path) for path in sorted(fresh.glob("*.whl"))]
        (fresh / REQUIREMENTS).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        (fresh / WHOLE).touch()
        size = format_bytes(size_of(fresh))
        _keep(fresh, folder)
        console.report(f"{len(rows)} packages for {kind.words} gathered: {size}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _build_wheels(lock: Lock, kind: Platform, folder: Path, *, console: Console) -> None:
    """The wheels of packages that come as source alone: nothing in them depends on the host."""
    pins = [pin.line for pin in lock.pins_for(kind.version, kind.machine) if pin.name in SOURCE_ALONE]
    if not pins:
        return
    console.progress(f"making the wheel of {', '.join(pins)}")
    here = LocalTransport(Host(name="this computer", workdir="", python=sys.executable))
    options = ("--no-deps", "--no-input", "--progress-bar=off", "--disable-pip-version-check", "--wheel-dir")
    argv = [*our_python("pip", "wheel"), *options, str(folder), *pins]
    result = here.run(argv, env={"DS_BUILD_OPS": "0"}, timeout_s=DOWNLOAD_S)
    if result.returncode != 0 or not all(path.name.endswith("-none-any.whl") for path in folder.glob("*.whl")):
        raise GanglineError(
            f"the wheel of {', '.join(pins)} cannot be made on this computer",
            seen=f"pip says:\n{_last_words(result)}",
            fix="pip here needs its source: an index, or a folder (pip config set global.find-links FOLDER) with it "
            "and what builds it; or name an environment of your own that has it in cluster.yaml",
        )


def _row(path: Path) -> str:
    """The requirement that this wheel and no other one meets."""
    from packaging.utils import parse_wheel_filename

    name, version, _build, _tags = parse_wheel_filename(path.name)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return f"{name}=={version} --hash=sha256:{digest.hexdigest()}"


def _choices(lock: Lock, kind: Platform) -> list[list[Pin]]:
    """What to ask pip for, the best first."""
    pins = sorted(lock.pins_for(kind.version, kind.machine), key=lambda pin: pin.name != "torch")
    if kind.has_gpu or not any(pin.name == "torch" and "+" not in pin.version and not pin.hashes for pin in pins):
        return [pins]
    return [[_cpu_build(pin) if pin.name == "torch" else pin for pin in pins], pins]


def _cpu_build(pin: Pin) -> Pin:
    return pin_of(pin.at(f"{pin.version}+cpu"))


def _download_any(choices: list[list[Pin]], lock: Lock, kind: Platform, folder: Path, *, console: Console) -> None:
    for pins in choices:
        result = _run_pip(wanted_text(pins, lock, folder), kind, folder, num_packages=len(pins), console=console)
        if result.returncode == 0:
            return
        if pins is choices[-1] or "torch==" not in _last_words(result) or _is_cut_off(result):
            raise _failed(result, kind)
        console.report(NO_CPU_BUILD.format(version=pins[0].version.partition("+")[0]))


def _add_uv(lock: Lock, kind: Platform, folder: Path, *, console: Console) -> None:
    """The uv that came with gangline, if it runs on such a host; otherwise pip brings the same version for it."""
    from packaging.tags import parse_tag

    try:
        own = metadata.distribution(UV)
    except metadata.PackageNotFoundError as error:
        raise GanglineError(
            "the Python that runs gangline has no uv, which builds environments",
            seen=f"{sys.executable}: {error}",
            fix=f"{sys.executable} -m pip install '{BY_NAME['uv'].requirement}'",
        ) from error
    lines = [line.split() for line in (own.read_text("WHEEL") or "").splitlines()]
    runs_on = {tag.platform for words in lines if words[:1] == ["Tag:"] for tag in parse_tag(words[1])}
    programs = [Path(str(path.locate())) for path in own.files or () if path.name == UV]
    if runs_on & set(kind.platforms) and programs and programs[0].is_file():
        shutil.copyfile(programs[0], folder / UV)
    else:
        apart = folder / "apart"  # the lock may name uv, too
        _download_any([[pin_of(f"{UV}=={own.version}")]], lock, kind, apart, console=console)
        with zipfile.ZipFile(next(apart.glob(f"{UV}-*.whl"))) as packed:
            (name,) = [name for name in packed.namelist() if name.endswith(f".data/scripts/{UV}")]
            (folder / UV).write_bytes(packed.read(name))
        shutil.rmtree(apart)
    (folder / UV).chmod(0o700)


def _keep(fresh: Path, folder: Path) -> None:
    """Somebody else may have gathered the same at the same time: then that is as good."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        fresh.rename(folder)
    if not (folder / WHOLE).exists():
        raise GanglineError(f"{folder} cannot be written", fix="look at that folder, and start again")


def download_argv(wanted: Path, kind: Platform, folder: Path) -> list[str]:
    """The command that fills a folder. wanted: a requirements file; an index may have a password in its address."""
    platforms = [word for name in kind.platforms for word in ("--platform", name)]
    abis = [word for name in (kind.python_tag, "abi3", "none") for word in ("--abi", name)]
    return [
        *our_python("pip", "download"), "--dest", str(folder), "--only-binary=:all:", "--no-input",
        "--progress-bar=off", "--disable-pip-version-check", "--implementation", "cp",
        "--python-version", ".".join(map(str, kind.version)), *abis, *platforms,
        "--requirement", str(wanted),
    ]  # fmt: skip


def wanted_text(pins: Sequence[Pin], lock: Lock, folder: Path | None = None) -> str:
    """What pip is asked for: where to look, and the packages. folder: wheels that were made here lie there."""
    rows = [" ".join([pin.line, *(f"--hash={digest}" for digest in pin.hashes)]) for pin in pins]
    made = [f"--find-links {folder}"] if any(pin.name in SOURCE_ALONE for pin in pins) else []
    return "".join(f"{line}\n" for line in [*lock.options, *made, *rows])


def _run_pip(text: str, kind: Platform, folder: Path, *, num_packages: int, console: Console) -> CommandResult:
    here = LocalTransport(Host(name="this computer", workdir="", python=sys.executable))
    wanted, begun = folder.with_name(f"{folder.name}.txt"), folder.with_name(f"{folder.name}.begun")
    begun.mkdir(mode=0o700, exist_ok=True)  # pip would take /tmp, which may be memory, for gigabytes
    watch = Gathering(kind.words, begun, num_packages=num_packages, console=console)
    write_atomic(wanted, text.encode())
    try:
        with watch.beating():
            argv = download_argv(wanted, kind, folder)
            return here.run(argv, env={"TMPDIR": str(begun)}, timeout_s=DOWNLOAD_S, on_line=watch.hear)
    finally:
        wanted.unlink()
        shutil.rmtree(begun, ignore_errors=True)


def _last_words(result: CommandResult) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip() and "[notice]" not in line]
    return "\n".join(lines[-15:])


def _is_cut_off(result: CommandResult) -> bool:
    """Whether pip did not reach an index; what it then says of packages means nothing."""
    return "after connection broken by" in result.stderr


def _failed(result: CommandResult, kind: Platform) -> GanglineError:
    words = _last_words(result)
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


class Gathering:
    """How far pip is, told every second: one package may take minutes, in which it says nothing."""

    def __init__(self, kind: str, folder: Path, *, num_packages: int, console: Console) -> None:
        self._kind = kind
        self._folder = folder
        self._num_packages = num_packages
        self._console = console
        self._seen: list[str] = []
        self._begun_s = time.monotonic()

    def hear(self, line: str) -> None:
        """Take the next line of pip."""
        if found := re.match(r"\s*(?:Collecting|Processing|Requirement already satisfied:) ([A-Za-z0-9._/+-]+)", line):
            name = found[1].rpartition("/")[2].partition("-")[0] if "/" in found[1] else found[1]
            if name not in self._seen:
                self._seen.append(name)
            self._tick()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Tell it until the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                self._tick()

        self._tick()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _tick(self) -> None:
        number = min(len(self._seen), self._num_packages)
        last = f"{number} of {self._num_packages}, {shown(self._seen[-1])}" if self._seen else "asking pip"
        # pip downloads into folders of their own; a file beside them is the copy for its cache
        size = sum(size_of(path) for path in self._folder.iterdir() if path.is_dir())
        loaded = f", {format_bytes(size)}" if size else ""
        self._console.progress(f"packages for {self._kind}: {last}{loaded}, {time.monotonic() - self._begun_s:.0f} s")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder that others may be writing to."""
    total = 0
    for parent, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been taken away
                total += (Path(parent) / name).stat().st_size
    return total


def mark_used(folder: Path) -> bool:
    """Whether a wheelhouse is whole; from now on it counts as used, and is not deleted."""
    with locked(folder.parent), contextlib.suppress(FileNotFoundError):
        os.utime(folder / WHOLE)
        return True
    return False


def delete_unused(house: Path, *, console: Console = SILENT) -> None:
    """Delete what was not used for 30 days, and what an interrupted start left there so long ago."""
    old: list[Path] = []
    with locked(house):
        for path in house.iterdir():
            marked = path / WHOLE if (path / WHOLE).exists() else path
            with contextlib.suppress(OSError):  # somebody else takes it away, or nobody can
                if time.time() - marked.stat().st_mtime > KEPT_S:
                    # nobody can begin to use what is deleted: it gets another name first
                    old.append(path.rename(path.with_name(f".{path.name.lstrip('.')}.old")))
    size = sum(size_of(path) if path.is_dir() else path.stat().st_size for path in old)
    for path in old:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if old:
        console.report(f"wheels that were not used for 30 days deleted: {format_bytes(size)} in {house}")


@contextlib.contextmanager
def locked(house: Path) -> Iterator[None]:
    """Nobody else looks whether wheels are there, or which of them are old."""
    house.mkdir(mode=0o700, parents=True, exist_ok=True)
    with house.with_name(f"{house.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
