"""A run over its attempts: when one has failed, the next goes on from the newest step that is whole anywhere."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.runs.files import full_disk
from gangline.runs.gang import Gang
from gangline.runs.job import FailureJob
from gangline.runs.layout import RunLayout
from gangline.runs.state import AttemptOutcome, RunState, read_leave, read_order, write_leave, write_order
from gangline.supervise.attempt_records import Superseded
from gangline.supervise.clean import end_earlier
from gangline.supervise.gang_control import SupervisedRun
from gangline.supervise.lost_hosts import CutOff, LostHosts, Partition, Reaching, Recovery, find_cut
from gangline.supervise.next_attempt import Base, failures_of, look_for_checkpoint, move_head, prepare
from gangline.supervise.supervisor import Ended, Supervisor
from gangline.units import listed

# Whether a run goes on after an attempt has ended, and on which hosts. Pure.
#
# An attempt that got beyond the step it went on from has earned the next one. What fails again for the same cause
# without having got any further would fail for ever.


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
        return "the job ends the run at the first failure (failures)"
    last = tried[-1]
    if (last.error or {}).get("kind") in NOT_AGAIN:
        return "the next attempt would fail for the same reason"
    return _why_not_unseen(last, failures) if last.starts is not None else _why_not_followed(tried, failures)


def _why_not_unseen(last: Tried, failures: FailureJob) -> str | None:
    starts = last.starts or 0
    return None if starts <= failures.restarts else f"it was started {starts} times"


def _why_not_followed(tried: Sequence[Tried], failures: FailureJob) -> str | None:
    last = tried[-1]
    if last.has_advanced:
        return None
    if len(tried) > 1 and tried[-2].cause == last.cause and not tried[-2].has_advanced:
        return "it failed twice for the same cause without completing a step in between"
    if (count := _in_vain(tried)) >= failures.restarts:
        return f"{count} attempts in a row did not get past step {last.began_at}"
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


NEVER = FailureJob(restarts=0)


class Attempts:
    """Looks after a run from one attempt on, until it has ended or cannot go on without being asked."""

    def __init__(self, run: SupervisedRun, attempt: int) -> None:
        self._layout = run.layout
        self._failures = failures_of(run.layout, attempt) or NEVER
        self._base = _base(run.layout, attempt) if self._failures.restarts else None
        self._transports = run.connect(self._base.cluster) if self._base else {}
        pace = dataclasses.replace(run.pace, silence_s=self._failures.wait_s) if self._base else run.pace
        self._run = dataclasses.replace(run, pace=pace)
        self._pace = pace
        self._tried: list[Tried] = []
        self._noted = 0
        """The last attempt that is in them."""
        self._left: set[str] = set(self._base.left) if self._base else set()
        """Hosts that were asked to leave, or left in good order."""
        self._lost = LostHosts(self._answers)
        self._reaching = Reaching(self._find_cut)
        self._lost.lose(self._base.away if self._base else ())
        self._secrets: Mapping[str, str] = {}
        self._recovery: Recovery | None = None
        self._current = Supervisor(self._run, attempt, makes_way=self._makes_way)

    def begin(self, secrets: Mapping[str, str] | None = None) -> None:
        """Start the gang, or find it running; raises what `Supervisor.begin` raises."""
        self._secrets = dict(secrets or {})
        if _has_ended(self._layout, self._current.attempt):
            self._current.followed.take_for_joined()
        else:
            self._current.begin(secrets)

    def watch(self) -> AttemptOutcome:
        """Look after the run until it has ended."""
        while True:
            ended = self._current.look_after()
            why = self._go_on(ended)
            if why is not None:
                ended = self._ended_by_user(self._current.ended or ended)
                self._current.close(ended, why=why if ended.outcome.result == "failed" else "")
                return ended.outcome

    def _go_on(self, ended: Ended) -> str | None:
        """Begin the next attempt; why not, where the run ends with this one."""
        self._recovery = Recovery(ended.noticed_at or time.monotonic())
        self._recovery.reach("ended")
        while (why := self._why_over(ended)) is None:
            assert self._base is not None
            try:
                return self._next(self._base, ended)
            except Superseded:
                raise
            except (GanglineError, OSError) as problem:  # a disk that is full, most of all
                error = _told(problem)
                if self._current.ended not in (None, ended):  # it was begun, and what is left of it is ended
                    ended = self._current.ended or ended
                    continue
                self._note(error.to_json(), reached=None)
                if why := why_not(self._tried, self._failures):
                    return f"{why}: {error.what}"
        return why

    def _ended_by_user(self, ended: Ended) -> Ended:
        """What failed, and was ended by the user before it could go on, has been stopped."""
        order = read_order(self._layout, attempt=self._current.attempt)
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
            return None if ended.made_way or self._left else ""
        if not self._had_begun(ended) and not self._tried:
            return "it had not begun"
        return None

    def _had_begun(self, ended: Ended) -> bool:
        """A program of the user's own does not say that it has joined, and may fail before anybody has looked."""
        is_own = self._base is not None and self._base.again is not None
        return ended.joined or (is_own and bool(ended.outcome.failures))

    def _next(self, base: Base, ended: Ended) -> str | None:
        """Prepare and start the next attempt; why not. Raises GanglineError where a host does not do its part."""
        current = self._current
        current.records.set_phase("restarting")
        chosen = self._wait_for_hosts(base, ended)
        if not chosen.hosts:
            return "no host answers any more" if self._failures.without else "it cannot continue without a host"
        places, choice = look_for_checkpoint(self._layout, base, self._transports, answering=chosen.hosts)
        if self._noted < current.attempt:
            self._noted = current.attempt
            self._note(ended.outcome.error, reached=choice.step or 0)
        if ended.made_way is None and (why := why_not(self._tried, self._failures)):
            return why
        self._rest(pause_s(self._tried))
        self._base = base = self._with_less_memory(base, ended)
        request = prepare(
            self._layout,
            dataclasses.replace(base, left=tuple(self._left)),
            current.attempt + 1,
            hosts=chosen.hosts,
            checkpoint=(places, choice),
            backend=self._run.backend(base.cluster.backend),
        )
        kept = move_head(self._layout, places, before=current.request.names[0], now=request.names[0])
        if self._is_ordered():
            return ""
        self._reach("prepared")
        current.gang.on(set(current.request.names) - set(request.names)).end_resting()  # they take no part any more
        self._tell(ended, chosen, step=choice.step, kept=kept)
        self._lost.lose(host for host in chosen.without if host not in self._left)
        self._current = Supervisor(
            self._run, current.attempt + 1, transports=self._transports, makes_way=self._makes_way
        )
        # A host that is back may still have what was started there before it was lost.
        end_earlier(self._run, self._current.attempt, hosts=request.names, epoch=self._current.epoch)
        self._current.start(self._secrets)
        self._reach("started")
        return None

    def _with_less_memory(self, base: Base, ended: Ended) -> Base:
        """The base with smaller micro-batches from now on, if the job allows and memory did not suffice."""
        smaller = (ended.outcome.error or {}).get("micro_batch")
        if smaller is None or not self._failures.smaller_micro_batch:
            return base
        return dataclasses.replace(base, micro_batch=int(smaller))

    def _note(self, error: Mapping[str, Any] | None, *, reached: int | None) -> None:
        """Write the attempt that has ended into our books. reached: None: it is not known, and counts as nowhere."""
        began_at = Gang.load(self._layout.gang(self._current.attempt)).resume_step or 0
        reached = began_at if reached is None else reached
        base = self._base
        starts = self._current.attempt - base.attempt + 1 if base is not None and base.again is not None else None
        self._tried.append(Tried(error=error, began_at=began_at, reached=reached, starts=starts))

    def _tell(self, ended: Ended, chosen: NextHosts, *, step: int | None, kept: bool) -> None:
        error = ended.outcome.error or {}
        details: dict[str, Any] = {
            "next": self._current.attempt + 1,
            "what": ended.made_way or error.get("what", "its ranks left"),
            "hosts": list(chosen.hosts),
            "without": list(chosen.without),
            "step": step,
            "lost_steps": None if ended.step is None else max(0, ended.step - (step or 0)),
        }
        if self._base is not None and self._base.micro_batch is not None:
            details["micro_batch"] = self._base.micro_batch
        if not kept:
            details["missing"] = "metrics and curves of the previous head"
        self._current.records.event("restarting", **details)

    def _wait_for_hosts(self, base: Base, ended: Ended) -> NextHosts:
        """Who takes part; hosts that do not answer are waited for as long as the job says."""
        begun = time.monotonic()
        cut = CutOff(ended.cut, lambda: self._find_cut(set(base.gang.hosts) - self._left - self._lost.silent))
        while True:
            self._run.beat()
            self._lost.look()
            passed_s = time.monotonic() - begun
            silent = dict.fromkeys(cut.look(), passed_s) | self._silent(ended, passed_s=passed_s)
            found = seats(base.gang.hosts, silent_s=silent, left=self._left, failures=self._failures)
            if not found.waits_for or self._is_ordered():
                return found
            is_over = min(silent[host] for host in found.waits_for) >= self._failures.wait_s
            if is_over:  # and the job wants nobody to go on without them
                return dataclasses.replace(found, hosts=())
            time.sleep(self._pace.poll_s)

    def _silent(self, ended: Ended, *, passed_s: float) -> dict[str, float]:
        """Hosts of the run that do not answer now, and for how long."""
        statuses = self._current.gang.poll()
        now = [status.host for status in statuses if status.phase == "unreachable"]
        gone = dict.fromkeys(self._lost.silent, self._failures.wait_s)
        return gone | {host: ended.silent_s.get(host, 0.0) + passed_s for host in now}

    def _is_ordered(self) -> bool:
        """Whether the user has ordered the run to end while no attempt runs."""
        return read_order(self._layout, attempt=self._current.attempt) is not None

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0 and not self._is_ordered():
            self._run.beat()
            time.sleep(min(self._pace.poll_s, left_s))

    def _reach(self, stage: str) -> None:
        if self._recovery is not None:
            self._recovery.reach(stage)

    def _makes_way(self) -> str | None:
        """At every poll of the current attempt: why it is to end in good order, so that another can take its place."""
        if self._base is None:
            return None
        self._tell_return()
        self._take_over_order()
        names = self._current.request.names
        leave = set(read_leave(self._layout, attempt=self._current.attempt)) & set(names)
        if leave and len(leave) < len(names):
            self._left |= leave
            return f"{listed(sorted(leave))} {_verb(leave, 'leaves', 'leave')}, as ordered"
        self._lost.look()
        back = self._lost.back() if self._failures.take_back else []
        if not back:
            return None
        return f"{listed(sorted(back))} {_verb(back, 'answers again and joins', 'answer again and join')}"

    def _take_over_order(self) -> None:
        """What the user ordered of the attempt before, while it had ended already, counts for this one."""
        before = self._current.attempt - 1
        if self._tried and (order := read_order(self._layout, attempt=before)) is not None:
            write_order(self._layout, order, attempt=self._current.attempt)
        if self._tried and (hosts := read_leave(self._layout, attempt=before)):
            write_leave(self._layout, hosts, attempt=self._current.attempt)

    def _tell_return(self) -> None:
        """Say once how long the way back took."""
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
        """Whether a host that was lost answers us, and reaches those that train."""
        try:
            self._transports[host].home()
        except (GanglineError, OSError):
            return False
        return self._reaching.reaches(host, self._current.request.names)

    def _find_cut(self, hosts: Collection[str]) -> Partition | None:
        """Who of these hosts is cut off from the others of them; raises what a transport raises."""
        assert self._base is not None
        cluster = self._base.cluster
        chosen = [host for host in cluster.hosts if host.name in hosts]
        return find_cut(chosen, cluster, self._transports, port=self._current.request.port)


