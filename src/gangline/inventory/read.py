"""From what a host says of itself to facts. It may be old, new, broken or lying: what it says is looked at first."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from gangline.inventory.facts import File, HostFacts, Resolved, System, TorchBuild, Unread, Variable
from gangline.inventory.hardware import Folder, Gpu, GpuDriver, GpuFault, Limits, Nic, Rdma, Route
from gangline.inventory.plain import plain
from gangline.inventory.topology import parse_topology

TEXT_LENGTH = 2000
LONG_TEXT_LENGTH = 1 << 17
"""For texts that are parsed and never shown."""
NUM_ITEMS = 512
NUMBER_LIMIT = 1 << 63
_T = TypeVar("_T")


class Unreadable(ValueError):
    """A host said something that cannot be meant."""


def read_facts(host: str, data: Any, *, asked_s: float | None = None, answered_s: float | None = None) -> HostFacts:
    """The facts in an answer of `gangline-agent facts`. Raises Unreadable, which names the place.

    Keys that are not known are passed over, missing ones are None; a value of another type is a lie.
    """
    if not isinstance(data, dict) or not isinstance(data.get("system"), dict):
        raise Unreadable("it has no section `system`")
    sections = {name: value for name, value in data.items() if not _failed(value)}
    if "system" not in sections:
        raise Unreadable(f"system: {_text(data['system'].get('error'), 'system')}")
    storage = _list(Folder, sections.get("storage"), "storage")
    work = storage[0] if storage else None
    return HostFacts(
        host=host,
        asked_s=asked_s,
        answered_s=answered_s,
        **_system(sections["system"]),
        workdir=(work and (work.real_path or work.path)) or "",
        disk_free_bytes=(work and work.free_bytes) or 0,
        **_packages(data.get("packages"), sections.get("packages")),
        **_gpus(sections.get("gpus")),
        topology=parse_topology(_optional_text(sections.get("topology"), "topology", LONG_TEXT_LENGTH) or ""),
        names=_names(sections.get("names")),
        nics=_list(Nic, sections.get("nics"), "nics"),
        routes=_routes(sections.get("routes")),
        rdma=checked(Rdma, sections.get("rdma") or {}, "rdma"),
        storage=storage,
        limits=checked(Limits, sections.get("limits") or {}, "limits"),
        variables=_list(Variable, sections.get("variables"), "variables"),
        programs=_convert(dict[str, str | None], _part(sections.get("programs"), "found"), "programs") or {},
        pythons=_convert(tuple[str, ...], _part(sections.get("programs"), "pythons"), "pythons") or (),
        files=_files(sections.get("files")),
        unread=tuple(
            Unread(section=name, why=_text(value["error"], name)) for name, value in data.items() if _failed(value)
        ),
    )


def checked(kind: type[_T], data: Any, where: str) -> _T:
    """A dataclass from plain data of a host; raises Unreadable."""
    if not isinstance(data, dict):
        raise Unreadable(f"{where}: expected an object, saw {type(data).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # classes are hashable
    values = {
        name: _convert(hints[name], data[name], f"{where}.{name}") for name in hints if data.get(name) is not None
    }
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise Unreadable(f"{where}: no {', '.join(missing)}")
    return kind(**values)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Types of the fields; looking them up takes longer than everything else here."""
    return typing.get_type_hints(kind)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {types.UnionType, typing.Union}:
        return _convert(next(kind for kind in arguments if kind is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return checked(typing.cast("type[Any]", hint), value, where)
    if origin is tuple:
        return tuple(_item(arguments[0], item, where) for item in _items(value, where))
    if origin is dict:
        return {_text(key, where): _item(arguments[1], item, where) for key, item in _pairs(value, where)}
    return _text(value, where) if hint is str else _scalar(hint, value, where)


def _item(hint: Any, value: Any, where: str) -> Any:
    if value is None and type(None) not in typing.get_args(hint):
        raise Unreadable(f"{where}: expected a value, saw none")
    return _convert(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and number and isinstance(value, int) and abs(value) < NUMBER_LIMIT:
        return value
    if hint is float and number and math.isfinite(value) and abs(value) < NUMBER_LIMIT:
        return float(value)
    raise Unreadable(f"{where}: expected {hint.__name__}, saw {str(value)[:40]!r}")


def _text(value: Any, where: str, limit: int = TEXT_LENGTH) -> str:
    """A text, cut; what could steer a terminal is replaced."""
    if not isinstance(value, str):
        raise Unreadable(f"{where}: expected text, saw {type(value).__name__}")
    return plain(value[:limit])


def _optional_text(value: Any, where: str, limit: int) -> str | None:
    # the escape sequences of a table are part of its format, and it is only parsed
    if value is None or (isinstance(value, str) and len(value) <= limit):
        return value
    return _text(value, where, limit)


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unreadable(f"{where}: expected a list, saw {type(value).__name__}")
    return value[:NUM_ITEMS]


def _pairs(value: Any, where: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise Unreadable(f"{where}: expected an object, saw {type(value).__name__}")
    return list(value.items())[:NUM_ITEMS]


def _list(kind: type[_T], value: Any, where: str) -> tuple[_T, ...]:
    return tuple(checked(kind, item, where) for item in _items(value or [], where))


def _part(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, dict) else None


def _failed(value: Any) -> bool:
    """Whether a section says that it could not be read."""
    return isinstance(value, dict) and isinstance(value.get("error"), str)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Computer:
    hostname: str
    num_cpus: int
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None


def _system(section: Any) -> dict[str, Any]:
    computer = checked(_Computer, section, "system")
    return {**dataclasses.asdict(computer), "system": checked(System, section, "system")}


def _packages(said: Any, section: Any) -> dict[str, Any]:
    """What is known of the ranks' Python: nothing where none was named or none could be asked."""
    if not section:
        why = _text(said["error"], "packages") if _failed(said) else "nobody named a Python"
        return {"python": "", "packages": {}, "python_reason": why}
    return {
        "python": _text(_part(section, "python"), "packages.python"),
        "packages": _convert(dict[str, str | None], _part(section, "packages"), "packages") or {},
        "python_arch": _convert(str, _part(section, "arch"), "packages.arch"),
        "torch": _convert(TorchBuild, _part(section, "torch"), "packages.torch"),
    }


def _gpus(section: Any) -> dict[str, Any]:
    if not section:
        return {"gpus": (), "gpu_reason": "could not be read"}
    said = dict(_pairs(section, "gpus"))
    reason = dict(_pairs(said.get("reason") or {}, "gpus.reason"))
    driver = checked(GpuDriver, {**said, "version": said.get("driver"), "trouble": reason.get("kind")}, "gpus")
    gpus = tuple(_gpu(card, driver) for card in _items(said.get("cards") or [], "gpus"))
    why = _convert(str, reason.get("text"), "gpus.reason") or _lost(driver.faults) or "the driver lists no card"
    return {"gpus": gpus, "gpu_reason": None if gpus else why, "gpu_driver": driver}


def _gpu(card: Any, driver: GpuDriver) -> Gpu:
    """One card. A simulated one says so in its name, so that nobody takes its figures for real."""
    said = {name: value for name, value in _pairs(card, "gpus.cards") if value is not None}
    gpu = checked(Gpu, {"uuid": "?", **said, "driver": driver.version or "?"}, "gpus.cards")
    return dataclasses.replace(gpu, name=f"{gpu.name} (simulated)") if driver.simulated else gpu


def _lost(faults: tuple[GpuFault, ...]) -> str | None:
    return faults[0].text if faults else None


def _names(section: Any) -> tuple[Resolved, ...]:
    found = []
    for name, answer in _pairs(_part(section, "addresses") or {}, "names"):
        if isinstance(answer, dict):
            found.append(Resolved(name=_text(name, "names"), error=_text(answer.get("error", "?"), "names")))
        else:
            found.append(
                Resolved(name=_text(name, "names"), addresses=_convert(tuple[str, ...], answer, "names") or ())
            )
    return tuple(found)


def _routes(section: Any) -> tuple[Route, ...]:
    rows = _pairs(section or {}, "routes")
    return tuple(checked(Route, {**row, "to": name}, "routes") for name, row in rows if isinstance(row, dict))


def _files(section: Any) -> tuple[File, ...]:
    found = []
    for item in _items(section or [], "files"):
        row = dict(_pairs(item, "files"))
        text = _optional_text(row.get("text"), "files", LONG_TEXT_LENGTH)
        found.append(dataclasses.replace(checked(File, {**row, "text": None}, "files"), text=text))
    return tuple(found)
