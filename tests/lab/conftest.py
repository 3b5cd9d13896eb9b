"""Labs for tests: the fixture `lab`, the marker `lab` with the capabilities that a test needs, and their host agent."""

import contextlib
import os
from pathlib import Path

import pytest

from tests.lab import probe
from tests.lab.hosts import Lab
from tests.order import longest_first

TIMEOUT_S = 60
LONG = (
    "test_pairs.py",
    "test_launch.py",
    "test_transport.py",
    "test_lab.py",
    "planted/test_planted.py",
)
REPORTS = set()
"""What processes that run tests at once said of this machine."""


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/lab/" not in item.path.as_posix():
            continue
        if not item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.lab)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    longest_first(items, Path(__file__).parent, LONG)


def pytest_sessionfinish(session):
    if probe.capabilities.cache_info().currsize and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["lab"] = probe.report()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    REPORTS.update(filter(None, [getattr(node, "workeroutput", {}).get("lab")]))


def pytest_terminal_summary(terminalreporter):
    if probe.capabilities.cache_info().currsize:
        REPORTS.add(probe.report())
    for report in sorted(REPORTS):
        terminalreporter.write_line(report)


@pytest.fixture(autouse=True)
def _needs(request):
    """Skip a test whose capabilities are not there; where labs are required (CI), that is a failure."""
    needs = {"lab"}.union(*(mark.args for mark in request.node.iter_markers("lab")))
    found = probe.capabilities()
    problems = {name: found[name] for name in sorted(needs) if found[name]}
    words = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    if problems and os.environ.get("GANGLINE_LAB") == "required" and not problems.keys() <= probe.EXTRAS:
        pytest.fail(f"this machine has to have it (GANGLINE_LAB=required): {words}")
    if problems:
        pytest.skip(words)


@pytest.fixture
def lab():
    """`lab(3, nics=2)`: a lab with three hosts, which ends with the test. Takes what `Lab` takes."""
    with contextlib.ExitStack() as labs:
        yield lambda *args, **options: labs.enter_context(Lab(*args, **options))


@pytest.fixture(scope="session")
def three_hosts():
    """A lab of three hosts for tests that change nothing in it."""
    with Lab(3, ttl_s=3600) as lab:
        yield lab
