"""How long a pipeline takes, against its schedule played event by event."""

import random

import pytest

from gangline.runs.formulas import ahead, step_s


def played(forward, backward, *, send_s, micro_batches, eager):
    """Every pass begins when its stage is free and its tensor is there; a link carries one after the other each way."""
    stages = len(forward)
    work = []
    for number in range(stages):
        first = min(micro_batches, ahead(number, stages, eager=eager))
        passes = [("forward", each) for each in range(first)]
        for each in range(micro_batches - first):
            passes += [("forward", first + each), ("backward", each)]
        work.append(passes + [("backward", each) for each in range(micro_batches - first, micro_batches)])
    free, link, there = [0.0] * stages, {}, {}
    while any(work):
        for number, passes in enumerate(work):
            while passes:
                way, which = passes[0]
                source = number - 1 if way == "forward" else number + 1
                begins = there.get((way, which, number), 0.0 if source in (-1, stages) else None)
                if begins is None:
                    break
                passes.pop(0)
                seconds = (forward if way == "forward" else backward)[number]
                free[number] = max(free[number], begins) + seconds
                target = number + 1 if way == "forward" else number - 1
                link[number, way] = max(link.get((number, way), 0.0), free[number]) + send_s
                there[way, which, target] = link[number, way]
    return max(free)


@pytest.mark.parametrize(("eager", "most"), [(False, 0.10), (True, 0.05)])
def test_a_step_takes_what_its_schedule_takes(eager, most):
    draw = random.Random(5)
    close = 0
    for _ in range(400):
        unlike, stages = draw.choice((0.0, 0.1, 0.4)), draw.choice((1, 2, 3, 4, 6, 8))
        each_s = [1 + draw.uniform(-unlike, unlike) for _ in range(stages)]
        share = draw.choice((0.5, 0.6, 0.67, 0.75))
        forward, backward = [s * (1 - share) for s in each_s], [s * share for s in each_s]
        words = {"send_s": draw.choice((0.0, 0.02, 0.1, 0.3, 0.8)), "micro_batches": draw.choice((1, 2, 4, 8, 24, 64))}
        expected = played(forward, backward, **words, eager=eager)
        assert step_s(forward, backward, **words, eager=eager) == pytest.approx(expected, rel=most)
        close += abs(step_s(forward, backward, **words, eager=eager) / expected - 1) < 0.03
    assert close > 360


def test_equal_stages_without_sending_have_the_bubble_of_the_books():
    for eager in (False, True):
        took = step_s([1.0] * 4, [2.0] * 4, send_s=0.0, micro_batches=8, eager=eager)
        assert took == pytest.approx((8 + 3) * 3.0)


def test_twice_as_many_ahead_hide_what_travels():
    words = {"forward": [1.0] * 3, "backward": [2.0] * 3, "send_s": 1.0, "micro_batches": 24}
    assert step_s(**words, eager=True) == pytest.approx(played(**words, eager=True), rel=0.02)
    assert step_s(**words, eager=True) < 0.75 * step_s(**words, eager=False)
    assert [ahead(number, 3, eager=True) for number in range(3)] == [4, 2, 0]
