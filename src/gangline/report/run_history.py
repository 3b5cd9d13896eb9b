"""The history of a run, attempt by attempt, from the records of its supervisors, host agents and rank 0.

Nothing is sorted by the clocks of different hosts: events are in the order of the supervisor, or of rank 0, and ends of
ranks host by host, in the order of each host agent.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gangline.diagnose.rank_ends import ECHOES, ORDERED, signal_name, weight
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable
from gangline.report.follow import View
from gangline.report.tail import JsonTail
from gangline.report.text_table import age, table
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import decode_record
from gangline.runs.registry import NEVER_STARTED, RunRecord
from gangline.runs.state import AttemptOutcome
from gangline.transport.ssh_options import NONSENSE, understood, whole
from gangline.transport.transport import Transport
from gangline.units import fold_names, format_duration

MOST_ATTEMPTS = 200
"""Only the newest attempts are read."""

EventRecord = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The bad end of one rank, as its host agent reports it."""

    host: str
    rank: int
    what: str
    weight: int
    """How far it is from being the cause (see `gangline.diagnose.rank_ends`)."""
    ordered: bool
    """It had the order to end."""
    exit: int | None
    log: str
    log_tail: tuple[str, ...]

    @property
    def is_echo(self) -> bool:
        """Whether it only lost other ranks, or was ended."""
        return self.weight >= ECHOES


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the gang, as far as it is known."""

    number: int
    hosts: tuple[str, ...]
    begun_by: EventRecord | None
    """The supervisor's event `restarting` that began it; None: train, run or resume began it."""
    from_step: int | None
    """The step with which it began; None: not known, or the user's own program."""
    to_step: int | None
    committed: int | None
    """The last step with a committed checkpoint."""
    outcome: AttemptOutcome | None
    """None: it has not ended, or its end was not written."""
    error: Mapping[str, Any] | None
    """The first cause, as `AttemptOutcome.error`; shorter where only an event has it."""
    ends: tuple[RankEnd, ...]
    """Ranks that ended badly, host by host, in the order of each host agent."""
    events: tuple[EventRecord, ...]
    """Events of the supervisor, in its order."""
    told: tuple[EventRecord, ...]
    """Events of rank 0, in its order."""

    @property
    def result(self) -> str | None:
        """finished, stopped or failed; None: it has not ended, as far as is known."""
        return self.outcome.result if self.outcome else None

    def of(self, name: str) -> EventRecord | None:
        """The last event of that name."""
        return next((event for event in reversed(self.events) if event.get("event") == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """A run and its attempts."""

    id: str
    run: RunRecord
    attempts: tuple[Attempt, ...]
    steps: int | None
    """In all, where that is known."""
    gaps: tuple[str, ...]
    """The records that could not be read."""

    @property
    def early(self) -> str:
        """Why it finished before its last step; "" where it did not."""
        if self.run.phase != "finished" or not self.attempts:
            return ""
        told = (event for event in self.attempts[-1].told if event.get("event") == "early-stopping")
        return next((str(event.get("what", "")) for event in told), "")


@dataclass(slots=True)
class _Notes:
    """The metrics and events of one attempt."""

    events: list[EventRecord] = field(default_factory=list)
    told: list[EventRecord] = field(default_factory=list)
    from_step: int | None = None
    to_step: int | None = None


def read_history(view: View, *, records: RunLayout, remote: Transport | None) -> RunHistory:
    """The readable history of a run. records: its folder on the supervisor's host `remote`; None: here.

    A host that does not answer leaves a gap. Raises HostKeyRefused.
    """
    run = view.record()
    gaps: dict[str, None] = {}
    notes, steps = _read_notes(view, gaps)
    last = run.state.attempt if run.state else max(notes, default=0)
    if last > MOST_ATTEMPTS:
        gaps[f"attempts 1 to {last - MOST_ATTEMPTS} are not shown"] = None
    numbers = range(max(1, last - MOST_ATTEMPTS + 1), last + 1)
    outcomes = {number: _outcome(number, view.layout, records, remote, gaps) for number in numbers}
    attempts = [_attempt(number, notes, outcomes[number], run if number == last else None) for number in numbers]
    return RunHistory(id=view.layout.run_id, run=run, attempts=tuple(attempts), steps=steps, gaps=tuple(gaps))


def _read_notes(view: View, gaps: dict[str, None]) -> tuple[dict[int, _Notes], int | None]:
    notes: dict[int, _Notes] = defaultdict(_Notes)
    steps: int | None = None
    for record in records_of(view.tails(), gaps):
        number = record.get("attempt")
        if type(number) is not int:
            continue
        if record.get("kind") == "event":
            _note_event(notes[number], record)
        elif record.get("kind") == "step" and type(record.get("step")) is int:
            notes[number].to_step = record["step"]
            steps = record["steps"] if type(record.get("steps")) is int else steps
    return notes, steps


def records_of(tails: Iterable[JsonTail], gaps: dict[str, None]) -> Iterator[dict[str, Any]]:
    """All lines of some files, file by file. gaps: takes the hosts that do not answer. Raises HostKeyRefused."""
    for tail in tails:
        is_behind = True
        while is_behind:
            try:
                yield from tail.objects()
            except HostKeyRefused:
                raise
            except HostUnreachable as error:
                gaps[f"{error.what}: what it wrote is missing"] = None
                break
            is_behind = tail.is_behind


def _note_event(notes: _Notes, record: dict[str, Any]) -> None:
    if record.get("source") != "worker":
        notes.events.append(record)
        return
    notes.told.append(record)
    if record.get("event") in {"started", "resumed"} and type(record.get("step")) is int:
        notes.from_step = record["step"]


def _outcome(
    number: int, here: RunLayout, records: RunLayout, remote: Transport | None, gaps: dict[str, None]
) -> AttemptOutcome | None:
    """The outcome of an attempt: it is written once, so a copy on this computer is enough."""
    try:
        return AttemptOutcome.load(here.outcome(number))
    except FileNotFoundError:
        pass
    except (*NONSENSE, OSError) as error:
        gaps[str(error).splitlines()[0]] = None
    if remote is None:
        return None
    try:
        with understood(remote.host, f"how attempt {number} ended"):
            path = records.outcome(number)
            return decode_record(remote.read(path), path, AttemptOutcome, host=remote.host)
    except HostKeyRefused:
        raise
    except HostUnreachable as error:
        gaps[f"{error.what}: what it wrote is missing"] = None
    except GanglineError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            gaps[f"{error.what}: {error.seen}"] = None
    return None


def _attempt(
    number: int, notes: Mapping[int, _Notes], outcome: AttemptOutcome | None, last_of: RunRecord | None
) -> Attempt:
    """last_of: the run, if it is the last attempt."""
    mine = notes.get(number) or _Notes()
    begun_by = _begun_by(number, notes)
    hosts = _hosts(mine.events, outcome, begun_by)
    return Attempt(
        number=number,
        hosts=hosts,
        begun_by=begun_by,
        from_step=mine.from_step,
        to_step=mine.to_step,
        committed=_last_step(mine.events, "committed"),
        outcome=outcome,
        error=_error(mine.events, outcome, last_of),
        ends=_ends(outcome, hosts),
        events=tuple(mine.events),
        told=tuple(mine.told),
    )


def _begun_by(number: int, notes: Mapping[int, _Notes]) -> EventRecord | None:
    before = notes.get(number - 1)
    events = before.events if before else []
    found = [event for event in events if event.get("event") == "restarting" and event.get("next") == number]
    return found[-1] if found else None


def _hosts(
    events: Sequence[EventRecord], outcome: AttemptOutcome | None, begun_by: EventRecord | None
) -> tuple[str, ...]:
    """In the order in which they were started."""
    started = next((event for event in events if event.get("event") == "started"), None)
    for event in (started, begun_by):
        names = event.get("hosts") if event else None
        if isinstance(names, list) and names:
            return tuple(map(str, names))
    return tuple(outcome.hosts) if outcome else ()


def _last_step(events: Sequence[EventRecord], name: str) -> int | None:
    steps = [event["step"] for event in events if event.get("event") == name and type(event.get("step")) is int]
    return steps[-1] if steps else None


def _error(
    events: Sequence[EventRecord], outcome: AttemptOutcome | None, last_of: RunRecord | None
) -> Mapping[str, Any] | None:
    if outcome is not None:
        return outcome.error
    if last_of is not None and last_of.phase == "failed" and last_of.state and last_of.state.error:
        return last_of.state.error
    failing = next((event for event in reversed(events) if event.get("event") == "failing"), None)
    return {"what": str(failing.get("what", ""))} if failing else None


def _ends(outcome: AttemptOutcome | None, hosts: Sequence[str]) -> tuple[RankEnd, ...]:
    """Times are those of one host agent's clock each, and compared within its host only."""
    found: dict[str, list[tuple[float, RankEnd]]] = {host: [] for host in hosts}
    for data in outcome.failures if outcome else ():
        try:
            end, time = _end(data), float(data["time"])
        except NONSENSE:
            continue  # a malformed row is skipped
        found.setdefault(end.host, []).append((time, end))
    return tuple(end for rows in found.values() for _, end in sorted(rows, key=lambda row: row[0]))


def _end(data: Mapping[str, Any]) -> RankEnd:
    error, code = data["error"], data["exit"]
    if not isinstance(error, dict | None):
        raise TypeError("an error that is none")
    found = weight(data)
    return RankEnd(
        host=str(data["host"]),
        rank=whole(data["rank"]),
        what=_what(error, None if code is None else whole(code), found, ordered=bool(data["ordered"])),
        weight=found,
        ordered=bool(data["ordered"]),
        exit=code,
        log=str(data["log"]),
        log_tail=tuple(map(str, data["log_tail"])),
    )


def _what(error: Mapping[str, Any] | None, code: int | None, found: int, *, ordered: bool) -> str:
    if error is not None:
        return next(iter(str(error.get("what", "")).splitlines()), "an error without words")
    if found == ORDERED:
        return "ended by gangline" if ordered else _ended_with_others(code)
    return f"killed by {signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"


def _ended_with_others(code: int | None) -> str:
    return "ended, and nobody says how" if code is None else "ended with the others, by SIGTERM"


# The attempts of a run, one line each: time, hosts, steps and end.


COLUMNS = ("attempt", "began", "took", "hosts", "from", "to", "end")


def attempt_table(history: RunHistory, *, now: datetime) -> list[str]:
    """For people, oldest first:

    attempt  began    took         hosts    from   to     end
    1        2 h ago  52 min 10 s  pc[1-3]  0      1,241  pc3 does not answer
    2        1 h ago  -            pc[1-2]  1,240  2,900  running
    """
    rows = [_row(each) for each in attempt_rows(history)]
    return table(COLUMNS, [[*row[:1], age(row[1], now=now) or "-", *row[2:]] for row in rows])


def attempt_rows(history: RunHistory) -> list[dict[str, Any]]:
    """For programs, oldest first.

    result: finished, stopped or failed; that of the run where the attempt has not ended; None: not known.
    what: the first line of its cause, or why another attempt took its place. next: whether one did by itself.
    """
    following = [*history.attempts, None][1:]
    return [_attempt_row(each, after, history) for each, after in zip(history.attempts, following, strict=True)]


def _attempt_row(attempt: Attempt, after: Attempt | None, history: RunHistory) -> dict[str, Any]:
    by_itself = after.begun_by if after else None
    error = attempt.error or {}
    said = by_itself.get("what") if by_itself else error.get("what")
    return {
        "attempt": attempt.number,
        "began": str((attempt.of("started") or {}).get("time", "")),
        "ended": attempt.outcome.ended if attempt.outcome else "",
        "hosts": list(attempt.hosts),
        "from_step": attempt.from_step,
        "to_step": attempt.to_step,
        "result": attempt.result or (history.run.phase if after is None else None),
        "what": next(iter(str(said or "").splitlines()), ""),
        "next": by_itself is not None,
    }


def _row(row: dict[str, Any]) -> list[str]:
    return [
        str(row["attempt"]),
        row["began"],
        _took(row["began"], row["ended"]),
        fold_names(row["hosts"]) or "-",
        _step(row["from_step"]),
        _step(row["to_step"]),
        _end_cell(row),
    ]


def _end_cell(row: dict[str, Any]) -> str:
    if row["next"]:
        return row["what"] or "another took its place"
    result = row["result"] or "nobody wrote down how"
    return f"{result}: {row['what']}" if row["what"] else str(result)


def _step(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def _took(began: str, ended: str) -> str:
    """Both times are those of the supervisor's clock."""
    try:
        first, last = (datetime.fromisoformat(time.replace("Z", "+00:00")) for time in (began, ended))
    except ValueError:
        return "-"
    return format_duration(max(0.0, (last - first).total_seconds()))


# Events as rows, each with the time of its writer; repeated events are one row.


MOST_ROWS = 24

_NAMES = {
    "started": "gang started",
    "joined": "all ranks have joined",
    "committed": "checkpoint",
    "stopping": "told to end",
    "failing": "a part has failed, the rest is ended",
    "unreachable": "does not answer",
    "reachable": "answers again",
    "leaving": "leaves",
    "preparing": "gets ready",
    "not-ready": "does not get ready",
    "hanging": "stands still",
    "going on": "goes on",
    "returned": "training again",
    "save-failed": "a save failed",
    "step-skipped": "step skipped: not finite",
    "host-left-out": "left out",
    "early-stopping": "early stopping",
}
"""Event -> its words on the screen, where they differ from its name."""

_ELSEWHERE = frozenset({"restarting", "beginning", "exchange", "shares", "saving", "resumed", "straggler-over"})
"""Shown on another line, or irrelevant to the cause."""

_OF_THE_GANG = frozenset({"started", "stopping", "finished", "stopped", "failed"})
"""Events of rank 0 that the supervisor writes for the whole gang."""


def event_rows(events: Iterable[EventRecord], *, cause: str = "") -> list[str]:
    """Events of the supervisor, in its order. cause: a sentence that is shown already."""
    return _rows([event for event in events if event.get("event") not in _ELSEWHERE], cause)


def rank0_rows(events: Iterable[EventRecord]) -> list[str]:
    """Events of rank 0 that may explain a cause, in its order."""
    return _rows([event for event in events if event.get("event") not in _ELSEWHERE | _OF_THE_GANG], "")


def _rows(events: Sequence[EventRecord], cause: str) -> list[str]:
    groups = [list(group) for _, group in itertools.groupby(events, key=lambda event: event.get("event"))]
    rows = [_event_row(group, cause) for group in groups]
    if len(rows) <= MOST_ROWS:
        return rows
    first = MOST_ROWS // 3
    last = MOST_ROWS - first - 1
    return [*rows[:first], f"... {len(rows) - first - last} more ...", *rows[-last:]]


def _event_row(group: Sequence[EventRecord], cause: str) -> str:
    """The row of equal events: the last of them, with their number."""
    event = group[-1]
    times = f" ({len(group)} times)" if len(group) > 1 else ""
    return f"{_clock(event.get('time'))}  {_words(event, cause)}{times}"


def _words(event: EventRecord, cause: str) -> str:
    name = str(event.get("event", ""))
    said = _NAMES.get(name, name.replace("-", " "))
    what = str(event.get("what") or event.get("why") or "")
    if what:
        host = str(event.get("host") or "")
        who = f"{host} " if host and host not in what else ""
        return said if what == cause else f"{who}{said}: {what}"
    hosts = event.get("hosts") if name == "started" else None
    parts = [
        _at(event),
        said,
        f"on {', '.join(map(str, hosts))}" if isinstance(hosts, list) else "",
        f"of step {event['step']}" if event.get("step") is not None else "",
        str(event.get("order") or ""),
        f"after {event['seconds']:.1f} s" if isinstance(event.get("seconds"), (int, float)) else "",
    ]
    return " ".join(part for part in parts if part)


def _at(event: EventRecord) -> str:
    rank = f"rank {event['rank']} on " if event.get("rank") is not None else ""
    return f"{rank}{event['host']}" if event.get("host") is not None else ""


def _clock(time: object) -> str:
    """14:02:07 of an ISO time."""
    text = str(time)
    return text[11:19] if len(text) >= len("2026-11-21T14:02:07") and text[10] == "T" else "--:--:--"


# The next command for a run, or the reason why none is needed.


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """A command and its effect; or no command, and the reason."""

    command: str | None
    why: str


def next_step(history: RunHistory, *, is_job: bool, can_resume: bool) -> NextStep:
    """The next command for the run in its current phase.

    is_job: it is not the user's own command. can_resume: it can be resumed.
    """
    run_id, phase = history.id, history.run.phase
    if (why := _unheard(history.run)) is not None:
        return NextStep(command=None, why=why)
    if phase in {"stopped", "failed"}:
        return _again(history, is_job=is_job, can_resume=can_resume)
    if phase == NEVER_STARTED:
        return NextStep(command="gangline train", why="the start was killed before a rank ran; nothing is lost")
    if phase == "lost":
        return NextStep(
            command=f"gangline stop {run_id} && gangline resume {run_id}",
            why="the first saves and ends what is left of it",
        )
    if phase == "running" and len(history.attempts) > 1:
        return NextStep(command=None, why=f"nothing to do: it runs; {_went_on(history.attempts[-1])}")
    return NextStep(
        command=None, why=_waiting(run_id).get(phase, "its state.json cannot be read; gangline ps lists all")
    )


def _unheard(run: RunRecord) -> str | None:
    """What helps a run that cannot be asked now; None: it can."""
    if (host := run.silent_host) is not None:
        return f"bring {host} back, which supervises it; if {host} is off: gangline resume {run.id} --without {host}"
    if run.suspended is not None:
        return f"it goes on once Slurm lets it; who suspended it does that: scontrol resume {run.suspended}"
    return None


def _waiting(run_id: str) -> dict[str, str]:
    return {
        "preparing": "nothing yet: a command on this computer prepares an attempt",
        "running": f"nothing to do: it runs; gangline attach {run_id} follows it",
        "stopping": "wait until it has ended: its ranks save and leave",
        "restarting": "nothing to do: the next attempt begins by itself",
        "finished": "nothing to do: it has finished",
    }


def _went_on(last: Attempt) -> str:
    event = last.begun_by
    if event is None:
        return f"attempt {last.number} was begun by gangline resume"
    step = event.get("step")
    return f"attempt {last.number} went on {f'from step {step}' if step else 'from the beginning'} by itself"


def _again(history: RunHistory, *, is_job: bool, can_resume: bool) -> NextStep:
    if not can_resume:
        return NextStep(
            command=None,
            why="start it anew with gangline run: without --resume-flag nothing says how your command goes on",
        )
    # an attempt that began from a step shows that it was committed, though the events of it may lie on a lost host
    known = [each for attempt in history.attempts for each in (attempt.from_step, attempt.committed)]
    steps = [step for step in known if step]
    if not is_job:
        why = "starts your command again, with the words of --resume-flag"
    elif steps:
        why = f"from the newest checkpoint that is whole; step {steps[-1]} was committed last"
    else:
        why = "from the beginning: no checkpoint was committed"
    return NextStep(command=f"gangline resume {history.id}", why=why)
