"""How far the failure of a rank is from being the cause. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from gangline.diagnose.signatures import is_witness

ECHOES = 2
"""Weight from which a failure is no cause any more."""

ORDERED = 3
"""Weight of an end that an order or torchrun brought about."""

Failure = Mapping[str, Any]
"""How one rank ended, as its guard says (HostStatus.failures)."""


def weight(failure: Failure) -> int:
    """How far a failure is from being the cause; time decides among equals.

    0: an error of its own, or a signal from outside. 1: an exit that nobody explained. 2: an echo of another's end.
    3: torchrun or an order ended it.
    """
    code = failure["exit"]
    if failure["error"] is not None:
        return ECHOES if is_echo(failure["error"]) else 0
    if failure["ordered"] or code == -signal.SIGTERM or code is None:
        return ORDERED
    return 0 if code < 0 else 1


def is_echo(error: Mapping[str, Any]) -> bool:
    """Whether an error only tells that another rank has gone."""
    return is_witness(f"{error.get('what', '')}\n{error.get('seen', '')}")
