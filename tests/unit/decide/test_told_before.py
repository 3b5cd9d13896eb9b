"""A known warning takes seven lines once, and then one."""

from dataclasses import replace

from gangline.checks.rules import Finding
from gangline.decide.told_before import acknowledged_line, is_acknowledged, start_lines
from gangline.runs.cluster import Cluster, Host

HOSTS = tuple(Host(name=name, workdir="/srv", python="python3") for name in ("pc1", "pc2"))
CLUSTER = Cluster(name="home", hosts=HOSTS)
DOORS = Finding(
    id="E-SEC-04",
    severity="warn",
    hosts=("pc1", "pc2"),
    title="reachable from outside the cluster: port 29500",
    evidence="this computer -> pc1",
    meaning="anybody who reaches it can run code as you",
    fix="let only them in",
)
SMALL = replace(DOORS, id="E-DISK-02", severity="fail", hosts=("pc2",), title="no room")


def test_a_warning_is_told_in_full_once_per_cluster_and_then_in_one_line(tmp_path):
    assert start_lines([DOORS], CLUSTER, tmp_path) == DOORS.lines()
    (line,) = start_lines([DOORS], CLUSTER, tmp_path)
    assert line == (
        "warn E-SEC-04  pc[1-2]: reachable from outside the cluster: port 29500 "
        "(gangline check says more; quiet with `acknowledged: [E-SEC-04]` in the file)"
    )
    assert start_lines([DOORS], replace(CLUSTER, name="attic"), tmp_path) == DOORS.lines()


def test_what_has_changed_is_told_in_full_again(tmp_path):
    start_lines([DOORS], CLUSTER, tmp_path)
    other = replace(DOORS, hosts=("pc1",))
    assert start_lines([other], CLUSTER, tmp_path) == other.lines()


def test_a_failure_is_told_in_full_every_time(tmp_path):
    for _ in range(2):
        assert start_lines([SMALL], CLUSTER, tmp_path) == SMALL.lines()


def test_an_acknowledged_warning_is_a_word_and_an_acknowledged_failure_is_a_failure(tmp_path):
    known = replace(CLUSTER, acknowledged=("E-SEC-04", "E-DISK-02"))
    assert start_lines([SMALL, DOORS], known, tmp_path) == [
        *SMALL.lines(),
        "known      E-SEC-04 pc[1-2] (acknowledged in the cluster file)",
    ]
    assert [is_acknowledged(each, known) for each in (SMALL, DOORS)] == [False, True]
    assert acknowledged_line([DOORS], CLUSTER) == []


def test_a_damaged_memory_is_none(tmp_path):
    path = tmp_path / "clusters" / "home" / "warnings.json"
    path.parent.mkdir(parents=True)
    path.write_text("[7")
    assert start_lines([DOORS], CLUSTER, tmp_path) == DOORS.lines()
