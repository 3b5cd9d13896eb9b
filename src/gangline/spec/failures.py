"""From the words of `failures:` to what is done when a part of the gang fails."""

from __future__ import annotations

from gangline.runs.job import FailureJob
from gangline.spec.job_words import JobWords
from gangline.spec.validate import Checked
from gangline.units import format_duration, parse_duration

LONGEST_WAIT_S = 86400.0


def resolve_failures(checked: Checked[JobWords]) -> FailureJob:
    """What the words mean; what is off is recorded in `checked`."""
    words = checked.words.failures
    wait_s = parse_duration(words.wait)
    if wait_s > LONGEST_WAIT_S:
        checked.report(
            ("failures", "wait"),
            seen=f"a wait of {format_duration(wait_s)}",
            expected="24h at the most",
            fix="write a shorter time, such as 10m: with take_back, a host that answers later joins again",
        )
    _check_restarts(checked)
    if words.take_back and not words.without and "take_back" in words.model_fields_set:
        checked.report(
            ("failures", "take_back"),
            seen="take_back, but the run never goes on without a host (without: false)",
            expected="take_back with without: true only",
            fix="delete it, or write `without: true`",
            reads=(("failures", "without"),),
        )
    return FailureJob(
        restarts=words.restarts,
        wait_s=wait_s,
        without=words.without,
        take_back=words.take_back,
        smaller_micro_batch=words.smaller_micro_batch,
    )


def _check_restarts(checked: Checked[JobWords]) -> None:
    """Without restarts the other keys say nothing."""
    words = checked.words.failures
    for key in ("wait", "without", "take_back", "smaller_micro_batch"):
        if words.restarts == 0 and key in words.model_fields_set:
            checked.report(
                ("failures", key),
                seen=f"{key}, but the first failure ends the run (restarts: 0)",
                expected=f"{key} with restarts of 1 or more",
                fix=f"delete {key}, or write more restarts",
                reads=(("failures", "restarts"),),
            )
