"""A host agent whose ranks have ended rests, and takes over its host's part of the next attempt; or it ends with all it
has."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.agent.supervise.left import left_of as found_left
from gangline.launch.poll import look
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport
from tests.process.launch.gang import (
    agent_record,
    exit_record,
    is_running,
    kill_left,
    let_go,
    order,
    prefork_part,
    running_rank,
    status,
)
from tests.waiting import wait_until

SECRET = "canary-of-the-cluster-file"


def agent(verb, asked):
    return subprocess.run(
        [sys.executable, "-m", "gangline.agent", *verb],
        input=json.dumps(asked).encode(),
        capture_output=True,
        timeout=60,
    )


def seen(part, folder):
    return look(part, LocalTransport(Host(name=part.host, workdir=str(folder), python=sys.executable)))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left(part):
    return found_left([json.loads(json.dumps(dataclasses.asdict(part)))], port=None)


class Hall:
    """One host, from attempt to attempt."""

    def __init__(self, folder):
        self.folder = folder
        self.parts = []

    def part(self, *ranks, attempt=1, env=None, **options):
        part = prefork_part(self.folder, "pc1", *ranks, attempt=attempt, **options)
        self.parts.append(dataclasses.replace(part, env={"COLOUR": "green", **(env or {})}))
        return self.parts[-1]

    def start(self, *ranks, epoch=1, **options):
        part = self.part(*ranks, **options)
        done = agent(["host-agent"], {"request": dataclasses.asdict(part), "epoch": epoch, "secrets": {}})
        assert done.returncode == 0, done.stdout + done.stderr
        for rank in part.ranks:
            running_rank(part, rank)
        return part

    def rested(self, *ranks, word="yield", **options):
        """An attempt whose ranks were told to leave, and did."""
        part = self.start(*ranks, **options)
        order(part, word)
        exit_record(part)
        return part

    def is_resting(self, part):
        return seen(part, self.folder).rests

    def slots(self):
        return [json.loads(path.read_text() or "null") for path in sorted(self.folder.glob("leases/pc1/cpu-*"))]


@pytest.fixture
def hall(tmp_path):
    made = Hall(tmp_path)
    yield made
    kill_left(*made.parts)


def test_ranks_that_were_told_to_yield_save_and_leave_and_their_host_agent_keeps_the_rest(hall):
    part = hall.start("0=orderly", "1=orderly")
    ranks = [running_rank(part, rank) for rank in (0, 1)]
    processes = [parent_of(pid) for pid in ranks]
    order(part, "yield")
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"], ended["failures"]) == (0, "stopped", 0, [])
    assert Path(part.rank_files, "saved-1").exists()
    assert hall.is_resting(part)
    assert [is_running(pid) for pid in ranks] == [False, False]
    assert all(map(is_running, [*processes, agent_record(part)["pid"], agent_record(part)["torchrun_pid"]]))
    assert [slot["run"] for slot in hall.slots()] == ["calm-otter-7"] * 2


def test_the_next_attempt_of_a_host_that_rests_is_taken_over_without_a_new_launcher(hall):
    first = hall.rested("0=orderly", "1=orderly")
    processes = [agent_record(first)[name] for name in ("pid", "torchrun_pid")]
    second = hall.start("2=plain", "3=plain", attempt=2, epoch=3)
    assert [agent_record(second)[name] for name in ("pid", "torchrun_pid")] == processes
    assert (seen(first, hall.folder).phase, hall.is_resting(first)) == ("ended", False)
    now = seen(second, hall.folder)
    assert (now.phase, now.epoch) == ("running", 3)
    assert {slot["folder"] for slot in hall.slots()} == {second.folder}
    let_go(second, 2)
    let_go(second, 3)
    ended = exit_record(second)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "finished", 0)
    wait_until(lambda: left(second)["processes"] == [], "nothing is left")
    assert hall.slots() == [None, None]


def test_a_launcher_that_waits_for_others_at_its_end_is_not_waited_for_in_a_later_attempt(hall):
    hall.rested("0=orderly", "1=orderly")
    second = hall.start("0=plain", "1=plain", attempt=2)
    os.kill(agent_record(second)["torchrun_pid"], signal.SIGSTOP)
    let_go(second, 0)
    let_go(second, 1)
    ended = exit_record(second)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "finished", 0)
    assert not hall.is_resting(second)


def test_a_later_attempt_stops_as_soon_as_its_ranks_have_left(hall):
    hall.rested("0=orderly")
    second = hall.start("0=orderly", attempt=2)
    os.kill(agent_record(second)["torchrun_pid"], signal.SIGSTOP)
    order(second, "stop")
    ended = exit_record(second)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "stopped", 0)


def test_a_host_agent_may_rest_again_and_again(hall):
    hall.rested("0=orderly")
    second = hall.rested("0=orderly", attempt=2)
    third = hall.start("0=orderly", attempt=3)
    assert agent_record(third)["pid"] == agent_record(second)["pid"]
    order(third, "stop")
    assert (exit_record(third)["reason"], exit_record(third)["left"]) == ("stopped", 0)
    assert not hall.is_resting(third)


def test_a_host_agent_holds_no_file_more_for_every_attempt_that_it_takes_over(hall):
    hall.rested("0=orderly")
    hall.rested("0=orderly", attempt=2)
    third = hall.start("0=orderly", attempt=3)
    held = [str(path.readlink()) for path in Path(f"/proc/{agent_record(third)['pid']}/fd").iterdir()]
    assert len([name for name in held if name.endswith("agent.lock")]) == 1


def test_where_launchers_never_meet_the_first_position_is_told_too(hall):
    part = hall.rested("4=orderly", attempt=5)
    assert json.loads(Path(part.folder, "prefork", "position-1.json").read_text()) == {
        "words": ["train", "orderly"],
        "ranks": [4],
        "world_size": 1,
        "meet": ["127.0.0.1", 29505],
        "files": part.rank_files,
        "schema_version": "1.0",
    }
    assert hall.is_resting(part)


def test_a_rank_that_fails_is_told_of_at_once_and_the_others_are_left_alone(hall):
    part = hall.start("0=plain", "1=plain")
    os.kill(running_rank(part, 1), signal.SIGKILL)
    (failure,) = wait_until(lambda: status(part)["failures"], "the end is told")
    assert (failure["rank"], failure["exit"], failure["ordered"]) == (1, -9, False)
    assert is_running(running_rank(part, 0))
    assert seen(part, hall.folder).phase == "running"
    order(part, "break")
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"]) == (-9, "broken")
    assert {each["rank"]: (each["exit"], each["ordered"]) for each in ended["failures"]} == {
        1: (-9, False),
        0: (-signal.SIGUSR2, True),
    }
    assert len(ended["failures"][0]["log_tail"]) == 40
    assert hall.is_resting(part)


def test_ranks_that_were_told_that_the_gang_is_broken_have_not_failed(hall):
    part = hall.rested("0=orderly", word="break")
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"]) == (0, "broken")
    assert [(each["exit"], each["error"]["what"]) for each in ended["failures"]] == [(5, "Connection reset by peer")]
    assert ended["error"]["what"] == "Connection reset by peer"


def test_a_host_whose_ranks_have_all_failed_rests_without_an_order(hall):
    part = hall.start("0=fail:no space left")
    let_go(part, 0)
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["error"]["what"]) == (5, "finished", "no space left")
    assert hall.is_resting(part)


def test_a_host_whose_ranks_have_all_done_their_work_does_not_rest(hall):
    part = hall.start("0=plain", "1=plain")
    let_go(part, 0)
    let_go(part, 1)
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "finished", 0)
    assert not hall.is_resting(part)
    assert hall.slots() == [None, None]


def test_ranks_that_do_not_yield_in_time_are_killed_with_their_orphans_and_the_host_agent_rests(hall):
    part = hall.start("0=stubborn", grace_s=0.2)
    orphan = json.loads(Path(part.rank_files, "orphan").read_text())["pid"]
    order(part, "yield")
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (-9, "killed", 0)
    assert not is_running(orphan)
    assert hall.is_resting(part)


@pytest.mark.parametrize("word", ["stop", "kill"])
def test_an_order_to_end_ends_what_rests_and_changes_nothing_of_how_the_part_ended(hall, word):
    part = hall.rested("0=orderly", "1=orderly")
    before = exit_record(part)
    order(part, "break")
    order(part, word)
    wait_until(lambda: not hall.is_resting(part), "it rests no more")
    assert exit_record(part) == before
    assert hall.slots() == [None, None]
    wait_until(lambda: left(part)["processes"] == [], "nothing is left")


def test_an_order_to_end_takes_the_place_of_one_to_yield(hall):
    part = hall.start("0=orderly", "1=stubborn")
    order(part, "yield")
    wait_until(Path(part.rank_files, "rank-0.exit.json").exists, "rank 0 has left")
    order(part, "kill")
    assert (exit_record(part)["reason"], exit_record(part)["left"]) == ("killed", 0)
    assert not hall.is_resting(part)


def test_it_does_not_rest_for_ever(hall):
    part = hall.rested("0=orderly", rest_s=0.2)
    wait_until(lambda: not Path(part.folder, "resting.json").exists(), "it is tired of it")
    wait_until(lambda: left(part)["processes"] == [], "nothing is left")


def test_a_machine_that_shuts_down_ends_what_rests(hall):
    part = hall.rested("0=orderly")
    os.kill(agent_record(part)["pid"], signal.SIGTERM)
    wait_until(lambda: left(part)["processes"] == [] and not hall.is_resting(part), "nothing is left")


@pytest.mark.parametrize("who", ["launcher", "process"])
def test_what_rests_without_a_part_of_it_ends(hall, who):
    part = hall.start("0=orderly", "1=orderly")
    victim = agent_record(part)["torchrun_pid"] if who == "launcher" else parent_of(running_rank(part, 1))
    order(part, "yield")
    exit_record(part)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not hall.is_resting(part) and left(part)["processes"] == [], "nothing is left")


def test_a_process_that_is_killed_ends_its_host_as_a_rank_without_one_does(hall):
    part = hall.start("0=plain", "1=plain")
    os.kill(parent_of(running_rank(part, 1)), signal.SIGKILL)
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (1, "finished", 0)
    assert not hall.is_resting(part)
    assert {each["rank"]: each["exit"] for each in ended["failures"]}[1] == -9


def test_a_launcher_that_is_killed_ends_its_host(hall):
    part = hall.start("0=plain")
    os.kill(agent_record(part)["torchrun_pid"], signal.SIGKILL)
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (-9, "signalled", 0)


def test_a_host_that_lacks_one_of_its_processes_does_not_rest(hall):
    part = hall.start("0=plain", "1=fail:no space left")
    let_go(part, 0)  # its process leaves with it
    wait_until(Path(part.rank_files, "rank-0.exit.json").exists, "rank 0 is done")
    let_go(part, 1)
    ended = exit_record(part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (5, "finished", 0)
    assert not hall.is_resting(part)


OTHER = {
    "ranks": {"ranks": ("0=orderly", "1=orderly")},
    "environment": {"env": {"COLOUR": "red"}},
}


@pytest.mark.parametrize("what", OTHER)
def test_a_part_that_does_not_fit_gets_a_host_agent_of_its_own_and_the_other_one_ends(hall, what):
    first = hall.rested("0=orderly")
    options = dict(OTHER[what])
    second = hall.start(*options.pop("ranks", ["0=orderly"]), attempt=2, **options)
    assert agent_record(second)["pid"] != agent_record(first)["pid"]
    assert not is_running(agent_record(first)["pid"])
    assert not hall.is_resting(first)
    assert left(first)["processes"] == []
    assert seen(second, hall.folder).phase == "running"


def test_a_host_agent_that_was_killed_while_it_rested_is_no_obstacle(hall):
    first = hall.rested("0=orderly")
    os.kill(agent_record(first)["pid"], signal.SIGKILL)
    wait_until(lambda: not hall.is_resting(first), "it is gone")
    assert {row["why"] for row in left(first)["processes"]} == {"tag"}
    second = hall.start("0=orderly", attempt=2)
    assert left(first)["processes"] == []
    assert agent_record(second)["torchrun_pid"] != agent_record(first)["torchrun_pid"]


def test_what_is_held_ready_is_not_left_and_what_serves_a_later_attempt_is_not_either(hall):
    first = hall.rested("0=orderly")
    nothing = {"processes": [], "ports": [], "leases": [], "gpus": []}
    assert left(first) == nothing
    second = hall.start("0=orderly", attempt=2)
    assert left(first) == nothing
    assert {row["why"] for row in left(second)["processes"]} == {"host agent", "child of the host agent"}
    assert left(second)["leases"] == ["cpu-0"]


def test_a_rank_that_outlives_its_part_is_left(hall):
    part = hall.rested("0=orderly")
    env = {**os.environ, "GANGLINE_PART": part.folder}
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
    try:
        assert [row["pid"] for row in left(part)["processes"]] == [other.pid]
    finally:
        other.communicate(b"\n")


def test_ending_what_an_ended_attempt_has_left_does_not_end_the_next(hall):
    first = hall.rested("0=orderly")
    second = hall.start("0=orderly", attempt=2)
    assert agent(["host-agent", "reap"], {"request": dataclasses.asdict(first)}).returncode == 0
    assert is_running(running_rank(second, 0))
    os.kill(agent_record(second)["pid"], signal.SIGKILL)
    assert agent(["host-agent", "reap"], {"request": dataclasses.asdict(second)}).returncode == 0
    assert left(second)["processes"] == []


def test_what_the_cluster_file_says_of_the_environment_is_written_nowhere(hall):
    hall.rested("0=orderly", env={"WANDB_API_KEY": SECRET})
    second = hall.start("0=orderly", attempt=2, env={"WANDB_API_KEY": SECRET})
    assert SECRET.encode() in Path(f"/proc/{running_rank(second, 0)}/environ").read_bytes()
    files = [path for path in hall.folder.rglob("*") if path.is_file()]
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []


def test_what_its_launcher_says_later_is_in_the_console_of_the_later_attempt(hall):
    first = hall.rested("0=plain", word="break")
    said = Path(first.folder, "console.log").read_text()
    second = hall.start("0=plain", attempt=2)
    os.kill(parent_of(running_rank(second, 0)), signal.SIGKILL)
    ended = exit_record(second)
    assert "exitcode  : -9" in ended["console_tail"][-1]
    assert "exitcode" not in said


def test_a_second_start_of_what_was_taken_over_is_refused(hall):
    hall.rested("0=orderly")
    second = hall.start("0=orderly", attempt=2)
    again = agent(["host-agent"], {"request": dataclasses.asdict(second), "epoch": 1})
    assert again.returncode == 1
    assert b"already started here" in again.stdout
    assert is_running(running_rank(second, 0))


def test_it_takes_over_within_a_moment(hall):
    hall.rested("0=orderly")
    part = hall.part("0=orderly", attempt=2)
    begun = time.monotonic()
    agent(["host-agent"], {"request": dataclasses.asdict(part), "epoch": 1})
    assert time.monotonic() - begun < 5  # a launcher that imports torch takes as long on a small computer
    assert agent_record(part)["pid"] == agent_record(hall.parts[0])["pid"]


def stand_by(hall, *ranks, code=0, **options):
    part = hall.part(*ranks, **options)
    done = agent(["host-agent", "standby"], {"request": dataclasses.asdict(part), "epoch": 1, "secrets": {}})
    assert done.returncode == code, done.stdout + done.stderr
    return part, json.loads(done.stdout.splitlines()[-1])


def test_a_host_on_standby_has_no_rank_and_takes_over_a_part_with_what_it_has_ready(hall):
    waiting, said = stand_by(hall, "0=orderly", "1=orderly", attempt=4)
    assert said["folder"] == waiting.folder
    wait_until(lambda: seen(waiting, hall.folder).ready, "it is ready")
    assert [slot["run"] for slot in hall.slots()] == ["calm-otter-7"] * 2
    assert not list(Path(waiting.rank_files).glob("rank-*"))
    processes = [agent_record(waiting)[name] for name in ("pid", "torchrun_pid")]
    assert left(waiting)["processes"] == []
    part = hall.start("0=orderly", "1=orderly", attempt=5)
    assert [agent_record(part)[name] for name in ("pid", "torchrun_pid")] == processes
    assert (hall.is_resting(waiting), seen(part, hall.folder).phase) == (False, "running")
    order(part, "stop")
    assert (exit_record(part)["reason"], exit_record(part)["left"]) == ("stopped", 0)
    wait_until(lambda: left(part)["processes"] == [], "nothing is left")
    assert hall.slots() == [None, None]


def test_who_asks_twice_gets_the_host_agent_that_waits_already(hall):
    waiting, _ = stand_by(hall, "0=orderly", attempt=4)
    agent_before = agent_record(waiting)["pid"]
    _, said = stand_by(hall, "0=orderly", attempt=6)
    assert said["folder"] == waiting.folder
    assert agent_record(waiting)["pid"] == agent_before


def test_one_that_waits_for_a_part_of_another_size_makes_room(hall):
    waiting, _ = stand_by(hall, "0=orderly", attempt=4)
    other, said = stand_by(hall, "0=orderly", "1=orderly", attempt=6)
    assert said["folder"] == other.folder
    assert not is_running(agent_record(waiting)["pid"])
    wait_until(lambda: seen(other, hall.folder).ready, "the other one is ready")


def test_a_host_on_standby_that_is_not_wanted_leaves_nothing(hall):
    waiting, _ = stand_by(hall, "0=orderly", attempt=4)
    host_agent = agent_record(waiting)["pid"]
    order(waiting, "kill")
    wait_until(lambda: not is_running(host_agent), "it leaves")
    assert left(waiting)["processes"] == []
    assert hall.slots() == [None]


def test_one_that_cannot_import_says_why_and_may_be_asked_again(hall):
    waiting, _ = stand_by(hall, "0=orderly", attempt=4, env={"PYTHONHOME": "/nowhere"})
    wait_until(lambda: seen(waiting, hall.folder).console_tail, "it ends")
    wait_until(lambda: not hall.is_resting(waiting), "nothing rests there")
    assert seen(waiting, hall.folder).phase == "ended"
    again, said = stand_by(hall, "0=orderly", attempt=4)
    assert said["folder"] == again.folder
    wait_until(lambda: seen(again, hall.folder).ready, "it is ready")
    assert Path(again.folder + ".before", "console.log").exists()
