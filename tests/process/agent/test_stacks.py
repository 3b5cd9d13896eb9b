"""A rank is asked where it stands; who cannot answer, or would end by being asked, is left in peace."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from gangline.agent.supervise import processes, rank_stacks, rank_start
from gangline.agent.supervise.host_agent import SHIM
from gangline.agent.supervise.processes import find
from gangline.agent.supervise.ranks import PHASE_RECORD, PHASES, Ranks
from gangline.agent.supervise.stacks import MOST_FRAMES, MOST_LETTERS, LastStacks, main_stack, stacks, waits, where
from gangline.runs.state import ProcessId
from tests.waiting import wait_until

LAST = '    print("ready", flush=True), sys.stdin.read()'
RANK = """
import faulthandler, signal, sys, threading
log = open(sys.argv[1], "a", buffering=1)
if sys.argv[2] == "listens":
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
def beside():
    threading.Event().wait()
threading.Thread(target=beside, daemon=True).start()
def load_rows(depth):
    if depth:
        load_rows(depth - 1)
    print("ready", file=log)
    print("ready", flush=True), sys.stdin.read()
load_rows(int(sys.argv[3]))
"""


class Host:
    """Ranks that stand in a function until the test ends."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.stack = stack
        self.processes = {}

    def start(self, rank, how="listens", *, phase=("data", 57, 56), depth=0):
        script = self.folder / "rows.py"
        script.write_text(RANK)
        words = [sys.executable, str(script), str(self.folder / f"rank-{rank}.log"), how, str(depth)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes[rank] = process
        self.stack.callback(self.end, process)
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: find(process.pid).state == "S", "it waits")
        (self.folder / f"rank-{rank}.pid").write_text(json.dumps(ProcessId.of(process.pid).to_json()))
        name, step, collectives = phase
        record = PHASE_RECORD.pack(step, PHASES.index(name), collectives, 0.0)
        (self.folder / f"rank-{rank}.phase").write_bytes(record)
        return process

    def start_own(self, rank, script, *, path, words=()):
        """A program of the user's own, as a host agent starts it."""
        shim, own = self.folder / SHIM, self.folder / "path"
        own.mkdir()
        shutil.copy(rank_start.__file__, shim)
        shutil.copy(rank_stacks.__file__, own / "sitecustomize.py")
        process = subprocess.Popen(
            [sys.executable, str(shim), str(self.folder), sys.executable, str(script), *words],
            stdin=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path},
            start_new_session=True,  # with its children, which outlive it
        )
        self.processes[rank] = process
        self.stack.callback(self.end, process)
        self.stack.callback(end_group, process.pid)
        return process

    def end(self, process):
        process.kill()
        process.communicate()

    def ask(self, **more):
        return stacks({"rank_files": str(self.folder), "ranks": sorted(self.processes), **more})


@pytest.fixture
def host(tmp_path):
    with ExitStack() as stack:
        yield Host(tmp_path, stack)


def end_group(group):
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def line_of(text):
    return RANK.splitlines().index(text) + 1


def test_a_rank_says_function_and_line_of_its_main_thread_and_where_it_is_in_the_step(host):
    process = host.start(2)
    row = host.ask()["2"]
    here = f"load_rows (rows.py:{line_of(LAST)})"
    assert row["stack"] == [here, f"<module> (rows.py:{len(RANK.splitlines())})"]
    assert (row["where"], row["waits"], row["others"]) == (here, False, 1)
    assert (row["phase"], row["step"], row["collectives"]) == ("data", 57, 56)
    assert (row["pid"], row["state"], row["unheard"]) == (process.pid, "S", [])
    assert process.poll() is None


def test_all_ranks_are_asked_and_each_answers_again(host):
    host.start(0)
    host.start(1)
    for _ in range(2):
        rows = host.ask()
        assert [bool(rows[rank]["where"]) for rank in ("0", "1")] == [True, True]


def test_one_that_is_stopped_is_not_asked_and_its_state_tells(host):
    process = host.start(0)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    row = host.ask()["0"]
    assert (row["state"], row["stack"], row["where"], row["others"]) == ("T", [], "", 0)
    assert row["phase"] == "data"
    os.kill(process.pid, signal.SIGCONT)
    assert "Thread" not in (host.folder / "rank-0.log").read_text()


def test_a_rank_that_does_not_listen_yet_is_not_ended_by_being_asked(host):
    """Until it has imported what it needs; the signal would kill it."""
    process = host.start(0, "does not", phase=("importing", 0, 0))
    row = host.ask()["0"]
    assert (row["where"], row["phase"]) == ("", "importing")
    assert process.poll() is None


