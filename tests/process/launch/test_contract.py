"""What every backend promises, whether it starts processes or only says so."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path, PurePath

import pytest

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.launch.direct import DirectBackend
from gangline.launch.mpirun import HydraBackend, MpirunBackend
from gangline.launch.pdsh import PdshBackend
from gangline.launch.program import Program
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank
from gangline.transport.local import LocalTransport
from tests.fakes.backend import FakeBackend
from tests.fakes.transport import FakeTransport
from tests.process.launch.gang import (
    agent_record,
    exit_record,
    kill_left,
    left_of,
    let_go,
    part,
    prefork_part,
    rank_pid,
    running_rank,
)
from tests.waiting import wait_until

HOSTS = ("pc1", "pc2", "pc3")


def cluster(folder):
    hosts = tuple(Host(name=name, workdir=str(folder / name), python=sys.executable) for name in HOSTS)
    return Cluster(name="home", hosts=hosts)


class Fickle(LocalTransport):
    """This computer, that does not answer for a while."""

    silent = False

    def run(self, *words, **how):
        self._need_host()
        return super().run(*words, **how)

    def read(self, *words, **how):
        self._need_host()
        return super().read(*words, **how)

    def write(self, *words, **how):
        self._need_host()
        return super().write(*words, **how)

    def _need_host(self):
        if self.silent:
            raise HostUnreachable(f"{self.host} does not answer")


class DirectGang:
    """Host agents and scripts on this computer."""

    def __init__(self, folder, modes, broken, has_warm_pool):
        self.backend = DirectBackend()
        self.folder, self.modes = folder, modes
        self.transports = {host.name: Fickle(host) for host in cluster(folder).hosts}
        argv = {name: ("/no/such/python",) if name in broken else () for name in HOSTS}
        parts = [part(folder, name, f"{rank}={modes[name]}", argv=argv[name]) for rank, name in enumerate(HOSTS)]
        self.request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))
        self.parts = dict(zip(HOSTS, parts, strict=True))
        self.begun = list(parts)
        if has_warm_pool:
            self.request = self.next(1, HOSTS)

    def next(self, attempt, hosts):
        parts = [
            prefork_part(self.folder, name, f"{rank}={self.modes[name]}", attempt=attempt)
            for rank, name in enumerate(hosts)
        ]
        self.parts = dict(zip(hosts, parts, strict=True))
        self.begun += parts
        return LaunchRequest(run_id="calm-otter-7", attempt=attempt, hosts=tuple(parts))

    def ready(self):
        for rank, name in enumerate(self.parts):
            wait = running_rank if self.parts[name].warm_pool else rank_pid
            wait(self.parts[name], rank)

    def finish(self, host, *, error=None):
        del error  # the script has it
        let_go(self.parts[host], HOSTS.index(host))

    def lose(self, host):
        os.kill(agent_record(self.parts[host])["pid"], 9)

    def silence(self, host):
        for name, transport in self.transports.items():
            transport.silent = name == host

    def left(self):
        return [pid for each in self.begun for pid in left_of(each)]

    def close(self):
        kill_left(*self.begun)


class MpirunGang(DirectGang):
    """The same, below an mpirun on this computer."""

    KIND = MpirunBackend

    def __init__(self, folder, modes, broken, has_warm_pool):
        program = self.KIND.program
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this computer")
        super().__init__(folder, modes, broken, has_warm_pool)
        self.backend = self.KIND()
        launcher = self.backend.launcher(cluster(folder), self.request)
        self.request = dataclasses.replace(self.request, backend=self.backend.name, launcher=launcher)

    def close(self):
        self.backend.withdraw(self.request, {host.name: LocalTransport(host) for host in cluster(self.folder).hosts})
        super().close()


class HydraGang(MpirunGang):
    """The same, below the launcher of MPICH."""

    KIND = HydraBackend


class PdshGang(MpirunGang):
    """The same, below a pdsh that uses no ssh."""

    KIND = PdshBackend


class FakeGang:
    """Nothing but words."""

    def __init__(self, folder, modes, broken, has_warm_pool):
        self.cluster, self.program = cluster(folder), Program(rest_s=60.0) if has_warm_pool else None
        stubborn = frozenset(name for name, mode in modes.items() if mode == "stubborn")
        self.backend = FakeBackend(broken=frozenset(broken), stubborn=stubborn)
        self.transports = {name: FakeTransport(name) for name in HOSTS}
        self.request = self.next(1, HOSTS)

    def next(self, attempt, hosts):
        ranks = tuple(GangRank(host=name, share=1) for name in hosts)
        gang = Gang(run_id="calm-otter-7", attempt=attempt, ranks=ranks)
        return self.backend.render(self.cluster, gang, port=29500, program=self.program)

    def ready(self):
        pass

    def finish(self, host, *, error=None):
        failure = {"rank": 0, "error": error}
        if error:
            self.backend.end(host, returncode=1, error=error, failures=(failure,), reason="finished")
        else:
            self.backend.end(host, returncode=0, reason="finished")

    def lose(self, host):
        self.backend.change(host, phase="lost")

    def silence(self, host):
        self.backend.silent = {host} - {None}

    def left(self):
        return [name for name, status in self.backend.statuses.items() if status.phase == "running"]

    def close(self):
        pass


KINDS = {
    "direct": DirectGang,
    "mpirun": MpirunGang,
    "mpiexec.hydra": HydraGang,
    "pdsh": PdshGang,
    "fake": FakeGang,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def make(request, tmp_path):
    yield from making(request.param, tmp_path)


@pytest.fixture(params=[DirectGang, FakeGang], ids=["direct", "fake"])
def make_warm(request, tmp_path):
    """Of backends that promise a warm restart."""
    yield from making(request.param, tmp_path)


def making(kind, tmp_path):
    made = []

    def _make(modes=None, broken=(), *, has_warm_pool=False):
        modes = dict.fromkeys(HOSTS, "orderly") | (modes or {})
        made.append(kind(tmp_path, modes, broken, has_warm_pool))
        return made[-1]

    yield _make
    for gang in made:
        gang.close()


def poll(gang):
    return {status.host: status for status in gang.backend.poll(gang.request, gang.transports)}


def until(gang, **phases):
    def reached():
        now = poll(gang)
        return now if all(now[host].phase == phase for host, phase in phases.items()) else None

    return wait_until(reached, f"phases {phases}")


def test_before_the_start_nothing_runs(make):
    assert {status.phase for status in poll(make()).values()} == {"starting"}


def test_after_the_start_every_host_runs_and_is_told_of_in_order(make):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    statuses = gang.backend.poll(gang.request, gang.transports)
    assert [(status.host, status.phase) for status in statuses] == [(name, "running") for name in HOSTS]
    assert {status.returncode for status in statuses} == {None}


def test_a_host_that_is_done_says_so(make):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    gang.finish("pc2")
    now = until(gang, pc2="ended")
    assert (now["pc2"].returncode, now["pc2"].reason, now["pc2"].error) == (0, "finished", None)
    assert now["pc1"].phase == "running"


def test_a_host_with_a_failing_rank_gives_its_error(make):
    error = {"kind": "RunFailed", "what": "no space left", "seen": "", "fix": "", "exit_code": 5}
    gang = make({"pc2": "fail:no space left"})
    gang.backend.start(gang.request, gang.transports)
    gang.finish("pc2", error=error)
    status = until(gang, pc2="ended")["pc2"]
    assert status.returncode == 1
    assert status.error == error
    assert [failure["error"] for failure in status.failures] == [error]


def test_a_stop_lets_the_ranks_leave_by_themselves(make):
    gang = make({"pc3": "stubborn"})
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.backend.stop(gang.request, gang.transports, now=False)
    now = until(gang, pc1="ended", pc2="ended")
    assert (now["pc1"].returncode, now["pc1"].reason) == (0, "stopped")
    assert now["pc3"].phase == "running"


def test_a_kill_ends_everything(make):
    gang = make({"pc3": "stubborn"})
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.backend.stop(gang.request, gang.transports, now=True)
    now = until(gang, pc1="ended", pc2="ended", pc3="ended")
    assert {status.reason for status in now.values()} == {"killed"}
    assert all(status.returncode for status in now.values())
    assert gang.left() == []


def test_a_host_whose_host_agent_is_gone_is_lost(make):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.lose("pc2")
    now = until(gang, pc2="lost")
    assert now["pc1"].phase == now["pc3"].phase == "running"


def test_stopping_ends_what_a_lost_host_has_left(make):
    gang = make({"pc2": "stubborn"})
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.lose("pc2")
    until(gang, pc2="lost")
    gang.backend.stop(gang.request, gang.transports, now=True)
    until(gang, pc1="ended", pc3="ended")
    assert gang.left() == []


def test_a_start_that_fails_on_one_host_leaves_nothing_on_any(make):
    gang = make(broken={"pc3"})
    with pytest.raises(GanglineError, match="pc3: the gangline agent did not start"):
        gang.backend.start(gang.request, gang.transports)
    assert gang.left() == []
    assert "running" not in {status.phase for status in poll(gang).values()}


def test_an_order_of_somebody_who_is_not_in_charge_any_more_is_refused(make):
    gang = make({"pc3": "stubborn"})
    gang.backend.start(gang.request, gang.transports, epoch=1)
    gang.ready()
    assert gang.backend.announce(gang.request, gang.transports, epoch=2) == []
    wait_until(lambda: {status.epoch for status in poll(gang).values()} == {2}, "all know who is in charge")
    gang.backend.stop(gang.request, gang.transports, now=True, epoch=1)
    gang.backend.stop(gang.request, gang.transports, now=False, epoch=2)
    now = until(gang, pc1="ended", pc2="ended")
    assert {now[host].reason for host in ("pc1", "pc2")} == {"stopped"}
    assert now["pc3"].phase == "running"


def test_a_host_that_does_not_answer_is_a_status_and_is_named_when_it_cannot_be_told(make):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.silence("pc2")
    status = poll(gang)["pc2"]
    assert status.phase == "unreachable"
    assert status.why
    assert status.since is not None
    assert poll(gang)["pc1"].phase == "running"
    assert gang.backend.stop(gang.request, gang.transports, now=True) == ["pc2"]
    until(gang, pc1="ended", pc3="ended")
    assert [(each.host, each.kind) for each in gang.backend.verify(gang.request.on(["pc2"]), gang.transports)] == [
        ("pc2", "unknown")
    ]
    gang.silence(None)
    until(gang, pc2="running")  # nobody waits for a host that did not answer the last time
    assert gang.backend.stop(gang.request.on(["pc2"]), gang.transports, now=True) == []
    until(gang, pc2="ended")


def test_a_gang_of_another_size_than_planned_is_not_started(make):
    gang = make()
    request = dataclasses.replace(gang.request, world_size=4)
    with pytest.raises(RunFailed, match="its world size is not what the plan says"):
        gang.backend.start(request, gang.transports)
    assert gang.left() == []


def test_what_is_left_is_seen_and_in_the_end_nothing_is(make):
    gang = make({"pc2": "stubborn"})
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    if isinstance(gang, DirectGang):
        hosts = {each.host for each in gang.backend.verify(gang.request, gang.transports) if each.kind == "process"}
        assert hosts == set(HOSTS)
    gang.backend.stop(gang.request, gang.transports, now=True)
    until(gang, pc1="ended", pc2="ended", pc3="ended")
    wait_until(lambda: not gang.backend.verify(gang.request, gang.transports), "nothing is left")


def test_a_failed_start_shows_what_the_host_said(tmp_path):
    gang = DirectGang(tmp_path, dict.fromkeys(HOSTS, "orderly"), {"pc1"}, has_warm_pool=False)
    with pytest.raises(GanglineError, match="cannot start /no/such/python: No such file"):
        gang.backend.start(gang.request, gang.transports)
    assert not (Path(gang.request.hosts[1].folder) / "agent.json").exists()


def test_a_poll_runs_no_command(tmp_path):
    gang = FakeGang(tmp_path, dict.fromkeys(HOSTS, "orderly"), (), has_warm_pool=False)
    transport = gang.transports["pc1"]
    folder = PurePath(gang.request.hosts[0].folder)
    transport.write(folder / "agent.json", b'{"pid": 4711, "start_ticks": 99}')
    assert DirectBackend().poll(gang.request, gang.transports)[0].phase == "lost"
    words = ["4711", "(a (b) c)", "S", *["0"] * 18, "99", "0"]
    transport.write(PurePath("/proc/4711/stat"), " ".join(words).encode())
    assert DirectBackend().poll(gang.request, gang.transports)[0].phase == "running"
    assert transport.calls == []


def test_an_end_is_never_taken_back(make):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    for host in HOSTS:
        gang.finish(host)
    until(gang, pc1="ended", pc2="ended", pc3="ended")
    gang.backend.stop(gang.request, gang.transports, now=True)
    assert {status.reason for status in poll(gang).values()} == {"finished"}
    if isinstance(gang, DirectGang):
        assert {exit_record(each)["left"] for each in gang.parts.values()} == {0}


def until_rest(gang, *hosts):
    def reached():
        now = poll(gang)
        return now if all(now[host].rests for host in hosts) else None

    return wait_until(reached, f"{hosts} rest")


def begun(make, modes=None):
    gang = make(modes, has_warm_pool=True)
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    return gang


def test_a_gang_that_yields_saves_and_rests(make_warm):
    gang = begun(make_warm, {"pc3": "stubborn"})
    assert gang.backend.stop(gang.request, gang.transports, now=False, resting=True) == []
    now = until_rest(gang, "pc1", "pc2")
    assert [(now[host].phase, now[host].reason, now[host].returncode) for host in ("pc1", "pc2")] == [
        ("ended", "stopped", 0)
    ] * 2
    assert now["pc3"].phase == "running"
    assert gang.backend.verify(gang.request.on({"pc1", "pc2"}), gang.transports) == []


def test_a_gang_that_is_broken_leaves_at_once_and_rests(make_warm):
    gang = begun(make_warm, {"pc3": "stubborn"})
    gang.backend.stop(gang.request, gang.transports, now=True, resting=True)
    now = until_rest(gang, *HOSTS)
    assert {(status.phase, status.reason, status.returncode) for status in now.values()} == {("ended", "broken", 0)}
    assert gang.backend.verify(gang.request, gang.transports) == []


def test_an_order_that_lets_host_agents_rest_does_not_end_those_that_do(make_warm):
    gang = begun(make_warm)
    for now in (True, False, True):
        gang.backend.stop(gang.request, gang.transports, now=now, resting=True)
        until_rest(gang, *HOSTS)


@pytest.mark.parametrize("now", [True, False])
def test_an_order_to_end_ends_those_that_rest_and_nothing_is_left(make_warm, now):
    gang = begun(make_warm)
    gang.backend.stop(gang.request, gang.transports, now=True, resting=True)
    until_rest(gang, *HOSTS)
    assert gang.backend.stop(gang.request, gang.transports, now=now) == []
    wait_until(lambda: not any(status.rests for status in poll(gang).values()), "nobody rests")
    assert {status.reason for status in poll(gang).values()} == {"broken"}
    wait_until(lambda: not gang.left() and not gang.backend.verify(gang.request, gang.transports), "nothing is left")


def test_the_next_attempt_takes_over_what_rests_and_the_one_before_has_nothing_any_more(make_warm):
    gang = begun(make_warm)
    gang.backend.stop(gang.request, gang.transports, now=True, resting=True)
    until_rest(gang, *HOSTS)
    before, after = gang.request, gang.next(2, ("pc1", "pc2"))
    gang.backend.start(after, gang.transports, epoch=2)
    gang.ready()
    now = {status.host: status for status in gang.backend.poll(before, gang.transports)}
    assert {host: (status.phase, status.rests) for host, status in now.items()} == {
        "pc1": ("ended", False),
        "pc2": ("ended", False),
        "pc3": ("ended", True),
    }
    assert gang.backend.verify(before, gang.transports) == []
    gang.backend.stop(before, gang.transports, now=True, epoch=2)  # whoever ends what is left of it ends no other
    gang.request = after
    assert {status.phase for status in poll(gang).values()} == {"running"}
    gang.backend.stop(after, gang.transports, now=True, epoch=2)
    now = until(gang, pc1="ended", pc2="ended")
    assert {status.reason for status in now.values()} == {"killed"}
    wait_until(lambda: not gang.left() and not gang.backend.verify(after, gang.transports), "nothing is left")


def test_a_host_that_is_new_in_an_attempt_starts_beside_those_that_rested(make_warm):
    gang = begun(make_warm)
    gang.backend.stop(gang.request, gang.transports, now=True, resting=True)
    until_rest(gang, *HOSTS)
    gang.lose("pc2")
    gang.request = gang.next(2, HOSTS)
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    until(gang, pc1="running", pc2="running", pc3="running")


@pytest.mark.parametrize("now", [True, False])
def test_without_a_warm_pool_nothing_rests(make, now):
    gang = make()
    gang.backend.start(gang.request, gang.transports)
    gang.ready()
    gang.backend.stop(gang.request, gang.transports, now=now, resting=True)
    ended = until(gang, pc1="ended", pc2="ended", pc3="ended")
    assert not any(status.rests for status in ended.values())
    assert {status.reason for status in ended.values()} == {"broken" if now else "stopped"}
