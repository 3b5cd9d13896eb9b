"""The explanation of a run, for people and for programs: first cause, echoes, evidence, next command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gangline.diagnose.log_search import Sighting, recognise
from gangline.diagnose.rank_ends import without_verdict
from gangline.report.run_history import Attempt, RankEnd, RunHistory, event_rows, next_step, rank0_rows
from gangline.report.text_table import clean
from gangline.runs.registry import NEVER_STARTED, RunRecord
from gangline.units import listed

LABEL = 9
"""Columns of the words before a line."""
SEEN_LINES = 24
TAIL_LINES = 8
SHOWN_LINE_CHARS, SHOWN_END_CHARS = 400, 150
"""Of a longer line the beginning and the end are shown."""
STACK_FRAMES = 4
STACK_LINES = 40
MOST_ENDS = 16

_THEN = re.compile(r"[;,.]? *then: gangline resume\b.*$")


def explain_lines(history: RunHistory, *, is_job: bool, can_resume: bool) -> list[str]:
    """The whole history, oldest attempt first, the cause first in each.

    is_job: it is not the user's own command. can_resume: it can be resumed.
    """
    attempts = [_attempt_lines(history, index, is_job=is_job) for index in range(len(history.attempts))]
    ahead = next_step(history, is_job=is_job, can_resume=can_resume)
    shown = [f"to go on:  {ahead.command}   # {ahead.why}" if ahead.command else f"to go on:  {ahead.why}"]
    lines = [line for block in [_head(history), *attempts, shown] for line in ["", *block]][1:]
    return [clean(line) for line in lines]


def explain_json(history: RunHistory, *, is_job: bool, can_resume: bool) -> dict[str, Any]:
    """The same as plain data."""
    ahead = next_step(history, is_job=is_job, can_resume=can_resume)
    state = history.run.state
    return {
        "run": history.id,
        "name": state.name if state else "",
        "phase": history.run.phase,
        "silent": history.run.silent,
        "steps": history.steps,
        "early_stopping": history.early or None,
        "attempts": [_attempt_json(attempt) for attempt in history.attempts],
        "missing": list(history.gaps),
        "go_on": {"command": ahead.command, "why": ahead.why},
    }


def _head(history: RunHistory) -> list[str]:
    state = history.run.state
    last = history.attempts[-1] if history.attempts else None
    reached = next((each.to_step for each in reversed(history.attempts) if each.to_step is not None), None)
    of = f" of {history.steps}" if history.steps else ""
    parts = [
        f"{history.id}{f' ({state.name})' if state else ''} {_stands(history.run)}",
        f"attempt {last.number}" if last else "",
        "" if reached is None else f"step {reached}{of}",
    ]
    early = [f"early stopping: {history.early}"] if history.early else []
    silent = [f"as last heard: {history.run.silent}"] if history.run.silent and not history.run.suspended else []
    return [", ".join(part for part in parts if part), *early, *silent, *(f"missing: {gap}" for gap in history.gaps)]


def _stands(run: RunRecord) -> str:
    if run.silent_host is not None:
        return f"was {run.phase} when it was last heard of"
    if run.suspended is not None:
        return f"is suspended: Slurm has suspended job {run.suspended}"
    words = {
        "preparing": "is being prepared",
        "running": "runs",
        "stopping": "is being ended",
        "restarting": "goes on by itself with another attempt",
        "finished": "has finished",
        "stopped": "was stopped",
        "failed": "has failed",
        "lost": "is lost: its supervisor is gone",
        NEVER_STARTED: "never started: its start was killed before any rank ran",
    }
    return words.get(run.phase, "cannot be read")


def _attempt_lines(history: RunHistory, index: int, *, is_job: bool) -> list[str]:
    attempt = history.attempts[index]
    after = history.attempts[index + 1] if index + 1 < len(history.attempts) else None
    is_over = history.run.ended or after is not None
    open_end = "nobody wrote down how it ended" if is_over else "goes on"
    if not is_over and history.run.silent_host is not None:
        open_end = "whether it goes on is not known"
    elif not is_over and history.run.suspended is not None:
        open_end = "rests"
    rows = [_title(attempt, open_end=open_end, is_job=is_job)]
    if attempt.error is not None:
        rows += _cause(history.id, attempt, attempt.error, is_followed=after is not None)
    rows += _ends(attempt)
    rows += _labelled("left", attempt.outcome.left if attempt.outcome else ())
    rows += _labelled("unseen", _unseen(attempt))
    rows += _labelled("events", event_rows(attempt.events, cause=str((attempt.error or {}).get("what", ""))))
    rows += _labelled("rank 0", rank0_rows(attempt.told))
    return [*rows, *_labelled("then", what_followed(attempt, after))]


def _title(attempt: Attempt, *, open_end: str, is_job: bool) -> str:
    where = f" on {listed(attempt.hosts)}" if attempt.hosts else ""
    return f"attempt {attempt.number}{where}: {_steps(attempt) if is_job else ''}{attempt.result or open_end}"


def _steps(attempt: Attempt) -> str:
    if attempt.from_step is None and attempt.to_step is None:
        return "no step, "
    begun = f"from step {attempt.from_step} " if attempt.from_step is not None else ""
    return f"{begun}to step {attempt.from_step if attempt.to_step is None else attempt.to_step}, "


def _cause(run_id: str, attempt: Attempt, error: Mapping[str, Any], *, is_followed: bool) -> list[str]:
    seen = [line for line in without_verdict(str(error.get("seen", "")).splitlines()) if line.strip()]
    fix = str(error.get("fix", ""))
    known = _known(error)
    tail = [] if _is_quoted(error) else without_verdict(_tail(error))
    return [
        *_labelled("cause", [str(error.get("what", "")) or "nobody says"]),
        *_labelled("seen", _middle_out(seen, SEEN_LINES)),
        *_labelled("stacks", _stacks(error)),
        *_labelled("fix", [_THEN.sub("", fix) if is_followed else fix] if fix else []),
        *(_labelled("known", [known.means, f"fix: {known.fix}"]) if known else []),
        *_labelled("log", [*tail[-TAIL_LINES:], *_log(run_id, attempt, error)]),
    ]


def _known(error: Mapping[str, Any]) -> Sighting | None:
    """The known failure in the evidence, unless the cause says the same."""
    said = [str(error.get("what", "")), *str(error.get("seen", "")).splitlines(), *_tail(error)]
    host = str(error.get("host") or "the host")
    seen = recognise("\n".join(map(clean, said)), host=host)
    own = min((each for each in seen if each.level in {"cause", "symptom"}), key=lambda each: each.order, default=None)
    return own if own and own.means not in str(error.get("what", "")) else None


def _tail(error: Mapping[str, Any]) -> list[str]:
    lines = error.get("log_tail")
    return [str(line) for line in lines if str(line).strip()] if isinstance(lines, list | tuple) else []


def _is_quoted(error: Mapping[str, Any]) -> bool:
    """Whether `seen` has the end of the log already."""
    tail = _tail(error)
    return not tail or tail[-1] in str(error.get("seen", ""))


def _log(run_id: str, attempt: Attempt, error: Mapping[str, Any]) -> list[str]:
    if error.get("log") is None:
        return []
    rank = error.get("rank")
    which = f"--rank {rank}" if type(rank) is int else "--console"
    return [f"all of it: gangline logs {run_id} --attempt {attempt.number} {which}"]


def _stacks(error: Mapping[str, Any]) -> list[str]:
    """The stacks of the other ranks of a hang, innermost call first; that of the accused is in `seen`."""
    stacks = error.get("stacks")
    rows = []
    for told in stacks if isinstance(stacks, list) else ():
        if not isinstance(told, dict) or told.get("rank") == error.get("rank"):
            continue
        frames = told.get("stack")
        shown = [str(frame) for frame in frames[:STACK_FRAMES]] if isinstance(frames, list) else []
        where = f"rank {told.get('rank')} on {told.get('host')} in {told.get('phase')} of step {told.get('step')}"
        rows += [where, *(f"  {frame}" for frame in shown)]
    return _middle_out(rows, STACK_LINES)


def _ends(attempt: Attempt) -> list[str]:
    """The ends of other ranks: their own failures, then echoes."""
    own, echoes = _others(attempt)
    rows = _labelled("also", [_end_line(end) for end in own])
    shown = [_end_line(end) for end in echoes[:MOST_ENDS]]
    more = [f"and {len(echoes) - MOST_ENDS} more"] if len(echoes) > MOST_ENDS else []
    return [*rows, *_labelled("echoes", [*shown, *more])]


def _others(attempt: Attempt) -> tuple[list[RankEnd], list[RankEnd]]:
    """Ends of all ranks but the cause: own failures, and echoes."""
    error = attempt.error or {}
    cause = (error.get("host"), error.get("rank"))
    others = [end for end in attempt.ends if (end.host, end.rank) != cause]
    return [end for end in others if not end.is_echo], [end for end in others if end.is_echo]


def _end_line(end: RankEnd) -> str:
    return f"rank {end.rank} on {end.host}: {end.what}"


def _unseen(attempt: Attempt) -> list[str]:
    hosts = attempt.outcome.unverified if attempt.outcome else ()
    return [f"{host} did not answer at the end: whether something is left there is not known" for host in hosts]


def what_followed(attempt: Attempt, after: Attempt | None) -> list[str]:
    """How the run went on after an attempt, or why it did not: at most one line."""
    if after is None:
        why = (attempt.of("failed") or {}).get("why")
        return [f"no attempt followed by itself: {why}"] if why else []
    if (event := after.begun_by) is None:
        return [f"attempt {after.number} was begun by gangline resume"]
    step = event.get("step")
    without = event.get("without")
    parts = [
        f"attempt {after.number} went on by itself {f'from step {step}' if step else 'from the beginning'}",
        f"without {listed([str(host) for host in without])}" if isinstance(without, list) and without else "",
        _lost(event.get("lost_steps")),
    ]
    return [", ".join(part for part in parts if part)]


def _lost(steps: object) -> str:
    if type(steps) is not int:
        return ""
    return "no step was lost" if steps == 0 else f"{steps} step{'' if steps == 1 else 's'} lost"


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    own, echoes = _others(attempt)
    known = _known(attempt.error) if attempt.error else None
    return {
        "attempt": attempt.number,
        "hosts": list(attempt.hosts),
        "from_step": attempt.from_step,
        "to_step": attempt.to_step,
        "committed_step": attempt.committed,
        "by_itself": attempt.begun_by is not None,
        "result": attempt.result,
        "cause": None if attempt.error is None else dict(attempt.error),
        "known": None if known is None else {"id": known.id, "means": known.means, "fix": known.fix},
        "also_failed": [_end_json(end) for end in own],
        "echoes": [_end_json(end) for end in echoes],
        "left": list(attempt.outcome.left) if attempt.outcome else [],
        "unverified": list(attempt.outcome.unverified) if attempt.outcome else [],
        "events": [dict(event) for event in attempt.events],
        "told_by_rank_0": [dict(event) for event in attempt.told],
    }


def _end_json(end: RankEnd) -> dict[str, Any]:
    names = ("host", "rank", "what", "ordered", "exit", "log")
    return {name: getattr(end, name) for name in names} | {"log_tail": list(end.log_tail)}


def _labelled(label: str, lines: Iterable[str]) -> list[str]:
    """Lines behind their label; of long lines the middle is left out."""
    cut = [_shortened(clean(line)) for line in lines]
    return [f"  {label if index == 0 else '':<{LABEL}}{text}".rstrip() for index, text in enumerate(cut)]


def _shortened(text: str) -> str:
    begin = SHOWN_LINE_CHARS - SHOWN_END_CHARS - 5
    return text if len(text) <= SHOWN_LINE_CHARS else f"{text[:begin]} ... {text[-SHOWN_END_CHARS:]}"


def _middle_out(lines: Sequence[str], most: int) -> list[str]:
    """The first and the last lines, where there are too many."""
    if len(lines) <= most:
        return list(lines)
    first = most // 4
    left_out = len(lines) - most + 1
    return [*lines[:first], f"... {left_out} lines ...", *lines[len(lines) - (most - first - 1) :]]
