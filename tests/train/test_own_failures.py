"""A few failures of a script of the user's own, with real torchrun and gloo: the first cause is the rank that failed.

All of them: python -m benchmarks.own_failures
"""

import pytest

from benchmarks.own_failures import OwnWorld, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", ["asleep", "skips_one", "exits_0", "crashes+"])
def test_the_rank_that_failed_is_named_and_no_rank_that_waited(tmp_path, case):
    line = play(OwnWorld(tmp_path), case)
    assert (line["wrong"], line["blamed"]) == ([], False), line
