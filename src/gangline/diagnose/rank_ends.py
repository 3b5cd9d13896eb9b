"""The ends of ranks: how far each is from being the cause, and what torchrun says of them. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from gangline.diagnose.signatures import is_witness, last_exception

ECHOES = 2
"""Weight from which a failure is no cause any more."""

ORDERED = 3
"""Weight of an end that an order or torchrun brought about."""

NOT_PASSED = "failed to pass monitoredBarrier"
"""So says a rank that waited."""
OTHER_SIZE = re.compile(r"op\.preamble\.(length|nbytes) <= op\.nbytes")
"""Gloo ends the rank that expected less than another one sent: either may be wrong."""

Failure = Mapping[str, Any]
"""How one rank ended, as its host agent says (HostStatus.failures)."""


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def weight(failure: Failure) -> int:
    """How far a failure is from being the cause; time decides among equals.

    0: an error of its own, or a signal from outside. 1: an exit that nobody explained. 2: an echo of another's end.
    3: torchrun or an order ended it. A program that is not ours writes no error down: the end of its log has it.
    """
    code = failure["exit"]
    if failure["error"] is not None:
        return ECHOES if is_echo(failure["error"]) else 0
    if failure["ordered"] or code == -signal.SIGTERM or code is None:
        return ORDERED
    lines = [str(line) for line in failure.get("log_tail") or ()]
    raised = last_exception(lines)
    aborted = "\n".join(lines) if code == -signal.SIGABRT else ""
    if is_witness(raised or aborted) or OTHER_SIZE.search(aborted) or NOT_PASSED in (raised or ""):
        return ECHOES
    return 0 if code < 0 or raised else 1


def is_echo(error: Mapping[str, Any]) -> bool:
    """Whether an error only tells that another rank has gone."""
    return is_witness(f"{error.get('what', '')}\n{error.get('seen', '')}")


# The verdict that torchrun prints when it ends: it is not believed, and not shown as a cause.


VERDICT = "Root Cause (first observed failure)"
LEFT_OUT = (
    'what torchrun calls the "root cause" is left out: it is the end that it saw first, often of a rank that waited'
)
_FENCE = re.compile(r"={20,}\s*$")


def without_verdict(lines: Sequence[str]) -> list[str]:
    """Lines of torchrun's output without its verdict, which ends at a line of equals signs; a line says so instead."""
    kept: list[str] = []
    inside = False
    for line in lines:
        if VERDICT in line:
            inside = True
            kept.append(LEFT_OUT)
        elif inside and _FENCE.search(line):
            inside = False
        elif not inside:
            kept.append(line)
    return kept
