"""Write src/gangline/provision/lock.txt from constraints.txt: what gangline[train] needs of it, on any Python.

Run it with the Python of the tests, after constraints.txt changed: python .ci/lock.py
What constraints.txt does not name, such as setuptools, is pinned as it is installed there. A row for a package that is
not installed there is for another Python, and stays.
"""

from importlib import metadata
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gangline.provision.requirements import linux_environment

ROOT = Path(__file__).parents[1]
HEAD = """\
# What gangline installs on a host whose environment is `locked`, and that the project is tested with.
# Made from constraints.txt by .ci/lock.py. torch has no local version (such as +cpu): any build of it will do.
"""
PYTHONS = [linux_environment((3, minor, 0), "x86_64") for minor in range(10, 15)]


def needed(requirements: list[str]) -> set[str]:
    """Every package that is needed for these, directly or not, on any of the Pythons."""
    seen: set[tuple[str, str]] = set()
    queue = [(text, "") for text in requirements]
    while queue:
        text, extra = queue.pop()
        found = Requirement(text)
        if found.marker and not any(found.marker.evaluate({**python, "extra": extra}) for python in PYTHONS):
            continue
        for asked in ["", *found.extras]:
            if (canonicalize_name(found.name), asked) not in seen:
                seen.add((canonicalize_name(found.name), asked))
                queue += [(text, asked) for text in _requires(found.name)]
    return {name for name, _ in seen}


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # of another Python


def main() -> None:
    """Write it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = needed(project["optional-dependencies"]["train"])
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    named = {canonicalize_name(Requirement(line).name) for line in lines}
    kept = [line for line in lines if _is_kept(canonicalize_name(Requirement(line).name), wanted)]
    kept += [f"{name}=={metadata.version(name)}" for name in sorted(wanted - named) if _is_installed(name)]
    kept.sort(key=str.lower)
    (ROOT / "src/gangline/provision/lock.txt").write_text(HEAD + "".join(f"{line}\n" for line in kept))


def _is_kept(name: str, wanted: set[str]) -> bool:
    return name in wanted or not _is_installed(name)


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
