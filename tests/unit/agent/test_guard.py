"""The guard outlives who started it, ends ranks only on order, and leaves nothing behind."""

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gangline
from gangline.runs.process import ProcessId
from tests.unit.launch.gang import (
    exit_record,
    guard_record,
    is_running,
    kill_left,
    left_of,
    let_go,
    part,
    rank_pid,
    wait_until,
)


def start(host_part, *words, **options):
    """Start a guard as a transport does; returns the ended parent."""
    return subprocess.run(
        [*host_part.guard_argv, *words],
        input=json.dumps(dataclasses.asdict(host_part)).encode(),
        capture_output=True,
        timeout=60,
        **options,
    )


def order(host_part, word):
    Path(host_part.folder, "order.json").write_text(json.dumps({"order": word}))


@pytest.fixture
def guarded(tmp_path):
    """Make a part, start its guard, and see to it that nothing outlives the test."""
    parts = []

    def make(*ranks, **options):
        host_part = part(tmp_path / "attempts", "pc1", *ranks, **options)
        parts.append(host_part)
        done = start(host_part)
        assert done.returncode == 0, done.stderr
        return host_part

    yield make
    kill_left(*parts)


def test_who_started_it_may_go_and_the_ranks_run_on_to_their_end(guarded):
    host_part = guarded("0=plain")
    record = guard_record(host_part)
    assert ProcessId(pid=record["pid"], start_ticks=record["start_ticks"]).is_alive
    assert os.getsid(record["pid"]) != os.getsid(0)
    rank_pid(host_part, 0)
    let_go(host_part, 0)
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"], ended["error"]) == (0, "finished", 0, None)
    assert ended["failures"] == []


def test_a_hangup_of_the_terminal_does_not_end_it(guarded):
    host_part = guarded("0=plain")
    rank_pid(host_part, 0)
    guard = guard_record(host_part)["pid"]
    os.kill(guard, signal.SIGHUP)
    os.kill(guard, signal.SIGINT)
    let_go(host_part, 0)
    assert exit_record(host_part)["reason"] == "finished"


def test_an_order_to_stop_lets_the_ranks_save_first(guarded):
    host_part = guarded("0=orderly", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "stopped", 0)
    assert Path(host_part.rank_files, "saved-0").exists()
    assert Path(host_part.rank_files, "saved-1").exists()


def test_a_rank_that_comes_up_after_the_order_gets_it_too(guarded):
    host_part = guarded("0=orderly")
    order(host_part, "stop")
    assert exit_record(host_part)["reason"] == "stopped"
    assert Path(host_part.rank_files, "saved-0").exists()


def test_ranks_that_do_not_leave_in_time_are_killed_with_their_orphans(guarded):
    host_part = guarded("0=stubborn", grace_s=0.2)
    rank_pid(host_part, 0)
    orphan = json.loads(Path(host_part.rank_files, "orphan").read_text())["pid"]
    assert os.getsid(orphan) != os.getsid(rank_pid(host_part, 0))
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left"]) == ("killed", 0)
    assert not is_running(orphan)
    assert left_of(host_part) == []


@pytest.mark.parametrize("mode", ["slow", "growing"])
def test_ranks_that_still_get_on_with_their_save_are_waited_for(guarded, mode):
    host_part = guarded(f"0={mode}", grace_s=0.7)
    rank_pid(host_part, 0)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"]) == (0, "stopped")
    assert Path(host_part.rank_files, "saved-0").exists()


