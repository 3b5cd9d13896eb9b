"""Ask every host for its facts, all at the same time."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import ipaddress
import json
import math
import time
import types
import typing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, TypeVar

from gangline.errors import GanglineError, HostUnreachable
from gangline.inventory.facts import (
    BuildFacts,
    File,
    Folder,
    Gpu,
    GpuDriver,
    GpuFault,
    HostFacts,
    HostFailure,
    Inventory,
    Nic,
    ProcessLimits,
    Rdma,
    Resolved,
    Route,
    System,
    TorchBuild,
    Unread,
    Variable,
    parse_topology,
)
from gangline.inventory.folders import plain
from gangline.runs.cluster import Cluster, Host
from gangline.transport.transport import AGENT, CommandResult, Transport

# From what a host says of itself to facts. It may be old, new, broken or lying: what it says is looked at first.


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
        limits=checked(ProcessLimits, sections.get("limits") or {}, "limits"),
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


TIMEOUT_S = 15.0
"""How long one host may take; the agent itself takes 11 s at most."""
NUM_AT_ONCE = 64
ANSWER_LENGTH = 1 << 21
WHY_LENGTH = 2000


def gather(cluster: Cluster, transports: Mapping[str, Transport]) -> Inventory:
    """Read the facts of all hosts in parallel. A host that fails is recorded with the reason, never raised."""
    with ThreadPoolExecutor(max_workers=min(NUM_AT_ONCE, len(cluster.hosts))) as pool:
        requests = [facts_request(host, cluster) for host in cluster.hosts]
        asked = zip(cluster.hosts, requests, strict=True)
        answers = list(pool.map(lambda pair: _ask(pair[0], pair[1], transports[pair[0].name]), asked))
    return Inventory(
        gathered=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        hosts=tuple(answer for answer in answers if isinstance(answer, HostFacts)),
        failures=tuple(answer for answer in answers if isinstance(answer, HostFailure)),
    )


def facts_request(host: Host, cluster: Cluster) -> dict[str, Any]:
    """What a host is asked."""
    files = [path for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE") if (path := host.env.get(name))]
    return {
        "workdir": host.workdir,
        "python_argv": list(host.argv()) if host.python else None,
        "python_env": {**host.code_env, **host.env},
        "names": asked_names(cluster),
        "shared": list(cluster.shared),
        "files": files,
    }


def asked_names(cluster: Cluster) -> list[str]:
    """Every name and address by which the hosts may call each other."""
    names = [name for host in cluster.hosts for name in (host.name, host.address, _destination(host))]
    return list(dict.fromkeys(name for name in names if name))


def _destination(host: Host) -> str:
    """The name behind an @; what stands in a user's ssh_config means nothing on other hosts, and does no harm."""
    return (host.ssh or "").rpartition("@")[2]


def is_address(text: str) -> bool:
    """Whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _ask(host: Host, request: dict[str, Any], transport: Transport) -> HostFacts | HostFailure:
    asked_s = time.time()
    try:
        result = transport.run((AGENT, "facts"), stdin=json.dumps(request).encode(), timeout_s=TIMEOUT_S)
    except HostUnreachable as error:
        why = "; ".join(filter(None, (error.what, error.seen)))
        return HostFailure(
            host=host.name,
            why=plain(why[:WHY_LENGTH]),
            unreachable=error.reason != "no-python",
            kind=error.reason or "unreachable",
            fix=error.fix,
        )
    except TimeoutError:
        return _no_facts(host, f"no facts within {TIMEOUT_S:.0f} s")
    except OSError as error:
        return _no_facts(host, error.strerror or str(error))
    return _read(host, result, asked_s=asked_s)


def _read(host: Host, result: CommandResult, *, asked_s: float) -> HostFacts | HostFailure:
    if result.returncode != 0:
        why = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return _no_facts(host, f"exit code {result.returncode}: {why}")
    if len(result.stdout) > ANSWER_LENGTH:
        return _no_facts(host, f"its facts are longer than {ANSWER_LENGTH >> 20} MiB")
    try:
        return read_facts(host.name, json.loads(result.stdout), asked_s=asked_s, answered_s=time.time())
    except (Unreadable, ValueError, RecursionError) as error:
        return _no_facts(host, f"its facts cannot be read: {error}")


def _no_facts(host: Host, why: str) -> HostFailure:
    return HostFailure(host=host.name, why=plain(why[:WHY_LENGTH]), unreachable=False, kind="no-facts")


# Ask the hosts whose environment is built by gangline what there is to build it with. Changes nothing there.


BUILDING_TIMEOUT_S = 15.0
"""Every Python there is run once, eight at a time."""
BUILDING_WHY_LENGTH = 300


def probe_building(
    inventory: Inventory, wanted: Mapping[str, tuple[Host, BuildFacts]], transports: Mapping[str, Transport]
) -> Inventory:
    """The inventory with `building` of the hosts that are asked, all at the same time.

    wanted: host name -> host, and what its lock says. A host that cannot say it has the reason as `BuildFacts.error`.
    """
    asked = {name: pair for name, pair in wanted.items() if inventory.of(name) is not None}
    if not asked:
        return inventory
    with ThreadPoolExecutor(max_workers=min(NUM_AT_ONCE, len(asked))) as pool:
        answers = pool.map(lambda name: _ask_building(*asked[name], transports[name]), asked)
        found = dict(zip(asked, answers, strict=True))
    return dataclasses.replace(inventory, hosts=tuple(_on(facts, found.get(facts.host)) for facts in inventory.hosts))


def environments_folder(host: Host) -> PurePath:
    """Where the environments lie that gangline builds there."""
    return PurePath(host.workdir) / "environments"


def read_building(said: Any, known: BuildFacts) -> BuildFacts:
    """What a host answers to `environment`, `do: look`, beside what is `known` of its lock; raises Unreadable."""
    fields = ("pythons", "built", "free_bytes")
    data = {name: said.get(name) for name in fields} if isinstance(said, dict) else said
    found = checked(BuildFacts, data, "environment")
    return dataclasses.replace(known, **{name: getattr(found, name) for name in fields})


def _on(facts: HostFacts, building: BuildFacts | None) -> HostFacts:
    return facts if building is None else dataclasses.replace(facts, building=building)


def _ask_building(host: Host, known: BuildFacts, transport: Transport) -> BuildFacts:
    request = json.dumps({"do": "look", "root": str(environments_folder(host))}).encode()
    try:
        result = transport.run((AGENT, "environment"), stdin=request, timeout_s=BUILDING_TIMEOUT_S)
        if result.returncode != 0:
            last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
            return _unknown(known, f"exit code {result.returncode}: {last}")
        return read_building(json.loads(result.stdout.splitlines()[-1]), known)
    except GanglineError as error:
        return _unknown(known, error.what)
    except TimeoutError:
        return _unknown(known, f"no answer within {BUILDING_TIMEOUT_S:g} s")
    except (OSError, ValueError, LookupError, RecursionError) as error:  # Unreadable is a ValueError
        return _unknown(known, f"its answer cannot be read: {error}")


def _unknown(known: BuildFacts, why: str) -> BuildFacts:
    return dataclasses.replace(known, error=plain(why[:BUILDING_WHY_LENGTH]))
