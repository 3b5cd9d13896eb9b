"""Host agents that rest between two attempts, and how the next attempt's part is handed to one.

In the folder of the part that has ended:

    resting.json  its host agent rests: who it is, what it holds, whether that is ready, and which parts fit
    next.json     a part that it is asked to take over; whoever wants to take that back removes the file first
    handed.json   the same, once it was taken; the host agent goes on in that part's folder

A host agent on standby rests from its start: its part has had no ranks, and its processes import what a rank needs
while the run goes on without this host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from gangline.agent.host_files import AGENT_RECORD, HANDED, NEXT, RESTING, read_record, write_record
from gangline.agent.supervise import processes
from gangline.agent.supervise.leases import TAG, forget

# The prefork processes of a host, and what their host agent tells them, by files.


FOLDER = "prefork"
LOCAL_RANK = b"LOCAL_RANK="
"""A variable that torchrun gives to each process that it starts as a rank."""


def has_warm_pool(request: Mapping[str, Any]) -> bool:
    """Whether the ranks of this part have prefork processes."""
    return bool(request.get("warm_pool") and request.get("ranks"))


class PreforkedProcesses:
    """The processes of one launcher. part: the folder of the attempt in which it is started."""

    def __init__(self, part: Path, *, num_ranks: int) -> None:
        self._folder = part / FOLDER
        self._num_ranks = num_ranks
        self._num_given = 0

    def prepare(self, request: Mapping[str, Any], *, standby: bool = False) -> None:
        """Make the folder, before the launcher starts; raises OSError. standby: there is no position yet."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if standby:
            (self._folder / "standby").touch()
        elif request.get("alone"):
            self.give(request)
        else:
            self._num_given = 1

    def give(self, request: Mapping[str, Any]) -> None:
        """Say who they are in the next attempt, which begins by that; raises OSError."""
        position = {
            "words": list(request["warm_pool"]["words"]),
            "ranks": list(request["ranks"]),
            "world_size": request["warm_pool"]["world_size"],
            "meet": list(request["meet"]),
            "files": request["rank_files"],
        }
        self._num_given += 1
        write_record(self._folder / f"position-{self._num_given}.json", position)
        # Not before: one whose rank has left well, and that finds neither, would leave.
        self.release()

    def hold(self) -> None:
        """From now on ranks that leave well do not take their processes with them; on a full disk they do."""
        with contextlib.suppress(OSError):
            (self._folder / "hold").touch()

    def release(self) -> None:
        """Take that back."""
        with contextlib.suppress(OSError):
            (self._folder / "hold").unlink()

    def leave(self) -> None:
        """Let those that wait leave; on a full disk they stay, and are ended."""
        self.release()
        with contextlib.suppress(OSError):
            (self._folder / "leave").touch()

    def all_stand(self, launcher: processes.Process) -> bool:
        """Whether every one of them runs; costs a scan of /proc."""
        return _standing(launcher) >= {LOCAL_RANK + b"%d" % number for number in range(self._num_ranks)}

    def all_ready(self) -> bool:
        """Whether every one of those that were started on standby has imported what it needs."""
        return all((self._folder / f"ready-{number}").exists() for number in range(self._num_ranks))

    def any_stands(self, launcher: processes.Process) -> bool:
        """Whether one of them runs; costs a scan of /proc."""
        return bool(_standing(launcher))


def _standing(launcher: processes.Process) -> Set[bytes]:
    words = [word for process in processes.descendants(launcher.pid) for word in processes.environment(process.pid)]
    return {word for word in words if word.startswith(LOCAL_RANK)}


TAKE_S = 10.0
"""How long a host agent may take to take a part over."""
END_S = 20.0
"""How long a host agent that rests may take to end all that it holds."""
LOOK_S = 0.02
BEFORE = ".before"
"""Added to the name of the folder in which a host agent on standby has ended, when another one is started."""
FITTING = ("host", "run_id", "slots", "leases", "env", "program", "devices", "cwd")
"""What two parts must have in common, for the same processes to serve both."""


def may_rest(request: Mapping[str, Any]) -> float:
    """For how many seconds the host agent of a part may rest; 0: not at all."""
    return float(request["warm_pool"]["rest_s"]) if has_warm_pool(request) else 0.0


def begin(request: Mapping[str, Any], *, tag: str, holds: Iterable[processes.Process], ready: bool = True) -> None:
    """Say that this process rests with what it holds; raises OSError. tag: what its processes carry.

    ready: a rank could be forked at once.
    """
    me = processes.this_process()
    record = {
        "pid": me.pid,
        "start_ticks": me.start_ticks,
        "since": time.time(),
        "ready": ready,
        "tag": tag,
        "fits": _fingerprint(request),
        "holds": [[process.pid, process.start_ticks] for process in (me, *holds)],
    }
    write_record(Path(request["folder"]) / RESTING, record)


def end(folder: Path) -> None:
    """Say that nothing is held ready any more."""
    with contextlib.suppress(FileNotFoundError):
        (folder / RESTING).unlink()


def taken(folder: Path) -> Optional[Dict[str, Any]]:
    """The next part that a host agent which rests in `folder` shall take over: {"request", "epoch"}. Nobody else gets
    it.
    """
    try:
        (folder / NEXT).rename(folder / HANDED)
    except OSError:  # there is none, or it was taken back
        return None
    return read_record(folder / HANDED) or None


def tag_of(request: Mapping[str, Any]) -> str:
    """The part whose name is in the environment of what serves this one: the one for which it was started."""
    return str(read_record(Path(request["folder"]) / AGENT_RECORD).get("tag", request["folder"]))


