"""What is drawn at random in a micro-batch."""

import torch

from gangline.worker.batch import begin_draws

CPU = torch.device("cpu")


def test_begins_where_torch_does():
    torch.manual_seed(2**63 - 1)
    expected = torch.rand(5)
    begin_draws(2**63 - 1, CPU)
    assert torch.initial_seed() == 2**63 - 1
    assert torch.equal(torch.rand(5), expected)