def test_the_users_own_program_does_not_get_the_signal_of_ours(host):
    host.start(0)
    row = host.ask(program="command")["0"]
    assert (row["state"], row["where"]) == ("S", "")
    assert "Thread" not in (host.folder / "rank-0.log").read_text()


OWN = """
import os, sys
import note
def load_rows():
    print(note.WORD, sys.path[0], "GANGLINE_STACKS" in os.environ, os.environ["PYTHONPATH"], file=sys.stderr, flush=True)
    sys.stdin.read()
load_rows()
"""


def test_a_program_of_the_users_own_says_where_it_stands_and_finds_python_as_without_us(host):
    """The user's own sitecustomize runs; only the path of the user is there; nothing comes into the log."""
    mine = host.folder / "mine"
    mine.mkdir()
    (mine / "note.py").write_text("WORD = 'nobody'\n")
    (mine / "sitecustomize.py").write_text("import note\nnote.WORD = 'user'\n")
    script = host.folder / "train.py"
    script.write_text(OWN)
    process = host.start_own(0, script, path=str(mine))
    log = host.folder / "rank-0.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "it waits")
    assert log.read_text() == f"user {host.folder} False {mine}\n"
    for _ in range(2):
        row = host.ask(program="command")["0"]
        assert (row["where"], row["waits"]) == (f"load_rows (train.py:{len(OWN.splitlines()) - 1})", False)
    assert process.poll() is None
    assert "Thread" not in log.read_text()


OPTIMIZER = """
hooks = []
register_optimizer_step_post_hook = hooks.append
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
TRAINS = """
import importlib.util, sys
importlib.util.find_spec("torch.optim.optimizer")  # as those do who ask whether there is one
from torch.optim.optimizer import Optimizer
first, second = Optimizer(), Optimizer()
first.step(), second.step(), second.step()
print(sorted(type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ == "StepCounter"), flush=True)
sys.stdin.read()
"""


def test_the_steps_of_the_first_optimizer_are_counted(host):
    """A stand-in for torch; tests/train has the real one."""
    package = host.folder / "mine/torch/optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text("import torch\n" + OPTIMIZER)
    (host.folder / "train.py").write_text(TRAINS)
    host.start_own(0, host.folder / "train.py", path=str(host.folder / "mine"))
    log = host.folder / "rank-0.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "it has trained")
    assert log.read_text() == "[]\n"
    assert (host.folder / "rank-0.count").read_text() == "1"


DIES = """
import os, signal, sys, time
def helper():
    if os.fork() == 0:
        signal.pause()
        os._exit(1)
def load_rows():
    print("here", flush=True)
    time.sleep(600)
def crash():
    os.abort()
helper()
signal.signal(signal.SIGTERM, lambda *_: print("saves", flush=True)) if sys.argv[1] == "takes" else None
def compute():
    print("here", flush=True)
    while True:
        pass
compute() if sys.argv[1] == "computes" else crash() if sys.argv[1] == "crashes" else load_rows()
"""


def dies(host, how):
    """A script of the user's own that stands, or crashes; and what its host agent sees of it."""
    (host.folder / "train.py").write_text(DIES)
    process = host.start_own(0, host.folder / "train.py", path="", words=[how])
    ranks = Ranks(host.folder, {0})
    log = host.folder / "rank-0.log"
    if how != "crashes":
        wait_until(lambda: log.exists() and "here" in log.read_text(), "it stands")
        ranks.scan(ordered=False)
    return process, ranks, LastStacks({"program": "command"}, ranks)


def told(ranks, last, code):
    ranks.scan(ordered=True, last=True)
    failures = ranks.failures({process.pid: code for process in ranks.processes.values()})
    last.note(failures)
    return failures[0].get("stack")


def test_a_rank_that_torchrun_ends_has_told_where_it_stood_and_ends_as_without_us(host):
    process, ranks, last = dies(host, "stands")
    process.terminate()
    assert process.wait() == -signal.SIGTERM
    row = told(ranks, last, -signal.SIGTERM)
    assert (row["where"], row["waits"]) == (
        f"load_rows (train.py:{DIES.splitlines().index('    time.sleep(600)') + 1})",
        False,
    )
    assert (host.folder / "rank-0.log").read_text() == "here\n"


def test_a_child_of_a_rank_does_not_speak_for_it(host):
    process, ranks, last = dies(host, "stands")
    (child,) = processes.descendants(process.pid)
    os.kill(child.pid, signal.SIGTERM)
    wait_until(lambda: find(child.pid) is None or find(child.pid).state == "Z", "the child has ended")
    process.kill()
    process.wait()
    assert told(ranks, last, -signal.SIGKILL) is None


