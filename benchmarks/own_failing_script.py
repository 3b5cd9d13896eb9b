"""A small training script that fails as it is told: nothing in it knows gangline (own_failures.py).

    python own_failing_script.py KIND VICTIM

Rank VICTIM fails at step 3; all ranks fail in kinds that begin with `all_`. A collective that others do not join gives
up after TIMEOUT_S. What is planted is the body of a function of the same name, so that a stack names it.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 10
FOR_EVER_S = 100_000
STEPS = 6
LONG, LONG_STEPS = frozenset({"goes_on", "writes_on"}), 2000
"""Kinds in which something happens from outside while it trains."""
GROUP_STEP = 3


# --- one rank never comes


def asleep() -> None:
    """Waits for rows that nobody brings."""
    time.sleep(FOR_EVER_S)


def computes() -> None:
    """A loop that never ends."""
    number = 1
    while number:
        number = (number * 5 + 1) % 1_000_003 or 1


def locks() -> None:
    """A lock that is held already."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def queues() -> None:
    """Waits for something from a thread that has gone."""
    queue.Queue[int]().get()


def reads_fifo() -> None:
    """A file that never opens, as on a file server that is gone."""
    path = Path(tempfile.mkdtemp(), "rows")
    os.mkfifo(path)
    path.read_text()


def reads_socket() -> None:
    """A service that takes the connection and says nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)


def waits_for_child() -> None:
    """A program that does not end."""
    subprocess.run(["sleep", str(FOR_EVER_S)], check=False)


def waits_for_file_lock() -> None:
    """A lock on a file that another process holds, as in a cache of a hub."""
    path = Path(tempfile.mkdtemp(), "lock")
    holder = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    holder += f"; time.sleep({FOR_EVER_S})"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with path.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)


def holds_interpreter() -> None:
    """Native code that holds the interpreter's lock: no line of Python runs any more."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def stopped() -> None:
    """Somebody stops it."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of a file; how: what becomes of the second one."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 1 and self.how == "hangs":
            time.sleep(FOR_EVER_S)
        if index == 1:
            raise KeyError("text")
        return index


def loader_hangs() -> None:
    """A process that loads data hangs."""
    list(torch.utils.data.DataLoader(Rows("hangs"), num_workers=1))


def takes_sigterm() -> None:
    """It takes SIGTERM for itself, as trainers do that save then, and hangs."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    while True:
        time.sleep(FOR_EVER_S)


def slow_save() -> None:
    """Rank VICTIM alone saves, for far longer than the others wait."""
    for _ in range(FOR_EVER_S):
        time.sleep(1.0)


# --- ranks that do not call the same


def barrier_instead() -> None:
    """Another collective than the others."""
    dist.barrier()


def evaluates_alone() -> None:
    """One rank alone evaluates, with a collective that nobody joins."""
    dist.all_reduce(torch.ones(8))


def skips_one() -> str:
    """One all-reduce is left out."""
    return "skip"


def has_no_more_data() -> str:
    """Its data are exhausted before those of the others."""
    return "end"


def other_size() -> str:
    """A tensor of another size."""
    return "size"


def receives() -> None:
    """Waits for a message that nobody sends."""
    dist.recv(torch.ones(4), src=(dist.get_rank() + 1) % dist.get_world_size())


def monitored() -> None:
    """It does not come to a barrier that names who is missing."""
    time.sleep(FOR_EVER_S)


# --- one rank ends


def raises() -> None:
    """An exception of the script."""
    raise ValueError("no such column: text")


def raises_key() -> None:
    """One whose words are only a name."""
    {"input": 1}["text"]


def asserts() -> None:
    """An assertion without words."""
    assert dist.get_world_size() == 64


def raises_in_chain() -> None:
    """An exception while another one is handled."""
    try:
        json.loads("{")
    except ValueError as error:
        raise RuntimeError("rows.jsonl cannot be read") from error


def nan_found() -> None:
    """The loss is no number, on one rank."""
    loss = torch.tensor(float("nan"))
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()} at step {GROUP_STEP}")


def recursion() -> None:
    """Too deep."""
    recursion()


def exits_3() -> None:
    """An exit code without a word."""
    sys.exit(3)


def exits_with_words() -> None:
    """An exit with a message."""
    sys.exit("config.yaml: unknown key: lr_rate")


def exits_0() -> None:
    """It ends well, before the others."""
    sys.exit(0)


def leaves_0() -> None:
    """The same, without the interpreter's end."""
    os._exit(0)


def leaves_7() -> None:
    """It ends badly without a word."""
    os._exit(7)


