"""What every backend promises, whether it starts processes or only says so."""

import dataclasses
import os
import sys
from pathlib import Path, PurePath

import pytest

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import Request
from gangline.launch.direct import DirectBackend
from gangline.launch.fake import FakeBackend
from gangline.remote.fake import FakeTransport
from gangline.remote.local import LocalTransport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank
from tests.unit.launch.gang import exit_record, guard_record, kill_left, left_of, let_go, part, rank_pid, wait_until

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
    """Guards and scripts on this computer."""

    def __init__(self, folder, modes, broken):
        self.backend = DirectBackend()
        self.transports = {host.name: Fickle(host) for host in cluster(folder).hosts}
        argv = {name: ("/no/such/python",) if name in broken else () for name in HOSTS}
        parts = [part(folder, name, f"{rank}={modes[name]}", argv=argv[name]) for rank, name in enumerate(HOSTS)]
        self.request = Request(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))
        self.parts = dict(zip(HOSTS, parts, strict=True))

    def ready(self):
        for rank, name in enumerate(HOSTS):
            rank_pid(self.parts[name], rank)

    def finish(self, host, *, error=None):
        del error  # the script has it
        let_go(self.parts[host], HOSTS.index(host))

    def lose(self, host):
        os.kill(guard_record(self.parts[host])["pid"], 9)

    def silence(self, host):
        for name, transport in self.transports.items():
            transport.silent = name == host

    def left(self):
        return [pid for each in self.parts.values() for pid in left_of(each)]

    def close(self):
        kill_left(*self.parts.values())


class FakeGang:
    """Nothing but words."""

    def __init__(self, folder, modes, broken):
        stubborn = frozenset(name for name, mode in modes.items() if mode == "stubborn")
        self.backend = FakeBackend(broken=frozenset(broken), stubborn=stubborn)
        self.transports = {name: FakeTransport(name) for name in HOSTS}
        gang = Gang(run_id="calm-otter-7", attempt=1, ranks=tuple(GangRank(host=name, share=1) for name in HOSTS))
        self.request = self.backend.render(cluster(folder), gang, port=29500)

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


@pytest.fixture(params=[DirectGang, FakeGang], ids=["direct", "fake"])
def make(request, tmp_path):
    made = []

    def _make(modes=None, broken=()):
        modes = dict.fromkeys(HOSTS, "orderly") | (modes or {})
        made.append(request.param(tmp_path, modes, broken))
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


def test_a_host_whose_guard_is_gone_is_lost(make):
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
    with pytest.raises(GanglineError, match="pc3: the guard did not start"):
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
    gang = DirectGang(tmp_path, dict.fromkeys(HOSTS, "orderly"), {"pc1"})
    with pytest.raises(GanglineError, match="cannot start /no/such/python: No such file"):
        gang.backend.start(gang.request, gang.transports)
    assert not (Path(gang.request.hosts[1].folder) / "guard.json").exists()


def test_a_poll_runs_no_command(tmp_path):
    gang = FakeGang(tmp_path, dict.fromkeys(HOSTS, "orderly"), ())
    transport = gang.transports["pc1"]
    folder = PurePath(gang.request.hosts[0].folder)
    transport.write(folder / "guard.json", b'{"pid": 4711, "start_ticks": 99}')
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
