"""The attempts of a run: after a failure the next attempt resumes from the newest complete checkpoint of any host."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import HostRequest, HostStatus, StandbyBackend
from gangline.launch.poll import look
from gangline.provision.checkpoint_sources import Places
from gangline.runs.files import full_disk
from gangline.runs.gang import Gang
from gangline.runs.job import FailureJob, Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import AttemptOutcome, RunState, StopOrder, read_leave, read_order, write_leave, write_order
from gangline.supervise.attempt_records import Superseded
from gangline.supervise.cause import OutOfMemory
from gangline.supervise.clean import end_earlier
from gangline.supervise.gang_control import GangControl, SupervisedRun
from gangline.supervise.lost_hosts import CutOff, LostHosts, Partition, Reaching, Recovery, find_partition
from gangline.supervise.next_attempt import (
    Base,
    failures_of,
    look_for_checkpoint,
    move_head,
    prepare,
    smaller_settings,
    standby_part,
    words_of,
)
from gangline.supervise.standby import Standbys, Steps
from gangline.supervise.supervisor import Ended, Supervisor
from gangline.units import listed

# The decision whether another attempt follows, and on which hosts. Pure.
#
# An attempt that made progress is always followed by another one. An attempt that fails for the same cause as the one
# before, without progress, would fail for ever. One that ran out of memory is followed by another one as long as a rank
# takes smaller settings, which has an end: many alike ranks may run out one after the other.


PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The first pause between attempts without progress, and the longest; each is twice as long as the one before."""
NUMBER = re.compile(r"\d+")
NOT_AGAIN = frozenset({"UsageError", "SpecError", "DataError", "ModelError", "CheckFailed", "DoesNotFit"})
"""Kinds of error that the next attempt would meet, too: the request is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """An attempt that has ended, and its progress."""

    error: Mapping[str, Any] | None
    """As in `Outcome.error`."""
    began_at: int
    """Optimizer step that it resumed from; 0: the beginning."""
    reached: int
    """The newest step from which the run can resume after it."""
    starts: int | None = None
    """Number of starts so far, of a program whose steps are unknown. None: steps are known."""
    shrinks: bool = False
    """Whether it ran out of memory, and the next attempt takes smaller settings."""

    @property
    def has_advanced(self) -> bool:
        """Whether it made progress."""
        return self.reached > self.began_at

    @property
    def cause(self) -> str:
        """The cause of its end without numbers such as pids, so that equal causes compare equal. Who ran out of memory
        is a part of the cause: another rank's lack is another one.
        """
        error = self.error or {}
        what, who = str(error.get("what", "")), f"{error.get('host', '')} {error.get('rank', '')}"
        out_of_memory = error.get("kind") == OutOfMemory.__name__
        what = f"{who} {NUMBER.sub('#', what)}" if out_of_memory else NUMBER.sub("#", f"{who} {what}")
        # memory may suffice for the next size of a micro-batch, or with recomputation
        again = "recomputing" if error.get("activation_checkpointing") else ""
        return f"{what} {error.get('micro_batch') or again}".rstrip()


def why_not(ended_attempts: Sequence[EndedAttempt], failures: FailureJob) -> str | None:
    """Why no attempt follows automatically after these, oldest first; None: one does."""
    if failures.restarts == 0:
        return "the job ends the run at the first failure (failures)"
    last = ended_attempts[-1]
    if (last.error or {}).get("kind") in NOT_AGAIN:
        return "the next attempt would fail for the same reason"
    return _why_not_unseen(last, failures) if last.starts is not None else _why_not_followed(ended_attempts, failures)


def _why_not_unseen(last: EndedAttempt, failures: FailureJob) -> str | None:
    starts = last.starts or 0
    return None if starts <= failures.restarts else f"it was started {starts} times"


def _why_not_followed(ended_attempts: Sequence[EndedAttempt], failures: FailureJob) -> str | None:
    last = ended_attempts[-1]
    if last.has_advanced or last.shrinks:
        return None
    if len(ended_attempts) > 1 and ended_attempts[-2].cause == last.cause and not ended_attempts[-2].has_advanced:
        return "it failed twice for the same cause without completing a step in between"
    if (count := _without_progress(ended_attempts)) >= failures.restarts:
        return f"{count} attempts in a row did not get past step {last.began_at}"
    return None


def pause_s(ended_attempts: Sequence[EndedAttempt]) -> float:
    """How long to wait before the next attempt."""
    count = _without_progress(ended_attempts)
    return 0.0 if count < 2 else min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (count - 2))


def _without_progress(ended_attempts: Sequence[EndedAttempt]) -> int:
    """The number of attempts without progress since the last one with progress, but for those that shrink."""
    count = 0
    for each in reversed(ended_attempts):
        if each.has_advanced:
            break
        count += not each.shrinks
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


def choose_hosts(
    all_hosts: Sequence[str],
    *,
    silent_s: Mapping[str, float],
    left: Collection[str],
    failures: FailureJob,
) -> NextHosts:
    """The hosts of the next attempt. silent_s: hosts that do not answer, and for how long. left: hosts that were asked
    to leave, or that shut down in good order.
    """
    stays = [host for host in all_hosts if host not in left]
    silent = [host for host in stays if host in silent_s]
    is_over = {host: failures.without and silent_s[host] >= failures.wait_s for host in silent}
    return NextHosts(
        hosts=tuple(host for host in stays if host not in silent_s),
        waits_for=tuple(host for host in silent if not is_over[host]),
        without=tuple(host for host in all_hosts if host in left or is_over.get(host, False)),
    )


NEVER = FailureJob(restarts=0)


class _NotConfirmedError(Exception):
    """Most hosts of the next attempt do not confirm who leads the run."""


class Attempts:
    """Supervises a run from one attempt on, until it has ended or only the user can resume it."""

    def __init__(self, run: SupervisedRun, attempt: int) -> None:
        self._layout = run.layout
        self._failures = failures_of(run.layout, attempt) or NEVER
        self._base = _base(run.layout, attempt) if self._failures.restarts else None
        self._transports = run.connect(self._base.cluster) if self._base else {}
        pace = dataclasses.replace(run.pace, silence_s=self._failures.wait_s) if self._base else run.pace
        self._run = dataclasses.replace(run, pace=pace)
        self._pace = pace
        self._ended_attempts: list[EndedAttempt] = []
        self._noted = 0
        """The last attempt in `_ended_attempts`."""
        self._left: set[str] = set(self._base.left) if self._base else set()
        """Hosts that were asked to leave, or left in good order."""
        self._lost = LostHosts(self._answers)
        self._reaching = Reaching(self._find_partition)
        self._standbys: Standbys | None = None
        """Hosts that are back get ready beside the run; None: they have nothing to get ready."""
        self._lost.lose(self._base.away if self._base else ())
        self._secrets: Mapping[str, str] = {}
        self._recovery: Recovery | None = None
        self._ended: Ended | None = None
        """The end of the attempt, where it had ended before; it is not looked for again."""
        self._current = Supervisor(self._run, attempt, reason_to_yield=self._reason_to_yield)
        if self._can_stand_by():
            self._standbys = Standbys(Steps(begin=self._begin_standby, look=self._look_at, end=self._end_standby))

    def begin(self, secrets: Mapping[str, str] | None = None) -> None:
        """Start the gang, or find it running; raises what `Supervisor.begin` raises."""
        self._secrets = dict(secrets or {})
        if _has_ended(self._layout, self._current.attempt):
            self._current.followed.take_for_joined()
            if self._run.lead is not None:
                self._ended = self._current.ended_before(self._lost.hosts)
            return
        names = self._current.request.names
        if self._has_begun_before() or read_order(self._layout, attempt=self._current.attempt) is not None:
            if self._run.lead is not None:
                self._run.lead.follow(names)
        elif not self._may_begin(self._current.attempt, names):
            raise RunFailed(
                f"attempt {self._current.attempt} of {self._layout.run_id} does not begin",
                seen="most of its hosts do not confirm who leads the run",
                fix="look at these hosts: gangline check; then: gangline resume",
            )
        if self._current.gang.epoch != self._current.epoch:  # it was elected again meanwhile
            transports = self._current.gang.transports
            self._current = Supervisor(
                self._run, self._current.attempt, transports=transports, reason_to_yield=self._reason_to_yield
            )
        self._current.begin(secrets)

    def _has_begun_before(self) -> bool:
        """Whether an earlier supervisor had begun the attempt: a majority had its records before that."""
        state = RunState.load(self._layout)
        return state.phase in {"running", "stopping"} and state.attempt == self._current.attempt

    def watch(self) -> AttemptOutcome:
        """Supervise the run until it has ended."""
        while True:
            ended, self._ended = self._ended or self._current.supervise_again(), None
            why = self._go_on(ended)
            if why is not None:
                ended = self._ended_by_user(self._current.ended or ended)
                self._end_standbys()
                self._current.close(ended, why=why if ended.outcome.result == "failed" else "")
                return ended.outcome

    def _go_on(self, ended: Ended) -> str | None:
        """Begin the next attempt; the reason where the run ends with this one."""
        self._recovery = Recovery(ended.noticed_at or time.monotonic())
        self._recovery.reach("ended")
        while (why := self._why_over(ended)) is None:
            assert self._base is not None
            try:
                return self._next(self._base, ended)
            except Superseded:
                raise
            except _NotConfirmedError:  # fewer hosts answer than a moment ago
                continue
            except (GanglineError, OSError) as problem:  # most likely a full disk
                error = _as_gangline_error(problem)
                if self._current.ended not in (None, ended):  # the next attempt was begun, and its processes were ended
                    ended = self._current.ended or ended
                    continue
                self._remember(error.to_json(), reached=None)
                if why := why_not(self._ended_attempts, self._failures):
                    return f"{why}: {error.what}"
        return why

    def _ended_by_user(self, ended: Ended) -> Ended:
        """The same end as `stopped` where the user ended the run after a failure, before the next attempt."""
        order = self._order()
        if order is None or ended.user_order is not None or ended.outcome.result == "finished":
            return ended
        outcome = dataclasses.replace(ended.outcome, result="stopped", error=None)
        return dataclasses.replace(ended, outcome=outcome, user_order=order)

    def _why_over(self, ended: Ended) -> str | None:
        """Why the run has ended with this attempt; None: it may go on."""
        if ended.outcome.result == "finished" or ended.user_order is not None or self._base is None:
            return ""
        self._left |= _left_by_themselves(ended)
        if ended.outcome.result == "stopped":
            return None if ended.yielded_because or self._left else ""
        if not self._had_begun(ended) and not self._ended_attempts:
            return "it had not begun"
        return None

    def _had_begun(self, ended: Ended) -> bool:
        """Whether its ranks had started: the user's own program reports no join, and may fail before the first poll."""
        is_own = self._base is not None and self._base.again is not None
        return ended.joined or (is_own and bool(ended.outcome.failures))

    def _next(self, base: Base, ended: Ended) -> str | None:
        """Prepare and start the next attempt; the reason if there is none. Raises GanglineError where a host fails, and
        _NotConfirmedError where most of its hosts do not confirm who leads.
        """
        current = self._current
        current.records.set_phase("restarting")
        if self._run.lead is not None and not self._run.lead.await_hold(self._is_ordered):
            return ""
        chosen = self._wait_for_hosts(base, ended)
        if not chosen.hosts:
            return "no host answers any more" if self._failures.without else "it cannot continue without a host"
        places, choice = look_for_checkpoint(self._layout, base, self._transports, answering=chosen.hosts)
        smaller, way = self._with_less_memory(base, ended)
        if self._noted < current.attempt:
            self._noted = current.attempt
            self._remember(ended.outcome.error, reached=choice.step or 0, shrinks=smaller is not base)
        if ended.yielded_because is None and (why := why_not(self._ended_attempts, self._failures)):
            return why
        self._pause(pause_s(self._ended_attempts))
        self._base = base = smaller
        request = prepare(
            self._layout,
            dataclasses.replace(base, left=tuple(self._left)),
            current.attempt + 1,
            hosts=chosen.hosts,
            checkpoint=(places, choice),
            backend=self._run.backend(base.cluster.backend),
        )
        missing = self._move_history(places, now=request.names[0])
        may_begin = self._may_begin(current.attempt + 1, request.names)
        if self._is_ordered():
            return ""
        if not may_begin:
            raise _NotConfirmedError
        self._reach("prepared")
        lost = set(chosen.without) - self._left  # what rests there ends by itself, and nobody waits until it answers
        current.gang.on(set(current.request.names) - set(request.names) - lost).end_resting()
        self._report_restart(ended, chosen, step=choice.step, missing=missing, way=way)
        self._lost.lose(host for host in chosen.without if host not in self._left)
        if self._standbys is not None:
            self._standbys.forget(request.names)
        self._current = Supervisor(
            self._run, current.attempt + 1, transports=self._transports, reason_to_yield=self._reason_to_yield
        )
        # A host that is back may still run processes from before it was lost.
        end_earlier(self._run, self._current.attempt, hosts=request.names, epoch=self._current.epoch)
        self._current.start(self._secrets)
        self._reach("started")
        return None

    def _move_history(self, places: Places, *, now: str) -> str:
        """Have the next host of rank 0 have its history; what is missing of that."""
        if move_head(self._layout, places, before=self._current.request.names[0], now=now):
            return ""
        if self._run.lead is not None and self._run.lead.restore_history(now):
            return "curves of the previous head, and what it wrote in its last seconds"
        return "metrics and curves of the previous head"

    def _may_begin(self, attempt: int, hosts: Sequence[str]) -> bool:
        """Whether an attempt on these hosts may begin: where others could take over, a majority has its records."""
        lead = self._run.lead
        if lead is None:
            return True
        state = RunState.load(self._layout)
        if state.attempt != attempt:
            dataclasses.replace(state, attempt=attempt).save(self._layout)
        if not lead.commit(hosts, self._is_ordered):
            return False
        lead.raise_epoch()
        return True

    def _with_less_memory(self, base: Base, ended: Ended) -> tuple[Base, str]:
        """The base after an out-of-memory error, if the job allows that, and words for what ranks do otherwise.

        Every rank that ran out takes smaller settings of its own, where the strategy knows such; else all take smaller
        micro-batches.
        """
        error = ended.outcome.error or {}
        if error.get("kind") != OutOfMemory.__name__ or not self._failures.smaller_micro_batch:
            return base, ""
        job, current = Job.load(self._layout.job), Gang.load(self._layout.gang(self._current.attempt))
        lacks = self._current.lacks_of_memory(ended.outcome.failures) or [error]
        found = [smaller_settings(lack, base, current=current, job=job) for lack in lacks]
        if named := [each for each in found if each is not None]:
            own = tuple(each.own for each in named)
            return dataclasses.replace(base, settings=(*base.settings, *own)), words_of(named)
        smaller = error.get("micro_batch")
        return (base if smaller is None else dataclasses.replace(base, micro_batch=int(smaller))), ""

    def _remember(self, error: Mapping[str, Any] | None, *, reached: int | None, shrinks: bool = False) -> None:
        """Remember the attempt that has ended. reached: None: unknown, which counts as no progress."""
        began_at = Gang.load(self._layout.gang(self._current.attempt)).resume_step or 0
        reached = began_at if reached is None else reached
        base = self._base
        starts = self._current.attempt - base.attempt + 1 if base is not None and base.again is not None else None
        self._ended_attempts.append(
            EndedAttempt(error=error, began_at=began_at, reached=reached, starts=starts, shrinks=shrinks)
        )

    def _report_restart(self, ended: Ended, chosen: NextHosts, *, step: int | None, missing: str, way: str) -> None:
        """missing: what there is no more of the history. way: what ranks do otherwise from here on."""
        error = ended.outcome.error or {}
        details: dict[str, Any] = {
            "next": self._current.attempt + 1,
            "what": ended.yielded_because or error.get("what", "its ranks left"),
            "hosts": list(chosen.hosts),
            "without": list(chosen.without),
            "step": step,
            "lost_steps": None if ended.step is None else max(0, ended.step - (step or 0)),
        }
        if self._base is not None and self._base.micro_batch is not None:
            details["micro_batch"] = self._base.micro_batch
        if way:
            details["settings"] = way
        if missing:
            details["missing"] = missing
        self._current.records.event("restarting", **details)

    def _wait_for_hosts(self, base: Base, ended: Ended) -> NextHosts:
        """The hosts of the next attempt; waits for hosts that do not answer as long as the job says."""
        begun = time.monotonic()
        cut = CutOff(ended.cut, lambda: self._find_partition(set(base.gang.hosts) - self._left - self._lost.silent))
        while True:
            self._run.beat()
            self._lost.look()
            passed_s = time.monotonic() - begun
            silent = dict.fromkeys(cut.look(), passed_s) | self._silent(ended, passed_s=passed_s)
            found = choose_hosts(base.gang.hosts, silent_s=silent, left=self._left, failures=self._failures)
            if not found.waits_for or self._is_ordered():
                return found
            is_over = min(silent[host] for host in found.waits_for) >= self._failures.wait_s
            if is_over:  # and the job does not allow fewer hosts
                return dataclasses.replace(found, hosts=())
            time.sleep(self._pace.poll_s)

    def _silent(self, ended: Ended, *, passed_s: float) -> dict[str, float]:
        """Hosts of the run that do not answer now, and for how long."""
        statuses = self._current.gang.on(set(self._current.request.names) - self._lost.hosts).poll()
        now = [status.host for status in statuses if status.phase == "unreachable"]
        others = set(self._base.gang.hosts if self._base else ()) - self._left - {*now, *self._lost.hosts}
        away = self._lost.hosts - set(self._to_join()) if others else self._lost.silent
        gone = dict.fromkeys(away, self._failures.wait_s)
        return gone | {host: ended.silent_s.get(host, 0.0) + passed_s for host in now}

    def _is_ordered(self) -> bool:
        """Whether the user has ordered the run to end while no attempt runs."""
        self._run.beat()
        return self._order() is not None

    def _order(self) -> StopOrder | None:
        """The order of the user: to this attempt, or to the next one, which state.json names before that begins."""
        numbers = (self._current.attempt, self._current.attempt + 1)
        return next((order for each in numbers if (order := read_order(self._layout, attempt=each))), None)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0 and not self._is_ordered():
            self._run.beat()
            time.sleep(min(self._pace.poll_s, left_s))

    def _reach(self, stage: str) -> None:
        if self._recovery is not None:
            self._recovery.reach(stage)

    def _reason_to_yield(self) -> str | None:
        """Asked at every poll: why the current attempt is to save and end, so that the next one has other hosts."""
        if self._base is None:
            return None
        self._report_recovery()
        self._take_over_order()
        names = self._current.request.names
        leave = set(read_leave(self._layout, attempt=self._current.attempt)) & set(names)
        if leave and len(leave) < len(names):
            self._left |= leave
            return f"{listed(sorted(leave))} {_verb(leave, 'leaves', 'leave')}, as ordered"
        self._lost.look()
        back = self._take_back() if self._failures.take_back else []
        if not back:
            return None
        return f"{listed(sorted(back))} {_verb(back, 'answers again and joins', 'answer again and join')}"

    def _take_back(self) -> list[str]:
        """Have the hosts that are back get ready; those that are."""
        if self._standbys is not None:
            before = dict(self._standbys.parts)
            for event, details in self._standbys.look(self._lost.back()):
                self._current.records.event(event, **details)
            if self._standbys.parts != before:
                parts = tuple(self._standbys.parts.values())
                waiting = dataclasses.replace(self._current.request, hosts=parts, world_size=None, launcher=None)
                write_record(self._layout.standby(self._current.attempt), waiting.to_json())
        return self._to_join()

    def _to_join(self) -> list[str]:
        """Lost hosts that can take part in the next attempt without keeping the others waiting."""
        back = self._lost.back()
        if self._standbys is None:
            return back
        ready = self._standbys.ready()
        return [host for host in back if host in ready]

    def _can_stand_by(self) -> bool:
        """Whether a host that is back has something to get ready, and may join."""
        if self._base is None or not self._failures.take_back:
            return False
        has_warm_pool = any(part.warm_pool for part in self._current.request.hosts)
        return has_warm_pool and isinstance(self._run.backend(self._base.cluster.backend), StandbyBackend)

    def _begin_standby(self, host: str) -> HostRequest:
        """Have a host that is back get ready, as a part of the next attempt. Called in the background."""
        base, current = self._base, self._current
        backend = self._run.backend(current.request.backend)
        assert base is not None
        assert isinstance(backend, StandbyBackend)
        # It may still run processes from before it was lost, which hold its slots.
        end_earlier(self._run, current.attempt, hosts=(host,), epoch=current.epoch)
        names = {*current.request.names, host}
        hosts = [name for name in base.gang.hosts if name in names]
        part = standby_part(
            self._layout, base, current.attempt, hosts=hosts, host=host, backend=self._run.backend(base.cluster.backend)
        )
        return backend.stand_by(part, self._transports[host], epoch=current.epoch, secrets=self._secrets)

    def _look_at(self, part: HostRequest) -> HostStatus:
        return look(part, self._transports[part.host])

    def _end_standby(self, part: HostRequest) -> None:
        self._gang_of([part]).stop()

    def _end_standbys(self) -> None:
        """End what waits on hosts that have not joined; a host that does not answer ends it by itself."""
        parts = self._standbys.end() if self._standbys is not None else []
        if parts:
            self._gang_of(parts).end_resting()

    def _gang_of(self, parts: Sequence[HostRequest]) -> GangControl:
        current = self._current.gang
        return dataclasses.replace(current, request=dataclasses.replace(current.request, hosts=tuple(parts)))

    def _take_over_order(self) -> None:
        """Apply orders to the attempt before, which had ended already, to the current one."""
        before = self._current.attempt - 1
        if self._ended_attempts and (order := read_order(self._layout, attempt=before)) is not None:
            write_order(self._layout, order, attempt=self._current.attempt)
        if self._ended_attempts and (hosts := read_leave(self._layout, attempt=before)):
            write_leave(self._layout, hosts, attempt=self._current.attempt)

    def _report_recovery(self) -> None:
        """Write once how long the recovery took."""
        recovery, followed = self._recovery, self._current.followed
        if recovery is None or not followed.joined:
            return
        recovery.reach("joined")
        began_at = Gang.load(self._layout.gang(self._current.attempt)).resume_step or 0
        if followed.step is not None and followed.step > began_at:
            recovery.reach("step")
            self._current.records.event("returned", **recovery.to_json())
            self._recovery = None

    def _answers(self, host: str) -> bool:
        """Whether a lost host answers, and reaches the hosts that train."""
        try:
            self._transports[host].home()
        except (GanglineError, OSError):
            return False
        return self._reaching.reaches(host, self._current.request.names)

    def _find_partition(self, hosts: Collection[str]) -> Partition | None:
        """The hosts among these that are cut off from the others; raises the errors of transports."""
        assert self._base is not None
        cluster = self._base.cluster
        chosen = [host for host in cluster.hosts if host.name in hosts]
        return find_partition(chosen, cluster, self._transports, port=self._current.request.port)