def holding(folder: Path) -> Optional[Set[Tuple[int, int]]]:
    """What a host agent that rests in `folder` holds ready, itself included: pid and start. None: nobody rests
    there.
    """
    record = read_record(folder / RESTING)
    if not record or not processes.is_alive(record["pid"], record["start_ticks"]):
        return None
    return {(int(pid), int(start_ticks)) for pid, start_ticks in record["holds"]}


def is_handed(folder: Path) -> bool:
    """Whether the host agent of the part in `folder` went on in another's, with all that it had."""
    request = read_record(folder / HANDED).get("request")
    if not isinstance(request, dict):
        return False
    before, after = (
        read_record(folder / AGENT_RECORD),
        read_record(Path(request["folder"]) / AGENT_RECORD),
    )
    return bool(before) and all(before.get(name) == after.get(name) for name in ("pid", "start_ticks"))


def hand_over(request: Mapping[str, Any], *, epoch: int) -> bool:
    """Whether a host agent that rests on this host has taken this part over. Others of the run that rest are ended:
    their slots are needed.
    """
    folder = Path(request["folder"])
    if (folder / AGENT_RECORD).exists():
        return False
    was_taken = False
    for resting in _resting(folder):
        host_agent = read_record(resting / RESTING)
        if not host_agent:
            continue
        if not was_taken and _fits(request, host_agent) and _offer(request, resting, host_agent, epoch=epoch):
            was_taken = True
        else:
            _end_agent(request, resting, host_agent)
    return was_taken


def keep(request: Mapping[str, Any]) -> Optional[Path]:
    """The folder in which a host agent rests that could serve a part like this one; None: there is none. Others of the
    run that rest on this host are ended: their slots are needed.
    """
    kept: Optional[Path] = None
    for resting in _all_resting(Path(request["folder"])):
        host_agent = read_record(resting / RESTING)
        if not host_agent:
            continue
        if kept is None and _fits(request, host_agent):
            kept = resting
        else:
            _end_agent(request, resting, host_agent)
    return kept


def put_aside(folder: Path) -> None:
    """Make room for another host agent in a folder whose last one has ended; of the earlier ones the last is kept.
    Raises OSError.
    """
    if (folder / AGENT_RECORD).exists() and holding(folder) is None:
        aside = folder.with_name(folder.name + BEFORE)
        shutil.rmtree(str(aside), ignore_errors=True)
        folder.rename(aside)


def _resting(folder: Path) -> List[Path]:
    """Folders of this host's parts in other attempts in which somebody rests, or has rested until he was killed."""
    return [each for each in _all_resting(folder) if each != folder]


def _all_resting(folder: Path) -> List[Path]:
    return [path.parent for path in sorted(folder.parent.parent.glob("*/{}/resting.json".format(folder.name)))]


def _fits(request: Mapping[str, Any], host_agent: Mapping[str, Any]) -> bool:
    """Whether a host agent that rests can serve a part: ranks of hosts that rested meet, their launchers do not."""
    is_alive = processes.is_alive(host_agent["pid"], host_agent["start_ticks"])
    return is_alive and bool(request.get("alone")) and host_agent["fits"] == _fingerprint(request)


def _offer(request: Mapping[str, Any], resting: Path, host_agent: Mapping[str, Any], *, epoch: int) -> bool:
    """Whether the host agent that rests there has taken it."""
    try:
        # What the cluster file says of the environment may be private: it is the same, and the host agent has it.
        write_record(resting / NEXT, {"request": dict(request, env={}), "epoch": epoch})
    except OSError:
        return False
    if _is_taken(resting, host_agent):
        return True
    with contextlib.suppress(FileNotFoundError):
        (resting / NEXT).unlink()
        return False
    return _is_taken(resting, host_agent)  # it has just begun to


def _is_taken(resting: Path, host_agent: Mapping[str, Any]) -> bool:
    return any(is_handed(resting) for _ in _moments(TAKE_S, host_agent))


def _end_agent(request: Mapping[str, Any], resting: Path, host_agent: Mapping[str, Any]) -> None:
    """End a host agent that rests, and all that it holds; also what one that is gone has left."""
    process = processes.Process(host_agent["pid"], host_agent["start_ticks"], 0, "S")
    processes.send(process, signal.SIGTERM)
    for _ in _moments(END_S, host_agent):
        pass
    processes.send(process, signal.SIGKILL)
    processes.end_all(lambda: processes.tagged("{}={}".format(TAG, host_agent["tag"])))
    with contextlib.suppress(OSError):  # a lease that stays written down is looked through by the next who wants it
        forget(dict(request, folder=str(resting)))
    end(resting)


def _moments(limit_s: float, host_agent: Mapping[str, Any]) -> Iterator[None]:
    """Moments to look, as long as a host agent lives, and one more."""
    deadline = time.monotonic() + limit_s
    while processes.is_alive(host_agent["pid"], host_agent["start_ticks"]) and time.monotonic() < deadline:
        yield
        time.sleep(LOOK_S)
    yield


def _fingerprint(request: Mapping[str, Any]) -> str:
    """The same for parts that the same processes can serve. A digest: what it is made of may be private."""
    argv = list(request["argv"])
    launcher = argv[: argv.index("-m")] if "-m" in argv else argv[:1]
    kept = {name: request.get(name) for name in FITTING}
    whole = dict(kept, num_ranks=len(request.get("ranks", ())), launcher=launcher, warm_pool=has_warm_pool(request))
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
