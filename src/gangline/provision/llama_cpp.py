"""llama.cpp on this computer: its converter from source, and its engine as a wheel, in a folder of their own.

Nothing is installed into an environment: the converter brings its own version of the module `gguf`, which another
program's may not be mixed with, and only the worker that converts has the folder on its path.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from gangline.errors import GanglineError
from gangline.provision.ask import run_there
from gangline.provision.console import SILENT, Console
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport, our_python
from gangline.transport.transport import CommandResult

DOWNLOAD_S = 3600.0
SOURCE = "llama-cpp-python"
KEPT = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
"""What is unpacked of llama.cpp in the source."""
WHOLE = "whole"
"""Written last."""


def bring_llama_cpp(python: Host, home: Path, *, console: Console = SILENT) -> Path:
    """The folder with converter and engine for this computer's Python `python`; downloaded once, by pip.

    Raises GanglineError where pip cannot have it.
    """
    pins = importlib.resources.files("gangline").joinpath("provision/llama_cpp.txt").read_text(encoding="utf-8")
    tag = _version(python)
    folder = home / "llama.cpp" / f"{hashlib.sha256(pins.encode()).hexdigest()[:16]}-python{tag}"
    if (folder / WHOLE).is_file():
        return folder
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    try:
        console.progress("downloading llama.cpp's converter and engine: 110 MB")
        _download(pins, tag, fresh)
        (fresh / WHOLE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _version(python: Host) -> str:
    """The version of a Python of this computer, such as 3.11."""
    words = python.argv("-c", "import sys; print('.'.join(map(str, sys.version_info[:2])))")
    result = run_there(LocalTransport(python), words)
    if result.returncode != 0:
        raise GanglineError(f"{python.python} does not start", seen=result.stderr.strip()[-300:], fix="gangline setup")
    return result.stdout.strip()


def _download(pins: str, tag: str, folder: Path) -> None:
    """Wheels into the folder, and the converter out of its source; all files by their hashes."""
    blocks = [f"{block}\n" for block in pins.replace("\\\n", " ").splitlines() if "==" in block]
    wheels, source = folder / "wheels.txt", folder / "source.txt"
    wheels.write_text("".join(block for block in blocks if not block.startswith(SOURCE)), encoding="utf-8")
    source.write_text("".join(block for block in blocks if block.startswith(SOURCE)), encoding="utf-8")
    how = ("--no-deps", "--require-hashes", "--no-input", "--progress-bar=off", "--disable-pip-version-check")
    only = ("--only-binary=:all:", "--python-version", tag, "--target", str(folder))
    _pip("install", *how, *only, "-r", str(wheels))
    packed = folder / "packed"
    _pip("download", *how, "--no-binary", SOURCE, "--dest", str(packed), "-r", str(source))
    for path in packed.glob("*.tar.gz"):
        unpack_converter(path, folder)
    shutil.rmtree(packed)


def unpack_converter(archive: Path, folder: Path) -> None:
    """Take the converter out of the source of llama-cpp-python. Raises GanglineError where it is not there."""
    with tarfile.open(archive) as packed:
        for member in packed:
            words = PurePosixPath(member.name).parts
            if words[1:3] != ("vendor", "llama.cpp") or len(words) < 4 or words[3] not in KEPT or ".." in words:
                continue
            if member.isfile() and (stream := packed.extractfile(member)) is not None:
                path = folder.joinpath(*words[3:])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stream.read())
    if not (folder / KEPT[0]).is_file():
        raise GanglineError(
            f"{archive.name} has no converter",
            seen=f"expected vendor/llama.cpp/{KEPT[0]} in it",
            fix="report it: gangline report-bug",
        )


def _pip(*words: str) -> CommandResult:
    argv: Sequence[str] = our_python("pip", *words)
    here = LocalTransport(Host(name="this computer", workdir="", python=sys.executable))
    result = here.run(argv, timeout_s=DOWNLOAD_S)
    if result.returncode != 0:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
        raise GanglineError(
            "llama.cpp's converter cannot be downloaded",
            seen="pip says:\n" + "\n".join(lines[-5:]),
            fix="pip here needs an index with llama-cpp-python (source), xllamacpp and sentencepiece",
        )
    return result
