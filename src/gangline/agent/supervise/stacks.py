"""`stacks`: where the ranks of this host stand, asked of their processes themselves.

    stacks < {"request": the request of this host's host agent}
        -> {"ranks": {"<r>": {"pid", "state": one letter as in proc(5), "wchan", "phase", "step", "collectives",
                              "stack": ["function (file:line)", ...], "where", "waits", "others",
                              "unheard": [addresses]}}}

stack: of the main thread, innermost first. where: its first frame that is not in torch or threading. waits: it waits
for other ranks there, in a call of gangline itself or of torch.distributed. Of the user's own program, where is in a
file of the user, and a backward pass waits, too: DDP exchanges gradients in it, out of sight. others: how many more
threads there are. unheard: places that do not acknowledge what was sent to them, again and again.

A rank of our own worker writes its stacks to its log on SIGUSR1 (gangline.worker.rank_files); one of the user's Python
program writes them to a file of their own, on a signal that programs do not use (rank_stacks). The signal goes only to
processes that have said to the kernel that they take it: any other would end by it. One that is stopped cannot answer,
and is not asked. X in the place of the state: the process is gone.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gangline.agent.host_files import read_text, size_bytes
from gangline.agent.supervise import processes
from gangline.agent.supervise.processes import Process, find, send
from gangline.agent.supervise.ranks import Ranks, tail

ANSWER_S = 2.0
"""How long all ranks together may take to answer."""
SETTLED_S = 0.1
"""An answer that has not grown for so long is whole: it is written piece by piece, and nothing marks its end."""
LOOK_S = 0.02
ANSWER_BYTES = 1 << 20
MOST_FRAMES = 60
MOST_LETTERS = 200
MOST_ADDRESSES = 8
STOPPED = "Tt"
ENDED = "ZX"
# As faulthandler writes it: 'Thread 0x00007f (most recent call first):', with a name in brackets from Python 3.14 on.
THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
TORCH = re.compile(r"/(site|dist)-packages/torch/")
OURS = re.compile(r"/gangline/(worker|strategies)/")
EXCHANGES = re.compile(r"/torch/(distributed|nn/parallel)/")
BACKWARD = "_engine_run_backward"
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
"""Files that a user has not written."""
SIGNALS = {"worker": signal.SIGUSR1, "command": signal.SIGRTMAX - 2}
"""By program; that of the user's own as in rank_stacks."""
FILES = {"worker": "rank-{}.log", "command": "rank-{}.stacks"}
THREADING = {"threading.py", "queue.py", "selectors.py"}
CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


class Frame(NamedTuple):
    """One call of a stack."""

    path: str
    line: str
    function: str

    @property
    def words(self) -> str:
        """As people read it."""
        return f"{self.function} ({PurePosixPath(self.path).name}:{self.line})"[:MOST_LETTERS]

    @property
    def is_plumbing(self) -> bool:
        """Whether it only waits or computes for somebody else."""
        return TORCH.search(self.path) is not None or PurePosixPath(self.path).name in THREADING


