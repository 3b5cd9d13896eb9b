"""The order of test files where several run at once."""

from collections.abc import Sequence
from pathlib import Path

import pytest


def longest_first(items: list[pytest.Item], folder: Path, names: Sequence[str]) -> None:
    """Put these files of a folder before its others, in place: a long file that is begun last ends long after the rest.

    The tests of a file stay together and in their order.
    """
    ranks = {folder / name: rank for rank, name in enumerate(names)}
    places = [place for place, item in enumerate(items) if folder in item.path.parents]
    ordered = sorted((items[place] for place in places), key=lambda item: ranks.get(item.path, len(ranks)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
