"""Ranks for the training tests."""

from pathlib import Path

import pytest

from tests.order import longest_first
from tests.train import bodies, story
from tests.train.pool import Zygote

bodies.install()

LONG = (
    "test_contract.py",
    "test_story_parts.py",
    "test_local_sgd.py",
    "test_zero.py",
    "test_adapter_options.py",
    "test_pipeline.py",
    "test_trace.py",
    "test_adam8.py",
    "test_optimizers.py",
    "test_story.py",
    "test_sweep.py",
    "test_adapters.py",
    "test_bad_input.py",
    "test_tensor_parallel.py",
    "test_notebook.py",
    "test_scaling.py",
    "test_resume.py",
    "test_exact.py",
    "test_recipes.py",
    "test_story_rounds.py",
    "test_versions.py",
    "test_run_again.py",
    "test_gang.py",
    "test_fsdp.py",
    "test_moving.py",
    "test_shards.py",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/train/" in item.path.as_posix():
            item.add_marker(pytest.mark.train)
    longest_first(items, Path(__file__).parent, LONG)


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
    """`pool(world_size).run(cases_x.function, ...)`: the results by rank."""
    return _session_zygote.pool


@pytest.fixture(scope="session")
def quick_python(_session_zygote):
    """A Python for hosts, whose workers need not import torch: they are forked from the zygote (forked_python.py)."""
    return _session_zygote.python


@pytest.fixture(scope="session")
def world(_session_zygote, tmp_path_factory):
    """A folder with a corpus, a tokenizer and a tiny Llama with weights, for users to have copies of."""
    folder = tmp_path_factory.mktemp("world")
    _session_zygote.fork(story.make_world, folder=str(folder)).result()
    return folder
