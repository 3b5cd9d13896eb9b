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
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    return Plugin(
        group=plugin.group,
        name=plugin.name,
        value=before.value,
        package=before.package,
        version=before.version,
        fault=f"the package {plugin.package} {plugin.version} brings a {plugin.noun} of the same name; remove one",
    )
