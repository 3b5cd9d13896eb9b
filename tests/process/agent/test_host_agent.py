"""The host agent outlives who started it, ends ranks only on order, and leaves nothing behind."""

import ast
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gangline
from gangline.runs.state import ProcessId
from gangline.transport.bootstrap import agent_zipapp
from tests.process.launch.gang import (
    agent_record,
    exit_record,
    is_running,
    kill_left,
    left_of,
    let_go,
    order,
    part,
    rank_pid,
    status,
)
from tests.waiting import wait_until


def start(host_part, *words, secrets=None, **options):
    """Start a host agent as a transport does; returns the ended parent."""
    return subprocess.run(
        [sys.executable, "-m", "gangline.agent", "host-agent", *words],
        input=json.dumps({"request": dataclasses.asdict(host_part), "epoch": 1, "secrets": secrets or {}}).encode(),
        capture_output=True,
        timeout=60,
        **options,
    )


@pytest.fixture
def agent_started(tmp_path):
    """Make a part, start its host agent, and see to it that nothing outlives the test."""
    parts = []

    def make(*ranks, **options):
        host_part = part(tmp_path / "attempts", "pc1", *ranks, **options)
        parts.append(host_part)
        done = start(host_part)
        assert done.returncode == 0, done.stderr
        return host_part

    yield make
    kill_left(*parts)


def test_who_started_it_may_go_and_the_ranks_run_on_to_their_end(agent_started):
    host_part = agent_started("0=plain")
    record = agent_record(host_part)
    assert ProcessId(pid=record["pid"], start_ticks=record["start_ticks"]).is_alive
    assert os.getsid(record["pid"]) != os.getsid(0)
    rank_pid(host_part, 0)
    let_go(host_part, 0)
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"], ended["error"]) == (0, "finished", 0, None)
    assert ended["failures"] == []


def test_a_hangup_of_the_terminal_does_not_end_it(agent_started):
    host_part = agent_started("0=plain")
    rank_pid(host_part, 0)
    host_agent = agent_record(host_part)["pid"]
    os.kill(host_agent, signal.SIGHUP)
    os.kill(host_agent, signal.SIGINT)
    let_go(host_part, 0)
    assert exit_record(host_part)["reason"] == "finished"


def test_an_order_to_stop_lets_the_ranks_save_first(agent_started):
    host_part = agent_started("0=orderly", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "stopped", 0)
    assert Path(host_part.rank_files, "saved-0").exists()
    assert Path(host_part.rank_files, "saved-1").exists()


def test_a_rank_that_comes_up_after_the_order_gets_it_too(agent_started):
    host_part = agent_started("0=orderly")
    order(host_part, "stop")
    assert exit_record(host_part)["reason"] == "stopped"
    assert Path(host_part.rank_files, "saved-0").exists()


def test_ranks_that_do_not_leave_in_time_are_killed_with_their_orphans(agent_started):
    host_part = agent_started("0=stubborn", grace_s=0.2)
    rank_pid(host_part, 0)
    orphan = json.loads(Path(host_part.rank_files, "orphan").read_text())["pid"]
    assert os.getsid(orphan) != os.getsid(rank_pid(host_part, 0))
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left"]) == ("killed", 0)
    assert not is_running(orphan)
    assert left_of(host_part) == []


@pytest.mark.parametrize("mode", ["slow", "growing"])
def test_ranks_that_still_get_on_with_their_save_are_waited_for(agent_started, mode):
    host_part = agent_started(f"0={mode}", grace_s=0.7)
    rank_pid(host_part, 0)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"]) == (0, "stopped")
    assert Path(host_part.rank_files, "saved-0").exists()


def test_a_program_of_the_user_is_waited_for_as_long_as_its_log_grows(agent_started):
    host_part = agent_started("0=talking", grace_s=0.7, program="command")
    rank_pid(host_part, 0)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left_early"]) == ("stopped", [])
    assert Path(host_part.rank_files, "saved-0").exists()


