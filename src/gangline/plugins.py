"""Plug-ins: rows that other installed packages add to gangline's tables, by entry points.

    [project.entry-points."gangline.formats"]      # the group: which table
    dialogue = "my_package.dialogue:FORMAT"        # the row's name in cluster.yaml and job.yaml, and the object

A table knows the names of its plug-ins from the metadata of the installed packages. It imports a plug-in only when
its row is asked for, so a broken or slow plug-in costs nothing until it is used, and a job that names built-in rows
only does not even read the metadata. A built-in row always wins over a plug-in of the same name.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gangline.errors import GanglineError, PluginError, UsageError

if TYPE_CHECKING:  # its import takes 30 ms, which only somebody with an unknown name pays
    from importlib.metadata import Distribution

GROUPS: Mapping[str, str] = {
    "gangline.backends": "launch backend",
    "gangline.strategies": "strategy",
    "gangline.checks": "family of checks",
    "gangline.formats": "data format",
    "gangline.exporters": "exporter",
    "gangline.callbacks": "callback",
    "gangline.gpus": "set of GPU entries",
}
"""The groups of entry points that gangline reads, and the noun for one row of each."""

SLOW_S = 2.0
"""`gangline plugins` names a plug-in whose import takes longer."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of an installed package. Nothing of the package is imported yet."""

    group: str
    name: str
    value: str
    """`module:object`."""
    package: str
    version: str
    fault: str = ""
    """Why it cannot be used, as far as the metadata tell; "" where nothing speaks against it."""

    @property
    def noun(self) -> str:
        """The word for its row, such as `data format`."""
        return GROUPS[self.group]

    def load(self) -> Any:
        """Import the object that the entry point names. Raises PluginError, whatever the import raises."""
        if self.fault:
            raise self.error(self.fault)
        module, _, attribute = self.value.partition(":")
        try:
            found = importlib.import_module(module.strip())
            for part in filter(None, attribute.split("[")[0].strip().split(".")):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            raise self.error(f"{type(error).__name__}: {error}") from error
        return found

    def error(self, cause: str) -> PluginError:
        """The error for the user: which plug-in of which package, the cause, and what to do next."""
        return PluginError(
            f"the {self.noun} {self.name!r} of the package {self.package} {self.version} cannot be used",
            seen=f"entry point {self.group}: {self.name} = {self.value}; {' '.join(cause.split())[:400]}",
            fix=f"update or remove it: pip install -U {self.package}, or pip uninstall {self.package}; "
            "`gangline plugins` lists all plug-ins",
        )


class Table(Generic[_T]):
    """The built-in rows of a group, and those of its plug-ins.

    group: a key of `GROUPS`.
    rows: the built-in rows by name.
    read: makes a row of the object that a plug-in's entry point names; called with the name and the object. It raises
        TypeError or ValueError with the reason for an object that is no such row.
    """

    def __init__(self, group: str, rows: Mapping[str, _T], *, read: Callable[[str, Any], _T]) -> None:
        self.group = group
        self.built_in = rows
        self._read = read
        self._loaded: dict[Plugin, _T] = {}

    def __contains__(self, name: object) -> bool:
        """Whether there is such a row; imports nothing."""
        return name in self.built_in or name in self.plugins()

    def __iter__(self) -> Iterator[str]:
        """The names of all rows, built-in ones first; imports nothing."""
        return iter((*self.built_in, *(name for name in self.plugins() if name not in self.built_in)))

    def __getitem__(self, name: str) -> _T:
        """The row of that name.

        Raises PluginError for a plug-in that cannot be used, and UsageError with the nearest name for an unknown one.
        """
        if name in self.built_in:
            return self.built_in[name]
        plugin = self.plugin(name)
        if plugin is None:
            raise self._unknown(name)
        return self._row(plugin)

    def plugins(self) -> dict[str, Plugin]:
        """The plug-ins of the group by name; imports nothing. Two plug-ins of one name are one that cannot be used."""
        found: dict[str, Plugin] = {}
        for plugin in find_plugins():
            if plugin.group == self.group:
                found[plugin.name] = _joined(found.get(plugin.name), plugin)
        return found

    def plugin(self, name: str) -> Plugin | None:
        """The plug-in that brings the row of that name; None for a built-in row or an unknown name."""
        return None if name in self.built_in else self.plugins().get(name)

    def load_all(self) -> tuple[dict[str, _T], tuple[PluginError, ...]]:
        """The rows of all plug-ins that can be used, and an error for each of the others."""
        rows: dict[str, _T] = {}
        errors: list[PluginError] = []
        for name, plugin in self.plugins().items():
            try:
                rows[name] = self.load(plugin)
            except PluginError as error:
                errors.append(error)
        return rows, tuple(errors)

    def load(self, plugin: Plugin) -> _T:
        """The row of one plug-in. Raises PluginError, also where a built-in row has its name."""
        if plugin.name in self.built_in:
            raise plugin.error(f"gangline itself has a {plugin.noun} {plugin.name!r}, which is used instead")
        return self._row(plugin)

    @contextlib.contextmanager
    def guard(self, name: str, *, passing: type[Exception] = GanglineError) -> Iterator[None]:
        """Run a function of the row; whatever a plug-in's function raises becomes a PluginError that names it.

        gangline's own errors and `passing` pass, and so does everything from a built-in row.
        """
        try:
            yield
        except (GanglineError, passing):
            raise
        except Exception as error:
            plugin = self.plugin(name)
            if plugin is None:
                raise
            raise plugin.error(f"{type(error).__name__}: {error}") from error

    def _row(self, plugin: Plugin) -> _T:
        if plugin not in self._loaded:
            found = plugin.load()
            try:
                self._loaded[plugin] = self._read(plugin.name, found)
            except (Exception, SystemExit) as error:
                raise plugin.error(str(error) or type(error).__name__) from error
        return self._loaded[plugin]

    def _unknown(self, name: str) -> UsageError:
        names = list(self)
        near = difflib.get_close_matches(name, names, n=1)
        noun = GROUPS[self.group]
        return UsageError(
            f"there is no {noun} {name!r}",
            seen=f"known: {', '.join(names)}",
            fix=f"did you mean {near[0]!r}?" if near else "choose one of these, or install the package that brings it",
        )


