"""Real torchrun on two hosts of this computer, with unequal numbers of ranks."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.agent.supervise.processes import LISTEN, sockets
from gangline.launch.backend import HostRequest
from gangline.launch.direct import DirectBackend
from gangline.launch.poll import free_port
from gangline.launch.program import Program
from gangline.runs.gang import Gang, GangRank
from gangline.runs.state import AttemptOutcome
from gangline.supervise.detached import spawn, stop_run
from gangline.transport.local import LocalTransport
from tests.process.launch.gang import exit_record, kill_left, left_of, rank_pid
from tests.saved import read_events
from tests.train.story import own_ports
from tests.unit.supervise.runs import RUN_ID, cluster_of, create_run
from tests.waiting import wait_until

RANK = Path(__file__).with_name("gang_rank.py")
START_S = 90.0
"""Importing torch several times at once, on a busy machine."""


def with_script(part: HostRequest) -> HostRequest:
    """The rendered command, with a script of ours where the worker was."""
    torchrun = part.argv[: len(part.argv) - 1 - part.argv[::-1].index("gangline.worker") - 1]
    return replace(part, argv=(*torchrun, str(RANK), part.rank_files))


@pytest.fixture
def start(quick_python, tmp_path):
    started = []

    def _start(program=None):
        low, high = map(int, own_ports().split("-"))
        cluster = replace(cluster_of(tmp_path, "pc1", "pc2"), ports=(low, high))
        cluster = replace(cluster, hosts=tuple(replace(host, python=str(quick_python)) for host in cluster.hosts))
        ranks = tuple(GangRank(host=host, share=1) for host in ("pc1", "pc1", "pc2"))
        gang = Gang(run_id=RUN_ID, attempt=1, ranks=ranks)
        port = free_port(cluster, LocalTransport(cluster.head))
        request = DirectBackend().render(cluster, gang, port=port, program=program)
        if program is None:
            request = replace(request, hosts=tuple(with_script(part) for part in request.hosts))
        layout = create_run(tmp_path, cluster, request)
        started.extend(request.hosts)
        spawn(layout.folder, 1)
        return layout, request.hosts

    yield _start
    kill_left(*started)


def outcome_of(layout):
    path = layout.attempt(1) / "outcome.json"
    wait_until(path.exists, "the attempt ends", timeout_s=START_S)
    return AttemptOutcome.load(path)


def test_ranks_of_two_hosts_meet_and_of_a_killed_one_and_those_that_lost_it_the_killed_one_is_the_cause(start):
    layout, (pc1, pc2) = start()
    files = [Path(pc1.rank_files, "sum-0"), Path(pc1.rank_files, "sum-1"), Path(pc2.rank_files, "sum-2")]
    wait_until(lambda: all(map(Path.exists, files)), "ranks work together", timeout_s=START_S)
    wait_until(lambda: [file.read_text() for file in files] == ["3.0"] * 3, "they add up what all of them have")
    listening = [each.local for each in sockets(LISTEN) if each.local[1] == pc1.meet[1]]
    assert listening == [("127.0.0.1", pc1.meet[1])]  # nobody on another computer can reach the store
    os.kill(rank_pid(pc2, 2), signal.SIGKILL)
    outcome = outcome_of(layout)
    assert outcome.result == "failed"
    assert outcome.error["what"] == "rank 2 on pc2 was killed by SIGKILL"
    echoes = [failure for failure in outcome.failures if failure["host"] == "pc1" and failure["error"]]
    assert echoes
    assert all("onnection" in failure["error"]["seen"] for failure in echoes)
    assert left_of(pc1) == left_of(pc2) == []


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {total.item():.0f} with {sys.argv[1:]} in {os.getcwd()}", flush=True)
while "forever" in sys.argv:
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("mode", ["once", "forever"])
def test_a_program_of_the_user_is_started_followed_logged_and_stopped(start, tmp_path, mode):
    for host in ("pc1", "pc2"):
        (tmp_path / host / "project").mkdir(parents=True)
        (tmp_path / host / "project" / "own.py").write_text(SCRIPT)
    layout, parts = start(Program(kind="command", argv=("python", "own.py", mode), cwd="project"))
    logs = {rank: Path(parts[rank == 2].rank_files, f"rank-{rank}.log") for rank in range(3)}
    wait_until(
        lambda: all(log.exists() and "rank" in log.read_text() for log in logs.values()), "all say", timeout_s=90
    )
    for rank, log in logs.items():
        folder = tmp_path / ("pc2" if rank == 2 else "pc1") / "project"
        assert f"rank {rank} of 3 with ['{mode}'] in {folder}" in log.read_text()
    if mode == "forever":
        wait_until(lambda: "joined" in [each["event"] for each in read_events(layout.events)], "the board is done")
        stop_run(layout, "stop")
    outcome = outcome_of(layout)
    assert (outcome.result, outcome.error) == ("stopped" if mode == "forever" else "finished", None)
    assert (outcome.left, outcome.unverified) == ((), ())
    assert [exit_record(part)["left"] for part in parts] == [0, 0]
