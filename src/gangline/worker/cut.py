"""The end of a wait for ranks that are gone: on SIGUSR2 this rank cuts its own connections to all others.

A rank in a collective waits inside C++ until the collective's deadline, for minutes; handlers written in Python do not
run then. So a thread of its own hears of the signal, by the descriptor that Python's C handler writes its number to.

What ends a wait (torch 2.13): gloo's groups have no abort of their own (`ProcessGroup.abort` does nothing for them, and
`_abort_process_group` only forgets the groups). Connections that are shut down, though, look to gloo and to the store
like others that have gone, and whatever waits for them raises within milliseconds. NCCL's groups do have an abort, and
it is called, before: a kernel that waits on a GPU does not look at connections. That was never run on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gangline.errors import RunFailed
from gangline.worker import compat

LOST = re.compile(r"Connection (was likely )?(reset|closed)|Broken pipe|Socket (was )?closed|abort", re.IGNORECASE)
"""What a wait says that was cut off."""
_ABORT_S = 3.0
"""How long NCCL may take to let go; connections are cut then, whatever it does."""
_CONNECTED = (socket.AF_INET, socket.AF_INET6)


class Cut:
    """Whether this rank was told that the gang has failed, and what comes of it.

    Until `stay`, and in any case as long as this rank has nothing to save, it leaves at once; then it is the main
    thread that leaves, at the next place where it looks (`check`), or out of the wait that was cut off.
    """

    def __init__(self) -> None:
        self.ordered = False
        self._lock = threading.Lock()
        self._leave: Callable[[], None] | None = None

    def install(self, leave: Callable[[], None]) -> None:
        """Listen to SIGUSR2. For the main thread; leave: says why, and ends the process; called by another thread."""
        self._leave = leave
        heard, told = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        # the descriptor hears of signals only that have a handler
        signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
        threading.Thread(target=self._listen, args=(heard,), name="gangline-cut", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    def stay(self) -> None:
        """From now on there may be something to save: the main thread leaves by itself."""
        with self._lock:
            self._leave = None

    def check(self) -> None:
        """Where nothing is half done: raises RunFailed once the order has come."""
        if self.ordered:
            raise told_to_leave()

    def explains(self, error: BaseException) -> bool:
        """Whether an error is what the cut did, and not one of this rank's own."""
        return self.ordered and (isinstance(error, dist.DistError) or LOST.search(str(error)) is not None)

    def _listen(self, heard: int) -> None:
        while numbers := os.read(heard, 64):
            if signal.SIGUSR2 in numbers:
                self._order()

    def _order(self) -> None:
        with self._lock:
            self.ordered = True
            leave = self._leave
        if leave is not None:
            leave()
        abort_comm()


def told_to_leave(seen: str = "") -> RunFailed:
    """What a rank says that was told to leave. `supervise.cause` knows it by these words for no cause."""
    return RunFailed(
        "it was told that the gang has failed elsewhere, and left",
        seen=seen,
        fix="another rank, or another host, says why; then: gangline resume",
    )


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Process groups are made inside: the sockets that appear meanwhile are theirs, and `abort_comm` ends them.

    gloo connects all pairs of a group when it is made, and nothing later (torch 2.13: a test counts), and the store's
    client connects in `init_process_group`. A socket that another thread opens just then counts as one of them.
    """
    before = set(_sockets().values())
    try:
        yield
    finally:
        _of_groups.update(set(_sockets().values()) - before)


_of_groups: set[str] = set()
"""Sockets of process groups, as /proc names them, with their inode: a descriptor may be given to another one."""


def abort_comm() -> None:
    """End all talk with other ranks, here and there: they hear at once that this rank has gone, whatever it still does.

    The TCP connections of process groups are shut down, and no others: an exporter may still send what it has.
    """
    if torch.cuda.is_initialized() and dist.is_initialized():
        aborting = threading.Thread(target=_abort_nccl, daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
    for descriptor, name in _sockets().items():
        if name in _of_groups:
            _shut_down(descriptor)


def _abort_nccl() -> None:
    for group in list(compat.PROCESS_GROUPS.get().pg_names):
        with contextlib.suppress(RuntimeError):
            group.abort()


def _sockets() -> dict[int, str]:
    """The open sockets of this process: descriptor -> name with inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


def _shut_down(descriptor: int) -> None:
    """The connection, if it is one; the descriptor stays open, so that whoever has it finds out by himself."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in _CONNECTED and connection.type == socket.SOCK_STREAM:
            connection.getpeername()  # raises for one that listens, which shutdown would end
            connection.shutdown(socket.SHUT_RDWR)
