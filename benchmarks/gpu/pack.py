"""Packages for a machine without a network: those that it lacks, as wheels, in pieces of a given size.

torch stays the machine's own: it is large, and it fits the driver there. So pip's resolver cannot be asked, which wants
torch's requirements, too; what is missing is followed from package to package, by what each wheel asks for.

Where packs are unpacked, nothing may be there yet but Python and pip: imports of other packages are inside `pack`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

from benchmarks.gpu.runs import ROOT

LIST = "pack.json"
TOOLS = ("pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "pytest-xdist>=3.8,<4", "jsonschema>=4.23,<5")
"""What the tests need beside the trainer's packages."""
COMPARED = ("trl>=1.16,<2", "liger-kernel>=0.8,<1")
"""What our loop is compared with."""
NEVER = ("torch",)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)] + ["manylinux2014_x86_64"]
_CHUNK = 1 << 20
_FOR_ONE_DEVICE = re.compile(r"_(cuda|rocm|xpu)\d+\.so$")


class PackError(Exception):
    """Nothing usable came of it; the text says why, and what to do."""


def pack(
    folder: Path,
    *,
    there: Path,
    python: str,
    piece_mib: float,
    wanted: Sequence[str | Path],
    cuda: str = "",
) -> dict[str, Any]:
    """Write pieces and their list into `folder`, which has to be empty; gives back the list.

    there: `pip list --format json` of the machine. wanted: what it has to have; of folders wheels are built. cuda: the
    version of the machine's torch, such as 13.0: libraries for other ones are left out.
    """
    if folder.exists() and any(folder.iterdir()):
        raise PackError(f"{folder} is not empty: name another folder, or delete it")
    packages = [each for each in wanted if isinstance(each, str)]
    projects = [each for each in wanted if isinstance(each, Path)]
    installed = read_list(there)
    if lacking := [name for name in NEVER if name in map(_plain, packages) and name not in installed]:
        raise PackError(f"{there} does not list {', '.join(lacking)}, which is never packed: install it there first")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheels = Path(temporary) / "wheels"
        wheels.mkdir()
        for project in projects:
            _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(project))
        _fetch(packages, wheels, installed=installed, python=python)
        if cuda:
            for made in wheels.glob("*.whl"):
                _leave_out(made, cuda)
        names = sorted(wheel.name for wheel in wheels.glob("*.whl"))
        whole = Path(temporary) / "wheels.tar"
        with tarfile.open(whole, "w") as archive:  # wheels are compressed already
            for name in names:
                archive.add(wheels / name, arcname=name)
        pieces = _cut(whole, folder, size=max(1, int(piece_mib * (1 << 20))))
    made = {"python": python, "wheels": names, "pieces": pieces, "sha256": {n: _digest(folder / n) for n in pieces}}
    (folder / LIST).write_text(json.dumps(made, indent=2), encoding="utf-8")
    return made


def needed() -> list[str | Path]:
    """What the trainer and the tests need, and gangline itself: commands look for its distribution."""
    from gangline.tested import TESTED

    return [ROOT, *(each.requirement for each in TESTED), *TOOLS, *COMPARED]


def unpack(folder: Path, *, into: Path) -> list[str]:
    """Install every wheel into a folder for PYTHONPATH; the machine's own packages stay as they are."""
    try:
        made = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackError(f"{folder / LIST} cannot be read ({error}): copy all that `pack` has written") from error
    wrong = [
        name
        for name in made["pieces"]
        if not (folder / name).is_file() or _digest(folder / name) != made["sha256"][name]
    ]
    if wrong:
        raise PackError(f"{', '.join(wrong)} in {folder}: missing or damaged; copy them again")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != made["python"]:
        raise PackError(f"packed for Python {made['python']}; this is {here}: pack again with --python {here}")
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "wheels.tar"
        with whole.open("wb") as stream:
            for name in made["pieces"]:
                stream.write((folder / name).read_bytes())
        with tarfile.open(whole) as archive:
            archive.extractall(temporary, filter="data")
        shutil.rmtree(into, ignore_errors=True)
        wheels = [str(Path(temporary) / name) for name in made["wheels"]]
        _pip("install", "--no-index", "--no-deps", "--target", str(into), *wheels)
    return list(made["wheels"])


