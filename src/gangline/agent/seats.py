"""The processes that stand by on a host, and what their guard tells them, by files.

torchrun starts them as ranks, once; a rank is a child of one of them (gangline.worker.prefork). The files lie in
`stand-by`, in the folder of the attempt in which they were started:

    seat-<k>.json  who they are in their k-th attempt; where launchers meet, torchrun says that of the first
    hold           a rank that leaves well does not take its process with it
    leave          those that wait shall leave
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, List, Mapping, Set

from gangline.agent import processes
from gangline.agent.records import write_whole

FOLDER = "stand-by"
LOCAL_RANK = b"LOCAL_RANK="
"""A variable that torchrun gives to each process that it starts as a rank."""


def stands_by(request: Mapping[str, Any]) -> bool:
    """Whether processes stand by for the ranks of this part."""
    return bool(request.get("stand_by") and request.get("ranks"))


class Seats:
    """The processes of one launcher. part: the folder of the attempt in which it is started."""

    def __init__(self, part: Path, *, num_ranks: int) -> None:
        self._folder = part / FOLDER
        self._num_ranks = num_ranks
        self._num_given = 0

    def prepare(self, request: Mapping[str, Any]) -> None:
        """Make the folder, before the launcher starts; raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if request.get("alone"):
            self.give(request)
        else:
            self._num_given = 1

    def give(self, request: Mapping[str, Any]) -> None:
        """Say who they are in the next attempt, which begins by that; raises OSError."""
        seat = {
            "words": list(request["stand_by"]["words"]),
            "ranks": list(request["ranks"]),
            "world_size": request["stand_by"]["world_size"],
            "meet": list(request["meet"]),
            "files": request["rank_files"],
        }
        self._num_given += 1
        write_whole(self._folder / f"seat-{self._num_given}.json", seat)
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

    def any_stands(self, launcher: processes.Process) -> bool:
        """Whether one of them runs; costs a scan of /proc."""
        return bool(_standing(launcher))


def _standing(launcher: processes.Process) -> Set[bytes]:
    words = [word for process in processes.descendants(launcher.pid) for word in _environment(process.pid)]
    return {word for word in words if word.startswith(LOCAL_RANK)}


def _environment(pid: int) -> List[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just left
        return []