def instance_of(kind: type[_T]) -> Callable[[str, Any], _T]:
    """A `read` for tables whose plug-ins name an object of `kind` itself."""

    def read(_name: str, found: Any) -> _T:
        if not isinstance(found, kind):
            raise TypeError(f"expected an object of {kind.__module__}.{kind.__qualname__}, found {shown_type(found)}")
        return found

    return read


def shown_type(found: object) -> str:
    """The type of an object in words: `a dict`, `the class Foo`."""
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def timed_load(table: Table[Any], plugin: Plugin) -> tuple[float, str]:
    """Load one plug-in: (seconds, why it cannot be used or "")."""
    start = time.perf_counter()
    try:
        table.load(plugin)
    except PluginError as error:
        return time.perf_counter() - start, error.seen.partition("; ")[2]
    return time.perf_counter() - start, ""


@functools.cache
def find_plugins() -> tuple[Plugin, ...]:
    """Every plug-in that is installed for this Python, in the order of packages on the path; imports none.

    It reads the metadata of all installed packages once: some milliseconds.
    """
    from importlib.metadata import distributions

    found: list[Plugin] = []
    packages: set[str] = set()
    for distribution in distributions():
        text = _entry_points(distribution)
        if "[gangline." not in text:
            continue
        package, version = _identity(distribution)
        if package in packages or _entry_points(_first(package, distribution)) != text:
            continue  # a package of the same name lies before it on the path
        packages.add(package)
        found += _read_entry_points(text, package, version)
    return tuple(found)


