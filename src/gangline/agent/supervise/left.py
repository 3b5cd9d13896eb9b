"""`left`: what of a part of a run is still on this host. Changes nothing.

    left < {"requests": [HostRequest, ...], "port": n or null}
        -> {"processes": [{pid, command, why}], "ports": [n], "leases": [name], "gpus": [{pid, memory_mib}]}

Looked for are: processes with the tag of the part in their environment, the host agent and what descends from it,
torchrun and ranks whose pids were noted, sockets that these listen on, locked leases, and GPU memory of any pid that
was noted. What a host agent that rests holds ready is not left; nor is what serves a later part of the run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from gangline.agent.host_files import AGENT_RECORD, read_bytes, read_record
from gangline.agent.supervise import leases, processes, warm_pool
from gangline.agent.supervise.leases import TAG

SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
SMI_S = 10.0
COMMAND_CHARACTERS = 200


def left_of(requests: Iterable[Mapping[str, Any]], *, port: Optional[int]) -> Dict[str, Any]:
    """What is left of some parts of one run."""
    found: Dict[int, str] = {}
    noted: Set[int] = set()
    held: List[str] = []
    for request in requests:
        records = list(_records(request))
        noted |= {pid for pid, _, _ in records}
        ready = warm_pool.holding(Path(request["folder"]))
        found.update(_running(request, records, ready or set()))
        held += leases.held(request) if ready is None else []
    found.pop(os.getpid(), None)
    rows = [{"pid": pid, "command": _command(pid), "why": why} for pid, why in sorted(found.items())]
    return {
        "processes": rows,
        "ports": _ports(found, port),
        "leases": sorted(set(held)),
        "gpus": _gpus(noted | set(found)),
    }


def _running(
    request: Mapping[str, Any], records: List[Tuple[int, int, str]], ready: Set[Tuple[int, int]]
) -> Dict[int, str]:
    """Why each process is of this part. ready: what a host agent that rests holds."""
    found: Dict[int, str] = {}
    if not warm_pool.is_handed(Path(request["folder"])):
        for process in processes.tagged(f"{TAG}={warm_pool.tag_of(request)}"):
            if (process.pid, process.start_ticks) not in ready:
                found[process.pid] = "tag"
    for pid, start_ticks, what in records:
        if not processes.is_alive(pid, start_ticks):
            continue
        if (pid, start_ticks) not in ready:
            found.setdefault(pid, what)
        if what == "host agent":
            below = [each for each in processes.descendants(pid) if (each.pid, each.start_ticks) not in ready]
            found.update({process.pid: "child of the host agent" for process in below})
    return found


def _records(request: Mapping[str, Any]) -> Iterable[Tuple[int, int, str]]:
    """Processes that were noted when they started: pid, start, what."""
    folder = Path(request["folder"])
    host_agent = read_record(folder / AGENT_RECORD)
    if host_agent and not warm_pool.is_handed(folder):
        yield int(host_agent["pid"]), int(host_agent["start_ticks"]), "host agent"
        yield int(host_agent["torchrun_pid"]), int(host_agent["torchrun_start_ticks"]), "torchrun"
    files = Path(request["rank_files"])
    for rank in request.get("ranks", ()):
        record = read_record(files / f"rank-{rank}.pid")
        # Who has told how a rank ended has waited for it; the pid may be that of the prefork process.
        if record and not (files / f"rank-{rank}.exit.json").exists():
            yield int(record["pid"]), int(record["start_ticks"]), f"rank {rank}"


def _ports(pids: Iterable[int], port: Optional[int]) -> List[int]:
    """Ports on which they listen; and the port of the run, if somebody does of whom we may not know who it is."""
    listening = processes.sockets(processes.LISTEN)
    ours = {each.local[1] for each in processes.of_processes(pids, listening)}
    if port is not None:
        inodes = {each.inode for each in listening if each.local[1] == port}
        known: Set[int] = set()
        for process in processes.every_process() if inodes else []:
            known |= processes.inodes(process.pid)
        if inodes - known:
            ours.add(port)
    return sorted(ours)


def _gpus(pids: Set[int]) -> List[Dict[str, int]]:
    """GPU memory that the driver counts for one of the pids."""
    try:
        said = subprocess.run(SMI, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=SMI_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in said.decode(errors="replace").splitlines():
        pid, _, memory = line.partition(",")
        if pid.strip().isdigit() and int(pid) in pids:
            found.append({"pid": int(pid), "memory_mib": int(memory) if memory.strip().isdigit() else 0})
    return found


def _command(pid: int) -> str:
    words = read_bytes(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ")
    return words.decode(errors="replace").strip()[:COMMAND_CHARACTERS]


def left(asked: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    return left_of(asked["requests"], port=asked.get("port"))
