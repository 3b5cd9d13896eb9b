"""Commands on this computer: nothing of them is left, and nothing is copied onto itself."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.state import ProcessId
from gangline.transport.connect import connect, connect_all
from gangline.transport.local import ALONE, LocalTransport, our_python
from gangline.transport.transport import AGENT
from tests.waiting import wait_until

# Leaves a child, and a grandchild in a session of its own, and says their pids.
FAMILY = """
import os, sys, time
def say(pid):
    with open(sys.argv[1], "a") as stream:
        stream.write(f"{pid} ")
for detached in (False, True):
    if os.fork() == 0:
        if detached:
            os.setsid()
        say(os.getpid())
        time.sleep(600)
while len(open(sys.argv[1]).read().split()) < 2:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def host(tmp_path):
    return Host(name="pc1", workdir=str(tmp_path / "work"), python=sys.executable)


def pids_in(path: Path):
    return [int(word) for word in path.read_text().split()]


def gone(pids):
    return all(ProcessId.of(pid) is None for pid in pids)


def test_with_a_command_that_takes_too_long_everything_it_started_is_ended(host, tmp_path):
    family = tmp_path / "family"
    family.touch()
    with pytest.raises(TimeoutError):
        LocalTransport(host).run([sys.executable, "-c", FAMILY, str(family)], timeout_s=3)
    assert len(pids_in(family)) == 2
    assert gone(pids_in(family))


def test_ctrl_c_ends_the_command_and_everything_it_started(host, tmp_path):
    family = tmp_path / "family"
    family.touch()

    def press(_line):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LocalTransport(host).run([sys.executable, "-c", FAMILY, str(family)], on_line=press)
    assert gone(pids_in(family))


def test_a_command_is_out_of_reach_of_our_terminal(host):
    words = LocalTransport(host).run([sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"]).stdout
    assert words == "True\n"


def test_what_a_command_leaves_running_does_not_hold_us_up(host, tmp_path):
    program = "import os, sys, time\nif os.fork() == 0: time.sleep(600)\nprint('done')"
    result = LocalTransport(host).run([sys.executable, "-c", program], timeout_s=20)
    assert (result.returncode, result.stdout) == (0, "done\n")
    left = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and program_of(path) == program]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


def program_of(folder: Path):
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return words[2].decode() if len(words) > 2 else None


def test_a_line_is_seen_while_the_command_still_runs(host, tmp_path):
    flag = tmp_path / "flag"
    program = (
        "import os, sys, time\nprint('first', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    )
    result = LocalTransport(host).run([sys.executable, "-c", program, str(flag)], on_line=lambda _line: flag.touch())
    assert result.returncode == 0


def test_a_command_may_close_its_input_unread(host):
    result = LocalTransport(host).run([sys.executable, "-c", "print(1)"], stdin=b"x" * (1 << 22))
    assert (result.returncode, result.stdout) == (0, "1\n")


def test_files_are_for_their_owner_only(host, tmp_path):
    transport = LocalTransport(host)
    transport.write(tmp_path / "work" / "file", b"")
    (tmp_path / "loose").write_bytes(b"")
    (tmp_path / "loose").chmod(0o666)
    transport.push(tmp_path / "loose", tmp_path / "work" / "tight")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "work").iterdir()}
    assert modes == {"file": 0o600, "tight": 0o600}
    assert (tmp_path / "work").stat().st_mode & 0o077 == 0


def test_pushing_a_folder_onto_itself_changes_nothing(host, tmp_path):
    """Without cluster.yaml the controller's home is the host's work folder."""
    (tmp_path / "file").write_bytes(b"data")
    LocalTransport(host).push(tmp_path, tmp_path)
    assert (tmp_path / "file").read_bytes() == b"data"


def test_a_copy_that_fails_leaves_what_was_there(host, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_bytes(b"new")
    (source / "b").symlink_to("nowhere")
    target.mkdir()
    (target / "old").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        LocalTransport(host).push(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert (target / "old").read_bytes() == b"old"


def test_two_threads_may_run_commands_at_once(host):
    results = []

    def work(number):
        results.append(LocalTransport(host).run([sys.executable, "-c", f"print({number})"]).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["0\n", "1\n", "2\n", "3\n"]


def test_every_host_of_a_cluster_gets_its_transport(host):
    transports = connect_all(Cluster(name="home", hosts=(host,)))
    assert {name: transport.host for name, transport in transports.items()} == {"pc1": "pc1"}


def test_a_transport_that_nobody_knows_is_refused(host):
    with pytest.raises(UsageError, match=r"host pc2: no transport is called 'telnet'\n.*known: local"):
        connect(Host(name="pc2", workdir="/w", python="python", transport="telnet"))  # type: ignore[arg-type]


def test_the_pids_of_ended_processes_are_not_taken_for_running_ones():
    child = os.fork()
    if child == 0:
        os._exit(0)
    wait_until(lambda: ProcessId.of(child) is None, "a process that is only waited for counts as ended")
    os.waitpid(child, 0)
    assert ProcessId.current().is_alive
    assert not ProcessId(pid=os.getpid(), start_ticks=0).is_alive


# In a folder with a contextlib.py of its own


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    (tmp_path / "contextlib.py").write_text("import sys; sys.exit('hijacked')\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hostile")
def test_the_agent_imports_nothing_of_the_folder_where_the_user_stands(host):
    result = LocalTransport(host).run((AGENT, "nonsense"))
    assert result.returncode == 2
    assert result.stderr.startswith("usage: gangline.agent VERB")


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    "argv",
    [
        our_python("gangline.supervise", "--help"),
        our_python("pip", "--version"),
        [sys.executable, "-c", ALONE, "gangline.supervise", "--help"],  # before Python 3.11
    ],
    ids=["supervisor", "pip", "old Python"],
)
def test_nor_does_any_other_program_of_ours(argv):
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("hostile")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons know no such variable")
def test_nor_do_programs_in_the_users_environment(host):
    env = {**os.environ, **host.code_env}
    done = subprocess.run(
        host.argv("-m", "gangline.runs.checkpoints", "--help"), env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("usage: python -m gangline.runs.checkpoints")
