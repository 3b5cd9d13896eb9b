"""Checks: every mistake is found at once, with evidence, meaning and fix; healthy hosts have no findings."""

from __future__ import annotations

import dataclasses

import pytest

from gangline.agent import facts as agent_facts
from gangline.checks.finding import Finding, fold, fold_names
from gangline.checks.judge import judge, require
from gangline.checks.versions import release
from gangline.errors import CheckFailed, HostUnreachable
from gangline.inventory.facts import HostFacts, HostFailure, Inventory
from gangline.runs.cluster import Cluster, Host

PACKAGES: dict[str, str | None] = {
    "gangline": "0.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
}
CLUSTER = Cluster(name="c", hosts=(Host(name="pc1", workdir="/w/pc1", python="python"),))


def facts(host: str = "pc1") -> HostFacts:
    return HostFacts(
        host=host,
        hostname=host,
        num_cpus=8,
        memory_total_bytes=16 << 30,
        memory_available_bytes=8 << 30,
        workdir=f"/w/{host}",
        disk_free_bytes=100 << 30,
        python="3.12.1",
        packages=dict(PACKAGES),
        gpu_reason="nvidia-ml-py is not installed",
    )


def found(*hosts: HostFacts, failures: tuple[HostFailure, ...] = ()) -> list[tuple[str, str, tuple[str, ...]]]:
    inventory = Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=hosts, failures=failures)
    return [(finding.id, finding.severity, finding.hosts) for finding in judge(inventory, CLUSTER)]


def having(base: HostFacts, **packages: str | None) -> HostFacts:
    return dataclasses.replace(base, packages={**base.packages, **packages})


def test_healthy_hosts_have_no_findings() -> None:
    assert found(facts("pc1"), facts("pc2"), facts("pc3")) == []


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": None}, "E-SW-01"),
        ({"torch": "2.9.1+cu128"}, "E-SW-02"),
        ({"transformers": "5.2.9"}, "E-SW-03"),
    ],
)
def test_a_missing_or_unsafe_package_stops_the_start(packages: dict[str, str | None], expected: str) -> None:
    assert found(having(facts(), **packages)) == [(expected, "fail", ("pc1",))]


@pytest.mark.parametrize(("package", "version"), [("torch", "2.10"), ("torch", "2.10.0"), ("transformers", "5.3.0")])
def test_the_floor_itself_is_good(package: str, version: str) -> None:
    assert found(having(facts(), **{package: version})) == []


def test_different_versions_are_named_with_their_hosts() -> None:
    inventory = Inventory(gathered="", hosts=(facts("pc1"), having(facts("pc2"), torch="2.12.0")))
    (finding,) = judge(inventory, CLUSTER)
    assert finding.id == "E-SW-04"
    assert "2.13.0+cpu on pc1" in finding.evidence
    assert "2.12.0 on pc2" in finding.evidence


def test_numpy_draws_the_order_of_the_samples_and_is_one_version_everywhere() -> None:
    assert "numpy" in agent_facts.PACKAGES
    assert found(having(facts(), numpy="2.3.4"), having(facts("pc2"), numpy="1.26.4")) == [
        ("E-SW-04", "fail", ("pc1", "pc2"))
    ]


@pytest.mark.parametrize(
    ("free", "expected"),
    [(3 << 30, []), (1 << 30, [("E-DISK-02", "warn", ("pc1",))]), (100 << 20, [("E-DISK-01", "fail", ("pc1",))])],
)
def test_room_in_the_work_folder(free: int, expected: list[tuple[str, str, tuple[str, ...]]]) -> None:
    assert found(dataclasses.replace(facts(), disk_free_bytes=free)) == expected


def test_little_memory_warns_and_unknown_memory_does_not() -> None:
    assert found(dataclasses.replace(facts(), memory_available_bytes=500 << 20)) == [("E-MEM-01", "warn", ("pc1",))]
    assert found(dataclasses.replace(facts(), memory_available_bytes=None)) == []


def test_two_hosts_in_one_work_folder_of_one_machine_are_refused() -> None:
    twin = dataclasses.replace(facts("pc2"), hostname="pc1", workdir="/w/pc1")
    assert found(facts("pc1"), twin) == [("E-NAME-01", "fail", ("pc1", "pc2"))]


def test_the_same_path_on_two_machines_is_fine() -> None:
    assert found(facts("pc1"), dataclasses.replace(facts("pc2"), workdir="/w/pc1")) == []


def test_all_findings_are_shown_worst_first_and_equal_hosts_folded() -> None:
    poor = [dataclasses.replace(facts(f"pc{n}"), memory_available_bytes=1) for n in (1, 2)]
    lost = HostFailure(host="pc3", why="exit code 1: No module named gangline", unreachable=False)
    assert found(*poor, failures=(lost,)) == [("E-ACC-02", "fail", ("pc3",)), ("E-MEM-01", "warn", ("pc1", "pc2"))]


def finding(severity: str, number: str = "E-SW-01") -> Finding:
    parts = {"title": "t", "evidence": "e", "meaning": "m", "fix": "f"}
    return Finding(id=number, severity=severity, hosts=("pc1",), **parts)  # type: ignore[arg-type]


def test_only_failures_stop_the_start() -> None:
    require([finding("warn"), finding("info")])
    with pytest.raises(CheckFailed, match="E-SW-01"):
        require([finding("warn"), finding("fail")])


def test_a_host_that_does_not_answer_has_its_own_exit_code() -> None:
    with pytest.raises(HostUnreachable):
        require([finding("fail"), finding("fail", "E-ACC-01")])


def test_a_finding_shows_evidence_meaning_and_fix() -> None:
    assert finding("fail").lines() == ["fail E-SW-01  pc1: t", "  evidence  e", "  means     m", "  fix       f"]


def test_different_evidence_is_not_folded() -> None:
    one = finding("warn")
    assert len(fold([one, dataclasses.replace(one, evidence="other")])) == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("gpu01", "gpu02", "gpu03", "nas"), "gpu[01-03], nas"),
        (("pc1", "pc3"), "pc1, pc3"),
        (("pc9", "pc10"), "pc9, pc10"),
        (("a", "b"), "a, b"),
        ((), ""),
    ],
)
def test_runs_of_numbers_are_folded(names: tuple[str, ...], expected: str) -> None:
    assert fold_names(names) == expected


def test_local_builds_count_by_their_release() -> None:
    assert release("2.13.0+cu128") == (2, 13, 0)
    assert release("nightly") == ()