def _entry_points(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _identity(distribution: Distribution) -> tuple[str, str]:
    """(name, version); a package whose metadata cannot be read has a name to be found by, at least."""
    try:
        metadata = distribution.metadata
        return str(metadata["Name"] or "unknown"), str(metadata["Version"] or "?")
    except Exception:  # noqa: BLE001 - metadata of a half-removed package; importlib.metadata names no errors
        return "unknown", "?"


def _first(package: str, fallback: Distribution) -> Distribution:
    from importlib.metadata import distribution

    try:
        return distribution(package)
    except Exception:  # noqa: BLE001 - see _identity
        return fallback


def _read_entry_points(text: str, package: str, version: str) -> Iterator[Plugin]:
    """The plug-ins of one entry_points.txt. A line that is none becomes a plug-in that cannot be used."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif line and not line.startswith("#") and group in GROUPS:
            name, _, value = (part.strip() for part in line.partition("="))
            fault = ""
            if not _NAME.fullmatch(name):
                fault = "its name is no word of letters, digits, '.', '_' and '-' that begins with a letter"
            elif not re.fullmatch(r"[\w.]+\s*(:\s*[\w.]+)?\s*(\[.*\])?", value):
                fault = "its entry point does not say module:object"
            yield Plugin(group=group, name=name, value=value, package=package, version=version, fault=fault)


def _joined(before: Plugin | None, plugin: Plugin) -> Plugin:
    if before is None:
        return plugin
    fault = f"the package {plugin.package} {plugin.version} brings a {plugin.noun} of the same name; remove one"
    return replace(before, fault=fault)


# --- what of a package comes to the hosts

COMPILED = (".so", ".pyd", ".dylib", ".dll")
LARGEST_BYTES = 32 * 2**20
"""Of the files of one package; more is data, which does not belong into the code folder of every host."""


@functools.cache
def package_files(package: str) -> Mapping[str, bytes]:
    """The files of an installed package by their name below a folder of Python's path, to be laid into another one.

    Modules and their data, and of the metadata what makes its entry points work. No scripts, no `.pth` files. Of an
    editable installation: the folders of the modules that its entry points name. Raises PluginError for a package that
    is not installed, has compiled files, is too large, or brings files of gangline.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(package)
    except PackageNotFoundError as error:
        raise PluginError(
            f"the package {package} is not installed on this computer",
            seen="a plug-in of it is used by this job or cluster",
            fix=f"pip install {package}, into the Python that runs gangline",
        ) from error
    files = _recorded(found)
    for top in sorted({_top(plugin) for plugin in find_plugins() if plugin.package == package and not plugin.fault}):
        if top and not any(name == f"{top}.py" or name.startswith(f"{top}/") for name in files):
            files |= _located(top)
    _refuse(package, files)
    content = {name: path.read_bytes() for name, path in sorted(files.items())}
    info = f"{re.sub(r'[-_.]+', '_', package)}-{_identity(found)[1]}.dist-info"
    content[f"{info}/METADATA"] = (found.read_text("METADATA") or "").encode()
    content[f"{info}/entry_points.txt"] = _entry_points(found).encode()
    # written anew: pip's own names files of this computer, and times
    content[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in sorted(content)).encode()
    return content


def package_version(package: str) -> str:
    """The version that is installed. Raises PluginError as `package_files`."""
    info = next(name for name in package_files(package) if name.endswith(".dist-info/METADATA"))
    return info.partition("/")[0].removesuffix(".dist-info").rpartition("-")[2]


def package_digest(package: str) -> str:
    """blake2b over all of `package_files`: what was used, also where nobody raised the version."""
    digest = hashlib.blake2b(digest_size=32)
    for name, content in package_files(package).items():
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _top(plugin: Plugin) -> str:
    return plugin.value.partition(":")[0].strip().partition(".")[0]


def _recorded(found: Distribution) -> dict[str, Path]:
    """What the package's own list of files names, below the folder in which it is installed."""
    files: dict[str, Path] = {}
    for each in found.files or ():
        is_ours = "__pycache__" not in each.parts and ".." not in each.parts and not each.is_absolute()
        is_metadata = each.parts[0].endswith((".dist-info", ".egg-info", ".data"))
        if is_ours and not is_metadata and each.suffix != ".pth" and not each.name.startswith(("__editable__", "_ed")):
            path = Path(str(found.locate_file(each)))
            if path.is_file():
                files[each.as_posix()] = path
    return files


def _located(top: str) -> dict[str, Path]:
    """The files of a module or package that is found on the path without being imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {f"{top}.py": Path(spec.origin)} if spec.origin and spec.origin.endswith(".py") else {}
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return {
        f"{top}/{path.relative_to(folder).as_posix()}": path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _refuse(package: str, files: Mapping[str, Path]) -> None:
    compiled = [name for name in files if name.endswith(COMPILED)]
    seen = fix = ""
    if not files:
        seen, fix = "no file of it can be found", f"install it anew: pip install --force-reinstall {package}"
    elif compiled:
        seen = f"expected Python files only; {compiled[0]} is compiled, and fits one kind of machine"
        fix = "move what is compiled into a package of its own, and have that in the environment of every host"
    elif any(name.partition("/")[0] in {"gangline", "gangline.py"} for name in files):
        seen, fix = "it has files of gangline itself", f"pip uninstall {package}, then install gangline anew"
    elif sum(path.stat().st_size for path in files.values()) > LARGEST_BYTES:
        seen = f"its files have more than {LARGEST_BYTES >> 20} MiB"
        fix = "keep data out of the package: it comes to every host as a whole"
    if seen:
        raise PluginError(f"the package {package} cannot be brought to the hosts", seen=seen, fix=fix)
