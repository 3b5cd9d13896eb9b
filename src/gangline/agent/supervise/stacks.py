"""`stacks`: where the ranks of this host stand, asked of their processes themselves.

    stacks < {"request": the request of this host's host agent}
        -> {"ranks": {"<r>": {"pid", "state": one letter as in proc(5), "wchan", "phase", "step", "collectives",
                              "stack": ["function (file:line)", ...], "where", "waits", "others",
                              "unheard": [addresses]}}}

stack: of the main thread, innermost first. where: its first frame that is not in torch or threading. waits: it waits
for other ranks there, in a call of gangline itself or of torch.distributed. others: how many more threads there are.
unheard: places that do not acknowledge what was sent to them, again and again.

A rank of our own worker writes its stacks to its log on SIGUSR1 (gangline.worker.rank_files); one of the user's Python
program writes them to a file of their own, on a signal that programs do not use (rank_stacks). The signal goes only to
processes that have said to the kernel that they take it: any other would end by it. One that is stopped cannot answer,
and is not asked. X in the place of the state: the process is gone.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gangline.agent.host_files import read_text, size_bytes
from gangline.agent.supervise import processes
from gangline.agent.supervise.processes import Process, find, send
from gangline.agent.supervise.ranks import Ranks

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
EXCHANGES = re.compile(r"/torch/distributed/")
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
        telling = where(frames)
        return {
            "pid": self._process.pid,
            "state": self.state,
            "wchan": _wchan(self._process.pid),
            "phase": phase.get("phase"),
            "step": phase.get("step"),
            "collectives": phase.get("collectives"),
            "stack": [frame.words for frame in frames[:MOST_FRAMES]],
            "where": telling.words if telling else "",
            "waits": telling is not None and waits(frames, telling),
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


def where(frames: List[Frame]) -> Optional[Frame]:
    """The innermost call that a person would look at; None if there is none."""
    telling = [frame for frame in frames if not frame.is_plumbing] or frames
    return telling[0] if telling else None


def waits(frames: List[Frame], telling: Frame) -> bool:
    """Whether it waits for other ranks: in gangline itself, or in torch.distributed on behalf of that call."""
    inner = frames[: frames.index(telling)]
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