def test_a_rank_that_takes_sigterm_for_itself_is_asked_before_it_is_ended(host):
    process, ranks, last = dies(host, "takes")
    process.terminate()
    log = host.folder / "rank-0.log"
    wait_until(lambda: "saves" in log.read_text(), "it has saved")
    last.look("kill")
    process.kill()
    process.wait()
    row = told(ranks, last, -signal.SIGKILL)
    assert row["where"].startswith("load_rows (train.py:")


def test_a_rank_that_computes_has_answered_before_it_gets_the_signal_that_ends_it(host):
    process, ranks, last = dies(host, "computes")
    last.look("stop")
    process.terminate()
    process.wait()
    assert told(ranks, last, -signal.SIGTERM)["where"].startswith("compute (train.py:")


def test_a_rank_that_crashes_tells_its_line_and_dies_of_its_signal(host):
    process, ranks, last = dies(host, "crashes")
    ranks.scan(ordered=False)
    assert process.wait() == -signal.SIGABRT
    row = told(ranks, last, -signal.SIGABRT)
    assert row["where"] == f"crash (train.py:{DIES.splitlines().index('    os.abort()') + 1})"


def test_a_rank_that_is_stopped_is_told_so(host):
    process, ranks, last = dies(host, "stands")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    last.look("stop")
    process.kill()
    process.wait()
    assert told(ranks, last, -signal.SIGKILL)["state"] == "T"


def test_what_a_rank_said_long_before_its_end_is_not_taken_for_its_end(host):
    process, ranks, last = dies(host, "stands")
    host.ask(program="command")
    path = host.folder / "rank-0.stacks"
    assert path.stat().st_size
    os.utime(path, (1.0, 1.0))
    process.kill()
    process.wait()
    assert told(ranks, last, -signal.SIGKILL) is None


