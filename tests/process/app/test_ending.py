"""`stop`: of a whole run, of the part of some hosts, and of a run that is between two attempts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import PurePath

import pytest

from gangline import app
from gangline.control.end import rehearse_stop, started_request, stop
from gangline.control.supervision import RunHandle, SupervisorRecord, open_run
from gangline.control.user_command import CommandRecord
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import Phase, ProcessId, RunState
from tests.fakes.transport import FakeTransport
from tests.process.app.world import THREE, World


@pytest.fixture
def run_id(world: World) -> str:
    """A run on the hosts a, c and d, that goes on."""
    run_id = app.train(world.start(cluster=THREE), console=world, deps=world.deps).run_id
    stands(world, run_id, "running")
    world.alive = True
    world.said.clear()
    return run_id


def stands(world: World, run_id: str, phase: Phase, *, supervisor: ProcessId | None = None) -> None:
    layout = RunLayout(world.home, run_id)
    RunState(name="job", phase=phase, supervisor=supervisor or ProcessId.current()).save(layout)


def gone() -> ProcessId:
    me = ProcessId.current()
    return ProcessId(pid=me.pid, start_ticks=me.start_ticks - 1)


def leave(world: World, run_id: str, *hosts: str) -> bool:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        return stop(run, hosts=hosts, deps=world.deps)


def refused(world: World, run_id: str, *hosts: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        leave(world, run_id, *hosts)
    assert world.said == []
    assert caught.value.seen
    assert caught.value.fix
    return caught.value


def test_a_run_is_asked_to_go_on_without_a_host(world: World, run_id: str) -> None:
    assert leave(world, run_id, "d")
    assert leave(world, run_id, "c", "d")
    assert world.said == ["leave d", "leave c d"]


def test_a_rehearsed_leave_says_what_becomes_of_every_host(world: World, run_id: str) -> None:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        lines = rehearse_stop(run, now=False, hosts=["d"], deps=world.deps)
    assert [line.partition(" (")[0] for line in lines] == [
        "a: save, and go on in attempt 2",
        "c: save, and go on in attempt 2",
        "d: save, leave, and take no part any more",
    ]
    assert world.said == []


def test_a_host_that_has_no_part_is_refused_with_what_was_meant(world: World, run_id: str) -> None:
    error = refused(world, run_id, "D1")
    assert error.what == f"'D1' is not part of {run_id}"
    assert error.seen == "it runs on a, c, d"
    path = RunLayout(world.home, run_id).attempt(1) / "request.json"
    data = read_json(path)
    data["hosts"][2]["host"] = "laptop"
    write_json(path, data)
    assert refused(world, run_id, "labtop").fix == "did you mean laptop?"


def test_all_hosts_is_not_a_part(world: World, run_id: str) -> None:
    error = refused(world, run_id, "a", "c", "d")
    assert "no host would remain" in error.seen
    assert error.fix == f"to end it: gangline stop {run_id}"


@pytest.mark.parametrize(
    ("phase", "what"), [("finished", "has ended"), ("failed", "has ended"), ("stopping", "is ending")]
)
def test_a_run_that_does_not_go_on_is_refused(world: World, run_id: str, phase: Phase, what: str) -> None:
    stands(world, run_id, phase)
    error = refused(world, run_id, "d")
    assert error.what == f"{run_id} {what}"
    assert phase in error.seen
    assert f"gangline resume {run_id} --cluster" in error.fix


def test_a_run_that_is_prepared_is_refused(world: World, run_id: str) -> None:
    stands(world, run_id, "preparing")
    assert "being prepared" in refused(world, run_id, "d").what


def test_a_run_that_nobody_looks_after_cannot_do_it(world: World, run_id: str) -> None:
    stands(world, run_id, "running", supervisor=gone())
    error = refused(world, run_id, "d")
    assert "has no supervisor" in error.what
    assert f"gangline stop {run_id}" in error.fix


@pytest.mark.parametrize(("words", "again"), [(("--resume",), "gangline resume"), (None, "gangline run --cluster")])
def test_a_command_of_the_users_own_is_refused(
    world: World, run_id: str, words: tuple[str, ...] | None, again: str
) -> None:
    record = CommandRecord(words=("train.py",), resume_words=words, folder="/f", project={})
    write_json(RunLayout(world.home, run_id).folder / "command.json", record.to_json())
    error = refused(world, run_id, "d")
    assert "runs your own command" in error.what
    assert again in error.fix


def test_the_host_that_looks_after_the_run_is_refused(world: World, run_id: str) -> None:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        record = run.record()
        kept = dataclasses.replace(run, supervisor=SupervisorRecord(host="a"))
        kept.records.folder.mkdir(parents=True, exist_ok=True)
        write_json(kept.records.state, read_json(run.layout.state))
        assert record.phase == "running"
        with pytest.raises(UsageError, match="a runs the supervisor of") as caught:
            stop(kept, hosts=["a"], deps=world.deps)
    assert "gangline resume" in caught.value.fix


def test_between_two_attempts_a_host_may_leave(world: World, run_id: str) -> None:
    stands(world, run_id, "restarting")
    assert leave(world, run_id, "d")
    assert world.said == ["leave d"]


@pytest.mark.parametrize("supervisor", [ProcessId.current, gone])
def test_between_two_attempts_a_run_can_be_stopped(world: World, run_id: str, supervisor) -> None:  # type: ignore[no-untyped-def]
    stands(world, run_id, "restarting", supervisor=supervisor())
    world.alive = False  # no supervisor, and no host agent that does more than rest
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        assert len(rehearse_stop(run, now=False, deps=world.deps)) == 3
        assert stop(run, deps=world.deps)
    assert world.said == ["order stop"]


PC = tuple(Host(name=name, workdir=f"/home/{name}", python="python3", transport="ssh") for name in ("pc1", "pc2"))


def kept_by_head(world: World, *, attempt: int) -> tuple[RunHandle, FakeTransport]:
    """A run whose head has begun attempts of its own."""
    layout = RunLayout(world.home, "calm-otter-7")
    layout.attempt(1).mkdir(parents=True)
    keeper = FakeTransport("pc1")
    run = RunHandle(
        layout=layout,
        cluster=Cluster(name="lan", hosts=PC),
        transports={"pc1": keeper, "pc2": FakeTransport("pc2")},
        supervisor=SupervisorRecord(host="pc1"),
    )
    RunState(name="job", phase="running", attempt=attempt, supervisor=ProcessId.current()).save(layout)
    for number, names in ((1, ("pc1", "pc2")), (attempt, ("pc1",))):
        data = json.dumps(request(number, *names).to_json()).encode()
        keeper.files[PurePath(run.records.attempt(number) / "request.json")] = data
    write_json(layout.attempt(1) / "request.json", request(1, "pc1", "pc2").to_json())
    return run, keeper


def request(attempt: int, *names: str) -> LaunchRequest:
    parts = []
    for name in names:
        files = f"/home/{name}/runs/calm-otter-7/attempts/{attempt}"
        parts.append(HostRequest(host=name, folder=f"{files}/{name}", rank_files=files, argv=("python",), env={}))
    return LaunchRequest(run_id="calm-otter-7", attempt=attempt, hosts=tuple(parts))


def test_what_the_head_has_started_by_itself_is_read_there(world: World) -> None:
    run, keeper = kept_by_head(world, attempt=3)
    found = started_request(run, run.record())
    assert (found.attempt, found.names) == (3, ("pc1",))
    keeper.files[PurePath(run.records.attempt(3) / "request.json")] = b"[1]"
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
        started_request(run, run.record())


def test_without_its_keeper_the_host_agents_are_told_in_the_folders_of_the_attempt_that_runs(world: World) -> None:
    run, keeper = kept_by_head(world, attempt=3)
    told: list[LaunchRequest] = []
    epochs: list[object] = []

    class Backend:
        def poll(self, _request: LaunchRequest, _transports: object) -> list[HostStatus]:
            silent_one = HostStatus(host="pc1", phase="unreachable")
            return [silent_one, HostStatus(host="pc2", phase="running", epoch=41)]

        def stop(self, request: LaunchRequest, _transports: object, **how: object) -> list[str]:
            told.append(request)
            epochs.append(how["epoch"])
            return ["pc1"]

    def silent(_layout: RunLayout, _keeper: object) -> bool:
        raise HostUnreachable("pc1 does not answer")

    keeper.reachable = False
    deps = dataclasses.replace(world.deps, is_alive=silent, backend=lambda _name: Backend())  # type: ignore[arg-type]
    with pytest.raises(HostUnreachable, match="which supervises"):
        stop(run, now=True, deps=deps)
    assert [part.folder for part in told[0].hosts] == [
        "/home/pc1/runs/calm-otter-7/attempts/3/pc1",
        "/home/pc2/runs/calm-otter-7/attempts/3/pc2",
    ]
    assert {part.attempt for part in told[0].hosts} == {3}
    assert epochs == [42]  # above that of the supervisor which cannot be asked


def test_a_lost_run_of_which_nothing_is_alive_is_ended_so_that_it_can_be_resumed(world: World, run_id: str) -> None:
    stands(world, run_id, "running", supervisor=gone())
    world.alive = False
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        assert run.record().phase == "lost"
        assert stop(run, deps=world.deps)  # `gangline stop RUN && gangline resume RUN`, as `explain` says
    assert world.said == ["order stop"]
