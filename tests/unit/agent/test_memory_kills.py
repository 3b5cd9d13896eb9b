"""Ranks that the kernel killed for memory are told from those that somebody else killed."""

from pathlib import Path

import pytest

from gangline.agent.supervise import memory_kills
from gangline.agent.supervise.memory_kills import MemoryKills

LINE = (
    "3,1204,8812345678,-;Memory cgroup out of memory: Killed process 4001 (python) total-vm:9812340kB, "
    "anon-rss:900000kB, file-rss:1268kB, shmem-rss:0kB, UID:1000 pgtables:2124kB oom_score_adj:0\n"
)
OTHER = "3,1205,8812345679,-;Out of memory: Killed process 77 (firefox) total-vm:1kB, anon-rss:1kB\n"
REAPED = "6,1206,8812345680,-;oom_reaper: reaped process 4002 (python), now anon-rss:0kB\n"


class Host:
    """A machine with a kernel's log and a control group."""

    def __init__(self, folder: Path, *, version: int = 2, log: bool = True) -> None:
        self._log = folder / "kmsg"
        if log:
            self._log.write_text(OTHER.replace("77", "4000"))  # before we came
        own = folder / "cgroup"
        own.write_text("0::/ranks\n" if version == 2 else "5:cpu:/\n4:memory:/ranks\n0::/\n")
        group = folder / "fs" / ("ranks" if version == 2 else "memory/ranks")
        group.mkdir(parents=True)
        self._count = group / ("memory.events" if version == 2 else "memory.oom_control")
        self.count(3)
        self.kills = MemoryKills(log=str(self._log), root=str(folder / "fs"), own=str(own))

    def count(self, number: int) -> None:
        self._count.write_text(f"low 0\noom 9\noom_kill {number}\noom_group_kill 0\n")

    def say(self, line: str) -> None:
        with self._log.open("a") as log:
            log.write(line)

    def noted(self, *failures):
        self.kills.note(list(failures))
        return {each["rank"]: each["oom"] for each in failures if "oom" in each}


def failure(rank, *, code=-9, time=0.0, ordered=False):
    return {"rank": rank, "pid": 4000 + rank, "time": time, "ordered": ordered, "exit": code, "error": None}


@pytest.fixture
def first_namespace(monkeypatch):
    """Processes have the same numbers for us as for the kernel, wherever the tests run."""
    monkeypatch.setattr(memory_kills, "FIRST_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)


@pytest.mark.usefixtures("first_namespace")
def test_the_kernels_log_names_the_process(tmp_path):
    host = Host(tmp_path)
    host.say(OTHER + LINE + REAPED)
    noted = host.noted(failure(0), failure(1), failure(2))
    assert list(noted) == [1]
    assert noted[1]["line"].startswith("Memory cgroup out of memory: Killed process 4001")
    assert noted[1]["memory_bytes"] > 0


@pytest.mark.usefixtures("first_namespace")
def test_what_the_log_named_is_not_counted_again(tmp_path):
    host = Host(tmp_path)
    host.say(LINE)
    host.count(4)
    noted = host.noted(failure(0), failure(1))
    assert list(noted) == [1]
    assert noted[1]["cgroup"] == "/ranks"


@pytest.mark.usefixtures("first_namespace")
def test_a_rank_that_ended_by_itself_was_not_killed_though_its_number_is_in_the_log(tmp_path):
    host = Host(tmp_path)
    host.say(LINE)
    assert host.noted(failure(1, code=1)) == {}
    assert list(host.noted(failure(1, code=None))) == [1]  # nobody has waited for it yet


def test_in_another_pid_namespace_the_log_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_kills, "FIRST_NAMESPACE", 1)
    host = Host(tmp_path)
    host.say(LINE)
    assert host.noted(failure(1)) == {}


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_log_the_control_group_tells_of_the_rank_that_was_killed_first(tmp_path, version):
    host = Host(tmp_path, version=version, log=False)
    tidied, ordered, failed = failure(0, time=9.0), failure(2, ordered=True), failure(3, code=1)
    assert host.noted(tidied, failure(1)) == {}
    host.count(4)
    noted = host.noted(tidied, failure(1, time=5.0), ordered, failed)
    assert list(noted) == [1]
    assert (noted[1]["cgroup"], noted[1]["line"]) == ("/ranks", None)


def test_a_new_attempt_begins_with_nothing(tmp_path):
    host = Host(tmp_path, log=False)
    host.count(5)
    host.kills.begin()
    assert host.noted(failure(0)) == {}
    host.count(6)
    assert list(host.noted(failure(0))) == [0]


def test_a_host_that_tells_nothing_is_no_error(tmp_path):
    gone = str(tmp_path / "gone")
    kills = MemoryKills(log=gone, root=gone, own=gone)
    bad = [failure(0)]
    kills.note(bad)
    assert "oom" not in bad[0]
