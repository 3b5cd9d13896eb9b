"""The supervisor as a process: it outlives who started it, and who kills it changes nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import gangline
from gangline.agent.supervise.processes import end_family
from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.runs.checkpoints import step_folder
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState, read_leave, read_order
from gangline.supervise import __main__ as program
from gangline.supervise import detached
from gangline.supervise.detached import (
    cannot_supervise,
    is_alive,
    leave_run,
    spawn,
    spawn_there,
    stop_run,
    unfinished,
)
from gangline.supervise.gang_control import SupervisedRun
from gangline.supervise.lock import has_supervisor, supervisor_lock
from gangline.transport.connect import connect_all
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT
from tests.fakes.transport import FakeTransport, Scripted
from tests.process.launch.gang import (
    agent_record,
    exit_record,
    kill_left,
    left_of,
    let_go,
    part,
    rank_pid,
    request,
    script,
)
from tests.saved import read_events
from tests.unit.supervise.runs import RUN_ID, cluster_of, create_run, save_part
from tests.waiting import wait_until

HOSTS = ("pc1", "pc2")


class Lab:
    """A run on two hosts of this computer, with scripts for ranks."""

    def __init__(self, folder, *modes):
        self.folder = folder
        self.cluster = cluster_of(folder, *HOSTS)
        self.parts = [part(folder, host, f"{rank}={modes[rank]}") for rank, host in enumerate(HOSTS)]
        self.layout = create_run(folder, self.cluster, request(*self.parts))

    def start(self):
        spawn(self.layout.folder, 1)
        for rank, host_part in enumerate(self.parts):
            rank_pid(host_part, rank)

    def supervisor(self) -> ProcessId:
        process = RunState.load(self.layout).supervisor
        assert process is not None
        return process

    def kill_supervisor(self):
        process = self.supervisor()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_alive, "the supervisor is gone")

    def outcome(self) -> AttemptOutcome:
        path = self.layout.attempt(1) / "outcome.json"
        wait_until(path.exists, "the attempt ends")
        wait_until(lambda: not has_supervisor(self.layout), "the supervisor leaves")
        return AttemptOutcome.load(path)

    def left(self):
        return [pid for host_part in self.parts for pid in left_of(host_part)]

    def events(self):
        """Without how far the ranks have come: that is told as often as it is seen."""
        names = [event["event"] for event in read_events(self.layout.events)]
        return [name for name in names if name not in {"beginning", "joined", "waiting"}]

    def close(self):
        state = RunState.load(self.layout)
        if state.supervisor is not None and state.supervisor.is_alive:
            os.kill(state.supervisor.pid, signal.SIGKILL)
        kill_left(*self.parts)


@pytest.fixture
def make(tmp_path):
    labs = []

    def _make(*modes):
        labs.append(Lab(tmp_path, *modes))
        return labs[-1]

    yield _make
    for lab in labs:
        lab.close()


def test_it_is_nobodys_child_and_sees_the_run_to_its_end(make):
    lab = make("plain", "plain")
    lab.start()
    pid = lab.supervisor().pid
    assert os.getsid(pid) != os.getsid(0)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    assert RunState.load(lab.layout).phase == "running"
    assert is_alive(lab.layout)
    for rank, host_part in enumerate(lab.parts):
        let_go(host_part, rank)
    assert lab.outcome().result == "finished"
    assert RunState.load(lab.layout).phase == "finished"
    assert not is_alive(lab.layout)


def test_it_goes_on_when_who_waited_for_it_has_gone(make):
    lab = make("plain", "plain")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gangline.supervise", str(lab.layout.folder), "1", "--detach"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, timeout=60)
    os.close(writer)
    for rank, host_part in enumerate(lab.parts):
        rank_pid(host_part, rank)
        let_go(host_part, rank)
    assert lab.outcome().result == "finished"


SLOW_AGENT = """
import json, os, subprocess, sys, time
folder = sys.argv[1]
asked = sys.stdin.buffer.read()
open(os.path.join(folder, "waiting"), "w").close()
while not os.path.exists(os.path.join(folder, "go-agent")):
    time.sleep(0.01)
