"""What every test of the project shares."""

import importlib.util
import os
import signal

import pytest

from tests.rotation import PARTS, TURN, divide, take_turn

# One thread per process: ranks share the cores, and sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell without job control starts what it puts into the background with Ctrl-C ignored, which every program below
# would take over; tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--rotate", action="store_true", help="of tests marked `rotating`, only the part of the day, and all in CI"
    )


def pytest_configure(config):
    if config.getoption("rotate"):
        take_turn()


def pytest_report_header(config):
    if config.getoption("rotate"):
        turn = take_turn()
        part = "all" if turn is None else f"part {turn} of {PARTS}"
        return f"rotating tests: {part} ({TURN}=0, 1, ... for another part, {TURN}=all for all)"
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("rotate"):
        items[:], rest = divide(items, take_turn())
        config.hook.pytest_deselected(items=rest)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
