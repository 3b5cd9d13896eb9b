"""Other versions of Python on this machine, for hosts that have an old or a new one."""

import functools
import os
import pwd
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab.namespaces import LabFailed

SYSTEM = {"/usr", "/usr/local"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A Python of this machine."""

    executable: str
    folder: str | None
    """What has to be bound into a host for it; None: it is where every host sees it."""


def _candidates(version: str):
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    yield from sorted(home.glob(f".pyenv/versions/{version}*/bin/python{version}"))
    yield from sorted(home.glob(f".local/share/uv/python/cpython-{version}*/bin/python{version}"))
    yield from sorted(Path("/opt").glob(f"hostedtoolcache/Python/{version}*/x64/bin/python{version}"))
    yield from sorted(Path("/opt").glob(f"python/{version}*/bin/python{version}"))
    if found := shutil.which(f"python{version}"):
        yield Path(found)


@functools.cache
def find(version: str) -> Python:
    """A Python of that version ("3.8"). Raises LabFailed if there is none."""
    for path in _candidates(version):
        # A shim of pyenv is on PATH also where there is nothing behind it.
        done = subprocess.run(
            [path, "-I", "-c", "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
        )
        prefix, _, seen = done.stdout.strip().rpartition(" ")
        if done.returncode == 0 and seen == version:
            executable = Path(prefix) / "bin" / f"python{version}"
            return Python(executable=str(executable), folder=None if prefix in SYSTEM else prefix)
    raise LabFailed(f"no Python {version} on this machine")


def has(version: str) -> bool:
    """Whether there is one."""
    try:
        find(version)
    except LabFailed:
        return False
    return True


def of_the_system() -> tuple[str, ...]:
    """Every Python that a login without a terminal may find: hidden, a host has none but the one it is given."""
    folders = [Path(folder) for folder in ("/usr/bin", "/usr/local/bin", "/bin")]
    paths = [path for folder in folders for path in folder.glob("python3*")]
    return tuple(str(path) for path in paths if re.fullmatch(r"python3[.0-9]*", path.name))