sys.exit(subprocess.run([sys.executable, "-m", "gangline.agent", "host-agent", *sys.argv[2:]], input=asked).returncode)
"""


def test_it_starts_the_gang_though_who_asked_is_killed_meanwhile(make, tmp_path):
    lab = make("plain", "plain")
    slow = script(tmp_path, "slow_agent.py", SLOW_AGENT)
    lab.parts[0] = replace(lab.parts[0], agent_argv=(sys.executable, slow, str(tmp_path)))
    lab.layout = create_run(tmp_path / "second", lab.cluster, request(*lab.parts))
    command = [sys.executable, "-m", "gangline.supervise", str(lab.layout.folder), "1", "--detach"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **streams) as asked:
        wait_until((tmp_path / "waiting").exists, "the gang is about to start")
        end_family(asked)
    (tmp_path / "go-agent").touch()
    for rank, host_part in enumerate(lab.parts):
        rank_pid(host_part, rank)
        let_go(host_part, rank)
    assert lab.outcome().result == "finished"


def test_a_stop_before_a_host_agent_stands_does_not_start_the_gang(make):
    lab = make("plain", "plain")
    # As a supervisor leaves it that died between the two.
    replace(RunState.load(lab.layout), phase="running", epoch=1).save(lab.layout)
    stop_run(lab.layout, "stop")
    assert lab.outcome().result == "stopped"
    assert "started" not in lab.events()
    assert not any(Path(each.folder, "agent.json").exists() for each in lab.parts)


def test_a_start_that_takes_too_long_is_an_error_with_what_to_do(make, monkeypatch):
    lab = make("plain", "plain")
    slow = script(lab.folder, "slow_agent.py", SLOW_AGENT)
    lab.parts[0] = replace(lab.parts[0], agent_argv=(sys.executable, slow, str(lab.folder)))
    lab.layout = create_run(lab.folder / "second", lab.cluster, request(*lab.parts))
    monkeypatch.setattr(detached, "START_TIMEOUT_S", 6.0)  # long enough for the supervisor to stand by itself
    with pytest.raises(RunFailed, match="does not respond during the start"):
        spawn(lab.layout.folder, 1)
    (lab.folder / "go-agent").touch()
    for rank, host_part in enumerate(lab.parts):
        rank_pid(host_part, rank)
        let_go(host_part, rank)
    assert lab.outcome().result == "finished"


def test_a_keeper_that_does_not_get_on_is_named(make):
    lab = make("plain", "plain")
    keeper = FakeTransport("pc1")

    def read(*_words, **_how):
        raise TimeoutError("pc1: no answer")

    keeper.read = read
    with pytest.raises(HostUnreachable, match="pc1 does not respond in time"):
        is_alive(lab.layout, keeper)


def test_a_run_that_runs_is_not_started_again(make):
    lab = make("orderly", "orderly")
    lab.start()
    with pytest.raises(RunFailed, match="is running already"):
        spawn(lab.layout.folder, 1)
    assert lab.supervisor().is_alive


def test_a_host_agent_that_cannot_start_is_told_to_who_asked(make, tmp_path):
    lab = make("plain", "plain")
    broken = part(tmp_path, "pc2", argv=("/no/such/python",))
    lab.layout = create_run(tmp_path / "second", lab.cluster, request(lab.parts[0], broken))
    with pytest.raises(RunFailed, match=r"pc2: the gangline agent did not start[\s\S]*No such file"):
        spawn(lab.layout.folder, 1)
    assert lab.outcome().result == "failed"
    assert lab.left() == []
    assert not is_alive(lab.layout)


def test_stop_saves_and_leaves_nothing(make):
    lab = make("orderly", "orderly")
    lab.start()
    stop_run(lab.layout, "stop")
    assert lab.outcome().result == "stopped"
    assert all(Path(each.rank_files, f"saved-{rank}").exists() for rank, each in enumerate(lab.parts))
    assert lab.left() == []


def test_an_order_reaches_the_attempt_that_has_begun_meanwhile(make, monkeypatch):
    lab = make("plain", "plain")
    replace(RunState.load(lab.layout), phase="restarting").save(lab.layout)
    write_order = detached.write_order

    def slowly(layout, order, *, attempt):
        write_order(layout, order, attempt=attempt)
        if attempt == 1:
            replace(RunState.load(layout), phase="running", attempt=2).save(layout)

    monkeypatch.setattr(detached, "write_order", slowly)
    with supervisor_lock(lab.layout):
        stop_run(lab.layout, "stop")
    assert read_order(lab.layout, attempt=2) == "stop"


def test_a_run_whose_supervisor_died_between_two_attempts_is_stopped_at_once(make):
    lab = make("orderly", "orderly")
    lab.start()
    stop_run(lab.layout, "stop")
    lab.outcome()
    replace(RunState.load(lab.layout), phase="restarting").save(lab.layout)
    stop_run(lab.layout, "stop")
    assert RunState.load(lab.layout).phase == "stopped"
    assert lab.left() == []


def test_who_looks_after_a_run_is_asked_to_go_on_without_hosts(make):
    lab = make("plain", "plain")
    with supervisor_lock(lab.layout):
        leave_run(lab.layout, ["pc2"])
    assert read_leave(lab.layout, attempt=1) == ("pc2",)


def test_where_nobody_looks_after_a_run_it_cannot_go_on_without_hosts(make):
    lab = make("plain", "plain")
    with pytest.raises(RunFailed, match="has no supervisor") as caught:
        leave_run(lab.layout, ["pc2"])
    assert "gangline stop" in caught.value.fix
    assert read_leave(lab.layout, attempt=1) == ()


def test_a_keeper_is_asked_to_go_on_without_hosts(make, keeper):
    lab = make("plain", "plain")
    as_kept(lab)
    with supervisor_lock(lab.layout):
        leave_run(lab.layout, ["pc2"], keeper)
    assert read_leave(lab.layout, attempt=1) == ("pc2",)
    with pytest.raises(RunFailed, match="has no supervisor"):
        leave_run(lab.layout, ["pc1"], keeper)


def test_a_run_whose_ranks_were_told_to_leave_by_somebody_else_is_stopped_and_not_finished(make):
    lab = make("orderly", "orderly")
    lab.start()
    for rank, host_part in enumerate(lab.parts):
        os.kill(rank_pid(host_part, rank), signal.SIGTERM)
    assert lab.outcome().result == "stopped"
    assert RunState.load(lab.layout).phase == "stopped"
    assert lab.events() == ["started", "stopped"]
    assert "not gangline stop" in read_events(lab.layout.events)[-1]["why"]


def test_a_run_whose_machine_shuts_down_is_stopped_and_not_finished(make):
    lab = make("orderly", "orderly")
    lab.start()
    for host_part in lab.parts:
        os.kill(agent_record(host_part)["pid"], signal.SIGTERM)
    assert lab.outcome().result == "stopped"


def test_stop_now_waits_for_nobody(make):
    lab = make("stubborn", "orderly")
    lab.start()
    stop_run(lab.layout, "kill")
    assert lab.outcome().result == "stopped"
    assert lab.left() == []


def test_when_one_host_fails_the_other_is_ended_soon(make):
    lab = make("orderly", "fail:no space left on device")
    lab.start()
    let_go(lab.parts[1], 1)
    outcome = lab.outcome()
    assert (outcome.result, outcome.error["what"]) == ("failed", "rank 1 on pc2: no space left on device")
    assert outcome.error["log_tail"][-1] == "line 99"
    assert lab.left() == []


def test_a_killed_rank_is_named(make):
    lab = make("orderly", "orderly")
    lab.start()
    os.kill(rank_pid(lab.parts[1], 1), signal.SIGKILL)
    assert lab.outcome().error["what"] == "rank 1 on pc2 was killed by SIGKILL"
    assert lab.left() == []


def test_a_killed_host_agent_ends_the_run_and_its_ranks(make):
    lab = make("orderly", "stubborn")
    lab.start()
    os.kill(agent_record(lab.parts[1])["pid"], signal.SIGKILL)
    outcome = lab.outcome()
    assert outcome.hosts["pc2"].phase == "lost"
    assert lab.left() == []


def test_without_a_supervisor_the_run_goes_on_and_can_be_stopped(make):
    lab = make("orderly", "orderly")
    lab.start()
    lab.kill_supervisor()
    assert is_alive(lab.layout)
    stop_run(lab.layout, "stop")
    assert lab.outcome().result == "stopped"
    assert lab.events() == ["started", "stopping", "stopped"]
    assert lab.left() == []


def test_a_new_supervisor_takes_over_and_commits_what_was_saved(make):
    lab = make("plain", "plain")
    lab.start()
    lab.kill_supervisor()
    transports = connect_all(lab.cluster)
    for host in HOSTS:
        save_part(transports[host], lab.folder / host, 100, hosts=HOSTS)
    for rank, host_part in enumerate(lab.parts):
        let_go(host_part, rank)
        exit_record(host_part)
    spawn(lab.layout.folder, 1)
    assert lab.outcome().result == "finished"
    assert "committed" in lab.events()
    for host in HOSTS:
        assert (step_folder(RunLayout(lab.folder / host, RUN_ID).checkpoints, 100) / "COMMITTED").exists()


def test_stopping_a_run_that_is_over_changes_nothing(make):
    lab = make("plain", "plain")
    lab.start()
    for rank, host_part in enumerate(lab.parts):
        let_go(host_part, rank)
    outcome = lab.outcome()
    stop_run(lab.layout, "kill")
    assert lab.outcome() == outcome
    assert not is_alive(lab.layout)


def test_if_everything_but_the_ranks_was_killed_a_stop_still_ends_them(make):
    lab = make("stubborn", "orderly")
    lab.start()
    lab.kill_supervisor()
    for host_part in lab.parts:
        os.kill(agent_record(host_part)["pid"], signal.SIGKILL)
    assert lab.left()
    assert is_alive(lab.layout)
    stop_run(lab.layout, "stop")
    assert lab.outcome().result == "failed"
    assert lab.left() == []
    assert not is_alive(lab.layout)


def test_after_a_power_cut_the_run_is_not_alive_and_a_new_attempt_may_start(make):
    lab = make("orderly", "orderly")
    lab.start()
    lab.kill_supervisor()
    for host_part in lab.parts:
        os.kill(agent_record(host_part)["pid"], signal.SIGKILL)
        for pid in left_of(host_part):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(lab.layout), "nothing is alive")
    (lab.folder / "second").mkdir()
    second = [part(lab.folder / "second", host, f"{rank}=plain") for rank, host in enumerate(HOSTS)]
    lab.layout.attempt(2).mkdir()
    write_json(
        lab.layout.attempt(2) / "request.json", LaunchRequest(run_id=RUN_ID, attempt=2, hosts=tuple(second)).to_json()
    )
    spawn(lab.layout.folder, 2)
    for rank, host_part in enumerate(second):
        let_go(host_part, rank)
        assert exit_record(host_part)["returncode"] == 0
    wait_until((lab.layout.attempt(2) / "outcome.json").exists, "the second attempt ends")
    wait_until(lambda: not has_supervisor(lab.layout), "the supervisor leaves")
    assert RunState.load(lab.layout).attempt == 2


def test_after_a_power_cut_the_run_goes_on_over_other_hosts(make):
    lab = make("orderly", "orderly")
    lab.start()
    lab.kill_supervisor()
    for host_part in lab.parts:
        os.kill(agent_record(host_part)["pid"], signal.SIGKILL)
        for pid in left_of(host_part):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(lab.layout), "nothing is alive")
    fresh = cluster_of(lab.folder, "pc9")
    lab.parts.append(part(lab.folder, "pc9", "0=plain"))
    write_json(lab.layout.attempt(1) / "cluster.json", lab.cluster.to_json())
    lab.layout.attempt(2).mkdir()
    write_json(lab.layout.attempt(2) / "cluster.json", fresh.to_json())
    second = LaunchRequest(run_id=RUN_ID, attempt=2, hosts=(lab.parts[-1],))
    write_json(lab.layout.attempt(2) / "request.json", second.to_json())
    spawn(lab.layout.folder, 2)
    assert load_record(lab.layout.cluster, Cluster) == fresh
    assert is_alive(lab.layout)
    let_go(lab.parts[-1], 0)
    wait_until((lab.layout.attempt(2) / "outcome.json").exists, "the second attempt ends")
    wait_until(lambda: not has_supervisor(lab.layout), "the supervisor leaves")
    assert AttemptOutcome.load(lab.layout.attempt(2) / "outcome.json").result == "finished"
    assert not is_alive(lab.layout)


def test_a_gang_that_does_not_start_leaves_the_run_with_its_hosts(make):
    lab = make("orderly", "orderly")
    lab.start()
    stop_run(lab.layout, "kill")
    lab.outcome()
    lab.layout.attempt(2).mkdir()
    write_json(lab.layout.attempt(2) / "cluster.json", cluster_of(lab.folder, "pc9").to_json())
    second = LaunchRequest(run_id=RUN_ID, attempt=2, hosts=(part(lab.folder, "pc9", argv=("/no/such/python",)),))
    write_json(lab.layout.attempt(2) / "request.json", second.to_json())
    with pytest.raises(RunFailed, match="did not start"):
        spawn(lab.layout.folder, 2)
    assert load_record(lab.layout.cluster, Cluster) == lab.cluster
    assert not is_alive(lab.layout)


def test_an_attempt_whose_host_agents_still_run_is_not_overtaken(make):
    lab = make("orderly", "orderly")
    lab.start()
    lab.kill_supervisor()
    lab.layout.attempt(2).mkdir()
    write_json(lab.layout.attempt(2) / "request.json", request(*lab.parts).to_json())
    with pytest.raises(RunFailed, match="attempt 1 has gangline agents that still run"):
        spawn(lab.layout.folder, 2)
    assert all(left_of(host_part) for host_part in lab.parts)


SOURCE = str(Path(gangline.__file__).parents[1])


@pytest.fixture
def keeper():
    """This computer, in the role of the head that keeps a run."""
    return LocalTransport(Host(name="pc1", workdir="", python=""))


def as_kept(lab):
    """The run as the head keeps it: with our own code in a folder there."""
    cluster = replace(lab.cluster, hosts=tuple(replace(host, code=SOURCE) for host in lab.cluster.hosts))
    write_json(lab.layout.cluster, cluster.to_json())
    return cluster.head


def test_the_head_can_keep_a_run_and_is_asked_about_it(make, keeper):
    lab = make("orderly", "orderly")
    spawn_there(as_kept(lab), keeper, lab.layout, 1)
    for rank, host_part in enumerate(lab.parts):
        rank_pid(host_part, rank)
    assert is_alive(lab.layout, keeper)
    stop_run(lab.layout, "stop", keeper)
    assert lab.outcome().result == "stopped"
    assert not is_alive(lab.layout, keeper)
    assert unfinished(lab.layout, keeper) == ()
    assert lab.left() == []


def test_what_keeps_the_head_from_starting_is_told_here(make, tmp_path, keeper):
    lab = make("plain", "plain")
    broken = part(tmp_path, "pc2", argv=("/no/such/python",))
    lab.layout = create_run(tmp_path / "second", lab.cluster, request(lab.parts[0], broken))
    with pytest.raises(RunFailed, match=r"pc2: the gangline agent did not start[\s\S]*No such file"):
        spawn_there(as_kept(lab), keeper, lab.layout, 1)


def test_secrets_reach_the_ranks_through_the_supervisor_and_no_file(make, tmp_path, keeper):
    lab = make("plain", "plain")
    spawn_there(as_kept(lab), keeper, lab.layout, 1, secrets={"HF_TOKEN": "hf_canary"})
    for rank, host_part in enumerate(lab.parts):
        assert b"HF_TOKEN=hf_canary" in Path(f"/proc/{rank_pid(host_part, rank)}/environ").read_bytes()
        let_go(host_part, rank)
    lab.outcome()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_canary" in path.read_bytes()]


def test_our_own_path_and_agents_that_come_with_a_connection_do_not_reach_the_ranks(make, keeper, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    lab = make("plain", "plain")
    spawn_there(as_kept(lab), keeper, lab.layout, 1)
    for rank, host_part in enumerate(lab.parts):
        env = Path(f"/proc/{rank_pid(host_part, rank)}/environ").read_bytes().split(b"\0")
        assert not [
            each for each in env if each.startswith((b"PYTHONPATH=", b"GANGLINE_OWN_PATH=", b"SSH_AUTH_SOCK=/"))
        ]
        let_go(host_part, rank)
    lab.outcome()


def test_a_run_that_the_head_does_not_have_is_not_alive_there(keeper, tmp_path):
    with pytest.raises(RunFailed, match="calm-otter-7 is not on pc1"):
        is_alive(RunLayout(tmp_path, RUN_ID), keeper)


def test_a_head_without_our_code_cannot_look_after_a_run(make, keeper):
    assert cannot_supervise(make("plain", "plain").cluster, keeper) == ["gangline's own code is not on pc1"]


def test_a_head_that_reaches_all_hosts_can_look_after_a_run_and_one_that_does_not_says_which(make, keeper):
    lab = make("plain", "plain")
    head = as_kept(lab)
    assert cannot_supervise(replace(lab.cluster, hosts=(head, lab.cluster.hosts[1])), keeper) == []
    far = Host(name="pc2", workdir="/srv", python="python3", transport="ssh", ssh="user@127.0.0.1", ssh_port=1)
    (reason,) = cannot_supervise(replace(lab.cluster, hosts=(head, far)), keeper)
    assert "pc2" in reason


def test_a_head_with_an_old_python_cannot(make):
    def answer(call):
        assert call.argv[:2] == (AGENT, "python")
        return Scripted(stdout='{"old": "3.9"}\n')

    head = replace(make("plain", "plain").cluster.head, code=SOURCE)
    cluster = Cluster(name="home", hosts=(head,))
    assert cannot_supervise(cluster, FakeTransport("pc1", answer=answer)) == [
        "the Python of pc1 is older than 3.10 (3.9)"
    ]


@pytest.mark.parametrize(
    ("stdout", "reasons"),
    [
        ('{"reasons": [], "program": "/usr/bin/python3"}\n', []),
        ('{"old": "3.6"}\n', ["the Python of pc1 is older than 3.10 (3.6)"]),
    ],
)
def test_a_node_of_an_allocation_says_its_version_alone(make, stdout, reasons):
    asked = []

    def answer(call):
        asked.append(call.argv)
        return Scripted(stdout=stdout)

    head = replace(make("plain", "plain").cluster.head, code=SOURCE, transport="local", allocation="41")
    assert cannot_supervise(Cluster(name="campus", hosts=(head,)), FakeTransport("pc1", answer=answer)) == reasons
    ((*_, program),) = asked
    assert "gangline" not in program


def test_a_supervisor_that_is_frozen_is_replaced_and_does_nothing_when_it_wakes(make):
    lab = make("orderly", "orderly")
    lab.start()
    frozen = lab.supervisor()
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        os.utime(lab.layout.folder / "supervisor.lock", (0, 0))  # as after a minute
        stop_run(lab.layout, "stop")
        assert lab.outcome().result == "stopped"
        assert lab.supervisor() != frozen
        before = lab.layout.state.read_bytes(), lab.layout.events.read_bytes()
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    wait_until(lambda: not frozen.is_alive, "it leaves")
    assert (lab.layout.state.read_bytes(), lab.layout.events.read_bytes()) == before
    assert "another supervisor is in charge of" in (lab.layout.attempt(1) / "supervisor.log").read_text()
    assert lab.left() == []


def test_a_supervisor_that_works_is_not_replaced(make):
    lab = make("stubborn", "stubborn")
    lab.start()
    before = lab.supervisor()
    stop_run(lab.layout, "stop")
    assert lab.supervisor() == before
    stop_run(lab.layout, "kill")
    assert lab.outcome().result == "stopped"


def test_a_supervisor_that_cannot_read_what_it_is_to_start_names_the_file(make):
    lab = make("plain", "plain")
    lab.layout.request(1).write_text("[]")
    with pytest.raises(RunFailed, match=r"did not start[\s\S]*request\.json is damaged"):
        spawn(lab.layout.folder, 1)
    assert "Traceback" not in lab.layout.supervisor_log(1).read_text()


def test_a_supervisor_that_breaks_says_so(make, monkeypatch):
    lab = make("plain", "plain")

    def broken(*_words, **_options):
        raise LookupError("no such row")

    monkeypatch.setattr(program, "Attempts", broken)
    reader, writer = os.pipe()
    with pytest.raises(LookupError, match="no such row"):
        program.supervise(lab.layout, 1, secrets={}, ready=writer)
    with os.fdopen(reader) as said:
        error = json.load(said)["error"]
    assert error["what"] == "LookupError: no such row"
    assert error["fix"] == "this is a bug in gangline; details are in supervisor.log"


@pytest.mark.parametrize(("path", "words"), [("state.json", "pc1: No space left"), (None, "pc1: No space left")])
def test_a_full_disk_of_the_head_is_no_bug_and_is_named(make, monkeypatch, path, words):
    lab = make("plain", "plain")

    def lock(_layout, *, timeout_s):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(program, "supervisor_lock", lock)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="No space"):
        program.supervise(lab.layout, 1, secrets={}, ready=writer)
    with os.fdopen(reader) as said:
        error = json.load(said)["error"]
    assert words in error["what"]
    assert (path or "a file") in error["seen"]
    assert "make room there" in error["fix"]


@pytest.mark.parametrize("words", [[], ["dance", "FOLDER"], ["leave", "FOLDER"], ["stop"], ["stop", "FOLDER", "pc1"]])
def test_the_verbs_that_a_keeper_knows_are_few(tmp_path, words):
    named = [str(tmp_path) if word == "FOLDER" else word for word in words]
    done = subprocess.run([sys.executable, "-m", "gangline.supervise.control", *named], capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")


DEEP = b"[" * 10**5
HOSTILE_CLUSTERS = [b"", b"[1]", b"7", b"null", b"{}", b'{"name": "lan", "hosts": []}', b'{"hosts": 7}', b"\xff", DEEP]


@pytest.mark.parametrize("text", HOSTILE_CLUSTERS)
@pytest.mark.parametrize("ask", [is_alive, unfinished, lambda layout, keeper: stop_run(layout, "kill", keeper)])
def test_a_keeper_whose_records_cannot_be_understood_is_named(tmp_path, text, ask):
    layout = RunLayout(tmp_path, RUN_ID)
    keeper = FakeTransport("pc1")
    keeper.write(layout.cluster, text)
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood") as caught:
        ask(layout, keeper)
    assert caught.value.seen
    assert caught.value.fix


@pytest.mark.parametrize("said", ["", "[1]", "7", "null", "{}", '{"error": [1]}', '{"error": "x"}', DEEP.decode()])
def test_a_keeper_whose_answer_cannot_be_understood_is_named(make, said):
    lab = make("plain", "plain")
    head = as_kept(lab)
    keeper = FakeTransport("pc1", answer=lambda _call: Scripted(stdout=said))
    keeper.write(lab.layout.cluster, lab.layout.cluster.read_bytes())
    for ask in (is_alive, unfinished):
        with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
            ask(lab.layout, keeper)
    (reason,) = cannot_supervise(Cluster(name="home", hosts=(head,)), keeper)
    assert "pc1" in reason


@pytest.mark.parametrize(
    "record", [b"[1]", b"7", b'{"pid": "x", "start_ticks": 1}', b'{"pid": 5}', DEEP, b'{"pid": Infinity}']
)
def test_a_host_that_lies_about_its_ranks_is_named_when_a_run_may_be_alive(make, monkeypatch, record):
    lab = make("plain", "plain")
    gone = b'{"pid": 1, "start_ticks": 1}'
    hosts = {host: FakeTransport(host) for host in HOSTS}
    for host_part in lab.parts:
        hosts[host_part.host].write(Path(host_part.folder, "status.json"), gone)
    rank = lab.parts[1].ranks[0] if lab.parts[1].ranks else 1
    hosts["pc2"].write(Path(lab.parts[1].rank_files, f"rank-{rank}.pid"), record)
    monkeypatch.setattr(detached, "SupervisedRun", partial(SupervisedRun, connect=lambda _cluster: hosts))
    with pytest.raises(GanglineError, match="what pc2 says cannot be understood"):
        is_alive(lab.layout)
    hosts["pc2"].write(Path(lab.parts[1].folder, "status.json"), record)
    assert not is_alive(lab.layout)  # as of a host that does not answer


def test_a_supervisor_that_was_begun_ahead_ends_where_nothing_is_said_to_it():
    argv = [sys.executable, "-m", "gangline.supervise", "--step"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
