"""What is far off, and what only looks like it."""

import math
import random

import pytest

from gangline.worker.spikes import WINDOW, Spikes


def curve(num_steps, *, seed, noise=0.1, start=4.0, end=1.0, heavy=0.0):
    """Losses and norms of an ordinary run: both fall, and jitter; `heavy`: part of the steps with hard samples."""
    dice = random.Random(seed)
    for step in range(num_steps):
        level = end + (start - end) * math.exp(-step / 80)
        hard = 2.5 if dice.random() < heavy else 1.0
        yield level * hard * math.exp(dice.gauss(0.0, noise)), 0.5 * level * math.exp(dice.gauss(0.0, 0.4))


def judged(spikes, steps, *, first=0):
    return [spikes.judge(loss, norm, step=first + step) for step, (loss, norm) in enumerate(steps)]


def calm(*, warmup_steps=0):
    """As many ordinary steps as it takes to judge the next one."""
    spikes = Spikes(warmup_steps=warmup_steps)
    assert not any(judged(spikes, curve(WINDOW, seed=1)))
    return spikes


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [{}, {"noise": 0.3}, {"heavy": 0.05}, {"start": 1.0}, {"start": 0.02, "end": 0.001}])
def test_an_ordinary_run_has_none(seed, kind):
    assert not any(judged(Spikes(warmup_steps=0), curve(2000, seed=seed, **kind)))


def test_a_loss_and_a_norm_that_are_both_far_off_are_one():
    spike = calm().judge(40.0, 60.0, step=WINDOW)
    assert (spike.loss, spike.norm) == (40.0, 60.0)
    assert 2 < spike.usual_loss < 4
    assert "loss 40 where the steps before had" in spike.words


@pytest.mark.parametrize(("loss", "norm"), [(40.0, 1.5), (3.0, 60.0), (4.5, 60.0)])
def test_one_of_them_alone_is_none(loss, norm):
    assert calm().judge(loss, norm, step=WINDOW) is None


def test_nothing_is_judged_before_there_are_enough_steps_or_while_the_rate_rises():
    spikes = Spikes(warmup_steps=0)
    assert not any(judged(spikes, [*curve(WINDOW - 1, seed=1), (40.0, 60.0)]))
    assert calm(warmup_steps=WINDOW + 1).judge(40.0, 60.0, step=WINDOW) is None
    assert calm(warmup_steps=WINDOW).judge(40.0, 60.0, step=WINDOW) is not None


def test_it_does_not_get_used_to_what_is_far_off():
    spikes = calm()
    assert all(judged(spikes, [(40.0, 60.0)] * (2 * WINDOW), first=WINDOW))
    assert spikes.judge(2.0, 1.0, step=3 * WINDOW) is None
