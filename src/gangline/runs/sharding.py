"""Along which of its dimensions a tensor is divided among ranks: what the plan counts and the worker does. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def shard_dimension(shape: Sequence[int], parts: int) -> int:
    """The first one, but for experts: the first that is divided evenly, if there is one.

    Rows of a matrix are many, and one more on some ranks is nothing. The first dimension of experts that lie in one
    tensor is their number: 8 of them over 12 ranks would be one on each of 8 ranks, none on the others, and FSDP2 sends
    what is missing as zeros. It divides no other dimension unevenly.
    """
    if len(shape) < 3 or shape[0] % parts == 0:
        return 0
    return next((place for place, size in enumerate(shape) if size % parts == 0), 0)


def padded(shape: Sequence[int], parts: int) -> int:
    """Numbers of all parts, each as large as the largest."""
    place, numbers = shard_dimension(shape, parts), 1
    for each, size in enumerate(shape):
        numbers *= -(-size // parts) * parts if each == place else size
    return numbers