def test_how_long_a_program_of_the_user_was_silent_is_told_by_the_second(agent_started):
    host_part = agent_started("0=plain", program="command")
    rank_pid(host_part, 0)
    row = wait_until(lambda: status(host_part)["silence"].get("0"), "the host agent has looked")
    assert (row["printed"], row["line"]) == (True, "")
    row = wait_until(lambda: (now := status(host_part)["silence"]["0"])["silent_s"] >= 2 and now, "time goes by")
    assert row["age_s"] >= row["silent_s"]
    with Path(host_part.rank_files, "rank-0.log").open("a") as log:
        log.write("step 2\n")
    wait_until(lambda: status(host_part)["silence"]["0"]["silent_s"] < 2, "the output is seen")
    let_go(host_part, 0)
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left_early"]) == ("finished", [0])


def test_nothing_is_said_of_the_log_of_our_worker(agent_started):
    host_part = agent_started("0=plain")
    rank_pid(host_part, 0)
    wait_until(lambda: status(host_part)["start"]["ranks"], "the host agent has looked")
    assert status(host_part)["silence"] == {}


def test_the_log_of_our_worker_is_no_sign_of_progress(agent_started):
    host_part = agent_started("0=talking", grace_s=0.7)
    rank_pid(host_part, 0)
    order(host_part, "stop")
    assert exit_record(host_part)["reason"] == "killed"


