"""What a host has to build its environment with, as it says itself."""

import dataclasses
import json
import sys

import pytest

from gangline.inventory.facts import BuildFacts, FoundPython, HostFacts, HostFailure, Inventory, why_not
from gangline.inventory.gather import probe_building
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport
from tests.fakes.transport import FakeTransport, Scripted

KNOWN = BuildFacts(lock="abc", torch="2.13.0")
FIT = FoundPython(
    path="/usr/bin/python3.12",
    version=(3, 12, 3),
    implementation="CPython",
    machine="x86_64",
    libc=("glibc", "2.39"),
    free_threaded=False,
)


def host(name, workdir="/w"):
    return Host(name=name, workdir=str(workdir), python="")


def facts(name):
    return HostFacts(
        host=name,
        hostname=name,
        num_cpus=1,
        memory_total_bytes=None,
        memory_available_bytes=None,
        workdir="/w",
        disk_free_bytes=0,
        python="",
        packages={},
    )


def inventory(*names, failures=()):
    return Inventory(gathered="", hosts=tuple(facts(name) for name in names), failures=failures)


def asked(answer, **more):
    transport = FakeTransport("pc1", answer=lambda _call: Scripted(**{"stdout": json.dumps(answer), **more}))
    seen = probe_building(inventory("pc1"), {"pc1": (host("pc1"), KNOWN)}, {"pc1": transport})
    (call,) = transport.calls
    assert call.argv == ("gangline-agent", "environment")
    assert json.loads(call.stdin) == {"do": "look", "root": "/w/environments"}
    return seen.hosts[0].building


def test_this_computer_says_its_pythons_and_its_room_and_nothing_is_left(tmp_path):
    place = host("pc1", tmp_path / "work")
    seen = probe_building(inventory("pc1", "pc2"), {"pc1": (place, KNOWN)}, {"pc1": LocalTransport(place)})
    building = seen.of("pc1").building
    assert (building.lock, building.torch, building.error, building.built) == ("abc", "2.13.0", None, ())
    assert sys.version_info[:3] in {python.version for python in building.pythons}
    assert building.free_bytes > 0
    assert seen.of("pc2").building is None
    assert not (tmp_path / "work").exists()
    assert Inventory.from_json(json.loads(json.dumps(seen.to_json()))) == seen


def test_a_host_that_did_not_say_its_facts_is_not_asked():
    lost = inventory(failures=(HostFailure(host="pc1", why="off", unreachable=True),))
    assert probe_building(lost, {"pc1": (host("pc1"), KNOWN)}, {}) == lost


@pytest.mark.parametrize(
    ("answer", "more", "why"),
    [
        ({}, {"duration_s": 60.0}, "no answer within 15 s"),
        ({}, {"returncode": 1, "stderr": "Traceback\nOSError: no\x1b[2J"}, "exit code 1: OSError: no?[2J"),
        ({"pythons": 7}, {}, "its answer cannot be read: environment.pythons: expected a list, found 7"),
        ({"pythons": [{"path": "/p"}]}, {}, "its answer cannot be read: environment.pythons[0].version is missing"),
        ([], {}, "its answer cannot be read: environment: expected an object, saw list"),
        ({}, {"stdout": ""}, "its answer cannot be read"),
    ],
)
def test_why_a_host_cannot_say_it(answer, more, why):
    building = asked(answer, **more)
    assert building.error.startswith(why)
    assert building.pythons == ()


def test_a_host_that_has_gone_meanwhile_is_no_error_of_the_check():
    transport = FakeTransport("pc1")
    transport.reachable = False
    seen = probe_building(inventory("pc1"), {"pc1": (host("pc1"), KNOWN)}, {"pc1": transport})
    assert seen.hosts[0].building.error == "pc1 does not answer"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"version": (3, 10, 0)}, None),
        ({"version": (3, 9, 18)}, "Python 3.9.18"),
        ({"version": (3, 15, 0)}, "Python 3.15.0"),
        ({"implementation": "PyPy"}, "PyPy 3.12.3"),
        ({"free_threaded": True}, "CPython 3.12.3, free-threaded"),
        ({"libc": ("", "")}, "not built with glibc, which the wheels need"),
        ({"libc": ("glibc",)}, "not built with glibc, which the wheels need"),
        ({"libc": ("glibc", "2.x")}, "not built with glibc, which the wheels need"),
        ({"version": (3,)}, "CPython 3"),
    ],
)
def test_which_python_is_fit(change, why):
    assert why_not(dataclasses.replace(FIT, **change), own_lock=True) == why


def test_a_lock_of_ones_own_may_know_newer_pythons():
    assert why_not(dataclasses.replace(FIT, version=(3, 15, 0)), own_lock=False) is None


def test_an_environment_is_known_by_its_lock_and_by_whether_there_is_a_gpu():
    building = BuildFacts(lock="abc", built=("abc-cp312-x86_64-gpu", "other-cp312-x86_64-cpu"))
    assert building.is_built(has_gpu=True)
    assert not building.is_built(has_gpu=False)