class _Asked:
    """One rank that was asked, or could not be."""

    def __init__(self, process: Process, folder: Path, rank: int, *, program: str) -> None:
        self._process = process
        self._is_own = program == "command"
        self._log = log = folder / FILES[program].format(rank)
        self._begin = self._size = size_bytes(log)
        self._grown_at: Optional[float] = None
        self.state = _state(process)
        self.answers = self.state not in STOPPED + ENDED and _takes_signal(process.pid, SIGNALS[program])
        """Whether an answer is to be waited for."""
        if self.answers:
            send(process, SIGNALS[program])

    def is_ready(self, now: float) -> bool:
        """Whether nothing more comes, as far as one can tell."""
        if not self.answers:
            return True
        size = size_bytes(self._log)
        if size != self._size:
            self._size, self._grown_at = size, now
        is_settled = self._grown_at is not None and now - self._grown_at >= SETTLED_S
        return is_settled and bool(main_stack(self._answer())[0])  # it may be an ordinary line

    def row(self, phase: Dict[str, Any]) -> Dict[str, Any]:
        """All that is known of it."""
        frames, num_threads = main_stack(self._answer())
        telling = where(frames, own=self._is_own)
        return {
            "pid": self._process.pid,
            "state": self.state,
            "wchan": _wchan(self._process.pid),
            "phase": phase.get("phase"),
            "step": phase.get("step"),
            "collectives": phase.get("collectives"),
            "stack": [frame.words for frame in frames[:MOST_FRAMES]],
            "where": telling.words if telling else "",
            "waits": telling is not None and waits(frames, telling, own=self._is_own),
            "others": max(0, num_threads - 1),
            "unheard": self._unheard(),
        }

    def _unheard(self) -> List[str]:
        resending = processes.unacknowledged()
        found = processes.of_processes([self._process.pid], resending) if resending else []
        return sorted({each.remote[0] for each in found})[:MOST_ADDRESSES]

    def _answer(self) -> str:
        if self._grown_at is None:
            return ""
        try:
            with self._log.open("rb") as stream:
                stream.seek(max(self._begin, self._size - ANSWER_BYTES))
                return stream.read(ANSWER_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""


def main_stack(text: str) -> Tuple[List[Frame], int]:
    """The frames of the main thread in what faulthandler wrote, innermost first, and how many threads it wrote of.

    It begins with the youngest thread and ends with the oldest, which is the main one. Lines of others may be between.
    """
    threads: List[List[Frame]] = []
    for line in text.splitlines():
        match = FRAME.fullmatch(line)
        if THREAD.fullmatch(line):
            threads.append([])
        elif match and threads:
            threads[-1].append(Frame(*match.groups()))
    return (threads[-1] if threads else []), len(threads)


def where(frames: List[Frame], *, own: bool = False) -> Optional[Frame]:
    """The innermost call that a person would look at; None if there is none. own: of the user's own program."""
    telling = [frame for frame in frames if not frame.is_plumbing]
    users = [frame for frame in telling if not LIBRARIES.search(frame.path)] if own else []
    return next(iter(users or telling or frames), None)


def waits(frames: List[Frame], telling: Frame, *, own: bool = False) -> bool:
    """Whether it waits for other ranks: in gangline itself, or in torch.distributed on behalf of that call."""
    inner = frames[: frames.index(telling)]
    if own and frames[0].function == BACKWARD:
        return True
    return OURS.search(telling.path) is not None or any(EXCHANGES.search(frame.path) for frame in inner)


def stacks(request: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Where every rank of a request stands; ranks whose processes were never seen are not there."""
    ranks = Ranks(Path(request["rank_files"]), {int(rank) for rank in request.get("ranks", ())})
    ranks.scan(ordered=True)
    program = request.get("program", "worker")
    asked = {
        rank: _Asked(process, ranks.folder, rank, program=program) for rank, process in sorted(ranks.processes.items())
    }
    deadline = time.monotonic() + ANSWER_S
    # All are looked at every time: it is a look that sees an answer grow.
    while not all([each.is_ready(time.monotonic()) for each in asked.values()]) and time.monotonic() < deadline:  # noqa: C419
        time.sleep(LOOK_S)
    phases = ranks.phases()
    return {str(rank): each.row(phases.get(rank, {})) for rank, each in asked.items()}


# A rank of the user's own program that is ended, or ends by a signal: where it stood.


FRESH_S = 60.0
"""What it wrote longer before its end tells of something else."""
LAST_FRAMES = 12


class LastStacks:
    """The stacks of ranks that are about to be ended. They wait for each other, and the one that does not tells why."""

    def __init__(self, request: Dict[str, Any], ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_wanted = request.get("program") == "command"
        self._asked: Dict[int, _Asked] = {}
        self._ended_at: Optional[float] = None
        """When a rank was first seen to have ended while others go on."""

    @property
    def has_asked(self) -> bool:
        """Whether any was asked."""
        return bool(self._asked)

    def look(self, order: Optional[str]) -> None:
        """Ask them once: before an order is carried out, or where one has ended and the others go on all the same."""
        if self._asked or not self._is_wanted or not (order or self._ranks.ended):
            return
        now = time.monotonic()
        self._ended_at = now if self._ended_at is None else self._ended_at
        if order is None and now < self._ended_at + 1.0:
            return
        alive = {rank: each for rank, each in self._ranks.processes.items() if rank not in self._ranks.ended}
        self._asked = {
            rank: _Asked(each, self._ranks.folder, rank, program="command") for rank, each in sorted(alive.items())
        }
        # Before any other signal: a rank that dies of one in the midst of its answer has not answered.
        while not self._are_ready() and time.monotonic() < now + ANSWER_S:
            time.sleep(LOOK_S)

    def _are_ready(self) -> bool:
        return all([each.is_ready(time.monotonic()) for each in self._asked.values()])  # noqa: C419

    def note(self, failures: List[Dict[str, Any]]) -> None:
        """Add to each failure where its rank stood, as far as known."""
        for failure in failures if self._is_wanted else ():
            row, collective = self._row(failure), self._collective(failure["rank"])
            if row is not None:
                failure["stack"] = row
            if collective is not None:
                failure["collective"] = collective

    def _collective(self, rank: int) -> Optional[Dict[str, Any]]:
        """The last one that a rank began which has raised; None: unknown. Other fields are of another torch."""
        try:
            said = json.loads((self._ranks.folder / f"rank-{rank}.flight").read_text(encoding="utf-8"))
            if said["is_p2p"]:
                return None
            return {
                "group": str(said["process_group"][0]),
                "number": int(said["collective_seq_id"]),
                "operation": str(said["profiling_name"]).rpartition(":")[2],
                "sizes": ", ".join(str(each) for each in said["input_sizes"])[:MOST_LETTERS],
            }
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _row(self, failure: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        rank = failure["rank"]
        path = self._ranks.folder / FILES["command"].format(rank)
        asked = self._asked.get(rank)
        state = asked.state if asked else ""
        try:
            is_fresh = path.stat().st_mtime >= failure["time"] - FRESH_S
        except OSError:
            is_fresh = False
        frames = main_stack("\n".join(tail(path, num_lines=4000, num_bytes=ANSWER_BYTES)))[0] if is_fresh else []
        telling = where(frames, own=True)
        if telling is None and state not in (*STOPPED, "D"):
            return None
        return {
            "pid": failure["pid"] or 0,
            "state": state,
            "where": telling.words if telling else "",
            "waits": telling is not None and waits(frames, telling, own=True),
            "stack": [frame.words for frame in frames[:LAST_FRAMES]],
        }


def _state(process: Process) -> str:
    now = find(process.pid)
    return now.state if now is not None and now.start_ticks == process.start_ticks else "X"


def _takes_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal: before it has imported what it needs, it has none."""
    match = CAUGHT.search(read_text(f"/proc/{pid}/status") or "")
    return match is not None and bool(int(match.group(1), 16) & 1 << (number - 1))


def _wchan(pid: int) -> str:
    """The kernel function in which it waits; "" if it does not, or we may not know."""
    text = read_text(f"/proc/{pid}/wchan") or ""
    return "" if text == "0" else text[:MOST_LETTERS]


def stacks_by_rank(asked: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    return {"ranks": stacks(asked["request"])}
