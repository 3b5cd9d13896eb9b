"""Whether a run goes on after an attempt has ended, and on which hosts. Pure.

An attempt that got beyond the step it went on from has earned the next one. What fails again for the same cause without
having got any further would fail for ever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.runs.job import FailureJob

PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before the second attempt in a row without a step, and the longest; each is twice as long as the one before."""
NUMBER = re.compile(r"\d+")
NOT_AGAIN = frozenset({"UsageError", "SpecError", "DataError", "ModelError", "CheckFailed", "DoesNotFit"})
"""Kinds of error that the next attempt would meet as well: what was asked for is wrong, not what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An attempt that has ended."""

    error: Mapping[str, Any] | None
    """As in `Outcome.error`."""
    began_at: int
    """Optimizer step that it went on from; 0: the beginning."""
    reached: int
    """The newest step from which the run can go on, once it had ended."""
    starts: int | None = None
    """Of a program whose steps nobody knows: how often it was started so far. None: steps are known."""

    @property
    def has_advanced(self) -> bool:
        """Whether it got any further than it began."""
        return self.reached > self.began_at

    @property
    def cause(self) -> str:
        """What ended it, so that the same cause reads the same: without numbers that differ, as those of processes."""
        error = self.error or {}
        what = NUMBER.sub("#", f"{error.get('host', '')} {error.get('rank', '')} {error.get('what', '')}")
        # memory may suffice for the next size of a micro-batch
        return f"{what} {error.get('micro_batch') or ''}".rstrip()


def why_not(tried: Sequence[Tried], failures: FailureJob) -> str | None:
    """Why the run does not go on by itself after these attempts, oldest first; None: it does."""
    if failures.restarts == 0:
        return "the job says that a failure ends the run"
    last = tried[-1]
    if (last.error or {}).get("kind") in NOT_AGAIN:
        return "the next attempt would meet the same"
    return _why_not_unseen(last, failures) if last.starts is not None else _why_not_followed(tried, failures)


def _why_not_unseen(last: Tried, failures: FailureJob) -> str | None:
    starts = last.starts or 0
    return None if starts <= failures.restarts else f"it was started {starts} times"


def _why_not_followed(tried: Sequence[Tried], failures: FailureJob) -> str | None:
    last = tried[-1]
    if last.has_advanced:
        return None
    if len(tried) > 1 and tried[-2].cause == last.cause and not tried[-2].has_advanced:
        return "it failed twice for the same cause, without a step between"
    if (count := _in_vain(tried)) >= failures.restarts:
        return f"{count} attempts in a row did not get beyond step {last.began_at}"
    return None


def pause_s(tried: Sequence[Tried]) -> float:
    """How long to wait before the next attempt."""
    count = _in_vain(tried)
    return 0.0 if count < 2 else min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (count - 2))


def _in_vain(tried: Sequence[Tried]) -> int:
    """Attempts in a row, up to the last, that did not get any further."""
    count = 0
    for each in reversed(tried):
        if each.has_advanced:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHosts:
    """Which hosts take part in the next attempt."""

    hosts: tuple[str, ...]
    """In the order of the cluster, so that the first of them is the head."""
    waits_for: tuple[str, ...] = ()
    """Hosts that do not answer, and are still waited for."""
    without: tuple[str, ...] = ()
    """Hosts of the run that do not take part."""


def seats(
    all_hosts: Sequence[str],
    *,
    silent_s: Mapping[str, float],
    left: Collection[str],
    failures: FailureJob,
) -> NextHosts:
    """Who takes part. silent_s: hosts that do not answer, and for how long. left: those that were asked to leave, or
    left by themselves in good order.
    """
    stays = [host for host in all_hosts if host not in left]
    silent = [host for host in stays if host in silent_s]
    is_over = {host: failures.without and silent_s[host] >= failures.wait_s for host in silent}
    return NextHosts(
        hosts=tuple(host for host in stays if host not in silent_s),
        waits_for=tuple(host for host in silent if not is_over[host]),
        without=tuple(host for host in all_hosts if host in left or is_over.get(host, False)),
    )
