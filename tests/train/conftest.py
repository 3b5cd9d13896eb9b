"""Ranks for the training tests."""

import pytest

from tests.train.pool import Zygote


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/train/" in item.path.as_posix():
            item.add_marker(pytest.mark.train)


@pytest.fixture(scope="session")
def _session_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(_session_zygote):
    """`zygote.fork(function, ...)` and `zygote.gang(world_size, function, kwargs)`: fresh processes, to be killed."""
    yield _session_zygote
    _session_zygote.close_others()


@pytest.fixture
def pool(_session_zygote):
    """`pool(world_size).run("package.module:function", ...)`: the results by rank."""
    return _session_zygote.pool
