"""A unit test starts no process and imports no torch: those that do lie in tests/process and tests/train."""

import gc
import sys

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_started = []


def _note(event, arguments):
    if event in STARTS and arguments[:1] != ("git",):  # the house rules ask git which files there are
        _started.append((event, *arguments[1:2]))


sys.addaudithook(_note)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """torch and transformers take four seconds to import, in each of the processes that run these tests at once."""
    had_torch = "torch" in sys.modules
    report = yield
    if "torch" in sys.modules and not had_torch:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} imports torch: tests that need it lie in tests/train"
    return report


def pytest_collection_finish():
    """What was imported and collected stays: looking through it for garbage again and again took a fifth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _starts_no_process():
    before = len(_started)
    yield
    assert _started[before:] == []