def test_an_order_to_kill_waits_for_nobody(agent_started):
    host_part = agent_started("0=stubborn", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    order(host_part, "kill")
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left"]) == ("killed", 0)
    assert left_of(host_part) == []
    assert not Path(host_part.rank_files, "saved-1").exists()


def test_kill_overtakes_stop(agent_started):
    host_part = agent_started("0=stubborn", grace_s=600.0)
    rank_pid(host_part, 0)
    order(host_part, "stop")
    order(host_part, "kill")
    assert exit_record(host_part)["reason"] == "killed"


def test_what_outlives_torchrun_is_ended(agent_started):
    host_part = agent_started("0=stubborn")
    rank_pid(host_part, 0)
    os.kill(agent_record(host_part)["torchrun_pid"], signal.SIGKILL)
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (-9, "signalled", 0)
    assert left_of(host_part) == []


def test_the_first_error_of_a_rank_is_kept_with_the_end_of_its_log(agent_started):
    host_part = agent_started("0=plain", "1=fail:the loss is not finite")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    let_go(host_part, 1)
    ended = exit_record(host_part)
    assert ended["returncode"] == 1
    assert ended["error"]["what"] == "the loss is not finite"
    (first, *others) = ended["failures"]
    assert (first["rank"], first["exit"]) == (1, 5)
    assert first["log_tail"] == [f"line {number}" for number in range(60, 100)]
    assert [failure["rank"] for failure in others] == [0]


def test_an_error_is_told_while_the_rest_still_runs(agent_started):
    host_part = agent_started("0=fail:no space left", argv=())
    let_go(host_part, 0)
    (failure,) = wait_until(lambda: status(host_part)["failures"], "the error is told")
    assert failure["error"]["what"] == "no space left"
    exit_record(host_part)


def test_a_rank_killed_by_the_kernel_is_named_with_its_signal(agent_started):
    host_part = agent_started("0=plain", "1=plain")
    rank_pid(host_part, 0)
    os.kill(rank_pid(host_part, 1), signal.SIGKILL)
    failures = exit_record(host_part)["failures"]
    assert {failure["rank"]: failure["exit"] for failure in failures}[1] == -9


def test_a_second_start_is_refused_while_it_runs_and_afterwards(agent_started):
    host_part = agent_started("0=plain")
    again = start(host_part)
    assert again.returncode == 1
    assert b"already started here" in again.stdout
    let_go(host_part, 0)
    exit_record(host_part)
    assert start(host_part).returncode == 1


def test_a_command_that_is_not_there_is_told_at_once_and_leaves_no_host_agent(tmp_path):
    host_part = part(tmp_path, "pc1", argv=(str(tmp_path / "no-such-python"), "-m", "torch"))
    done = start(host_part)
    assert done.returncode == 1
    assert "no-such-python: No such file" in json.loads(done.stdout)["seen"]
    assert not Path(host_part.folder, "agent.json").exists()


def test_what_a_killed_host_agent_has_left_can_be_ended(agent_started):
    host_part = agent_started("0=stubborn", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    os.kill(agent_record(host_part)["pid"], signal.SIGKILL)
    assert len(left_of(host_part)) >= 4
    assert start(host_part, "reap").returncode == 0
    assert left_of(host_part) == []


def test_reaping_one_part_leaves_another_alone(agent_started, tmp_path):
    host_part = agent_started("0=plain")
    other = part(tmp_path, "pc2")
    assert start(other, "reap").returncode == 0
    assert is_running(rank_pid(host_part, 0))


def test_torchrun_writes_to_the_console_log_and_gets_the_environment_of_the_request(tmp_path, agent_started):
    text = "import os; print(os.environ['COLOUR'], os.environ['GANGLINE_PART'], os.getcwd())"
    host_part = part(tmp_path, "pc1", argv=(sys.executable, "-c", text))
    host_part = dataclasses.replace(host_part, env={"COLOUR": "green"})
    assert start(host_part).returncode == 0
    assert exit_record(host_part)["returncode"] == 0
    written = Path(host_part.folder, "console.log").read_text().split()
    assert written == ["green", host_part.folder, host_part.folder]


def test_nobody_else_may_read_what_it_writes(agent_started):
    host_part = agent_started("0=plain")
    let_go(host_part, 0)
    exit_record(host_part)
    assert [path.name for path in Path(host_part.folder).iterdir() if path.stat().st_mode & 0o077] == []


def test_the_machine_going_down_is_an_order_to_stop(agent_started):
    host_part = agent_started("0=orderly")
    rank_pid(host_part, 0)
    os.kill(agent_record(host_part)["pid"], signal.SIGTERM)
    assert exit_record(host_part)["reason"] == "stopped"
    assert Path(host_part.rank_files, "saved-0").exists()


AGENT = Path(gangline.__file__).parent / "agent"
MINE = sorted(path.relative_to(AGENT).as_posix() for path in AGENT.rglob("*.py"))


@pytest.mark.parametrize("name", MINE)
def test_it_is_written_for_the_oldest_python_that_a_host_may_have(name):
    tree = ast.parse((AGENT / name).read_text(encoding="utf-8"), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside <= {"gangline"}
    assert {".".join(name.split(".")[:2]) for name in names if name.startswith("gangline")} <= {
        "gangline",
        "gangline.agent",
    }


def test_it_says_every_second_that_it_gets_on(agent_started):
    host_part = agent_started("0=plain")
    first = status(host_part)
    assert (first["pid"], first["epoch"], first["order"]) == (agent_record(host_part)["pid"], 1, None)
    wait_until(lambda: status(host_part)["beat"] >= first["beat"] + 2, "the heart beats")
    wait_until(lambda: "0" in status(host_part)["start"]["ranks"], "the rank is told of")


def test_an_order_from_who_is_not_in_charge_any_more_is_refused_and_noted(agent_started):
    host_part = agent_started("0=orderly")
    rank_pid(host_part, 0)
    order(host_part, None, epoch=2)
    wait_until(lambda: status(host_part)["epoch"] == 2, "the new supervisor is known")
    order(host_part, "kill", epoch=1)
    log = Path(host_part.folder, "agent.log")
    wait_until(lambda: "refused: kill of epoch 1" in log.read_text(), "the order is refused")
    assert is_running(rank_pid(host_part, 0))
    order(host_part, "stop", epoch=2)
    assert exit_record(host_part)["reason"] == "stopped"


def test_secrets_reach_the_command_and_no_file(tmp_path, agent_started):
    text = "import os, hashlib; print(hashlib.sha256(os.environ['HF_TOKEN'].encode()).hexdigest()[:8])"
    host_part = part(tmp_path, "pc1", argv=(sys.executable, "-c", text))
    secret = "hf_" + "canary" * 3
    assert start(host_part, secrets={"HF_TOKEN": secret}).returncode == 0
    assert exit_record(host_part)["returncode"] == 0
    assert len(Path(host_part.folder, "console.log").read_text().strip()) == 8
    found = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert found == []


def test_what_the_cluster_file_says_counts_more_than_a_secret(tmp_path, agent_started):
    host_part = part(tmp_path, "pc1", argv=(sys.executable, "-c", "import os; print(os.environ['WANDB_API_KEY'])"))
    host_part = dataclasses.replace(host_part, env={"WANDB_API_KEY": "of the file"})
    start(host_part, secrets={"WANDB_API_KEY": "of the shell"})
    exit_record(host_part)
    assert Path(host_part.folder, "console.log").read_text() == "of the file\n"


def test_what_is_on_pythons_path_for_our_own_sake_is_not_on_the_commands(tmp_path, agent_started):
    host_part = part(tmp_path, "pc1", argv=(sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"))
    source = str(Path(gangline.__file__).parents[1])
    start(host_part, env={**os.environ, "PYTHONPATH": source, "GANGLINE_OWN_PATH": source})
    exit_record(host_part)
    assert Path(host_part.folder, "console.log").read_text() == "None\n"


@pytest.mark.parametrize("own", [None, "/of/the/user"])
@pytest.mark.parametrize(
    ("name", "place"), [("TORCHINDUCTOR_CACHE_DIR", "compiled"), ("TRITON_CACHE_DIR", "compiled/triton")]
)
def test_what_is_compiled_goes_where_no_other_user_can_put_anything(tmp_path, own, name, place):
    """torch.compile's own choice is a folder in /tmp that is named after the user, Triton's is the home folder."""
    text = f"import os; print(os.environ['{name}'])"
    host_part = part(tmp_path / "a", "pc1", argv=(sys.executable, "-c", text))
    host_part = dataclasses.replace(host_part, leases=str(tmp_path / "work" / "leases" / "pc1"))
    env = {each: value for each, value in os.environ.items() if each != name}
    start(host_part, env={**env, name: own} if own else env)
    exit_record(host_part)
    said = Path(host_part.folder, "console.log").read_text()
    assert said == f"{own or tmp_path / 'work' / place}\n"


def claiming(host_part, run_id, workdir):
    return dataclasses.replace(host_part, run_id=run_id, ranks=(0,), leases=str(workdir / "leases"))


def test_a_slot_that_another_run_has_is_not_taken_and_the_run_is_named(tmp_path, agent_started):
    agent_started("0=plain")  # the fixture ends what is left of a part
    first = claiming(part(tmp_path / "first", "pc1", "0=plain"), "calm-otter-7", tmp_path)
    second = claiming(part(tmp_path / "second", "pc1", "0=plain"), "brave-fox-2", tmp_path)
    try:
        assert start(first).returncode == 0
        refused = start(second)
        assert json.loads(refused.stdout)["what"] == "cpu-0 is in use by calm-otter-7"
        assert not Path(second.folder, "agent.json").exists()
        os.kill(agent_record(first)["pid"], signal.SIGKILL)
        wait_until(lambda: not is_running(agent_record(first)["pid"]), "the host agent is gone")
        assert start(second).returncode == 1  # its ranks live on, and hold what they have
        assert start(first, "reap").returncode == 0
        assert start(second).returncode == 0
        let_go(second, 0)
        assert exit_record(second)["returncode"] == 0
        assert Path(tmp_path, "leases", "cpu-0").read_bytes() == b""
    finally:
        kill_left(first, second)


def test_ranks_that_do_not_join_in_time_are_ended_by_their_host_agent(tmp_path, agent_started):
    host_part = dataclasses.replace(part(tmp_path, "pc1", "0=orderly"), ranks=(0,), join_timeout_s=0.5)
    try:
        assert start(host_part).returncode == 0
        ended = exit_record(host_part)
        assert (ended["reason"], ended["left"]) == ("late", 0)
    finally:
        kill_left(host_part)


def test_it_works_from_an_archive_that_has_no_name(tmp_path, agent_started):
    archive = os.memfd_create("agent", 0)
    os.write(archive, agent_zipapp())
    host_part = part(tmp_path, "pc1", "0=orderly")
    try:
        done = subprocess.run(
            [sys.executable, "-I", f"/proc/self/fd/{archive}", "host-agent"],
            input=json.dumps({"request": dataclasses.asdict(host_part)}).encode(),
            capture_output=True,
            pass_fds=(archive,),
            timeout=60,
        )
        os.close(archive)
        assert (done.returncode, done.stderr) == (0, b"")
        rank_pid(host_part, 0)
        order(host_part, "stop")
        assert exit_record(host_part)["reason"] == "stopped"
        assert Path(host_part.folder, "agent.log").read_text() == ""
    finally:
        kill_left(host_part)


def test_a_port_that_another_program_has_taken_is_named_before_anything_is_started(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        host_part = dataclasses.replace(part(tmp_path, "pc1", "0=plain"), ranks=(0,), meet=("127.0.0.1", port))
        done = start(host_part)
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert f"another program has taken port {port}" in said["seen"]
    assert not list(tmp_path.rglob("rank-*.pid"))
