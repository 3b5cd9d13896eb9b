"""Ranks for tests, forked from one process that has imported everything.

    pool(3).run(cases_loop.gradient, shares=[5, 3, 2]) -> [value of rank 0, of rank 1, of rank 2]

- `pool(n)`: one set of n ranks, with a gloo group that is set up once and used by many cases; `pool(n, "cuda")`: all of
  them on the first GPU, with NCCL beside gloo, which takes each of them for a host; `pool(n, "shared")`: the same with
  gloo alone, as gangline has ranks that share a GPU. A case that fails in any rank, or takes too long, ends these ranks, and so do many threads; the next call makes new ones.
- `gang(n, function, kwargs)`: n fresh ranks of one's own, to be killed.
- `fork(function, ...)`: one fresh process without a group.

Arguments and results are JSON. This module and pytest's process need no torch: `bodies` says how a test names a
function without importing it.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.train.bodies import Body, address
from tests.train.forked_python import write_program
from tests.train.messages import receive, send

Function = Callable | Body

ROOT = Path(__file__).parents[2]
_LOG_TAIL = 6000
# torch keeps the process groups of device meshes, and each has threads that wake 100 times a second.
_MAX_THREADS = {"cpu": 40, "cuda": 120, "shared": 120}


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    # torch.cuda.is_available asks NVML then: a driver that the zygote has opened is of no use in its children
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class RankFailure(AssertionError):
    """A rank raised, died or took too long; the text says which, and shows its traceback or its stacks."""


class Child:
    """One process forked from the zygote. It serves one call after the other."""

    def __init__(self, zygote: "Zygote", *, name: str, group: dict | None = None) -> None:
        self.name = name
        self.returncode: int | None = None
        self._zygote = zygote
        self._log = zygote.folder / f"{name}.log"
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.pid = zygote.request_fork({"log": str(self._log), "group": group}, theirs)
        self._pidfd = os.pidfd_open(self.pid)

    def call(self, function: Function, kwargs: dict) -> None:
        """Begin a function of a module with these arguments."""
        try:
            send(self._channel, {"function": address(function), "kwargs": kwargs})
        except BrokenPipeError:
            raise RankFailure(self._died()) from None

    def result(self, *, timeout_s: float = 60.0):
        """What the call returned; raises RankFailure."""
        if not select.select([self._channel], [], [], max(0.0, timeout_s))[0]:
            raise RankFailure(f"{self.name} did not answer in time; it was here:\n{self._stacks()}")
        try:
            answer = receive(self._channel)
        except EOFError:
            raise RankFailure(self._died()) from None
        if "error" in answer:
            raise RankFailure(f"{self.name}: {answer['error']}{self.output()}")
        return answer["value"]

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has been reaped."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.signal(signal.SIGKILL)

    def wait(self, *, timeout_s: float = 10.0) -> int:
        """Wait for the end; the exit status, or minus the number of the signal. Raises TimeoutError."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout_s)[0]:
                raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout_s} s")
            self.returncode = self._zygote.request_reap(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def num_threads(self) -> int:
        """How many threads the process has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def close(self) -> None:
        """Kill and reap."""
        self.kill()
        self.wait()
        self._channel.close()

    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.exists() else ""

    def _died(self) -> str:
        return f"{self.name} died, exit status {self.wait()}:\n{self.output()}"

    def _stacks(self) -> str:
        """Stacks of all its threads, by faulthandler: the main thread comes last, so until nothing more is written.

        What is there after 5 s, for a stopped process writes none.
        """
        self.signal(signal.SIGUSR1)
        deadline, before = time.monotonic() + 5.0, ""
        while time.monotonic() < deadline:
            select.select([self._pidfd], [], [], 0.1)
            text = self.output()
            if text == before and "(most recent call first)" in text:
                break
            before = text
        return before


class Ranks:
    """Processes that share a group: of gloo, and on a GPU of NCCL, too."""

    def __init__(self, zygote: "Zygote", world_size: int, *, device: str = "cpu", timeout_s: float = 60.0) -> None:
        number = zygote.next_number()
        group = {"world_size": world_size, "device": device, "timeout_s": timeout_s}
        group["store"] = str(zygote.folder / f"store-{number}")
        self.is_open = True
        self.children = [
            Child(zygote, name=f"gang-{number}-rank-{rank}", group={**group, "rank": rank})
            for rank in range(world_size)
        ]

    def start(self, function: Function, kwargs: dict) -> None:
        """Begin `function` on every rank."""
        for child in self.children:
            child.call(function, kwargs)

    def results(self, *, timeout_s: float = 60.0) -> list:
        """What each rank returned. When one fails, all are ended, and RankFailure tells of each one that failed."""
        deadline = time.monotonic() + timeout_s
        values, failures = {}, []
        waiting = dict(enumerate(self.children))
        while waiting:
            ready = self._next(waiting, deadline)
            child = waiting.pop(ready)
            try:
                values[ready] = child.result(timeout_s=deadline - time.monotonic())
            except RankFailure as error:
                failures.append(str(error))
                # The others may wait for this rank in a collective: they get a moment to tell of their own failure.
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return [values[rank] for rank in range(len(self.children))]

    def run(self, function: Function, *, timeout_s: float = 60.0, **kwargs) -> list:
        """Call a function with the same arguments on every rank; the results by rank."""
        try:
            self.start(function, kwargs)
            return self.results(timeout_s=timeout_s)
        except BaseException:
            # Also for pytest's own timeout and Ctrl-C: an answer that comes late must not reach the next case.
            self.close()
            raise

    def close(self) -> None:
        """Kill and reap every rank."""
        if self.is_open:
            self.is_open = False
            for child in self.children:
                child.kill()
            for child in self.children:
                child.close()

    def _next(self, waiting: dict, deadline: float) -> int:
        by_channel = {child._channel: rank for rank, child in waiting.items()}
        ready, _, _ = select.select(list(by_channel), [], [], max(0.0, deadline - time.monotonic()))
        return by_channel[ready[0]] if ready else next(iter(waiting))


class Zygote:
    """The process that has imported everything (`imports`), and the ranks forked from it."""

    def __init__(self, *, imports: bool = True) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="gangline-ranks-")
        self.folder = Path(self._temporary.name)
        self._number = 0
        self._pools: dict[tuple[int, str], Ranks] = {}
        self._others: list[Child | Ranks] = []
        self._control, theirs = socket.socketpair()
        address = str(self.folder / "zygote.socket")
        self.python = write_program(self.folder, address)
        """In the place of a Python on a host: its workers are forked from the zygote."""
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            sockets = [theirs.fileno(), listener.fileno()]
            words = [*map(str, sockets), *(["plain"] if not imports else [])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.train.zygote", *words],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                pass_fds=sockets,
                # Ctrl-C is pytest's to handle.
                start_new_session=True,
            )
        receive(self._control)
        self.process_id = self._process.pid

    def pool(self, world_size: int, device: str = "cpu") -> Ranks:
        """The shared ranks of this size, made on first use, after a failure, and when they have many threads."""
        ranks, most = self._pools.get((world_size, device)), _MAX_THREADS[device]
        if ranks is not None and ranks.is_open and max(child.num_threads() for child in ranks.children) > most:
            ranks.close()
        if ranks is None or not ranks.is_open:
            ranks = self._pools[world_size, device] = Ranks(self, world_size, device=device)
        return ranks

    def gang(self, world_size: int, function: Function, kwargs: dict | None = None) -> Ranks:
        """Fresh ranks that already run `function`; they end with the session at the latest."""
        ranks = Ranks(self, world_size)
        self._others.append(ranks)
        ranks.start(function, kwargs or {})
        return ranks

    def fork(self, function: Function, **kwargs) -> Child:
        """A fresh process that already runs `function`; it ends with the session at the latest."""
        child = Child(self, name=f"fork-{self.next_number()}")
        self._others.append(child)
        child.call(function, kwargs)
        return child

    def next_number(self) -> int:
        """A number that was not given out before, for names of files."""
        self._number += 1
        return self._number

    def request_fork(self, request: dict, channel: socket.socket) -> int:
        """Fork; the child serves `channel`. Its process id."""
        send(self._control, request)
        socket.send_fds(self._control, [b"."], [channel.fileno()])
        return int(receive(self._control)["pid"])

    def request_reap(self, pid: int) -> int:
        """The exit status of a child that has ended."""
        send(self._control, {"reap": pid})
        return int(receive(self._control)["returncode"])

    def close_others(self) -> None:
        """End what `gang` and `fork` made."""
        while self._others:
            self._others.pop().close()

    def close(self) -> None:
        """End everything."""
        self.close_others()
        for ranks in self._pools.values():
            ranks.close()
        self._control.close()
        self._process.wait(timeout=10)
        self._temporary.cleanup()
