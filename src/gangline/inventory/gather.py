"""Ask every host for its facts, all at the same time."""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from gangline.errors import GanglineError, HostUnreachable
from gangline.inventory.facts import (
    BuildFacts,
    File,
    Folder,
    Gpu,
    GpuDriver,
    HostFacts,
    HostFailure,
    Inventory,
    Nic,
    OtherGpu,
    OtherLease,
    ProcessLimits,
    Rdma,
    Resolved,
    System,
    TorchBuild,
    Unread,
    Variable,
    parse_topology,
)
from gangline.inventory.folders import plain
from gangline.runs.cluster import Cluster, Host
from gangline.runs.decode import DecodeError, build, known_part
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import AGENT, CommandResult, Transport

# From the JSON of a host to facts. The host may be old, new, broken or lying, so every value is checked first.


TEXT_LENGTH = 2000
LONG_TEXT_LENGTH = 1 << 17
"""For texts that are parsed and never shown."""
NUM_ITEMS = 512
NUMBER_LIMIT = 1 << 63
_T = TypeVar("_T")


class Unreadable(ValueError):
    """The JSON of a host cannot be facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sections:
    """Sections of an answer that are facts as they stand."""

    nics: tuple[Nic, ...] = ()
    rdma: Rdma = field(default_factory=Rdma)
    other_gpus: tuple[OtherGpu, ...] = ()
    leases: tuple[OtherLease, ...] = ()
    storage: tuple[Folder, ...] = ()
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    variables: tuple[Variable, ...] = ()
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _System(System):
    hostname: str
    num_cpus: int
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packages:
    python: str
    packages: dict[str, str | None] = field(default_factory=dict)
    arch: str | None = None
    torch: TorchBuild | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Programs:
    found: dict[str, str | None] = field(default_factory=dict)
    pythons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoCards:
    kind: str | None = None
    text: str | None = None


def read_facts(host: str, data: Any, *, asked_s: float | None = None, answered_s: float | None = None) -> HostFacts:
    """The facts in an answer of `gangline-agent facts`. Raises Unreadable, which names the place.

    Unknown keys are passed over, missing ones are None; a value of another type is a lie.
    """
    if not isinstance(data, dict) or not isinstance(data.get("system"), dict):
        raise Unreadable("it has no section `system`")
    errors = {name: value["error"] for name, value in data.items() if _failed(value)}
    said = {name: value for name, value in data.items() if name not in errors}
    if "system" in errors:
        raise Unreadable(f"system: {_clean(errors['system'], 'system')}")
    sections = checked(_Sections, {name: said.get(name) for name in _Sections.__dataclass_fields__}, "")
    system = checked(_System, said["system"], "system")
    programs = checked(_Programs, said.get("programs") or {}, "programs")
    work = sections.storage[0] if sections.storage else None
    return HostFacts(
        host=host,
        asked_s=asked_s,
        answered_s=answered_s,
        hostname=system.hostname,
        num_cpus=system.num_cpus,
        memory_total_bytes=system.memory_total_bytes,
        memory_available_bytes=system.memory_available_bytes,
        system=System(**{name: getattr(system, name) for name in System.__dataclass_fields__}),
        workdir=(work and (work.real_path or work.path)) or "",
        disk_free_bytes=(work and work.free_bytes) or 0,
        **_packages(said.get("packages"), errors.get("packages", "nobody named a Python")),
        **_gpus(said.get("gpus")),
        topology=parse_topology(_long_text(said.get("topology"), "topology") or ""),
        names=_names(said.get("names")),
        **{name: getattr(sections, name) for name in _Sections.__dataclass_fields__ if name != "files"},
        programs=programs.found,
        pythons=programs.pythons,
        files=tuple(
            dataclasses.replace(file, text=_long_text(row.get("text"), "files"))
            for file, row in zip(sections.files, said.get("files") or (), strict=False)
        ),
        unread=tuple(Unread(section=_clean(name, ""), why=_clean(why, name)) for name, why in errors.items()),
    )


def read_leases(rows: Any) -> tuple[OtherLease, ...]:
    """The leases in a section of facts; raises Unreadable."""
    return checked(_Sections, {"leases": rows or []}, "").leases


def checked(kind: type[_T], data: Any, where: str) -> _T:
    """A dataclass from plain data of a host; raises Unreadable."""
    if not isinstance(data, dict):
        raise Unreadable(f"{where}: expected an object, saw {type(data).__name__}")
    try:
        return build(kind, known_part(kind, _clean(data, where)))
    except DecodeError as error:
        raise Unreadable(f"{where}.{error}" if where else str(error)) from error


def _clean(value: Any, where: str) -> Any:
    """Plain data without control characters, missing values of objects, endless lists and endless numbers."""
    if isinstance(value, str):
        return plain(value[:TEXT_LENGTH])
    if isinstance(value, list):
        return [_clean(item, where) for item in value[:NUM_ITEMS]]
    if isinstance(value, dict):
        items = list(value.items())[:NUM_ITEMS]
        return {_clean(key, where): _clean(item, f"{where}.{key}") for key, item in items if item is not None}
    if isinstance(value, (int, float)) and not abs(value) < NUMBER_LIMIT:
        raise Unreadable(f"{where}: expected a number, saw {str(value)[:40]!r}")
    return value


def _long_text(value: Any, where: str) -> str | None:
    """A text with its escape sequences, which are part of its format: it is only parsed."""
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"{where}: expected text, saw {type(value).__name__}")
    return value if value is None or len(value) <= LONG_TEXT_LENGTH else plain(value[:TEXT_LENGTH])


def _failed(value: Any) -> bool:
    """Whether a section says that it could not be read."""
    return isinstance(value, dict) and isinstance(value.get("error"), str)


def _packages(section: Any, why: str) -> dict[str, Any]:
    """The packages of the ranks' Python; without any, `why` says why."""
    if not section:
        return {"python": "", "packages": {}, "python_reason": _clean(why, "packages")}
    found = checked(_Packages, section, "packages")
    names = section["packages"] if isinstance(section.get("packages"), dict) else {}
    missing = {_clean(name, "packages"): None for name, version in names.items() if version is None}
    return {
        "python": found.python,
        "packages": {**missing, **found.packages},
        "python_arch": found.arch,
        "torch": found.torch,
    }


