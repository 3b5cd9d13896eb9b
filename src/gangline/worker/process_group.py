"""Joining the gang: process group, device, and the place of this rank in it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gangline.errors import RunFailed
from gangline.runs.gang import Gang
from gangline.worker import compat
from gangline.worker.launch import is_loopback, loopback_store

# The end of a wait for ranks that are gone: on SIGUSR2 this rank cuts its own connections to all others.


LOST = re.compile(r"Connection (was likely )?(reset|closed)|Broken pipe|Socket (was )?closed|abort", re.IGNORECASE)
"""What a wait says that was cut off."""
NCCL_ENDS_NOBODY = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
"""Where a peer is lost or late, torch's watchdog ends NCCL's communicators, and with its default this process, too,
before a survivor has saved its last step. With 2 it only ends the wait: the step's report, over gloo, says the rest
(docs/decisions/0060).
"""
_ABORT_S = 3.0
"""How long NCCL may take to let go; connections are cut then, whatever it does."""
_CONNECTED = (socket.AF_INET, socket.AF_INET6)


class AbortHandler:
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
    return {descriptor: name for descriptor, name in open_files().items() if name.startswith("socket:")}


def open_files() -> dict[int, str]:
    """What this process has open: descriptor -> path, or the kernel's name for what has none."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found[int(entry.name)] = str(entry.readlink())
    return found


def _shut_down(descriptor: int) -> None:
    """The connection, if it is one; the descriptor stays open, so that whoever has it finds out by himself."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in _CONNECTED and connection.type == socket.SOCK_STREAM:
            connection.getpeername()  # raises for one that listens, which shutdown would end
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """This rank's place in the gang."""

    gang: Gang
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.gang.world_size

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.gang.ranks[self.rank].host

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank writes its host's checkpoints."""
        return self.rank == self.gang.ranks_on(self.host)[0]

    @property
    def shares(self) -> list[int]:
        """Micro-batches of a full step, by rank."""
        return [rank.share for rank in self.gang.ranks]

    def require_sums(self) -> None:
        """Raise dist.DistBackendError where NCCL has let go of a rank: then its sums of this step are none.

        Nothing else would tell where two ranks live on whose cards reach each other no more (docs/decisions/0060).
        """
        backends = _nccl_backends() if self.size > 1 and self.device.type == "cuda" else ()
        for name, backend in backends:
            if (error := backend.get_error().name) != "SUCCESS":
                raise dist.DistBackendError(
                    f"NCCL gave up on a rank in this step ({error} in the group {name}): what it was to add up is not "
                    "added up, and the step does not count. The last step that does is saved; look at the network "
                    "between the cards (gangline check --tier full), then gangline resume"
                )


def _nccl_backends() -> Iterator[tuple[str, Any]]:
    """Every group that has NCCL, by its name."""
    for group in list(compat.PROCESS_GROUPS.get().pg_names):
        with contextlib.suppress(RuntimeError):  # one of gloo alone has no backend for cards
            backend = compat.BACKEND.of(group)(torch.device("cuda"))
            if backend.name() == "nccl" and hasattr(backend, "get_error"):
                yield group.group_name, backend


def join(gang: Gang) -> ProcessGroup:
    """Join the process group that torchrun prepared.

    Raises RunFailed when the number of processes is not the gang's: a run of another size would be another run.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != gang.world_size:
        raise RunFailed(
            f"the gang of {gang.run_id} was started with another number of processes than planned",
            seen=f"expected {gang.world_size}, saw WORLD_SIZE={size}",
            fix="start it with `gangline train` or `gangline resume`, not by hand",
        )
    device = _own_device(gang.ranks[rank].device)
    if size > 1:
        os.environ.setdefault(*NCCL_ENDS_NOBODY)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not gang.shares_gpus else "gloo"
        with connecting():
            timeout = timedelta(seconds=gang.collective_timeout_s)
            store = meeting_place(gang, rank, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return ProcessGroup(gang=gang, rank=rank, device=device)


KNOCK_S, KNOCK_PAUSE_S = 5.0, 0.01
"""How long and how often a rank looks whether rank 0 listens already."""
_MEETING = "gangline/meeting"
"""The first key in the store: the digest of the gang whose ranks meet there."""


def meeting_place(gang: Gang, rank: int, *, timeout: timedelta) -> dist.Store:
    """The store at the address and port that torchrun gave, once it is known to be that of this gang.

    Raises RunFailed for the store of another gang: a port may be taken by another user's run between the moment in
    which it was found free and the moment in which torch listens there.
    """
    store = _own_store(gang, rank, timeout=timeout)
    if store is None:
        if rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            await_listener(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        store, _, _ = next(dist.rendezvous("env://", rank, gang.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if gang.meeting:
        found = store.compare_set(_MEETING, "", gang.meeting) if rank == 0 else store.get(_MEETING)
        if found.decode("utf-8", "replace") != gang.meeting:
            raise RunFailed(
                f"rank {rank} of {gang.run_id} has met the ranks of another run",
                seen=f"the store at {os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}, belongs to "
                "another run, which took the port at the same moment; nothing was exchanged with it",
                fix=f"start it again, with another port: gangline resume {gang.run_id}",
            )
    return dist.PrefixStore("default_pg", store)


def await_listener(address: str, port: int, *, patience_s: float = KNOCK_S) -> None:
    """Return once somebody listens there, or it does not look as if anybody were about to: whoever comes then says so.

    torch's own client (2.13) that comes before rank 0 listens comes again half a second later. Ranks that are forked
    come at the same moment.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=patience_s).close()
        except ConnectionRefusedError:
            time.sleep(KNOCK_PAUSE_S)
        except OSError:  # no answer, no such name: torch waits for it, and the host agent sees that
            return
        else:
            return


def _own_store(gang: Gang, rank: int, *, timeout: timedelta) -> dist.Store | None:
    """The store that rank 0 keeps, on the loopback address alone; None where another process keeps it, or ranks of
    other computers come to it.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_loopback(address):
        return None
    port = int(os.environ["MASTER_PORT"])
    try:
        return loopback_store(dist.TCPStore, address, port, gang.world_size, True, timeout, multi_tenant=True)
    except OSError as error:
        raise RunFailed(
            f"another program has taken port {port}, where the ranks of {gang.run_id} were to meet",
            seen=str(error),
            fix=f"start it again, with another port: gangline resume {gang.run_id}; ss -ltnp shows who listens",
        ) from error


def leave(code: int) -> NoReturn:
    """End this process at once with an exit code.

    Not by returning: whoever drops the last reference to a gloo group (DDP's reducer, as a frame unwinds) joins the
    group's thread while holding the interpreter's lock, which that thread may need to let go of a tensor; one rank in
    a few hundred then never ends (torch 2.13). Files must be closed before.
    """
    if code == 0 and dist.is_initialized() and torch.cuda.is_available():  # of a broken gang it would wait for ever
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _own_device(index: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index %= torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
