"""Slurm clusters for tests: the fixtures `slurm` and `cluster`. Every test needs the capability "slurm" of the lab."""

import contextlib

import pytest

from tests.lab import conftest as lab_tests
from tests.slurm.cluster import SlurmLab
from tests.slurm.user import Account

TIMEOUT_S = 90
_needs = lab_tests._needs


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/slurm/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.lab("root", "slurm"))
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def slurm():
    """`slurm(3, gpus=2)`: a Slurm cluster, which ends with the test. Takes what `SlurmLab` takes."""
    with contextlib.ExitStack() as labs:
        yield lambda *args, **options: labs.enter_context(SlurmLab(*args, **options))


@pytest.fixture(scope="module")
def three_nodes():
    """A cluster of three nodes for the tests of a file that leave it as they found it."""
    with SlurmLab(3, gpus={"n0": 2, "n1": 1}) as lab:
        yield lab


@pytest.fixture
def cluster(three_nodes):
    """The same; nothing is left on it after each test."""
    yield three_nodes
    three_nodes.cancel_all()
    assert three_nodes.left() == []


@pytest.fixture
def account(one_cluster):
    """A user of the cluster of a file, its fixture `one_cluster`; nothing is left on it after each test."""
    yield Account(one_cluster)
    one_cluster.cancel_all()
    assert one_cluster.left() == []
