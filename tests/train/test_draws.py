"""What is drawn at random in a micro-batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gangline.errors import ModelError, UsageError
from gangline.worker.batch import begin_draws
from gangline.worker.dropout import SampleDropout

CPU = torch.device("cpu")


def test_begins_where_torch_does():
    torch.manual_seed(2**63 - 1)
    expected = torch.rand(5)
    begin_draws(2**63 - 1, CPU)
    assert torch.initial_seed() == 2**63 - 1
    assert torch.equal(torch.rand(5), expected)


def pass_over(samples, *, step=3, joined=True):
    return SampleDropout(np.array(samples), seed=7, step=step, device=CPU, joined=joined)


def dropped(samples, shape, *, p=0.25, step=3):
    """What two layers keep of ones."""
    with pass_over(samples, step=step):
        ones = torch.ones(len(samples), *shape, dtype=torch.float64)
        return F.dropout(ones, p), F.dropout(ones, p)


@pytest.mark.parametrize(("shape", "padded"), [((6, 32), (9, 32)), ((4, 6, 6), (4, 9, 9))])
def test_a_sample_is_dropped_alike_whatever_shares_its_pass_and_however_long_that_is(shape, padded):
    alone, together = dropped([5], shape), dropped([9, 5, 2], padded)
    for one, all_rows in zip(alone, together, strict=True):
        assert torch.equal(one[0], all_rows[(1, *(slice(length) for length in shape))])
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(together[0][0], together[0][1])
    assert not torch.equal(dropped([5], shape, step=4)[0], alone[0])


def test_rows_that_a_layer_has_flattened_stay_rows():
    with pass_over([9, 5]):
        flat = F.dropout(torch.ones(2 * 6, 32), 0.25)
    assert torch.equal(flat[6:] > 0, dropped([5], (6, 32))[0][0] > 0)
    with pass_over([9, 5]), pytest.raises(ModelError, match=r"multiple of 2 rows"):
        F.dropout(torch.ones(3, 32), 0.25)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_masks_are_dropped_at_the_rate_and_independently(p):
    first, second = (kept == 0 for kept in dropped(range(8), (64, 256), p=p))
    others = {
        "layer": second,
        "row": first.roll(1, 0),
        "position": first.roll(1, 1),
        "column": first.roll(1, 2),
        "far column": first.roll(128, 2),
    }
    n = first.numel()
    assert abs(first.double().mean() - p) < 5 * (p * (1 - p) / n) ** 0.5
    for name, other in others.items():
        both = float((first & other).double().mean())
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / n) ** 0.5, name
    corners = first & first.roll(1, 1) & first.roll(1, 2) & first.roll((1, 1), (1, 2))
    assert abs(float(corners.double().mean()) - p**4) < 5 * (p**4 / n) ** 0.5 * 3
    assert float(dropped([5], (6, 32), p=p)[0].max()) == pytest.approx(1 / (1 - p))


def test_what_does_not_know_of_rows_is_refused_only_where_ranks_join_others():
    with pass_over([5, 2]), pytest.raises(UsageError, match=r"draws at random by rand_like"):
        torch.rand_like(torch.ones(2))
    with pass_over([5, 2], joined=False):
        noise = torch.rand_like(torch.ones(8))
    with pass_over([5, 2], joined=False):
        assert torch.equal(torch.rand_like(torch.ones(8)), noise)
    with pass_over([2, 5], joined=False):
        assert not torch.equal(torch.rand_like(torch.ones(8)), noise)


def test_dropout_of_an_evaluation_is_none():
    with pass_over([5]):
        assert F.dropout(torch.ones(1, 4), 0.5, training=False).tolist() == [[1.0] * 4]
        assert F.dropout(torch.ones(1, 4), 1.0).tolist() == [[0.0] * 4]
