"""An environment that gangline builds: is there a Python for it, and room?"""

import dataclasses

import pytest

from gangline.checks.judge import judge, skipped
from gangline.inventory.facts import BuildFacts, FoundPython
from gangline.runs.cluster import Environment
from tests.unit.checks.machines import GIB, cluster, cpu_only, host, inventory, pc

LOCKED = Environment(kind="locked")
MINE = Environment(kind="locked", path="/home/me/my.lock")


def python(*version, **more):
    known = {"implementation": "CPython", "machine": "x86_64", "libc": ("glibc", "2.39"), "free_threaded": False}
    return FoundPython(**{"path": "/usr/bin/python3", "version": version, **known, **more})


def building(*pythons, **more):
    return BuildFacts(**{"lock": "abc", "torch": "2.13.0", "pythons": pythons, "free_bytes": 400 * GIB, **more})


FIT = building(python(3, 12, 3))


def case(*buildings, answer=cpu_only, environment=LOCKED, **more):
    """Hosts pc1, pc2, ... whose environments are not built yet, and what they have for that."""
    names = [f"pc{number}" for number in range(1, len(buildings) + 1)]
    seen = inventory({name: {**answer(name), "packages": {}} for name in names})
    hosts = tuple(dataclasses.replace(facts, building=each) for facts, each in zip(seen.hosts, buildings, strict=True))
    members = [host(name, python="", environment=environment, **more) for name in names]
    return dataclasses.replace(seen, hosts=hosts), cluster(*members)


def found(*buildings, **more):
    return [(one.id, one.severity, one.hosts) for one in judge(*case(*buildings, **more))]


def test_nothing_is_said_of_hosts_that_can_build_it():
    assert found(FIT, building(python(3, 9, 1), python(3, 13, 0))) == []


def test_equal_hosts_without_a_fit_python_are_one_finding_that_names_what_they_have():
    old = building(python(3, 9, 18))
    (finding,) = judge(*case(FIT, old, old))
    assert (finding.id, finding.severity, finding.hosts) == ("E-SW-14", "fail", ("pc2", "pc3"))
    assert finding.evidence == "found /usr/bin/python3 (Python 3.9.18)"
    assert "CPython 3.10 to 3.14" in finding.meaning
    assert "install Python 3.12" in finding.fix


def test_a_host_without_any_python_that_answers():
    (finding,) = judge(*case(building()))
    assert finding.evidence == "found none"


def test_a_newer_python_is_the_business_of_a_lock_of_ones_own():
    assert [row[0] for row in found(building(python(3, 15, 0)))] == ["E-SW-14"]
    assert found(building(python(3, 15, 0)), environment=MINE) == []
    (finding,) = judge(*case(building(python(3, 8, 0)), environment=MINE))
    assert "CPython 3.10 or newer" in finding.meaning


@pytest.mark.parametrize(
    ("answer", "transport", "free", "expected"),
    [
        (cpu_only, "ssh", 892_000_000, []),
        (cpu_only, "ssh", 891_999_999, ["E-DISK-13"]),
        (cpu_only, "local", 700_000_000, []),
        (cpu_only, "local", 699_999_999, ["E-DISK-13"]),
        (pc, "ssh", 5_000_000_000, []),
        (pc, "ssh", 4_999_999_999, ["E-DISK-13"]),
        (pc, "local", 2_500_000_000, []),
        (pc, "local", 2_499_999_999, ["E-DISK-13"]),
    ],
)
def test_room_for_torch_at_least(answer, transport, free, expected):
    seen = building(python(3, 12, 3), free_bytes=free)
    assert [row[0] for row in found(seen, answer=answer, transport=transport)] == expected


def test_the_finding_says_what_is_free_and_what_is_needed():
    (finding,) = judge(*case(building(python(3, 12, 3), free_bytes=GIB), answer=pc))
    assert finding.evidence == "1 GiB free in /home/u/gangline-pc1"
    assert "torch 2.13.0 alone takes 4.66 GiB" in finding.meaning


@pytest.mark.parametrize(
    "enough",
    [
        building(python(3, 12, 3), free_bytes=GIB, built=("abc-cp312-x86_64-gpu",)),
        building(python(3, 12, 3), free_bytes=GIB, torch="2.13.0+cpu"),
        building(python(3, 12, 3), free_bytes=GIB, torch=None),
        building(python(3, 12, 3), free_bytes=None),
    ],
)
def test_no_room_is_needed_for_what_is_there_or_for_what_takes_none(enough):
    assert found(enough, answer=pc) == []


def test_an_environment_for_another_kind_of_host_does_not_count():
    other = building(python(3, 12, 3), free_bytes=GIB, built=("abc-cp312-x86_64-cpu", "old-cp312-x86_64-gpu"))
    assert [row[0] for row in found(other, answer=pc)] == ["E-DISK-13"]


def test_a_host_that_could_not_be_asked_is_among_what_was_skipped():
    lost = building(error="no answer within 15 s")
    assert found(lost) == []
    rows = {row.what: row.why for row in skipped(*case(lost))}
    assert rows["what builds the environment of pc1"] == "no answer within 15 s"
    assert "what builds the environment of pc1" not in {row.what for row in skipped(*case(FIT))}


def test_each_is_shown_with_its_family():
    both = building(python(3, 9, 1), free_bytes=1)
    assert [one.id for one in judge(*case(both), only=("versions",))] == ["E-SW-14"]
    assert [one.id for one in judge(*case(both), only=("storage",))] == ["E-DISK-13"]