def _told(problem: GanglineError | OSError) -> GanglineError:
    """A file that could not be written, here or on a host, as an error for people."""
    if isinstance(problem, GanglineError):
        return problem
    return full_disk(problem) or RunFailed(
        "the next attempt could not be prepared",
        seen=str(problem),
        fix="find the fault: gangline check; then: gangline resume",
    )


def _has_ended(layout: RunLayout, attempt: int) -> bool:
    """Whether an earlier supervisor has seen this attempt end, and died before the next."""
    is_between = RunState.load(layout).phase == "restarting"
    return is_between and layout.outcome(attempt).exists()


def _verb(hosts: Collection[str], one: str, several: str) -> str:
    return one if len(hosts) == 1 else several


def _base(layout: RunLayout, attempt: int) -> Base | None:
    """None for a run that an earlier version started: what the next attempt needs was not written down."""
    try:
        return Base.of(layout, attempt)
    except FileNotFoundError:
        return None


def _left_by_themselves(ended: Ended) -> set[str]:
    """Hosts whose host agent was told to save and leave by their own machine, as when it shuts down."""
    if ended.user_order is not None or ended.made_way is not None or ended.told_to_stop:
        return set()
    return {
        status.host
        for status in ended.statuses
        if status.phase == "ended" and status.reason == "stopped" and not status.rests
    }
