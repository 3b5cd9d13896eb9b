"""Which rows share a sample: best fit decreasing, on lengths alone.

The result depends on the lengths only, so it is fixed with the content of the set. Johnson (1973) shows that best
fit decreasing needs at most 11/9 of the fewest bins plus a constant; on text it fills samples to more than 99 %.
The samples are then numbered at random, so that the first ones of a set stand for all of it.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

_SEED = 0x67616E67


def mixed(num_samples: int) -> npt.NDArray[np.int64]:
    """The new number of every sample: a permutation of 0 to `num_samples` - 1 that follows from their count alone.

    Packing makes the fullest samples first, and files are often sorted; `evaluation.max_samples` takes the first.
    """
    # NEP 19 fixes the stream of a bit generator for ever, but not what Generator.permutation makes of it.
    numbers = np.random.PCG64(_SEED).random_raw(num_samples)
    return np.argsort(numbers, kind="stable")


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """The sample of every row, numbered from 0 in the order of their first row's length, longest first.

    lengths: tokens of every row, 1 to `capacity`. Memory: about 40 bytes per row.
    """
    sample_of = np.empty(len(lengths), dtype=np.int64)
    open_samples: dict[int, array[int]] = {}
    # bit c is set where an open sample has room for c tokens: best fit is then the lowest bit from `length` on
    rooms, num_samples = 0, 0
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[room].pop()
            if not open_samples[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, num_samples
            num_samples += 1
        sample_of[row] = sample
        if left := room - length:
            open_samples.setdefault(left, array("q")).append(sample)
            rooms |= 1 << left
    return sample_of