def test_the_signal_by_which_a_rank_is_asked_does_not_end_it_once_python_takes_no_signals_any_more(host):
    process, _, _ = dies(host, "stands")
    ignored = re.search(r"^SigIgn:\s*([0-9a-f]+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert not int(ignored[1], 16) & 1 << (signal.SIGRTMAX - 3), "it listens"
    (child,) = processes.descendants(process.pid)
    os.kill(child.pid, signal.SIGRTMAX - 2)
    os.kill(child.pid, signal.SIGCONT)
    assert find(child.pid).state in "SR"


RAISES = """
import json, sys, time, types
def dump(includeCollectives, onlyActive):
    assert includeCollectives and not onlyActive
    if sys.argv[1] == "hangs":
        time.sleep(600)
    if sys.argv[1] == "other":
        return b"no json"
    last = {"process_group": ["0", "default_pg"], "collective_seq_id": 6, "profiling_name": "gloo:all_reduce"}
    return json.dumps({"entries": [{}, {**last, "input_sizes": [[7], [2, 3]], "is_p2p": False, "state": "scheduled"}]}).encode()
c10d = sys.modules["torch._C._distributed_c10d"] = types.ModuleType("c10d")
c10d._dump_fr_trace_json = dump
if sys.argv[1] == "well":
    sys.exit(3)
raise ValueError("gave up")
"""


@pytest.mark.parametrize("how", ["told", "hangs", "other", "well"])
def test_a_rank_that_raises_tells_its_last_collective_and_ends_as_without_us(host, how):
    """The recorder is played: its function hangs in one case, and is of another torch in another."""
    script = host.folder / "train.py"
    script.write_text(RAISES)
    process = host.start_own(0, script, path="", words=[how])
    assert process.wait(timeout=60) == (3 if how == "well" else 1)
    ranks = Ranks(host.folder, {0})
    ranks.scan(ordered=False)
    failures = ranks.failures({})
    LastStacks({"program": "command"}, ranks).note(failures)
    told = {"group": "0", "number": 6, "operation": "all_reduce", "sizes": "[7], [2, 3]"}
    assert failures[0].get("collective") == (told if how == "told" else None)
    assert failures[0]["log_tail"][-1:] == ([] if how == "well" else ["ValueError: gave up"])


@pytest.mark.parametrize(
    ("path", "where_it_is", "is_waiting"),
    [
        ("/usr/lib/python3.12/subprocess.py", "load_rows (train.py:14)", False),
        ("/v/lib/python3.12/site-packages/datasets/arrow_dataset.py", "load_rows (train.py:14)", False),
        ("/v/lib/python3.12/site-packages/torch/nn/parallel/distributed.py", "load_rows (train.py:14)", True),
    ],
)
def test_of_the_users_own_program_the_line_in_a_file_of_the_user_is_told(path, where_it_is, is_waiting):
    text = f"""Thread 0x1 (most recent call first):
  File "{path}", line 3252 in _wait
  File "/home/ann/train.py", line 14 in load_rows
"""
    frames, _ = main_stack(text)
    telling = where(frames, own=True)
    assert (telling.words, waits(frames, telling, own=True)) == (where_it_is, is_waiting)


def test_a_rank_in_a_backward_pass_waits_for_others_as_ddp_exchanges_gradients_there():
    text = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.12/site-packages/torch/autograd/graph.py", line 12 in _engine_run_backward
  File "/home/ann/train.py", line 14 in train
"""
    frames, _ = main_stack(text)
    assert waits(frames, where(frames, own=True), own=True)


def test_a_program_that_waits_in_torch_waits_for_others():
    text = """Thread 0x1 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/ann/train.py", line 14 in train
"""
    frames, _ = main_stack(text)
    assert waits(frames, where(frames))
    assert not waits(frames[1:], where(frames))


def test_a_rank_that_is_gone_says_so(host):
    host.end(host.start(0))
    assert host.ask()["0"]["state"] == "X"


def test_a_deep_stack_is_cut(host):
    host.start(0, depth=90)
    row = host.ask()["0"]
    assert len(row["stack"]) == MOST_FRAMES
    assert row["where"].startswith("load_rows (rows.py:")


def test_no_ranks_no_answers(tmp_path):
    assert stacks({"rank_files": str(tmp_path / "none"), "ranks": [0]}) == {}


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_what_other_pythons_write_is_understood(version):
    """From Python 3.14 on threads have names in it; lines of the log may be between."""
    name = " [MainThread]" if version == "3.13" else ""
    text = f"""an ordinary line
Thread 0x00007f351c31d6c0 (most recent call first):
  File "/usr/lib/python3/threading.py", line 359 in wait
  File "/usr/lib/python3/threading.py", line 1012 in _bootstrap

Current thread 0x00007f351ce9eb80{name} (most recent call first):
  File "/opt/lib/python3/site-packages/torch/autograd/graph.py", line 12 in _engine_run_backward
another line
  File "/home/ann/my torch/in (two) parts.py", line ??? in <lambda>
  File "/home/ann/code/gangline/strategies/ddp/train.py", line 61 in forward_backward
  ...
"""
    frames, num_threads = main_stack(text)
    assert num_threads == 2
    assert [frame.words for frame in frames] == [
        "_engine_run_backward (graph.py:12)",
        "<lambda> (in (two) parts.py:???)",
        "forward_backward (train.py:61)",
    ]
    assert where(frames).words == "<lambda> (in (two) parts.py:???)"


def test_where_all_is_plumbing_the_innermost_call_is_told():
    text = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 3 in ' + "w" * 500
    (frame,), _ = main_stack(text)
    assert where([frame]) is frame
    assert len(frame.words) == MOST_LETTERS
    assert where([]) is None
    assert main_stack('nothing of the kind\n  File "x.py", line 1 in y') == ([], 0)


def test_a_socket_that_sends_the_same_again_and_again_is_found(tmp_path, monkeypatch):
    rows = [
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
        "   0: 0A000A0A:07E8 0C000A0A:C350 01 00000010:00000000 01:000000C8 00000004     0        0 1145 2 0 20 4 0 10 -1",
        "   1: 0A000A0A:07E8 0B000A0A:C350 01 00000010:00000000 01:00000014 00000000     0        0 1146 2 0 20 4 0 10 -1",
        "   2: 0A000A0A:07E9 0B000A0A:C351 01 00000000:00000000 00:00000000 00000000     0        0 1147 1 0 20 4 0 10 -1",
    ]
    (tmp_path / "tcp").write_text("\n".join(rows))
    monkeypatch.setattr(processes, "TABLES", (str(tmp_path / "tcp"), str(tmp_path / "tcp6")))
    (found,) = processes.unacknowledged()
    assert (found.inode, found.remote[1]) == (1145, 50000)


def test_the_verb_reads_a_request_and_writes_json(host):
    host.start(4)
    request = {"rank_files": str(host.folder), "ranks": [4], "program": "worker"}
    words = [sys.executable, "-m", "gangline.agent", "stacks"]
    said = subprocess.run(words, input=json.dumps({"request": request}), capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["ranks"]["4"]["where"].startswith("load_rows")