def test_an_order_to_kill_waits_for_nobody(guarded):
    host_part = guarded("0=stubborn", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    order(host_part, "kill")
    ended = exit_record(host_part)
    assert (ended["reason"], ended["left"]) == ("killed", 0)
    assert left_of(host_part) == []
    assert not Path(host_part.rank_files, "saved-1").exists()


def test_kill_overtakes_stop(guarded):
    host_part = guarded("0=stubborn", grace_s=600.0)
    rank_pid(host_part, 0)
    order(host_part, "stop")
    order(host_part, "kill")
    assert exit_record(host_part)["reason"] == "killed"


def test_what_outlives_torchrun_is_ended(guarded):
    host_part = guarded("0=stubborn")
    rank_pid(host_part, 0)
    os.kill(guard_record(host_part)["torchrun_pid"], signal.SIGKILL)
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (-9, "signalled", 0)
    assert left_of(host_part) == []


def test_the_first_error_of_a_rank_is_kept_with_the_end_of_its_log(guarded):
    host_part = guarded("0=plain", "1=fail:the loss is not finite")
    rank_pid(host_part, 1)
    let_go(host_part, 1)
    ended = exit_record(host_part)
    assert ended["returncode"] == 1
    assert ended["error"]["what"] == "the loss is not finite"
    (first, *others) = ended["failures"]
    assert (first["rank"], first["exit"]) == (1, 5)
    assert first["log_tail"] == [f"line {number}" for number in range(60, 100)]
    assert [failure["rank"] for failure in others] == [0]


def test_an_error_is_told_while_the_rest_still_runs(guarded):
    host_part = guarded("0=fail:no space left", argv=())
    live = Path(host_part.folder, "failures.json")
    let_go(host_part, 0)
    wait_until(live.exists, "the error is told")
    assert json.loads(live.read_text())[0]["error"]["what"] == "no space left"
    exit_record(host_part)


def test_a_rank_killed_by_the_kernel_is_named_with_its_signal(guarded):
    host_part = guarded("0=plain", "1=plain")
    os.kill(rank_pid(host_part, 1), signal.SIGKILL)
    rank_pid(host_part, 0)
    failures = exit_record(host_part)["failures"]
    assert {failure["rank"]: failure["exit"] for failure in failures}[1] == -9


def test_a_second_start_is_refused_while_it_runs_and_afterwards(guarded):
    host_part = guarded("0=plain")
    again = start(host_part)
    assert again.returncode == 1
    assert b"already started here" in again.stderr
    let_go(host_part, 0)
    exit_record(host_part)
    assert start(host_part).returncode == 1


def test_a_command_that_is_not_there_is_told_at_once_and_leaves_no_guard(tmp_path):
    host_part = part(tmp_path, "pc1", argv=(str(tmp_path / "no-such-python"), "-m", "torch"))
    done = start(host_part)
    assert done.returncode == 1
    assert b"no-such-python: No such file" in done.stderr
    assert not Path(host_part.folder, "guard.json").exists()


def test_what_a_killed_guard_has_left_can_be_ended(guarded):
    host_part = guarded("0=stubborn", "1=orderly")
    for rank in (0, 1):
        rank_pid(host_part, rank)
    os.kill(guard_record(host_part)["pid"], signal.SIGKILL)
    assert len(left_of(host_part)) >= 4
    assert start(host_part, "reap").returncode == 0
    assert left_of(host_part) == []


def test_reaping_one_part_leaves_another_alone(guarded, tmp_path):
    host_part = guarded("0=plain")
    other = part(tmp_path, "pc2")
    assert start(other, "reap").returncode == 0
    assert is_running(rank_pid(host_part, 0))


def test_torchrun_writes_to_the_console_log_and_gets_the_environment_of_the_request(tmp_path, guarded):
    text = "import os; print(os.environ['COLOUR'], os.environ['GANGLINE_PART'], os.getcwd())"
    host_part = part(tmp_path, "pc1", argv=(sys.executable, "-c", text))
    host_part = dataclasses.replace(host_part, env={"COLOUR": "green"})
    assert start(host_part).returncode == 0
    assert exit_record(host_part)["returncode"] == 0
    written = Path(host_part.folder, "console.log").read_text().split()
    assert written == ["green", host_part.folder, host_part.folder]


def test_nobody_else_may_read_what_it_writes(guarded):
    host_part = guarded("0=plain")
    let_go(host_part, 0)
    exit_record(host_part)
    assert [path.name for path in Path(host_part.folder).iterdir() if path.stat().st_mode & 0o077] == []


def test_the_machine_going_down_is_an_order_to_stop(guarded):
    host_part = guarded("0=orderly")
    rank_pid(host_part, 0)
    os.kill(guard_record(host_part)["pid"], signal.SIGTERM)
    assert exit_record(host_part)["reason"] == "stopped"
    assert Path(host_part.rank_files, "saved-0").exists()


@pytest.mark.parametrize("name", ["guard", "processes", "ranks", "__init__"])
def test_it_is_written_for_the_oldest_python_that_a_host_may_have(name):
    path = Path(gangline.__file__).parent / "agent" / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside <= {"gangline"}
    assert {name for name in names if name.startswith("gangline")} <= {
        "gangline.agent",
        "gangline.agent.processes",
        "gangline.agent.ranks",
    }