def _gpus(section: Any) -> dict[str, Any]:
    if not section:
        return {"gpus": (), "gpu_reason": "could not be read"}
    if not isinstance(section, dict):
        raise Unreadable(f"gpus: expected an object, saw {type(section).__name__}")
    reason = checked(_NoCards, section.get("reason") or {}, "gpus.reason")
    driver = checked(GpuDriver, {**section, "version": section.get("driver"), "trouble": reason.kind}, "gpus")
    cards = section.get("cards") or []
    if not isinstance(cards, list):
        raise Unreadable(f"gpus.cards: expected a list, saw {type(cards).__name__}")
    gpus = tuple(_gpu(card, driver) for card in cards[:NUM_ITEMS])
    why = reason.text or (driver.faults[0].text if driver.faults else "the driver lists no card")
    return {"gpus": gpus, "gpu_reason": None if gpus else why, "gpu_driver": driver}


def _gpu(card: Any, driver: GpuDriver) -> Gpu:
    """One card. The name of a simulated one says so: its figures are not real."""
    said = {"uuid": "?", **card, "driver": driver.version or "?"} if isinstance(card, dict) else card
    gpu = checked(Gpu, said, "gpus.cards")
    return dataclasses.replace(gpu, name=f"{gpu.name} (simulated)") if driver.simulated else gpu


def _names(section: Any) -> tuple[Resolved, ...]:
    said = section.get("addresses") if isinstance(section, dict) else None
    if not isinstance(said, dict):
        return ()
    rows = (
        {"name": name, **(answer if isinstance(answer, dict) else {"addresses": answer})}
        for name, answer in list(said.items())[:NUM_ITEMS]
    )
    return tuple(checked(Resolved, row, "names") for row in rows)


TIMEOUT_S = 15.0
"""How long one host may take; the agent itself takes 11 s at most. Both take longer on a busy host."""
MOST_LOAD = 6.0
LOAD, CORES = PurePath("/proc/loadavg"), PurePath("/sys/devices/system/cpu/online")
NUM_AT_ONCE = 64
UNUSED = "the cluster file says gpu: none"
ANSWER_LENGTH = 1 << 21
WHY_LENGTH = 2000


