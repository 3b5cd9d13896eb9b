"""Polls of hosts: a few small reads each, all hosts at once; a dead host does not delay the others."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

from gangline.errors import HostUnreachable, RunFailed
from gangline.inventory.pairs import CLAIMS_FOLDER, HOLD_S, RENDEZVOUS_PORTS
from gangline.launch.backend import (
    HostRequest,
    HostStatus,
    HostTrouble,
    LaunchRequest,
    RankSigns,
    RankSilence,
    StartSigns,
    WorkSigns,
)
from gangline.runs.cluster import Cluster
from gangline.runs.decode import build, known_part
from gangline.runs.layout import AGENT_NAMES
from gangline.runs.old_format import old_names
from gangline.runs.state import parse_stat
from gangline.transport.ssh_options import printable, understood, whole
from gangline.transport.transport import AGENT, Transport, read_if_there

AT_ONCE = 32
PATIENCE_S = 5.0
"""How long a host that answered the last time may take before it counts as unreachable."""
LINE_LETTERS = 200
MOST_TROUBLES = 16
MOST_FRAMES = 12
RANK_PID = re.compile(r"rank-\d+\.pid")
ENDPOINT = re.compile(r"\S{1,64}:\d{1,5}")

T = TypeVar("T")
_Key = tuple[str, str]


def _key(part: HostRequest) -> _Key:
    return part.host, part.folder


class HostPoller:
    """Statuses of hosts. A poll that hangs continues in the background; until it ends its host is unreachable."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline look")
        self._begun: dict[_Key, tuple[float, Future[HostStatus]]] = {}
        """Polls that have not ended, and when they began."""
        self._answers: dict[_Key, bool] = {}
        """Whether the host of a part answered the last time; missing: not polled yet."""
        self._silent_since: dict[_Key, float] = {}

    def at(self, request: LaunchRequest, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """The status of every host, in the order of the request."""
        for part in request.hosts:
            if _key(part) not in self._begun:
                future = self._pool.submit(look, part, transports[part.host])
                self._begun[_key(part)] = (time.monotonic(), future)
        deadline = time.monotonic() + self._patience_s
        for part in request.hosts:
            self._await(_key(part), deadline)
        return [self._status(part) for part in request.hosts]

    def lost(self, part: HostRequest) -> None:
        """Mark a host as silent: the next poll does not wait for it."""
        self._answers[_key(part)] = False

    def _await(self, key: _Key, deadline: float) -> None:
        _, future = self._begun[key]
        if self._answers.get(key) is None:
            wait([future])  # the transport knows when to give up
        elif self._answers[key]:
            wait([future], max(0.0, deadline - time.monotonic()))

    def _status(self, part: HostRequest) -> HostStatus:
        begun, future = self._begun[_key(part)]
        if not future.done():
            return self._silent(part, f"no answer for {time.monotonic() - begun:.0f} s")
        del self._begun[_key(part)]
        try:
            status = future.result()
        except (HostUnreachable, OSError) as error:
            return self._silent(part, _first_line(error))
        except Exception as error:  # noqa: BLE001  (whatever a host says, the others are looked after)
            return self._silent(part, f"what it says cannot be understood: {_first_line(error)}")
        self._answers[_key(part)] = True
        self._silent_since.pop(_key(part), None)
        return status

    def _silent(self, part: HostRequest, why: str) -> HostStatus:
        self._answers[_key(part)] = False
        since = self._silent_since.setdefault(_key(part), time.time())
        return HostStatus(host=part.host, phase="unreachable", why=why, since=since)


def look(part: HostRequest, transport: Transport) -> HostStatus:
    """The status of one host; raises HostUnreachable, and other errors for files that no host agent wrote."""
    folder = PurePath(part.folder)
    record = read_record(transport, folder / AGENT_NAMES["EXIT"])
    if record is None:
        said = read_record(transport, folder / AGENT_NAMES["STATUS"])
        if said is None:
            said = read_record(transport, folder / AGENT_NAMES["AGENT_RECORD"])
        if said is None:
            return HostStatus(host=part.host, phase="starting")
        if process_runs(transport, said):
            return _running(part, said)
        # It may have ended between the two looks.
        record = read_record(transport, folder / AGENT_NAMES["EXIT"])
        if record is None:
            return replace(_running(part, said), phase="lost")
    rests, ready = _rests(folder, transport)
    return HostStatus(
        host=part.host,
        phase="ended",
        returncode=whole(record["returncode"]),
        error=_error(record["error"]),
        reason=_text(record["reason"]),
        failures=tuple(map(_failure, record["failures"])),
        left_early=tuple(map(whole, record.get("left_early", ()))),
        console_tail=tuple(map(str, record["console_tail"])),
        epoch=_count(record.get("epoch")),
        rests=rests,
        ready=ready,
    )


def _rests(folder: PurePath, transport: Transport) -> tuple[bool, bool]:
    """Whether an idle host agent is there, and whether its warm pool is ready. The file is removed once that has ended
    or was taken over.
    """
    record = read_record(transport, folder / AGENT_NAMES["RESTING"])
    rests = record is not None and process_runs(transport, record)
    return rests, rests and record.get("ready", True) is True


def outlives_agent(part: HostRequest, transport: Transport) -> bool:
    """Whether a host agent died, and torchrun or a rank that it started still runs. By files alone.

    Raises GanglineError for files that no host agent wrote.
    """
    with understood(part.host, "whether ranks outlive their host agent"):
        return _outlives_agent(part, transport)


def _outlives_agent(part: HostRequest, transport: Transport) -> bool:
    if look(part, transport).phase != "lost":
        return False
    host_agent = read_record(transport, PurePath(part.folder) / AGENT_NAMES["AGENT_RECORD"])
    host_agent = {} if host_agent is None else host_agent
    pid, ticks = host_agent.get("torchrun_pid"), host_agent.get("torchrun_start_ticks")
    torchrun = [] if pid is None else [{"pid": pid, "start_ticks": ticks}]
    folder = PurePath(part.rank_files)
    wanted = {f"rank-{rank}.pid" for rank in part.ranks}
    names = [name for name in transport.names(folder) if name in wanted or (not wanted and RANK_PID.fullmatch(name))]
    ranks = [record for name in names if (record := read_record(transport, folder / name)) is not None]
    return any(process_runs(transport, record) for record in [*torchrun, *ranks])


def _running(part: HostRequest, said: Mapping[str, Any]) -> HostStatus:
    return HostStatus(
        host=part.host,
        phase="running",
        failures=tuple(map(_failure, said.get("failures", ()))),
        beat=_count(said.get("beat")),
        epoch=_count(said.get("epoch")),
        signs=_signs(said["start"]) if "start" in said else None,
        silence=tuple(_silence(part, rank, row) for rank, row in said.get("silence", {}).items()),
        troubles=read_troubles(said.get("troubles", [])),
    )


def read_troubles(rows: Any) -> tuple[HostTrouble, ...]:
    """What a host says of its file systems; raises TypeError, DecodeError."""
    if not isinstance(rows, list):
        raise TypeError(f"troubles: expected a list, found {type(rows).__name__}")
    return tuple(_trouble(row) for row in rows[:MOST_TROUBLES])


def _trouble(row: Any) -> HostTrouble:
    found = build(HostTrouble, known_part(HostTrouble, row))
    texts = {name: printable(getattr(found, name))[:LINE_LETTERS] for name in ("point", "kind", "words")}
    return replace(found, **texts)


def _failure(said: Mapping[str, Any]) -> dict[str, Any]:
    """A rank that ended badly, with all keys that are read later; raises LookupError, TypeError, ValueError."""
    code, oom, stack, collective = (said.get(name) for name in ("exit", "oom", "stack", "collective"))
    return {
        "rank": int(said["rank"]),
        "pid": said["pid"],
        "time": float(said["time"]),
        "ordered": bool(said["ordered"]),
        "error": _error(said["error"]),
        "exit": None if code is None else int(code),
        "log": str(said["log"]),
        "log_tail": list(map(str, said["log_tail"])),
        **({} if oom is None else {"oom": _oom(oom)}),
        **({} if stack is None else {"stack": _stack(stack)}),
        **({} if collective is None else {"collective": _collective(collective)}),
    }


def _stack(said: Mapping[str, Any]) -> dict[str, Any]:
    """Where a rank of the user's own program stood at its end (gangline.agent.supervise.stacks)."""
    texts = {name: _words(said[name]) for name in ("state", "where")}
    frames = [_words(frame) for frame in list(said["stack"])[:MOST_FRAMES]]
    return {"pid": whole(said["pid"]), **texts, "waits": said["waits"] is True, "stack": frames}


def _collective(said: Mapping[str, Any]) -> dict[str, Any]:
    """The last collective that such a rank began before it raised."""
    texts = {name: _words(said[name]) for name in ("group", "operation", "sizes")}
    return {"number": whole(said["number"]), **texts}


def _words(value: object) -> str:
    return printable(str(value)[:LINE_LETTERS])


def _oom(said: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence that the kernel killed a rank for memory (gangline.agent.supervise.memory_kills)."""
    texts = {name: _text(said.get(name)) for name in ("line", "cgroup")}
    return {**texts, **{name: _count(said.get(name)) for name in ("limit_bytes", "memory_bytes")}}


def _error(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if said is None:
        return None
    texts = {name: str(said.get(name, "")) for name in ("what", "seen", "fix")}
    return {**said, **texts}


def _count(value: object) -> int | None:
    return None if value is None else whole(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _signs(start: Mapping[str, Any]) -> StartSigns:
    ranks = [
        _part_of(RankSigns, rank, row, has_torch=row["torch"], has_met=row["met"])
        for rank, row in start["ranks"].items()
    ]
    ranks.sort(key=lambda row: row.rank)
    waits_for = tuple(each for each in start["waits_for"] if ENDPOINT.fullmatch(each))
    work = start.get("work")
    said = {
        "launcher": start["launcher"] is True,
        "met": start["met"] is True,
        "knocks": start.get("knocks") is True,
        "work": None if work is None else known_part(WorkSigns, work),
        "load": start.get("load"),
    }
    return replace(build(StartSigns, said), ranks=tuple(ranks), waits_for=waits_for)


def _silence(part: HostRequest, rank: str, row: Mapping[str, Any]) -> RankSilence:
    """How long a rank has printed nothing; raises LookupError, TypeError, ValueError."""
    line = " ".join(str(row["line"])[:LINE_LETTERS].split())
    found = _part_of(RankSilence, rank, row, has_printed=row["printed"], line=line)
    if part.ranks and found.rank not in part.ranks:
        raise ValueError(f"rank {rank[:20]} is not one of {part.host}")
    return found


def _part_of(kind: type[T], rank: str, row: Mapping[str, Any], **values: Any) -> T:
    """What a host agent reports of one rank; a newer agent may report more. Raises DecodeError, ValueError."""
    return build(kind, known_part(kind, {**row, **values, "rank": int(rank)}))


def process_runs(transport: Transport, record: Mapping[str, Any]) -> bool:
    """Whether the process of a record with "pid" and "start_ticks" runs there."""
    pid, start_ticks = whole(record["pid"]), whole(record["start_ticks"])
    try:
        stat = read_if_there(transport, PurePath(f"/proc/{pid}/stat"), limit=4096)
    except PermissionError:  # its number was given to a process of another user
        return False
    process = parse_stat(pid, stat) if stat else None
    return process is not None and process.start_ticks == start_ticks


def read_record(transport: Transport, path: PurePath) -> Any:
    """A JSON document, under its name of now or of the old format; None where it is missing, or damaged as after a
    power cut.
    """
    for name in (path.name, *old_names(path.name)):
        with suppress(FileNotFoundError):
            try:
                return json.loads(transport.read(path.with_name(name)))
            except ValueError:
                return None
    return None


# The port at which ranks meet, chosen on the head.


LOOPBACK = "127.0.0.1"


def free_port(cluster: Cluster, head: Transport, *, claim: bool = True) -> int:
    """A TCP port of the head on which nobody listens and which no other run was given just now; raises RunFailed.

    claim: keep it for a while from other runs, with a file in the work folder; else nothing is written.
    """
    low, high = cluster.ports or RENDEZVOUS_PORTS
    asked = {
        "address": LOOPBACK if cluster.is_one_machine else cluster.head.address,
        "range": [low, high],
        "claims": str(PurePath(cluster.head.workdir, CLAIMS_FOLDER)) if claim else None,
        "hold_s": HOLD_S,
    }
    try:
        result = head.run((AGENT, "free-port"), stdin=json.dumps(asked).encode())
    except TimeoutError as error:
        raise HostUnreachable(
            f"{head.host}: no port can be looked for", seen=str(error), fix="look at the load of that host, try again"
        ) from error
    if result.returncode:
        raise HostUnreachable(f"{head.host}: no port can be looked for", seen=result.stderr[-2000:])
    with understood(head.host, "which port is free"):
        port = json.loads(result.stdout)["port"]
        port = None if port is None else whole(port)
    if port is None:
        raise RunFailed(
            f"{head.host}: no port is free from {low} to {high}",
            seen="all are listened on, or were given to runs that are about to start",
            fix="end what listens there, or write another range in cluster.yaml: ports",
        )
    return port
