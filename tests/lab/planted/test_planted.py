"""What `gangline check` says about hosts on which one thing is wrong, or nothing. All 75: python -m benchmarks.planted."""

import pytest

from benchmarks.planted import shown, try_case
from tests.lab.planted.listed import PLANTED
from tests.lab.planted.plants import HEALTHY, PLANTS

QUICK = ("A03", "A08", "N05", "C01", "S01", "G01", "W02", "D04")


def test_every_row_has_a_plant_and_every_plant_a_row():
    assert sorted(PLANTS) == sorted(row.name for row in PLANTED)
    assert len(PLANTED) == 60
    assert sum(row.held_out for row in PLANTED) == 35


def test_there_are_fifteen_healthy_variants():
    assert sorted(HEALTHY) == [f"H{number:02}" for number in range(1, 16)]


def test_no_row_of_the_quick_selection_is_held_out():
    assert not any(row.held_out for row in PLANTED if row.name in QUICK)


def test_findings_are_told_apart_by_severity():
    findings = [{"id": f"E-{word}", "severity": word} for word in ("fail", "warn", "info", "fail")]
    assert shown(findings) == {"fail": ["E-fail"], "warn": ["E-warn"]}


@pytest.mark.lab("root", "nft", "gcc")
@pytest.mark.parametrize("name", QUICK)
def test_the_misconfiguration_is_found(name):
    line = try_case(name)
    assert line["right"], line


@pytest.mark.lab("root", "nft", "gcc")
@pytest.mark.parametrize("name", ["H01", "H07"])
def test_nothing_fails_on_healthy_hosts(name):
    line = try_case(name)
    assert (line["fail"], line["exit"]) == ([], 0), line
    # Else a row could be right for nothing. The firewalls of X01 differ from host to host, so it is no such row.
    assert not ({row.finding for row in PLANTED} - {"E-SEC-04"}) & {*line["warn"]}, line
