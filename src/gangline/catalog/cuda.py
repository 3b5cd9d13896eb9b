"""What a CUDA version asks of cards and drivers.

Cards: the architectures that PyTorch compiles its official Linux builds for (its .ci/manywheel/build_cuda.sh). A binary
for 8.6 runs on every 8.x from 8.6 on, not on 9.0. Drivers: the CUDA toolkit's release notes and NVIDIA's page on minor
version compatibility: within one major version, a driver of its first minor version runs all later ones, with limits.
"""

from __future__ import annotations

import re

Version = tuple[int, ...]

_ARCHITECTURES: dict[Version, tuple[Version, ...]] = {
    (11, 8): ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    (12, 1): ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    (12, 4): ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    (12, 6): ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    (12, 8): ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    (12, 9): ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    (13, 0): ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (11, 0), (12, 0)),
}
_FLOORS: dict[int, Version] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""The oldest driver that runs anything of a major version."""
_OWN: dict[Version, Version] = {
    (11, 8): (520, 61, 5),
    (12, 1): (530, 30, 2),
    (12, 4): (550, 54, 14),
    (12, 6): (560, 28, 3),
    (12, 8): (570, 26),
    (12, 9): (575, 51, 3),
    (13, 0): (580, 65, 6),
}
"""The driver that came with the toolkit: from it on there are no limits."""


def numbers(text: str) -> Version:
    """The numbers at the beginning of a version: "570.124.06" -> (570, 124, 6); () where there are none."""
    found = re.match(r"\d+(\.\d+)*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def needed_cuda(capability: str) -> str | None:
    """The oldest CUDA whose official torch build has kernels for a card, such as "12.8" for "12.0"."""
    fitting = [cuda for cuda in sorted(_ARCHITECTURES) if _runs(numbers(capability), _ARCHITECTURES[cuda])]
    return ".".join(map(str, fitting[0])) if fitting else None


def has_kernels(cuda: str, capability: str) -> bool | None:
    """Whether torch's official build for a CUDA version runs on a card; None where this table does not know."""
    built_for, card = _ARCHITECTURES.get(numbers(cuda)[:2]), numbers(capability)
    return _runs(card, built_for) if built_for and card else None


def _runs(card: Version, built_for: tuple[Version, ...]) -> bool:
    return any(built[0] == card[0] and built <= card for built in built_for)


def driver_floor(cuda: str) -> str | None:
    """The oldest driver that can run anything of this CUDA's major version; None where this table does not know."""
    floor = _FLOORS.get(numbers(cuda)[0]) if numbers(cuda) else None
    return ".".join(map(str, floor)) if floor else None


def own_driver(cuda: str) -> str | None:
    """The driver that came with a CUDA version; None where this table does not know."""
    own = _OWN.get(numbers(cuda)[:2])
    return ".".join(map(str, own)) if own else None


def has_bf16(capability: str) -> bool:
    """Whether a card computes in bfloat16."""
    return numbers(capability) >= (8, 0)