def read_list(path: Path) -> dict[str, str]:
    """Package -> version, of `pip list --format json`."""
    try:
        return {_plain(row["name"]): row["version"] for row in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(
            f"{path} is not what `pip list --format json` prints ({type(error).__name__}: {error})"
        ) from error


def _fetch(wanted: Iterable[str], wheels: Path, *, installed: Mapping[str, str], python: str) -> None:
    """Follow requirements; of what is there in a version that does, nothing is fetched."""
    from packaging.requirements import Requirement

    queue, asked = list(wanted), set[str]()
    while queue:
        requirement = Requirement(queue.pop(0))
        name = _plain(requirement.name)
        text = f"{name}{requirement.specifier}"
        if (
            text in asked
            or name in NEVER
            or (name in installed and requirement.specifier.contains(installed[name], prereleases=True))
        ):
            continue
        asked.add(text)
        before = set(wheels.iterdir())
        known = next((wheel for wheel in before if _plain(wheel.name.split("-")[0]) == name), None)
        if known is not None and requirement.specifier.contains(known.name.split("-")[1], prereleases=True):
            continue
        _get(text, wheels, python)
        new = [wheel for wheel in wheels.iterdir() if wheel not in before]
        if known is not None and new:
            raise PackError(f"{text} and {known.name} are both asked for: give one of them by its version")
        queue += [row for wheel in new for row in _requires(wheel, python)]


def _get(requirement: str, wheels: Path, python: str) -> None:
    """Download a wheel for that Python, or build one of a package that has none: it will do if it fits every Python."""
    download = [*("download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels))]
    download += [*("--python-version", python, "--implementation", "cp")]
    download += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    try:
        _pip(*download, requirement)
    except PackError as failure:
        built = wheels.parent / "built"
        shutil.rmtree(built, ignore_errors=True)
        try:
            _pip("wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", str(built), requirement)
        except PackError:
            raise failure from None
        made = next(built.glob("*.whl"))
        if not made.name.endswith("-none-any.whl"):
            raise PackError(f"{requirement}: no wheel for Python {python}; {made.name} fits this computer") from None
        made.rename(wheels / made.name)


def _requires(wheel: Path, python: str) -> list[str]:
    """What a wheel asks for on that Python, without extras."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(row for row in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", row))
        rows = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "", "sys_platform": "linux"}
    asked = [row for row in map(Requirement, rows) if row.marker is None or row.marker.evaluate(environment)]
    return [f"{row.name}{row.specifier}" for row in asked]


def _leave_out(wheel: Path, cuda: str) -> None:
    """Take out of a wheel what it has for other versions of CUDA, and for cards of other makers.

    bitsandbytes has a library for each, of which a machine loads one: 4 MB of 43 are left.
    """
    kept = f"_cuda{cuda.replace('.', '')}.so"
    with zipfile.ZipFile(wheel) as archive:
        rows = archive.infolist()
        gone = {row.filename for row in rows if _FOR_ONE_DEVICE.search(row.filename)}
        gone = {name for name in gone if not name.endswith(kept)}
        if not gone:
            return
        slim = wheel.with_suffix(".slim")
        with zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as left:
            for row in rows:
                data = archive.read(row)
                if row.filename.endswith(".dist-info/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if line.split(",")[0] not in gone).encode()
                if row.filename not in gone:
                    left.writestr(row, data)
    slim.replace(wheel)


def _cut(whole: Path, folder: Path, *, size: int) -> list[str]:
    names = []
    with whole.open("rb") as stream:
        while data := stream.read(size):
            names.append(f"piece-{len(names) + 1:03}")
            (folder / names[-1]).write_bytes(data)
    return names


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _plain(requirement: str) -> str:
    """The name in a requirement, as pip spells it."""
    return re.sub(r"[._-]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def _pip(*words: str) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    told = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, env=environment, check=False
    )
    if told.returncode:
        rows = [row for row in told.stderr.splitlines() if not row.startswith("WARNING")]
        raise PackError(f"pip {words[0]} {words[-1]} failed:\n" + "\n".join(rows[-5:]))