def gather(cluster: Cluster, transports: Mapping[str, Transport]) -> Inventory:
    """Read the facts of all hosts in parallel. A host that fails is recorded with the reason, never raised."""
    requests = [(host, facts_request(host, cluster)) for host in cluster.hosts]
    answers = in_parallel(lambda asked: _ask(*asked, transports[asked[0].name]), requests, at_once=NUM_AT_ONCE)
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
    # behind the @; what stands in a user's ssh_config means nothing on other hosts, and does no harm
    names = [name for host in cluster.hosts for name in (host.name, host.address, (host.ssh or "").rpartition("@")[2])]
    return list(dict.fromkeys(name for name in names if name))


def is_address(text: str) -> bool:
    """Whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _ask(host: Host, request: dict[str, Any], transport: Transport) -> HostFacts | HostFailure:
    asked_s, limit_s = time.time(), TIMEOUT_S
    try:
        limit_s *= _load(transport)
        result = transport.run((AGENT, "facts"), stdin=json.dumps(request).encode(), timeout_s=limit_s)
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
        return _no_facts(host, f"no facts within {limit_s:.0f} s")
    except OSError as error:
        return _no_facts(host, error.strerror or str(error))
    return _read(host, result, asked_s=asked_s)


def _load(transport: Transport) -> float:
    """Processes per core that want to run on a host, from 1 to 6; raises HostUnreachable."""
    try:
        load = float(transport.read(LOAD, limit=4096).split()[0])
        cores = sum(map(_width, transport.read(CORES, limit=4096).decode().split(",")))
    except (OSError, ValueError, IndexError):  # a host without them
        return 1.0
    return min(max(1.0, load / max(1, cores)), MOST_LOAD)


def _width(cores: str) -> int:
    """The cores of a part of such a list: 0-3 are four."""
    first, _, last = cores.strip().partition("-")
    return int(last or first) - int(first) + 1


def _read(host: Host, result: CommandResult, *, asked_s: float) -> HostFacts | HostFailure:
    if result.returncode != 0:
        why = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return _no_facts(host, f"exit code {result.returncode}: {why}")
    if len(result.stdout) > ANSWER_LENGTH:
        return _no_facts(host, f"its facts are longer than {ANSWER_LENGTH >> 20} MiB")
    try:
        facts = read_facts(host.name, json.loads(result.stdout), asked_s=asked_s, answered_s=time.time())
        return dataclasses.replace(facts, gpus=(), gpu_reason=UNUSED, other_gpus=()) if host.gpu == {} else facts
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
    answers = in_parallel(lambda name: _ask_building(*asked[name], transports[name]), asked, at_once=NUM_AT_ONCE)
    found = dict(zip(asked, answers, strict=True))
    hosts = [dataclasses.replace(facts, building=found.get(facts.host, facts.building)) for facts in inventory.hosts]
    return dataclasses.replace(inventory, hosts=tuple(hosts))


def environments_folder(host: Host) -> PurePath:
    """Where the environments lie that gangline builds there."""
    return PurePath(host.workdir) / "environments"


def read_building(said: Any, known: BuildFacts) -> BuildFacts:
    """What a host answers to `environment`, `do: look`, beside what is `known` of its lock; raises Unreadable."""
    fields = ("pythons", "built", "free_bytes")
    data = {name: said.get(name) for name in fields} if isinstance(said, dict) else said
    found = checked(BuildFacts, data, "environment")
    return dataclasses.replace(known, **{name: getattr(found, name) for name in fields})


def _ask_building(host: Host, known: BuildFacts, transport: Transport) -> BuildFacts:
    request = json.dumps({"do": "look", "root": str(environments_folder(host))}).encode()
    limit_s = BUILDING_TIMEOUT_S
    try:
        limit_s *= _load(transport)
        result = transport.run((AGENT, "environment"), stdin=request, timeout_s=limit_s)
        if result.returncode != 0:
            last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
            return _unknown(known, f"exit code {result.returncode}: {last}")
        return read_building(json.loads(result.stdout.splitlines()[-1]), known)
    except GanglineError as error:
        return _unknown(known, error.what)
    except TimeoutError:
        return _unknown(known, f"no answer within {limit_s:.0f} s")
    except (OSError, ValueError, LookupError, RecursionError) as error:  # Unreadable is a ValueError
        return _unknown(known, f"its answer cannot be read: {error}")


def _unknown(known: BuildFacts, why: str) -> BuildFacts:
    return dataclasses.replace(known, error=plain(why[:BUILDING_WHY_LENGTH]))
