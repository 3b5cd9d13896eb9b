"""A host agent samples its host in a process of its own, which ends with it."""

import json
import os
import signal
from pathlib import Path

import pytest

from gangline.runs.state import ProcessId
from tests.process.agent.test_host_agent import agent_started
from tests.process.launch.gang import agent_record, exit_record, is_running, let_go, order, rank_pid
from tests.waiting import wait_until

__all__ = ["agent_started"]


@pytest.fixture
def sampled(agent_started, tmp_path):
    """A part that is sampled, once there are rows: the part, its file, the pid of its sampler."""

    def make(kind):
        path = tmp_path / "samples-pc1.jsonl"
        host_part = agent_started(f"0={kind}", samples=str(path))
        rank_pid(host_part, 0)
        wait_until(lambda: path.exists() and len(rows(path)) >= 2, "there are samples")
        host_agent = agent_record(host_part)["pid"]
        return host_part, path, sampler_of(host_agent, host_part)

    return make


def rows(path):
    return [
        row for line in path.read_text().rpartition("\n")[0].splitlines() if isinstance(row := json.loads(line), list)
    ]


def sampler_of(host_agent, host_part):
    children = set(map(int, Path(f"/proc/{host_agent}/task/{host_agent}/children").read_text().split()))
    (found,) = children - {agent_record(host_part)["torchrun_pid"]}
    return found


def test_the_samples_of_a_run_go_on_until_its_ranks_have_ended(sampled):
    host_part, path, sampler = sampled("plain")
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["samples"], first["interval_s"]) == ("pc1", 2.0)
    columns = next(line["columns"] for line in map(json.loads, path.read_text().splitlines()) if "columns" in line)
    assert {"cpu_percent", "memory_bytes", "disk/read_bytes_per_s"} <= set(columns)
    let_go(host_part, 0)
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["left"], ended["failures"]) == (0, 0, [])
    assert not is_running(sampler)


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_a_sampler_that_is_killed_ends_nothing_and_one_without_its_host_agent_ends(sampled, end):
    host_part, _, sampler = sampled("orderly")
    if end is not None:
        host_agent = agent_record(host_part)
        os.kill(host_agent["pid"], end)
        wait_until(lambda: not is_running(sampler), "the sampler has ended")
        assert not ProcessId(pid=host_agent["pid"], start_ticks=host_agent["start_ticks"]).is_alive
        return
    os.kill(sampler, signal.SIGKILL)
    order(host_part, "stop")
    ended = exit_record(host_part)
    assert (ended["returncode"], ended["reason"], ended["left"]) == (0, "stopped", 0)
