"""From the values of a foreign file to the draft of a job: one verdict for every key, and the defaults written out.

Everything here is pure but for `settled`, which asks the words of job.yaml whether they can say what the tables want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gangline.config.mistakes import Mistake
from gangline.convert.outcomes import Foreign, Outcome, Tool, Verdict, judge

Check = Callable[[Mapping[str, Any]], Sequence[Mistake]]
"""What is off in a job that is given by dotted keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyVerdict:
    """What became of one key of the file, or of a default that the file relies on."""

    key: str
    """Dotted, as the foreign file has it; of a default: the key of the job."""
    value: Any
    outcome: Outcome
    is_default: bool = False

    @property
    def verdict(self) -> Verdict:
        """One of the four."""
        return self.outcome.verdict


@dataclass(slots=True, kw_only=True)
class Draft:
    """A job on its way: the keys that were written, and by which foreign key."""

    tool: Tool
    foreign: Foreign
    job: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of job.yaml and their values."""
    writers: dict[str, str] = field(default_factory=dict)
    """Key of the job -> the foreign key that wrote it first."""
    verdicts: list[KeyVerdict] = field(default_factory=list)

    def record(self, key: str, value: Any, outcome: Outcome, *, is_default: bool = False) -> None:
        """Take in what became of a key. Two keys that say different things of the same are a contradiction."""
        for job, wanted in outcome.job.items():
            if job in self.job and self.job[job] != wanted:
                said = f"{self.writers[job]} says {self.job[job]} for {job}, this says {wanted}"
                outcome = Outcome(verdict="refused", reason=f"a contradiction: {said}", settled_by=(job,))
                break
        else:
            self.job.update(outcome.job)
            for job in outcome.job:
                self.writers.setdefault(job, key)
        self.verdicts.append(KeyVerdict(key=key, value=value, outcome=outcome, is_default=is_default))

    @property
    def refused(self) -> list[KeyVerdict]:
        """Keys that nothing can be made of yet."""
        return [each for each in self.verdicts if each.verdict == "refused"]


def draft(tool: Tool, foreign: Foreign, *, leave_out: Iterable[str] = (), given: Iterable[str] = ()) -> Draft:
    """Judge every key, then state the tool's defaults.

    leave_out: keys that the user gives up although numbers change. given: keys of the job that the command line says,
    which settle what the file leaves open.
    """
    made = Draft(tool=tool, foreign=foreign)
    left_out, known = set(leave_out), set(given)
    for key, value in foreign.values.items():
        outcome = judge(tool, key, value, foreign)
        made.record(key, value, _settled(key, outcome, left_out=left_out, given=known))
    for key, outcome in tool.missing(foreign).items():
        made.record(key, None, _settled(key, outcome, left_out=left_out, given=known))
    for default in tool.defaults:
        if default.job in made.job or any(_covers(key, default.job) for key in (*known, *_rivals(made, default.job))):
            continue
        value = default.value(foreign)
        if value is not None:
            outcome = Outcome(verdict="same", job={default.job: value}, reason=default.reason)
            made.record(default.job, value, outcome, is_default=True)
    return made


def _settled(key: str, outcome: Outcome, *, left_out: set[str], given: set[str]) -> Outcome:
    if key in left_out and outcome.verdict != "dropped":
        return Outcome(verdict="dropped", reason="left out, as you asked: numbers change")
    if outcome.verdict != "refused":
        return outcome
    said = [job for job in outcome.settled_by if any(_covers(word, job) or _covers(job, word) for word in given)]
    return Outcome(verdict="equivalent", reason=f"{said[0]} is given on the command line") if said else outcome


def _covers(key: str, other: str) -> bool:
    """Whether `key` is `other`, or stands above it."""
    return other == key or other.startswith(f"{key}.")


_EXCLUDE = (
    ("epochs", "steps"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("evaluation.every_steps", "evaluation.every_epochs"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
)


def _rivals(made: Draft, job: str) -> list[str]:
    """[job], where a key is written already that excludes it."""
    return [job for pair in _EXCLUDE if job in pair and any(other in made.job for other in pair if other != job)]


def fit(made: Draft, check: Check) -> Draft:
    """Refuse what job.yaml has no words for: "not supported yet". This is the one place that asks which keys exist.

    Keys are taken out until the rest is a job that gangline's loader accepts.
    """
    for _ in range(len(made.job) + 1):
        misfits = _misfits(made.job, check(made.job))
        if not misfits:
            break
        verdicts = [_refused(each, misfits) for each in made.verdicts]
        job = {key: value for key, value in made.job.items() if key not in misfits}
        made = Draft(tool=made.tool, foreign=made.foreign, job=job, writers=made.writers, verdicts=verdicts)
    return made


def _misfits(job: Mapping[str, Any], mistakes: Sequence[Mistake]) -> dict[str, str]:
    """Keys of the job that the loader takes offence at, and what it says."""
    found: dict[str, str] = {}
    for mistake in mistakes:
        for key in sorted(job, key=len, reverse=True):
            if _covers(key, mistake.key) or _covers(mistake.key, key):
                found.setdefault(key, mistake.contrast)
                break
    # a path of the model is looked for beside the job, which is not there yet
    return {key: said for key, said in found.items() if key != "model" and not key.startswith("model.path")}


def _refused(each: KeyVerdict, misfits: Mapping[str, str]) -> KeyVerdict:
    if each.verdict in {"refused", "dropped"}:
        return each
    bad = [key for key in each.outcome.job if key in misfits]
    if not bad:
        return each
    value = each.outcome.job[bad[0]]
    reason = f"not supported yet: {bad[0]}: {value} ({misfits[bad[0]]})"
    return replace(each, outcome=Outcome(verdict="refused", reason=reason, settled_by=(bad[0],)))
