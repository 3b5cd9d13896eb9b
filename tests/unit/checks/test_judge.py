"""All findings are shown, worst first, equal hosts folded; what was not checked is said, too."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from gangline.checks.judge import FAMILIES, judge, prefixes, require, skipped
from gangline.checks.rules import Finding, fold
from gangline.errors import CheckFailed, HostUnreachable, UsageError
from gangline.inventory.facts import HostFailure
from gangline.units import fold_names
from tests.unit.checks.machines import GIB, cluster, cpu_only, findings, found, host, inventory, pc

ROOT = Path(__file__).parents[3]
CHECKS = ROOT / "src" / "gangline" / "checks"
ERRORS = ROOT / "docs" / "errors.md"


def having(name: str, **packages: str | None):
    answer = cpu_only(name)
    answer["packages"]["packages"] |= packages
    return answer


def with_memory(name: str, available: int | None):
    answer = cpu_only(name)
    answer["system"]["memory_available_bytes"] = available
    return answer


def with_disk(free: int):
    answer = cpu_only("pc1")
    answer["storage"][0]["free_bytes"] = free
    return answer


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": None}, "E-SW-01"),
        ({"torch": "2.9.1+cu128"}, "E-SW-02"),
        ({"transformers": "5.2.9"}, "E-SW-03"),
    ],
)
def test_a_missing_or_unsafe_package_stops_the_start(packages: dict[str, str | None], expected: str) -> None:
    assert found({"pc1": having("pc1", **packages)}) == [(expected, "fail", ("pc1",))]


@pytest.mark.parametrize(("package", "version"), [("torch", "2.10"), ("torch", "2.10.0"), ("transformers", "5.3.0")])
def test_the_floor_itself_does_not_stop_the_start(package: str, version: str) -> None:
    assert [row for row in found({"pc1": having("pc1", **{package: version})}) if row[1] == "fail"] == []


def test_numpy_draws_the_order_of_the_samples_and_is_one_version_everywhere() -> None:
    answers = {"pc1": having("pc1", numpy="2.3.4"), "pc2": having("pc2", numpy="1.26.4")}
    assert found(answers) == [("E-SW-04", "fail", ("pc1", "pc2"))]


@pytest.mark.parametrize(
    ("free", "expected"),
    [(3 * GIB, []), (GIB, ["E-DISK-02"]), (200 << 20, ["E-DISK-02"]), ((200 << 20) - 1, ["E-DISK-01"])],
)
def test_room_in_the_work_folder(free: int, expected: list[str]) -> None:
    assert [one.id for one in findings({"pc1": with_disk(free)})] == expected


def test_little_memory_warns_and_unknown_memory_does_not() -> None:
    assert found({"pc1": with_memory("pc1", 500 << 20)}) == [("E-MEM-01", "warn", ("pc1",))]
    assert found({"pc1": with_memory("pc1", None)}) == []


def test_two_hosts_in_one_work_folder_of_one_machine_are_refused() -> None:
    answers = {name: {**cpu_only("pc1"), "storage": cpu_only("pc1")["storage"]} for name in ("pc1", "pc2")}
    local = [host(name, transport="local", code=None, address="127.0.0.1") for name in answers]
    assert found(answers, *local) == [("E-NAME-01", "fail", ("pc1", "pc2"))]


def test_the_same_path_on_two_machines_is_fine() -> None:
    answers = {name: {**cpu_only(name), "storage": cpu_only("pc1")["storage"]} for name in ("pc1", "pc2")}
    assert found(answers) == []


def test_all_findings_are_shown_worst_first_and_equal_hosts_folded() -> None:
    poor = {name: with_memory(name, 1) for name in ("pc1", "pc2")}
    lost = HostFailure(host="pc3", why="exit code 1: No module named gangline", unreachable=False)
    expected = [("E-ACC-02", "fail", ("pc3",)), ("E-MEM-01", "warn", ("pc1", "pc2"))]
    assert found(poor, host("pc3"), failures=(lost,)) == expected


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ((), ["E-SW-01", "E-MEM-01"]),
        (("memory",), ["E-MEM-01"]),
        (("versions", "memory"), ["E-SW-01", "E-MEM-01"]),
        (("E-SW",), ["E-SW-01"]),
        (("E-MEM-01", "versions"), ["E-SW-01", "E-MEM-01"]),
        (("network",), []),
    ],
)
def test_only_what_was_asked_for_is_shown(only: tuple[str, ...], expected: list[str]) -> None:
    answer = with_memory("pc1", 1)
    answer["packages"]["packages"]["peft"] = None
    assert [one.id for one in findings({"pc1": answer}, only=only)] == expected


def test_a_family_that_does_not_exist_is_named_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match="'netwrok'") as caught:
        prefixes(("netwrok",))
    assert caught.value.fix == "did you mean 'network'?"


def test_what_was_not_checked_is_listed_with_the_reason() -> None:
    unread = {**cpu_only("pc1"), "rdma": {"error": "PermissionError: no"}}
    lost = HostFailure(host="pc2", why="pc2 does not answer; timed out", unreachable=True)
    case = inventory({"pc1": unread}, failures=(lost,)), cluster(host("pc1"), host("pc2"))
    rows = {row.what: row.why for row in skipped(*case)}
    assert rows["everything else about pc2"] == "pc2 does not answer; timed out"
    assert rows["rdma of pc1"] == "PermissionError: no"
    assert rows["fabric"] == "no InfiniBand or RoCE adapter on any host"
    assert rows["gpus"] == "no host has an NVIDIA driver"
    assert "nothing was sent" in rows["network"]
    assert "gpus" not in {row.what for row in skipped(*case, only=("names",))}


def test_packages_of_an_environment_that_is_built_later_are_not_checked() -> None:
    case = inventory({"pc1": {**pc("pc1"), "packages": {}}}), cluster(host("pc1", python=""))
    assert judge(*case) == ()
    assert "its environment is made at the start" in {row.why for row in skipped(*case)}


def written_ids() -> set[str]:
    return {name for path in CHECKS.glob("*.py") for name in re.findall(r'"(E-[A-Z]+-\d+)"', path.read_text("utf-8"))}


def test_every_finding_has_a_row_in_the_docs_and_every_row_a_finding() -> None:
    rows = re.findall(r"^\| (E-[A-Z]+-\d+) (\|.*)", ERRORS.read_text("utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == written_ids()
    assert len(rows) == len(set(rows))


def test_every_finding_belongs_to_a_family() -> None:
    assert {rule.id for family in FAMILIES.built_in.values() for rule in family} == written_ids()


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


@pytest.mark.parametrize("number", ["E-ACC-03", "E-ACC-05", "E-ACC-06", "E-ACC-07"])
def test_so_has_one_that_is_not_let_in(number: str) -> None:
    with pytest.raises(HostUnreachable, match=number):
        require([finding("fail", number)])


def test_a_host_that_answers_and_cannot_say_its_facts_is_a_failed_check() -> None:
    with pytest.raises(CheckFailed):
        require([finding("fail", "E-ACC-02")])


def test_a_finding_shows_evidence_meaning_and_fix() -> None:
    assert finding("fail").lines() == ["fail E-SW-01  pc1: t", "  evidence  e", "  means     m", "  fix       f"]


def test_long_evidence_has_one_example_a_line() -> None:
    examples = ["pc1 -> pc2 10.0.0.2:29500 timed out after 3.0 s", "pc2 -> pc1 10.0.0.1:29500 timed out after 3.0 s"]
    one = dataclasses.replace(finding("fail"), evidence="; ".join([*examples, "and 4 more"]))
    assert one.lines()[1:4] == [f"  evidence  {examples[0]}", f"            {examples[1]}", "            and 4 more"]


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
