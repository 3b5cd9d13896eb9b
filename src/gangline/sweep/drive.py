"""The supervisor of a sweep: starts waiting trials on free hosts, watches them, judges rungs, until all have ended.

It looks at one trial after the other through `TrialRuns`, and keeps what it sees in trial.json, so that another
supervisor can take over at any time, and `show` needs no host.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from gangline.control.user_command import CommandRecord
from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.inventory.pairs import RENDEZVOUS_PORTS
from gangline.runs.cluster import Cluster
from gangline.runs.job import Job
from gangline.runs.layout import SweepLayout
from gangline.sweep.hparams import TrialEvents
from gangline.sweep.records import (
    SweepRecord,
    SweepState,
    TrialPhase,
    TrialRecord,
    anew,
    load_trial,
    load_trial_work,
    load_trials,
    read_order,
    runs_of,
    save_state,
    save_trial,
)
from gangline.sweep.schedule import pause_of, placements, promote, waiting, worthwhile

POLL_S = 1.0
SILENT_S = 120.0
"""A host that has not answered for so long loses its trial, which begins anew elsewhere."""
BUSY_S = 2.0
"""After so long a start is tried again on a host whose slots another run holds."""
AHEAD_S = 90.0
"""So long before the end of a trial the next one is prepared on its host: code, model, tokens."""
AWAY_S = 30.0
"""After so long a host is tried again that did not answer."""
MOST_STARTS = 3
"""Starts of a trial in a row that get nowhere."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSight:
    """Where the run of a trial stands."""

    phase: str
    """Of `RunRecord.phase`."""
    step: int = 0
    steps: int | None = None
    step_s: float | None = None
    """Seconds of a step lately."""
    losses: Mapping[str, float | None] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    silent: str | None = None
    """Why this is only the last known state."""

    @property
    def ended(self) -> bool:
        """Whether its processes are gone, or nobody looks after them."""
        return self.phase in {"finished", "stopped", "failed", "lost", "unknown", "never started"}


def with_figures(trial: TrialRecord, seen: TrialSight) -> TrialRecord:
    """The trial with the figures of its run, as they were seen last."""
    return dataclasses.replace(
        trial,
        step=seen.step or trial.step,
        steps=seen.steps or trial.steps,
        losses={**trial.losses, **seen.losses},
        starts=0 if seen.step > trial.step else trial.starts,
    )


class TrialRuns(Protocol):
    """What a sweep does with runs. Each call may take long and may raise GanglineError."""

    def start(
        self,
        work: Job | CommandRecord,
        cluster: Cluster,
        *,
        trial: Mapping[str, Any],
        turn: Callable[[], None] | None = None,
    ) -> str:
        """Start a run, and return its id once its ranks have been started. turn: see `StartOptions.turn`; of a job."""
        ...

    def resume(self, run: str, cluster: Cluster, *, pause_at: int | None) -> None:
        """Continue a run from its newest checkpoint, on these hosts, up to its next pause."""
        ...

    def look(self, run: str) -> TrialSight:
        """Where a run stands."""
        ...

    def end(self, run: str, *, now: bool) -> None:
        """Order a run to end; now: without saving."""
        ...


class PointSource(Protocol):
    """Chooses the points of a sweep one after the other, by what the trials before reached."""

    def ask(self, trials: Sequence[TrialRecord]) -> TrialRecord | None:
        """Create a trial, after these; None where there are no more. Raises GanglineError for a point that is none."""
        ...

    def take_in(self, trial: TrialRecord) -> bool:
        """Learn how a trial stands; whether it is so far behind that it is to be dropped."""
        ...


@dataclass(slots=True, kw_only=True)
class Ahead:
    """A trial that is prepared on a host which still trains another one."""

    number: int
    start: Future[str] | None = None
    go: threading.Event = field(default_factory=threading.Event)
    called_off: bool = False

    def turn(self) -> None:
        """Wait until the host is free; raises RunFailed where the trial is not to start."""
        self.go.wait()
        if self.called_off:
            raise RunFailed("the start was called off", seen="its sweep ends", fix="gangline sweep resume")

    def call_off(self) -> None:
        """Have the start end without a run."""
        self.called_off = True
        self.go.set()


