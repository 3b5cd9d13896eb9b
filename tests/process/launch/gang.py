"""A gang without torch: small scripts in the place of torchrun, of the prefork processes and of the ranks, and a
look at what is left of them.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Literal

from gangline.launch.backend import HostRequest, LaunchRequest, WarmPool
from gangline.runs.state import ProcessId
from tests.waiting import wait_until

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

def break_off(*_):
    error = {"kind": "RunFailed", "what": "Connection reset by peer", "seen": "", "fix": "", "exit_code": 5}
    write(f"rank-{rank}.error.json", error)
    sys.exit(5)

if mode != "plain":
    signal.signal(signal.SIGUSR2, break_off)
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

PREFORK = """
import ctypes, json, os, signal, subprocess, sys, time
control, rank, mode = sys.argv[1:]
local, rank, number, told = int(os.environ["LOCAL_RANK"]), int(rank), 1, []
files = os.path.join(control, "..", "..")
signal.signal(signal.SIGUSR2, lambda *_: None)  # it is for ranks

def write(folder, name, value):
    with open(os.path.join(folder, name + ".part"), "w") as stream:
        json.dump(value, stream)
    os.replace(os.path.join(folder, name + ".part"), os.path.join(folder, name))

def has(name):
    return os.path.exists(os.path.join(control, name))

def sit():
    global rank, mode, files
    with open(os.path.join(control, f"position-{number}.json")) as stream:
        position = json.load(stream)
    rank, mode, files = position["ranks"][local], position["words"][1 + local], position["files"]

def pass_on(number, _frame):
    told.append(number)
    child.send_signal(number)

if has("standby"):
    open(os.path.join(control, f"ready-{local}"), "w").close()
    while not has("position-1.json"):
        if has("leave"):
            sys.exit(0)
        time.sleep(0.02)
if has("position-1.json"):
    sit()
ticks = int(open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[19])
write(files, f"rank-{rank}.pid", {"pid": os.getpid(), "start_ticks": ticks})
script = os.path.join(os.path.dirname(__file__), "rank.py")
while True:
    words = [sys.executable, script, files, str(rank), mode]
    child = subprocess.Popen(words, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 9))  # it dies with this one
    signal.signal(signal.SIGTERM, pass_on)
    code = child.wait()
    write(files, f"rank-{rank}.exit.json", {"pid": child.pid, "code": code})
    number += 1
    if code == 0 and not has("hold"):
        sys.exit(0)
    while not has(f"position-{number}.json"):
        if told or has("leave"):
            sys.exit(code if code >= 0 else 128 - code)
        time.sleep(0.01)
    sit()
"""

LAUNCHER = """
import os, signal, subprocess, sys, time
rank_script, folder, words = sys.argv[1], sys.argv[2], sys.argv[3:]
ranks = [subprocess.Popen([sys.executable, rank_script, folder, *word.split("=", 1)], start_new_session=True,
                          env={**os.environ, "LOCAL_RANK": str(number)})
         for number, word in enumerate(words)]

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
    samples: str | None = None,
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
        samples=samples,
    )


def prefork_part(
    folder: Path, host: str, *ranks: str, attempt: int = 1, rest_s: float = DEADLINE_S, grace_s: float = DEADLINE_S
) -> HostRequest:
    """What is started on a host with a warm pool; see `part`. Later attempts meet without launchers."""
    files = folder / "attempts" / str(attempt)
    files.mkdir(parents=True, exist_ok=True)
    script(folder, "rank.py", RANK)
    scripts = script(folder, "launcher.py", LAUNCHER), script(folder, "prefork_process.py", PREFORK)
    numbers, modes = zip(*(word.split("=", 1) for word in ranks), strict=True)
    return HostRequest(
        host=host,
        folder=str(files / host),
        rank_files=str(files),
        argv=(sys.executable, *scripts, str(files / host / "prefork"), *ranks),
        env={},
        run_id="calm-otter-7",
        attempt=attempt,
        grace_s=grace_s,
        ranks=tuple(map(int, numbers)),
        slots=len(ranks),
        leases=str(folder / "leases" / host),
        meet=("127.0.0.1", 29500 + attempt),
        alone=attempt > 1,
        warm_pool=WarmPool(rest_s=rest_s, words=("train", *modes), world_size=len(ranks)),
    )


def request(*parts: HostRequest) -> LaunchRequest:
    return LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=parts)


def let_go(part: HostRequest, rank: int) -> None:
    """Let a rank that waits go on."""
    Path(part.rank_files, f"go-{rank}").touch()


def rank_pid(part: HostRequest, rank: int) -> int:
    """The pid of a rank, once it runs."""
    path = Path(part.rank_files, f"rank-{rank}.pid")
    wait_until(path.exists, f"rank {rank} of {part.host} starts")
    return json.loads(path.read_text())["pid"]


def running_rank(part: HostRequest, rank: int) -> int:
    """The pid of a rank, once it is more than its prefork process."""
    path = Path(part.rank_files, f"rank-{rank}.pid")

    def found():
        pid = json.loads(path.read_text())["pid"] if path.exists() else None
        try:
            return pid if pid and b"rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        except FileNotFoundError:
            return None

    return wait_until(found, f"rank {rank} of {part.host} runs")


def agent_record(part: HostRequest) -> dict:
    return json.loads(Path(part.folder, "agent.json").read_text())


def exit_record(part: HostRequest) -> dict:
    """What the host agent wrote at its end, once it has ended."""
    path = Path(part.folder, "exit.json")
    wait_until(path.exists, f"the host agent of {part.host} ends")
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


def order(part: HostRequest, word: str | None, epoch: int = 1) -> None:
    """Order something of the host agent of a part."""
    whole = Path(part.folder, "order")
    whole.write_text(json.dumps({"epoch": epoch, "order": word}))
    whole.replace(Path(part.folder, f"order-{epoch}.json"))


def status(part: HostRequest) -> dict:
    """What the host agent of a part says of it now."""
    return json.loads(Path(part.folder, "status.json").read_text())


def kill_left(*parts: HostRequest) -> None:
    """For the end of a test: whatever it did, nothing may stay."""
    for part in parts:
        record = Path(part.folder, "agent.json")
        host_agent = json.loads(record.read_text()) if record.exists() else None
        if host_agent and ProcessId(pid=host_agent["pid"], start_ticks=host_agent["start_ticks"]).is_alive:
            os.kill(host_agent["pid"], 9)
        while pids := left_of(part):  # a launcher may start another rank while it is ended
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has left meanwhile
                    os.kill(pid, 9)
