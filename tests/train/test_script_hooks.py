"""gangline.hooks with ranks that have torch: all of them stop after the same step, whichever had the signal."""

import os
import shutil
import subprocess
import sys

import pytest

from gangline.agent.supervise import rank_stacks, rank_start
from tests.train import cases_hooks


@pytest.mark.parametrize(("asked", "found"), [([], False), ([1], True), ([0, 1, 2], True)])
def test_all_ranks_stop_as_soon_as_one_was_asked(zygote, asked, found):
    gang = zygote.gang(3, cases_hooks.stopped, {"asked": asked})
    assert gang.results() == [[False, found]] * 3


@pytest.mark.parametrize("asked", [[1], [0, 2]])
def test_all_ranks_save_once_when_one_is_asked_and_once_before_they_stop(zygote, asked):
    gang = zygote.gang(3, cases_hooks.saved, {"saves": asked, "stops": asked})
    assert gang.results() == [[[False, False], [True, False], [False, False], [True, True]]] * 3


TRAINS = """
import torch
layer = torch.nn.Linear(2, 2)
optimizer, other = torch.optim.SGD(layer.parameters()), torch.optim.SGD(layer.parameters())
for _ in range(3):
    layer(torch.ones(2)).sum().backward()
    optimizer.step(), other.step()
"""


def test_steps_of_an_optimizer_of_torch_are_counted_without_a_word_of_the_script(tmp_path):
    own = tmp_path / "path"
    own.mkdir()
    shutil.copy(rank_start.__file__, tmp_path)
    shutil.copy(rank_stacks.__file__, own / "sitecustomize.py")
    words = [sys.executable, str(tmp_path / "rank_start.py"), str(tmp_path), sys.executable, "-c", TRAINS]
    subprocess.run(words, env={**os.environ, "RANK": "0"}, check=True)
    assert (tmp_path / "rank-0.count").read_text() == "3", (tmp_path / "rank-0.log").read_text()