class Driver:
    """One supervisor of one sweep."""

    def __init__(
        self,
        layout: SweepLayout,
        runs: TrialRuns,
        *,
        source: PointSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """A supervisor that begins with what is on disk. source: of more points; None: they are all there."""
        self._layout, self._runs, self._clock, self._wait = layout, runs, clock, wait
        self._source = source
        self._request = SweepRecord.load(layout.request)
        self._names = [host.name for host in self._request.cluster.hosts]
        self._pool = ThreadPoolExecutor(max_workers=3 * len(self._names) + 2)
        self._trials: dict[int, TrialRecord] = {}
        self._starts: dict[int, Future[str]] = {}
        self._ahead: dict[str, Ahead] = {}
        """Host -> the trial that it gets next."""
        self._left_s: dict[int, float] = {}
        """Trial -> seconds until it ends or pauses, as far as they are known."""
        self._clearing: dict[str, Future[bool]] = {}
        """Run that was given up -> whether it has ended."""
        self._step_s: dict[str, float] = {}
        """Host -> seconds of a step, of one machine alone."""
        self._free: set[str] = set()
        self._silent_since: dict[str, float] = {}
        self._not_before: dict[str, float] = {}
        """Host -> when it is tried again."""
        self._ordered: dict[str, str] = {}
        """Run -> the order that it got."""
        self._events: dict[int, TrialEvents] = {}

    def run(self) -> None:
        """Drive the sweep until every trial has ended, or it was ordered to stop."""
        self._adopt()
        try:
            while not self._turn():
                self._wait(POLL_S)
        finally:
            self._unbind(list(self._ahead))
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _turn(self) -> bool:
        """Look, judge, start; whether nothing is left to do."""
        for number in set(self._layout.numbers()) - self._trials.keys():  # at the beginning all, later those added
            self._trials[number] = load_trial(self._layout, number)
        order = read_order(self._layout)
        self._take_in_starts()
        self._look()
        self._clear_hosts()
        if order is not None:
            return self._stop(order)
        if self._request.halving is not None:
            for number, phase in promote(list(self._trials.values()), self._request.halving).items():
                self._judge(self._trials[number], phase)
        self._ask()
        self._start()
        self._prepare()
        is_done = all(trial.ended for trial in self._trials.values()) and not self._starts
        return is_done and self._source is None and set(self._layout.numbers()) == self._trials.keys()

    def _ask(self) -> None:
        """One more point for each host that is free, or about to be: later ones know more."""
        busy = [trial for trial in self._trials.values() if self._holds(trial)]
        soon = sum(self._left_s.get(trial.number, math.inf) <= AHEAD_S for trial in busy)
        wanted = len(self._names) - len({name for trial in busy for name in trial.hosts}) + soon
        if self._request.at_once is not None:
            wanted = min(wanted, self._request.at_once - len(busy) + soon)
        while self._source is not None and len(waiting(list(self._trials.values()))) < wanted:
            try:
                made = self._source.ask(list(self._trials.values()))
            except GanglineError as error:
                log.error("no more points: %s", error)  # noqa: TRY400 - it is told in three parts
                save_state(self._layout, SweepState.load(self._layout.state), error=error.to_json())
                made = None
            if made is None:
                self._source = None
            else:
                self._trials[made.number] = made

    def _adopt(self) -> None:
        """Take over: a start that a supervisor began and did not note is found by what the run says of itself."""
        noted = runs_of(self._layout.home, self._layout.sweep_id)
        for trial in load_trials(self._layout):
            self._trials[trial.number] = trial
            unknown = [run for run in noted.get(trial.number, []) if run != trial.run and run not in trial.given_up]
            begun = [run for run in unknown if not self._runs.look(run).ended] if trial.run is None else []
            if begun:
                self._note(trial, run=begun[-1], phase="running")
            elif trial.phase == "running" and trial.run is None:
                self._note(trial, phase="waiting")

    def _judge(self, trial: TrialRecord, phase: str) -> None:
        rung = trial.rung
        if phase == "waiting":
            self._note(trial, phase="waiting", rung=rung + 1, starts=0)
        else:
            self._note(trial, phase="dropped")
        log.info("trial %d is %s at rung %d: %s", trial.number, phase, rung, trial.loss)

    # What becomes of those that run.

    def _look(self) -> None:
        active = [trial for trial in self._trials.values() if trial.phase == "running" and trial.run is not None]
        for trial, seen in zip(active, self._pool.map(self._seen, active), strict=True):
            self._take_in(trial, seen)

    def _seen(self, trial: TrialRecord) -> TrialSight:
        assert trial.run is not None
        try:
            return self._runs.look(trial.run)
        except GanglineError as error:
            return TrialSight(phase="running", silent=str(error))

    def _take_in(self, trial: TrialRecord, seen: TrialSight) -> None:
        assert trial.run is not None
        if seen.silent is not None:
            since = self._silent_since.setdefault(trial.run, self._clock())
            self._unbind(trial.hosts)
            if self._clock() - since > SILENT_S:
                self._give_up(trial, seen.silent)
            return
        self._silent_since.pop(trial.run, None)
        trial = self._keep(trial, with_figures(trial, seen), quiet=True)
        self._tell(trial)
        if self._learns(trial) and not seen.ended:
            self._order(trial, "drop")
        goal = min(trial.steps or 0, pause_of(trial, self._request.halving) or trial.steps or 0)
        if seen.step_s is not None:
            self._left_s[trial.number] = (goal - trial.step) * seen.step_s
        if seen.step_s is not None and len(trial.hosts) == 1:
            self._step_s[trial.hosts[0]] = seen.step_s
        if seen.ended:
            self._ended(trial, seen)

    def _ended(self, trial: TrialRecord, seen: TrialSight) -> None:
        assert trial.run is not None
        pause, error = pause_of(trial, self._request.halving), seen.error or {}
        ordered = self._ordered.pop(trial.run, None)
        if seen.phase == "finished":
            # one that stopped early is at its end, whatever the rung
            last = len(self._request.halving.rungs) - 1 if self._request.halving else 0
            self._note(trial, phase="finished", rung=last, error=None)
        elif seen.phase == "stopped" and pause is not None and trial.step >= pause:
            self._note(trial, phase="paused", error=None)
        elif seen.phase == "stopped":
            phase: TrialPhase = "dropped" if ordered == "drop" else "waiting" if ordered else "stopped"
            self._note(trial, phase=phase, error=None)
        elif error.get("kind") in {"HostUnreachable", "HostKeyRefused"}:
            self._give_up(trial, str(error.get("what")))
        elif seen.phase == "failed" or trial.starts >= MOST_STARTS:
            why = {"kind": "RunFailed", "what": f"its run is {seen.phase}", "seen": "", "fix": ""}
            self._note(trial, phase="failed", error=dict(error or why))
        else:  # lost: another supervisor of the run goes on from its checkpoint
            self._note(trial, phase="waiting", starts=trial.starts + 1)
        self._finish_events(self._trials[trial.number])
        self._learns(self._trials[trial.number])

    def _learns(self, trial: TrialRecord) -> bool:
        """Tell the source of points how a trial stands; whether it is to be dropped."""
        return self._source is not None and self._source.take_in(trial)

    def _order(self, trial: TrialRecord, order: str) -> None:
        """Order the run of a trial to end: `stop` and `drop` save first, `kill` does not."""
        assert trial.run is not None
        try:
            self._runs.end(trial.run, now=order == "kill")
            self._ordered[trial.run] = order
        except GanglineError as error:
            log.warning("trial %d cannot be ended: %s", trial.number, error)

    def _give_up(self, trial: TrialRecord, why: str) -> None:
        """The trial begins anew elsewhere; its run is ended where it was once the host answers."""
        assert trial.run is not None
        log.warning("trial %d leaves %s: %s", trial.number, " ".join(trial.hosts), why)
        given_up = {**trial.given_up, trial.run: " ".join(trial.hosts[:1])}
        self._note(trial, phase="waiting", run=None, hosts=(), step=0, losses={}, given_up=given_up)

    def _clear_hosts(self) -> None:
        """End the runs that were given up, on hosts that answer again; one that does not is tried in the background."""
        left = [(trial.number, *each) for trial in self._trials.values() for each in trial.given_up.items()]
        for number, run, host in left:
            if run not in self._clearing and self._not_before.get(host, 0.0) <= self._clock():
                self._clearing[run] = self._pool.submit(self._clear, run)
            elif run in self._clearing and self._clearing[run].done():
                self._take_in_cleared(self._trials[number], run, host)

    def _clear(self, run: str) -> bool:
        """Whether a run that was given up has ended; it is ordered to."""
        if self._runs.look(run).ended:
            return True
        self._runs.end(run, now=True)
        return False

    def _take_in_cleared(self, trial: TrialRecord, run: str, host: str) -> None:
        try:
            has_ended = self._clearing.pop(run).result()
        except GanglineError as error:
            self._sit_out((host,), AWAY_S, error)
            return
        if has_ended:
            log.info("%s answers again, and %s has ended", host, run)
            self._note(trial, given_up={each: where for each, where in trial.given_up.items() if each != run})

    def _unbind(self, hosts: Sequence[str]) -> None:
        """What is prepared on hosts that do not answer may start elsewhere."""
        for host in hosts:
            if (ahead := self._ahead.pop(host, None)) is not None:
                ahead.call_off()

    # What starts.

    def _start(self) -> None:
        busy = [name for trial in self._trials.values() if self._holds(trial) for name in trial.hosts]
        given_up = [host for trial in self._trials.values() for host in trial.given_up.values()]
        now = self._clock()
        free = [
            name for name in self._names if name not in {*busy, *given_up} and self._not_before.get(name, 0.0) <= now
        ]
        self._free = set(free)
        at_once = self._request.at_once
        room = None if at_once is None else at_once - sum(map(self._holds, self._trials.values()))
        for host in [name for name in free if name in self._ahead][:room]:
            free.remove(host)
            room = None if room is None else room - 1
            ahead = self._ahead.pop(host)
            assert ahead.start is not None
            self._note_start(self._trials[ahead.number], (host,))
            self._starts[ahead.number] = ahead.start
            ahead.go.set()
        bound = {*self._starts, *(ahead.number for ahead in self._ahead.values())}
        trials = [trial for trial in self._trials.values() if trial.number not in bound]
        for trial, hosts in self._placements(trials, free, room):
            self._starts[trial.number] = self._pool.submit(self._begin, self._note_start(trial, hosts))

    def _placements(
        self, trials: Sequence[TrialRecord], free: Sequence[str], room: int | None
    ) -> list[tuple[TrialRecord, tuple[str, ...]]]:
        useful = self._useful_hosts(trials)
        return placements(trials, hosts=self._names, free=[name for name in free if name in useful], room=room)

    def _useful_hosts(self, trials: Sequence[TrialRecord]) -> set[str]:
        """The hosts that would not hold up the end with another trial; all, where some speed is not known.

        trials: those that are bound to no host yet.
        """
        # a host that does not answer takes no work off the others
        alone = {trial.hosts[0]: trial.number for trial in self._trials.values() if self._trains_alone(trial)}
        there = {*alone, *self._free}
        anywhere = all(set(trial.fits) == set(self._names) for trial in waiting(trials))
        if not there <= self._step_s.keys() or not anywhere:
            return set(self._names)
        steps = max((trial.steps or 0 for trial in self._trials.values()), default=0)
        trial_s = {name: steps * self._step_s[name] for name in there}
        free_in_s = {name: self._left_s.get(number, trial_s[name]) for name, number in alone.items()}
        free_in_s |= dict.fromkeys(there - alone.keys(), 0.0)
        free_in_s |= {name: free_in_s[name] + trial_s[name] for name in self._ahead.keys() & there}
        return worthwhile(len(waiting(trials)), free_in_s=free_in_s, trial_s=trial_s)

    def _trains_alone(self, trial: TrialRecord) -> bool:
        return trial.phase == "running" and len(trial.hosts) == 1 and trial.run not in self._silent_since

    def _note_start(self, trial: TrialRecord, hosts: tuple[str, ...]) -> TrialRecord:
        log.info("trial %d starts on %s", trial.number, " ".join(hosts))
        places = (*trial.places, *hosts[:1])
        self._left_s.pop(trial.number, None)
        if not self._request.can_continue:
            trial = anew(trial)
        return self._note(trial, phase="running", hosts=hosts, places=places, starts=trial.starts + 1)

    def _prepare(self) -> None:
        """Prepare the next trial on hosts that are about to be free. One that has a run goes on from its checkpoint,
        which is brought then.
        """
        bound = {*self._starts, *(ahead.number for ahead in self._ahead.values())}
        for trial in list(self._trials.values()):
            if not self._holds(trial) or len(trial.hosts) != 1 or self._left_s.get(trial.number, math.inf) > AHEAD_S:
                continue
            if trial.run in self._silent_since:
                continue
            host = trial.hosts[0]
            following = next((each for each in waiting(list(self._trials.values())) if each.number not in bound), None)
            if host in self._ahead or following is None or following.run is not None or host not in following.fits:
                continue
            if host not in self._useful_hosts([each for each in self._trials.values() if each.number not in bound]):
                continue
            log.info("trial %d is prepared on %s", following.number, host)
            ahead = self._ahead[host] = Ahead(number=following.number)
            bound.add(following.number)
            placed = dataclasses.replace(following, hosts=(host,))
            ahead.start = self._pool.submit(self._begin, placed, ahead.turn)

    def _holds(self, trial: TrialRecord) -> bool:
        return trial.phase == "running"

    def _begin(self, trial: TrialRecord, turn: Callable[[], None] | None = None) -> str:
        pause_at = pause_of(trial, self._request.halving)
        cluster = hosts_of(self._request.cluster, trial.hosts)
        if trial.run is not None:
            self._runs.resume(trial.run, cluster, pause_at=pause_at)
            return trial.run
        work = load_trial_work(self._layout, trial.number)
        if isinstance(work, Job):
            work = dataclasses.replace(work, pause_at=pause_at)
        said = {"sweep": self._layout.sweep_id, "number": trial.number}
        return self._runs.start(work, cluster, trial=said, turn=turn)

    def _take_in_starts(self) -> None:
        for number, start in list(self._starts.items()):
            if start.done():
                del self._starts[number]
                self._take_in_start(self._trials[number], start)

    def _take_in_start(self, trial: TrialRecord, start: Future[str]) -> None:
        try:
            self._note(trial, run=start.result())
        except HostUnreachable as error:
            self._sit_out(trial.hosts, AWAY_S, error)
            self._note(trial, phase="waiting", starts=trial.starts - 1)
        except GanglineError as error:
            if error.details.get("taken") or error.fix.startswith("wait for it"):
                self._sit_out(trial.hosts, BUSY_S, error)
                self._note(trial, phase="waiting", starts=trial.starts - 1)
            elif trial.run is not None and not self._seen(trial).ended:
                log.info("trial %d runs already: the supervisor before had begun to resume it", trial.number)
            else:
                log.warning("trial %d did not start: %s", trial.number, error)
                self._note(trial, phase="failed", error=error.to_json())
        except Exception as error:
            log.exception("trial %d did not start", trial.number)
            bug = GanglineError(f"{type(error).__name__}: {error}", fix=f"this is a bug; see {self._layout.log}")
            self._note(trial, phase="failed", error=bug.to_json())

    def _sit_out(self, hosts: Sequence[str], seconds: float, error: GanglineError) -> None:
        """No trial starts on these hosts for a while."""
        log.info("%s waits: %s", " ".join(hosts), error.what)
        for host in hosts or self._names:
            self._not_before[host] = self._clock() + seconds

    def _stop(self, order: str) -> bool:
        """Order what runs to end; whether nothing runs any more. What ends so waits for `resume`."""
        self._unbind(list(self._ahead))
        active = [trial for trial in self._trials.values() if trial.phase == "running"]
        for trial in active:
            if trial.run is None or trial.number in self._starts or self._ordered.get(trial.run) == order:
                continue
            self._order(trial, order)
        return not active and not self._starts

    # What is written.

    def _note(self, trial: TrialRecord, **changes: Any) -> TrialRecord:
        """The trial with changes; written where they are any."""
        return self._keep(trial, dataclasses.replace(trial, **changes))

    def _keep(self, trial: TrialRecord, changed: TrialRecord, *, quiet: bool = False) -> TrialRecord:
        if changed != trial:
            save_trial(self._layout, changed)
            if not quiet:
                log.info("trial %d: %s %s", changed.number, changed.phase, changed.run or "")
        self._trials[trial.number] = changed
        return changed

    def _tell(self, trial: TrialRecord) -> None:
        folder = self._layout.tensorboard / str(trial.number)
        events = self._events.setdefault(trial.number, TrialEvents(folder, trial.point))
        self._quietly(lambda: events.losses(trial.losses))

    def _finish_events(self, trial: TrialRecord) -> None:
        if trial.ended and (events := self._events.pop(trial.number, None)) is not None:
            self._quietly(lambda: events.ended(trial.phase))

    def _quietly(self, write: Callable[[], None]) -> None:
        """A curve that finds no room on the disk ends no sweep."""
        try:
            write()
        except OSError as error:
            log.warning("TensorBoard files are not written: %s", error)


def hosts_of(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster of one trial. Of hosts that are one machine, each has its own part of the ports: a port is claimed
    in the work folder of a host, so two of them might get the same one at the same time.
    """
    hosts = tuple(host for host in cluster.hosts if host.name in names)
    neighbours = [host.name for host in cluster.hosts if host.address == hosts[0].address]
    low, high = cluster.ports or RENDEZVOUS_PORTS
    width, place = (high - low + 1) // len(neighbours), neighbours.index(hosts[0].name)
    ports = (low + place * width, low + (place + 1) * width - 1) if width and len(hosts) == 1 else cluster.ports
    return dataclasses.replace(cluster, hosts=hosts, ports=cluster.ports if len(neighbours) == 1 else ports)
