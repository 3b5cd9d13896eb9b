"""A gang without torch: small scripts in the place of torchrun and of the ranks, and a look at what is left of them."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Literal

from gangline.launch.backend import HostRequest, Request
from gangline.runs.process import ProcessId

DEADLINE_S = 60.0

RANK = """
import json, os, signal, struct, subprocess, sys, time
folder, rank, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def path(name):
    return os.path.join(folder, name)

def write(name, value):
    with open(path(name + ".part"), "w") as stream:
        json.dump(value, stream)
    os.replace(path(name + ".part"), path(name))

def wait_for(name):
    while not os.path.exists(path(name)):
        time.sleep(0.01)

def say_result(result):
    if rank == 0:
        write("result.json", {"result": result, "step": 40})

def save_and_leave(*_):
    write(f"saved-{rank}", {})
    say_result("stopped")
    sys.exit(0)

def save_slowly(*_):
    for count in range(20):
        if mode == "slow":
            with open(path(f"rank-{rank}.phase"), "wb") as stream:
                stream.write(struct.pack("<qqqd", 40, 6, count, time.time()))
        elif mode == "talking":
            with open(path(f"rank-{rank}.log"), "a") as log:
                log.write("still saving\\n")
        else:
            part = path("../../checkpoints/step-00000040/part-pc1.tmp")
            os.makedirs(part, exist_ok=True)
            with open(os.path.join(part, "weights"), "ab") as stream:
                stream.write(b"some")
        time.sleep(0.1)
    save_and_leave()

if mode == "orderly":
    signal.signal(signal.SIGTERM, save_and_leave)
elif mode in ("slow", "growing", "talking"):
    signal.signal(signal.SIGTERM, save_slowly)
elif mode != "plain":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "stubborn":
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        write("orphan", {"pid": os.getpid()})
        while True:
            signal.pause()
    os.wait()
    wait_for("orphan")
with open(path(f"rank-{rank}.log"), "w") as log:
    log.write("".join(f"line {number}\\n" for number in range(100)))
ticks = int(open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[19])
write(f"rank-{rank}.pid", {"pid": os.getpid(), "start_ticks": ticks})
if mode.startswith("fail:"):
    wait_for(f"go-{rank}")
    error = {"kind": "RunFailed", "what": mode[5:], "seen": "", "fix": "", "exit_code": 5}
    write(f"rank-{rank}.error.json", error)
    sys.exit(5)
wait_for(f"go-{rank}")
say_result("finished")
"""

LAUNCHER = """
import signal, subprocess, sys, time
rank_script, folder, words = sys.argv[1], sys.argv[2], sys.argv[3:]
ranks = [subprocess.Popen([sys.executable, rank_script, folder, *word.split("=", 1)], start_new_session=True)
         for word in words]

def leave(*_):
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + 0.5  # as torchrun, which waits for its ranks before it ends them for good
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(1)

signal.signal(signal.SIGTERM, leave)
while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.02)
bad = [rank for rank in ranks if rank.poll()]
for rank in bad:
    print(f"  exitcode  : {rank.returncode} (pid: {rank.pid})", flush=True)
if bad:
    leave()
"""


def wait_until(condition, what, *, timeout_s=DEADLINE_S):
    """Look until `condition()` is true, and return its value; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.02)


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def part(
    folder: Path,
    host: str,
    *ranks: str,
    grace_s: float = DEADLINE_S,
    argv: tuple[str, ...] = (),
    program: Literal["worker", "command"] = "worker",
) -> HostRequest:
    """What is started on a host; each of `ranks` is "<global rank>=<mode>"."""
    attempt = folder / host
    attempt.mkdir(parents=True, exist_ok=True)
    rank_script, launcher = script(folder, "rank.py", RANK), script(folder, "launcher.py", LAUNCHER)
    return HostRequest(
        host=host,
        folder=str(attempt / host),
        rank_files=str(attempt),
        argv=argv or (sys.executable, launcher, rank_script, str(attempt), *ranks),
        env={},
        grace_s=grace_s,
        program=program,
    )


def request(*parts: HostRequest) -> Request:
    return Request(run_id="calm-otter-7", attempt=1, hosts=parts)


def let_go(part: HostRequest, rank: int) -> None:
    """Let a rank that waits go on."""
    Path(part.rank_files, f"go-{rank}").touch()


def rank_pid(part: HostRequest, rank: int) -> int:
    """The pid of a rank, once it runs."""
    path = Path(part.rank_files, f"rank-{rank}.pid")
    wait_until(path.exists, f"rank {rank} of {part.host} starts")
    return json.loads(path.read_text())["pid"]


def guard_record(part: HostRequest) -> dict:
    return json.loads(Path(part.folder, "guard.json").read_text())


def exit_record(part: HostRequest) -> dict:
    """What the guard wrote at its end, once it has ended."""
    path = Path(part.folder, "exit.json")
    wait_until(path.exists, f"the guard of {part.host} ends")
    return json.loads(path.read_text())


def is_running(pid: int) -> bool:
    return ProcessId.of(pid) is not None


def left_of(part: HostRequest) -> list[int]:
    """Processes that were started for this part and still run, as their environment tells."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
        except OSError:
            continue
        if f"GANGLINE_PART={part.folder}".encode() in environment and is_running(int(folder.name)):
            found.append(int(folder.name))
    return found


def kill_left(*parts: HostRequest) -> None:
    """For the end of a test: whatever it did, nothing may stay."""
    for part in parts:
        record = Path(part.folder, "guard.json")
        pids = left_of(part)
        if record.exists():
            guard = json.loads(record.read_text())
            if ProcessId(pid=guard["pid"], start_ticks=guard["start_ticks"]).is_alive:
                pids.append(guard["pid"])
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has left meanwhile
                os.kill(pid, 9)
