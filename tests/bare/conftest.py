"""Bare machines for tests: the fixture `bare`. Every test needs the capability "bare" of the lab."""

import contextlib

import pytest

from tests.lab import conftest as lab_tests
from tests.lab.bare import BareLab

TIMEOUT_S = 150
_needs = lab_tests._needs


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/bare/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.lab("root", "bare"))
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def bare():
    """`bare({"pc1": BareKind(firewall="ufw")})`: bare machines, which end with the test. Takes what `BareLab` takes."""
    with contextlib.ExitStack() as labs:
        yield lambda *args, **options: labs.enter_context(BareLab(*args, **options))