def killed() -> None:
    """SIGKILL from outside."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOR_EVER_S)


def crashes() -> None:
    """SIGSEGV in native code."""
    ctypes.string_at(0)


def aborts() -> None:
    """SIGABRT in native code."""
    os.abort()


def bus_error() -> None:
    """SIGBUS, as a full /dev/shm brings it."""
    signal.raise_signal(signal.SIGBUS)


def terminated() -> None:
    """SIGTERM from a person."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(FOR_EVER_S)


def interrupted() -> None:
    """SIGINT from a person."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(FOR_EVER_S)


def no_memory() -> None:
    """The limit of its memory is reached."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(8 << 30)


def no_tensor_memory() -> None:
    """There is no memory for a tensor."""
    torch.empty(1 << 46)


def memory_killed() -> None:
    """It takes memory until its kernel ends it."""
    taken = []
    while True:
        taken.append(bytes(range(256)) * (1 << 14))


def no_descriptors() -> None:
    """The limit of open files is reached."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    while True:
        taken.append(os.dup(0))


def disk_full() -> None:
    """No room for a checkpoint."""
    Path("/dev/full").write_bytes(bytes(1 << 20))


def no_file() -> None:
    """A file that is on the other hosts only."""
    Path("/data/tokens.bin").read_bytes()


def no_permission() -> None:
    """A file that it may not read."""
    raise PermissionError(13, "Permission denied", "/data/tokens.bin")


def port_taken() -> None:
    """A port of its own that another program has."""
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_server(server.getsockname())


def loader_raises() -> None:
    """A process that loads data raises."""
    list(torch.utils.data.DataLoader(Rows("raises"), num_workers=1))


def loader_killed() -> None:
    """A process that loads data is killed."""
    import torch.multiprocessing as processes

    process = processes.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    raise RuntimeError(f"DataLoader worker (pid {process.pid}) is killed by signal: Killed. ")


def no_module() -> None:
    """A package that the other hosts have."""
    import flash_attn_9  # type: ignore[import-not-found]  # noqa: F401


def other_version() -> None:
    """A package of another version than on the other hosts."""
    from torch.distributed import all_reduce_of_tomorrow  # type: ignore[attr-defined]  # noqa: F401


def fills_shm() -> None:
    """Shared memory is full, as with too many loader processes."""
    with Path("/dev/shm/batch").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(16 << 20))


def goes_on() -> None:
    """Nothing: what happens comes from outside."""


def writes_on() -> None:
    """Nothing: every rank saves at every step."""


BEFORE_JOINING = frozenset(
    {"early_no_module", "early_asleep", "early_raises", "early_exit", "early_wrong_interface", "early_wrong_address"}
)


def before_joining(kind: str) -> None:
    """What goes wrong on one rank before it joins."""
    name = kind.removeprefix("early_")
    if name == "exit":
        sys.exit(0)
    elif name == "wrong_interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    elif name == "wrong_address":
        os.environ.update(MASTER_ADDR="127.0.0.9", MASTER_PORT="9", TORCHELASTIC_USE_AGENT_STORE="False")
    else:
        globals()[name]()


def of_all(kind: str) -> None:
    """What goes wrong on every rank."""
    if kind == "all_arguments":
        argparse.ArgumentParser().parse_args(["--learning-rate", "1"])
    if kind == "all_no_gpu":
        torch.ones(1, device="cuda")
    if kind == "all_asleep":
        asleep()


def train(kind: str, victim: int) -> None:
    """All-reduce of gradients, step by step."""
    rank = dist.get_rank()
    for step in range(LONG_STEPS if kind in LONG else STEPS):
        print("step", step, flush=True)
        time.sleep(0.2)
        how = None
        if kind == "writes_on":
            Path(f"saved-{rank}-{step % 64}.pt").write_bytes(bytes(1 << 20))
        if step == GROUP_STEP and kind.startswith("all_"):
            of_all(kind)
        elif step == GROUP_STEP and rank == victim and kind not in BEFORE_JOINING:
            how = globals()[kind]()
        if kind == "monitored" and step == GROUP_STEP:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=TIMEOUT_S / 2))
        if how == "end":
            break
        if how != "skip":
            dist.all_reduce(torch.ones(4096 if how == "size" else 1024))
    save()


def save() -> None:
    """All wait for each other."""
    dist.barrier()


def main() -> None:
    """Join, train, leave."""
    kind, victim = sys.argv[1], int(sys.argv[2])
    if kind in BEFORE_JOINING and int(os.environ["RANK"]) == victim:
        before_joining(kind)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    train(kind, victim)
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