def _as_gangline_error(problem: GanglineError | OSError) -> GanglineError:
    """The error for the user: a full disk, or a file that could not be written here or on a host."""
    if isinstance(problem, GanglineError):
        return problem
    return full_disk(problem) or RunFailed(
        "the next attempt could not be prepared",
        seen=str(problem),
        fix="find the fault: gangline check; then: gangline resume",
    )


def _has_ended(layout: RunLayout, attempt: int) -> bool:
    """Whether an earlier supervisor saw this attempt end, and died before the next one."""
    is_between = RunState.load(layout).phase == "restarting"
    return is_between and layout.outcome(attempt).exists()


def _verb(hosts: Collection[str], one: str, several: str) -> str:
    return one if len(hosts) == 1 else several


def _base(layout: RunLayout, attempt: int) -> Base | None:
    """The base; None for a run of an earlier version, which did not write it."""
    try:
        return Base.of(layout, attempt)
    except FileNotFoundError:
        return None


def _left_by_themselves(ended: Ended) -> set[str]:
    """Hosts whose machine shut down in good order: the host agent had its ranks save and exit."""
    if ended.user_order is not None or ended.yielded_because is not None or ended.stop_ordered:
        return set()
    return {
        status.host
        for status in ended.statuses
        if status.phase == "ended" and status.reason == "stopped" and not status.rests
    }
