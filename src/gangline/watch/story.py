"""What is known of a run's past, attempt by attempt, as its supervisors, guards and rank 0 wrote it down.

Nothing here is put in order by the clocks of different hosts: events are told as the supervisor, or rank 0, wrote them
one after the other, and ends of ranks host by host, as the guard of each saw them.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.diagnose.failures import ECHOES, ORDERED, weight
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable
from gangline.remote.said import NONSENSE, understood, whole
from gangline.remote.transport import Transport
from gangline.runs.layout import RunLayout
from gangline.runs.registry import RunRecord
from gangline.runs.state import Outcome
from gangline.runs.versions import decode_record
from gangline.watch.follow import View

MOST_ATTEMPTS = 200
"""The newest; of a run that fails for days, nobody reads the others."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended badly, as its guard says."""

    host: str
    rank: int
    what: str
    weight: int
    """How far it is from being the cause (see `gangline.diagnose.failures`)."""
    ordered: bool
    """It was told to end before."""
    exit: int | None
    log: str
    log_tail: tuple[str, ...]

    @property
    def is_echo(self) -> bool:
        """It only tells that others have gone, or was ended."""
        return self.weight >= ECHOES


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the gang, from what is known of it."""

    number: int
    hosts: tuple[str, ...]
    begun_by: Event | None
    """The supervisor's word with which it went on by itself; None: somebody typed train, run or resume."""
    from_step: int | None
    """The step with which it began; None: not known, or the user's own program."""
    to_step: int | None
    committed: int | None
    """The last step of which a checkpoint was committed in it."""
    outcome: Outcome | None
    """None: it has not ended, or nobody wrote down how."""
    error: Mapping[str, Any] | None
    """The first cause, as `Outcome.error`; less where only an event tells it."""
    ends: tuple[RankEnd, ...]
    """Ranks that ended badly: host by host, in the order in which the guard of each saw them."""
    events: tuple[Event, ...]
    """What the supervisor wrote, in its order."""
    told: tuple[Event, ...]
    """What rank 0 wrote, in its order."""

    @property
    def result(self) -> str | None:
        """finished, stopped or failed; None: it has not ended, as far as is known."""
        return self.outcome.result if self.outcome else None

    def of(self, name: str) -> Event | None:
        """The last event of that name."""
        return next((event for event in reversed(self.events) if event.get("event") == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run and its attempts."""

    id: str
    run: RunRecord
    attempts: tuple[Attempt, ...]
    steps: int | None
    """In all, where that is known."""
    gaps: tuple[str, ...]
    """What could not be read."""


@dataclass(slots=True)
class _Notes:
    """What metrics and events say of one attempt."""

    events: list[Event] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)
    from_step: int | None = None
    to_step: int | None = None


def read_story(view: View, *, kept: RunLayout, keeper: Transport | None) -> Story:
    """All that can be read of a run's past. kept: where its records lie, on the host `keeper`; None: here.

    A host that does not answer leaves a gap. Raises HostKeyRefused.
    """
    run = view.record()
    gaps: dict[str, None] = {}
    notes, steps = _read_notes(view, gaps)
    last = run.state.attempt if run.state else max(notes, default=0)
    if last > MOST_ATTEMPTS:
        gaps[f"attempts 1 to {last - MOST_ATTEMPTS} are not shown"] = None
    numbers = range(max(1, last - MOST_ATTEMPTS + 1), last + 1)
    outcomes = {number: _outcome(number, view.layout, kept, keeper, gaps) for number in numbers}
    attempts = [_attempt(number, notes, outcomes[number], run if number == last else None) for number in numbers]
    return Story(id=view.layout.run_id, run=run, attempts=tuple(attempts), steps=steps, gaps=tuple(gaps))


def _read_notes(view: View, gaps: dict[str, None]) -> tuple[dict[int, _Notes], int | None]:
    notes: dict[int, _Notes] = defaultdict(_Notes)
    steps: int | None = None
    for record in _records(view, gaps):
        number = record.get("attempt")
        if type(number) is not int:
            continue
        if record.get("kind") == "event":
            _note_event(notes[number], record)
        elif record.get("kind") == "step" and type(record.get("step")) is int:
            notes[number].to_step = record["step"]
            steps = record["steps"] if type(record.get("steps")) is int else steps
    return notes, steps


def _records(view: View, gaps: dict[str, None]) -> Iterator[dict[str, Any]]:
    """All lines of metrics and events, file by file."""
    for tail in view.tails():
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
    number: int, here: RunLayout, kept: RunLayout, keeper: Transport | None, gaps: dict[str, None]
) -> Outcome | None:
    """How an attempt ended: it is written once, so a copy on this computer is as good."""
    try:
        return Outcome.load(here.outcome(number))
    except FileNotFoundError:
        pass
    except (*NONSENSE, OSError) as error:
        gaps[str(error).splitlines()[0]] = None
    if keeper is None:
        return None
    try:
        with understood(keeper.host, f"how attempt {number} ended"):
            path = kept.outcome(number)
            return decode_record(keeper.read(path), path, Outcome, host=keeper.host)
    except HostKeyRefused:
        raise
    except HostUnreachable as error:
        gaps[f"{error.what}: what it wrote is missing"] = None
    except GanglineError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            gaps[f"{error.what}: {error.seen}"] = None
    return None


def _attempt(number: int, notes: Mapping[int, _Notes], outcome: Outcome | None, last_of: RunRecord | None) -> Attempt:
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


def _begun_by(number: int, notes: Mapping[int, _Notes]) -> Event | None:
    before = notes.get(number - 1)
    events = before.events if before else []
    found = [event for event in events if event.get("event") == "restarting" and event.get("next") == number]
    return found[-1] if found else None


def _hosts(events: Sequence[Event], outcome: Outcome | None, begun_by: Event | None) -> tuple[str, ...]:
    """In the order in which they were started."""
    started = next((event for event in events if event.get("event") == "started"), None)
    for event in (started, begun_by):
        names = event.get("hosts") if event else None
        if isinstance(names, list) and names:
            return tuple(map(str, names))
    return tuple(outcome.hosts) if outcome else ()


def _last_step(events: Sequence[Event], name: str) -> int | None:
    steps = [event["step"] for event in events if event.get("event") == name and type(event.get("step")) is int]
    return steps[-1] if steps else None


def _error(events: Sequence[Event], outcome: Outcome | None, last_of: RunRecord | None) -> Mapping[str, Any] | None:
    if outcome is not None:
        return outcome.error
    if last_of is not None and last_of.phase == "failed" and last_of.state and last_of.state.error:
        return last_of.state.error
    failing = next((event for event in reversed(events) if event.get("event") == "failing"), None)
    return {"what": str(failing.get("what", ""))} if failing else None


def _ends(outcome: Outcome | None, hosts: Sequence[str]) -> tuple[RankEnd, ...]:
    """Times are those of one guard's clock each, and compared within its host only."""
    found: dict[str, list[tuple[float, RankEnd]]] = {host: [] for host in hosts}
    for data in outcome.failures if outcome else ():
        try:
            end, time = _end(data), float(data["time"])
        except NONSENSE:
            continue  # one row that cannot be read hides no other
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


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
