"""Who measures with whom, and when: no host is in two pairs at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every unordered pair once, in as few rounds as there can be: as in a tournament, one stays, the others turn."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meets = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in meets if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def both_ways(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The same pairs there, and back."""
    return list(pairs), [(other, one) for one, other in pairs]


def sample(found: list[list[tuple[str, str]]], most: int) -> list[list[tuple[str, str]]]:
    """At most so many rounds, spread evenly: each host still meets as many others as every other host does."""
    if len(found) <= most:
        return found
    return [found[index * len(found) // most] for index in range(most)]
