"""How often a run saves by itself, from what a save costs. Pure.

    interval = sqrt(2 * cost * mean time between two losses)      (J. W. Young, Communications of the ACM 17(9), 1974)

Cost is how long training stands still for a save. Most failures lose nothing, for ranks that survive save the last
complete step as they leave; what is left is a power cut for all hosts, or a fault in the middle of all of them.
"""

from __future__ import annotations

import math

LOSSES_S = 24 * 3600.0
"""Between two ends that lose what was not saved; assumed."""
LEAST_MIN, MOST_MIN = 1.0, 30.0
BUSY = 0.05
"""Part of the time in which disks may write checkpoints; so often they wear out, too."""
FIRST_MIN = 2.0
"""Before the first save, of which nothing is known yet."""


def minutes_between(hold_s: float, write_s: float) -> float:
    """Minutes from one save to the next. hold_s: how long training stood still for the last; write_s: until it was on
    the disk.
    """
    young_s = math.sqrt(2 * max(0.0, hold_s) * LOSSES_S)
    return min(MOST_MIN, max(LEAST_MIN, young_s / 60, write_s / BUSY / 60))
