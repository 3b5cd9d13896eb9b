"""Every option of an adapter is the same over uneven ranks as on one process, or refused by the capability table.

The benchmark `adapter_options` has all options, optimizers and schedules under all strategies, for 20 steps.
"""

import pytest

from benchmarks.adapter_options import GANGS, OPTIONS, Sides
from tests.train.tolerances import FP32, FP64

pytestmark = pytest.mark.rotating

STRATEGIES = [kind for kind, gang in GANGS.items() if len(gang["shares"]) == 3]
CASES = [(name, STRATEGIES[number % len(STRATEGIES)]) for number, name in enumerate(OPTIONS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the models with weights, written once."""
    return str(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_over_uneven_ranks_it_is_that_of_one_process_or_refused(pool, folder, name, strategy):
    words = {"layers": 4, "steps": 4, **OPTIONS[name][0]}
    if strategy.startswith("zero"):
        words |= {"precision": "fp32"}
    figure, refused = Sides(pool, folder).split(words, strategy)
    assert refused.startswith("method.") if refused else figure <= (FP32 if "precision" in words else FP64)
