"""The backend of hosts that we start ourselves: one guard and one torchrun per host, static rendezvous."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import HostUnreachable, RunFailed
from gangline.launch.backend import HostRequest, HostStatus, Request
from gangline.launch.env import is_one_machine, rank_env
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout
from gangline.runs.process import parse_stat

JOIN_RESERVE_S = 60
"""On top of the ranks' own deadline to join, torchrun waits this long: hosts import torch at different speeds."""
LOOPBACK = "127.0.0.1"
RANK_PID = re.compile(r"rank-\d+\.pid")


def free_port() -> int:
    """A TCP port that nothing on this computer listens on now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


class LocalBackend:
    """torchrun on every host, under a guard.

    num_cpus: cores of this computer, dealt to the ranks if all hosts are on it.
    """

    def __init__(self, *, num_cpus: int | None = None) -> None:
        self._num_cpus = num_cpus if num_cpus is not None else os.cpu_count()

    def render(self, cluster: Cluster, gang: Gang, *, port: int) -> Request:
        """See `Backend.render`; `port` is free on the head (`free_port`)."""
        hosts = {host.name: host for host in cluster.hosts}
        parts = tuple(self._part(cluster, gang, hosts[name], port=port) for name in gang.hosts)
        return Request(run_id=gang.run_id, attempt=gang.attempt, hosts=parts)

    def _part(self, cluster: Cluster, gang: Gang, host: Host, *, port: int) -> HostRequest:
        layout = RunLayout(Path(host.workdir), gang.run_id)
        attempt = layout.attempt(gang.attempt)
        return HostRequest(
            host=host.name,
            folder=str(attempt / host.name),
            rank_files=str(attempt),
            argv=(*_torchrun(cluster, gang, host, port=port), *_worker(layout, gang.attempt)),
            env=rank_env(cluster, host, num_cpus=self._num_cpus),
            guard_argv=(host.python, "-m", "gangline.agent.guard"),
            ranks=tuple(number for number, rank in enumerate(gang.ranks) if rank.host == host.name),
        )

    def start(self, request: Request, transports: Mapping[str, Transport]) -> None:
        """See `Backend.start`."""
        for index, part in enumerate(request.hosts):
            try:
                _start_guard(part, transports[part.host])
            except BaseException:  # Ctrl-C, too: all or nothing
                begun = Request(run_id=request.run_id, attempt=request.attempt, hosts=request.hosts[: index + 1])
                self._end(begun, transports)
                raise

    def poll(self, request: Request, transports: Mapping[str, Transport]) -> list[HostStatus]:
        """See `Backend.poll`. Costs a few small reads per host."""
        return [_status(part, transports[part.host]) for part in request.hosts]

    def stop(self, request: Request, transports: Mapping[str, Transport], *, now: bool) -> None:
        """See `Backend.stop`. Where the guard is gone, what it left is ended here and at once."""
        order = json.dumps({"order": "kill" if now else "stop"}).encode()
        for part in request.hosts:
            transport = transports[part.host]
            phase = _status(part, transport).phase
            if phase in {"starting", "running"}:
                transport.write(PurePath(part.folder) / "order.json", order)
            elif phase == "lost":
                _reap(part, transport)

    def _end(self, request: Request, transports: Mapping[str, Transport], *, timeout_s: float = 30.0) -> None:
        """Kill what was started and wait until it is gone."""
        self.stop(request, transports, now=True)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(status.phase != "running" for status in self.poll(request, transports)):
                return
            time.sleep(0.05)


def outlives_guard(part: HostRequest, transport: Transport) -> bool:
    """Whether a guard is gone, and torchrun or a rank that it had started still runs. By files alone."""
    if _status(part, transport).phase != "lost":
        return False
    guard = _read(transport, PurePath(part.folder) / "guard.json") or {}
    torchrun = {"pid": guard.get("torchrun_pid"), "start_ticks": guard.get("torchrun_start_ticks")}
    folder = PurePath(part.rank_files)
    wanted = {f"rank-{rank}.pid" for rank in part.ranks}
    names = [name for name in transport.names(folder) if name in wanted or (not wanted and RANK_PID.fullmatch(name))]
    ranks = [record for name in names if (record := _read(transport, folder / name)) is not None]
    return any(_runs(transport, record) for record in [torchrun, *ranks])


def _torchrun(cluster: Cluster, gang: Gang, host: Host, *, port: int) -> tuple[str, ...]:
    one_machine = is_one_machine(cluster)
    attempt = RunLayout(Path(host.workdir), gang.run_id).attempt(gang.attempt)
    options = {
        "--nnodes": len(gang.hosts),
        "--nproc-per-node": gang.num_ranks(host.name),
        "--node-rank": gang.hosts.index(host.name),
        "--rdzv-backend": "static",
        "--rdzv-id": f"{gang.run_id}-{gang.attempt}",
        "--rdzv-conf": f"timeout={round(gang.init_timeout_s) + JOIN_RESERVE_S}",
        "--master-addr": LOOPBACK if one_machine else cluster.head.address,
        "--master-port": port,
        "--local-addr": LOOPBACK if one_machine else host.address,
        "--max-restarts": 0,
        "--monitor-interval": 0.5,
        "--shutdown-timeout": 10,
        # Else torchrun leaves a folder in /tmp.
        "--log-dir": attempt / host.name / "torchrun",
    }
    words = tuple(str(word) for option in options.items() for word in option)
    return (host.python, "-m", "torch.distributed.run", *words)


def _worker(layout: RunLayout, attempt: int) -> tuple[str, ...]:
    return ("-m", "gangline.worker", "train", str(layout.job), str(layout.gang(attempt)), str(layout.root))


def _start_guard(part: HostRequest, transport: Transport) -> None:
    request = json.dumps(asdict(part)).encode()
    try:
        result = transport.run(part.guard_argv, stdin=request)
    except TimeoutError as error:
        raise HostUnreachable(
            f"{part.host}: the guard did not start",
            seen=str(error),
            fix="look at the load of that host, try again",
        ) from error
    if result.returncode:
        tail = "\n".join(result.stderr.splitlines()[-40:])
        raise RunFailed(
            f"{part.host}: the guard did not start",
            seen=f"{' '.join(part.guard_argv)} ended with {result.returncode}: {tail}",
            fix=f"python of {part.host} in cluster.yaml must have gangline[train] installed",
        )


def _status(part: HostRequest, transport: Transport) -> HostStatus:
    folder = PurePath(part.folder)
    record = _read(transport, folder / "exit.json")
    if record is None:
        guard = _read(transport, folder / "guard.json")
        if guard is None:
            return HostStatus(host=part.host, phase="starting")
        if _runs(transport, guard):
            failures = tuple(_read(transport, folder / "failures.json") or ())
            return HostStatus(host=part.host, phase="running", failures=failures)
        # It may have ended between the two looks.
        record = _read(transport, folder / "exit.json")
    if record is None:
        return HostStatus(host=part.host, phase="lost")
    return HostStatus(
        host=part.host,
        phase="ended",
        returncode=record["returncode"],
        error=record["error"],
        reason=record["reason"],
        failures=tuple(record["failures"]),
        console_tail=tuple(record["console_tail"]),
    )


def _runs(transport: Transport, record: Mapping[str, Any]) -> bool:
    """Whether the process of a record with "pid" and "start_ticks" runs there."""
    try:
        stat = transport.read(PurePath(f"/proc/{record['pid']}/stat"), limit=4096)
    except FileNotFoundError:
        return False
    process = parse_stat(record["pid"], stat) if stat else None
    return process is not None and process.start_ticks == record["start_ticks"]


def _read(transport: Transport, path: PurePath) -> Any:
    try:
        return json.loads(transport.read(path))
    except FileNotFoundError:
        return None


def _reap(part: HostRequest, transport: Transport) -> None:
    transport.run((*part.guard_argv, "reap"), stdin=json.dumps(asdict(part)).encode())
