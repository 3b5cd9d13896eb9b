"""gangline.hooks with ranks that have torch: all of them stop after the same step, whichever had the signal."""

import pytest

from tests.train import cases_hooks


@pytest.mark.parametrize(("asked", "found"), [([], False), ([1], True), ([0, 1, 2], True)])
def test_all_ranks_stop_as_soon_as_one_was_asked(zygote, asked, found):
    gang = zygote.gang(3, cases_hooks.stopped, {"asked": asked})
    assert gang.results() == [[False, found]] * 3
