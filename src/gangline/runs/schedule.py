"""What the stages of a pipeline do when, and how long that takes: 1F1B. Pure.

A stage begins with some micro-batches forward, and then does one backward and one forward in turn (Narayanan et al.,
PipeDream, 2019; Megatron-LM, 2021). With as many at the beginning as there are stages behind it, it holds the
activations of the fewest that keep all stages busy, if sending takes no time. Where it does, a micro-batch comes back
late, and everybody waits; with twice as many what travels is hidden (Zhuang et al., On Optimizing the Communication of
Model Parallelism, 2022, call that eager 1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence


def ahead(number: int, stages: int, *, eager: bool) -> int:
    """Micro-batches that stage `number` of so many does forward before its first backward."""
    return (2 if eager else 1) * (stages - 1 - number)


def step_s(
    forward: Sequence[float], backward: Sequence[float], *, send_s: float, micro_batches: int, eager: bool
) -> float:
    """Seconds until all micro-batches have gone through and come back.

    forward, backward: of one micro-batch, by stage; send_s: between two stages, each way. It is the longest of what
    cannot be shorter: each link one tensor at a time; each stage all its work, after its first micro-batch has come and
    until its last has gone back, and idle while the first one is on its way behind it and nothing else is to be done;
    each stage's round, for no more than its number on the way can come back in the time that one takes. Against the
    schedule played event by event it is within 5 % with `eager`, and within 10 % without.
    """
    stages, k = len(forward), micro_batches
    both = [one + other for one, other in zip(forward, backward, strict=True)]
    row_s = sum(both) + 2 * (stages - 1) * send_s
    longest = row_s + ((k - 1) * send_s if stages > 1 else 0.0)
    before_s = 0.0
    for number, each_s in enumerate(both):
        behind_s = row_s - before_s - each_s
        most = ahead(number, stages, eager=eager)
        idle_s = max(0.0, behind_s - min(k - 1, most) * forward[number])
        longest = max(longest, before_s + k * each_s + idle_s)
        if k > most + 1:
            longest = max(longest, row_s + (k - 1) * (each_s + behind_s) / (most + 1))
        before_s += each_s + 2 * send_s
    return longest
