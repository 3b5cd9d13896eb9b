"""The supervisor of one attempt: starts the gang or finds it running, watches it, and writes down how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

from gangline.errors import GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import Backend, HostStatus, Leftover, Request
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.state import HostOutcome, Order, Outcome, Phase, RunState, read_order
from gangline.supervise.aside import Aside
from gangline.supervise.cause import first_cause, gather_failures
from gangline.supervise.claims import Claims
from gangline.supervise.clean import clean
from gangline.supervise.commit import Committer
from gangline.supervise.compared import LookBack, look_back
from gangline.supervise.earlier import end_earlier
from gangline.supervise.first_step import FirstStep
from gangline.supervise.heartbeat import Heartbeats
from gangline.supervise.pace import Pace
from gangline.supervise.presence import Presence
from gangline.supervise.records import Records
from gangline.supervise.stall import Stall
from gangline.supervise.start import Start
from gangline.supervise.telling import Telling
from gangline.supervise.troubles import Troubles


class Supervisor:
    """Looks after one attempt until nothing of it runs.

    If the attempt runs already (an earlier supervisor was killed), it is taken over and not started again.
    """

    def __init__(
        self,
        layout: RunLayout,
        attempt: int,
        *,
        backend: Backend,
        connect: Callable[[Cluster], Mapping[str, Transport]],
        pace: Pace | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout = layout
        self._attempt = attempt
        self._backend = backend
        self._connect = connect
        self._pace = pace or Pace()
        self._cluster = Cluster.of_attempt(layout, attempt)
        self._transports = connect(self._cluster)
        self._records = Records(layout, attempt, disk_s=self._pace.disk_s, pause_s=self._pace.poll_s, beat=beat)
        self.request = Request.from_json(read_json(layout.attempt(attempt) / "request.json"))
        committer = Committer(
            self._cluster, self._transports, run_id=layout.run_id, hosts=self.request.names, attempt=attempt
        )
        self._committing = Aside(committer.sweep, patience_s=self._pace.patience_s)
        self._comparing = Aside(self._compared, patience_s=self._pace.patience_s)
        self._presence = Presence(notice_s=self._pace.notice_s)
        self._heartbeats = Heartbeats(stall_s=self._pace.stall_s)
        self._claims = Claims(num_hosts=len(self.request.hosts), doubt_s=self._pace.doubt_s)
        self._telling = Telling(self._tell_one, patience_s=self._pace.patience_s)
        self._troubles = Troubles(self._records, patience_s=self._pace.trouble_s)
        self._start = Start(self.request, self._cluster, self._transports, limits=self._pace.start)
        self._first_step = FirstStep(self.request)
        is_quiet = RunState.load(layout).quiet_since is not None
        self._stall = Stall(self.request.stall, run_id=layout.run_id, is_told=is_quiet)
        self._user_order: Order | None = None
        """What the user ordered and was passed on."""
        self._order: Order | None = None
        """The strongest that the guards were ordered, by the user or because the gang failed."""
        self._ordered_at = float("inf")
        """When they were (monotonic)."""
        self._untold: set[str] = set()
        """Hosts that have not heard the last of it."""
        self._failed_at: float | None = None
        """When a failure was first seen (monotonic)."""
        self._failure: GanglineError | None = None
        """Why the start was given up, or a run that stood still was ended."""

    @property
    def epoch(self) -> int:
        """Of two supervisors of a run, the one with the higher epoch is in charge."""
        return self._records.epoch

    def begin(self, secrets: Mapping[str, str] | None = None) -> None:
        """Say that we are here, and start the gang unless it runs; raises what `Backend.start` raises.

        secrets: more environment for the ranks of a gang that is started.
        """
        end_earlier(self._layout, self._attempt, backend=self._backend, connect=self._connect, epoch=self.epoch)
        statuses = self._poll()
        has_begun = self._has_begun(statuses)
        if not has_begun:
            self._require_no_order()
        self._records.set_phase("running", supervisor=ProcessId.current())
        if has_begun:
            self._untold = set(self.request.names)
            self._tell(statuses)
            self._start.done = self._first_step.done = _is_done(self._layout, self._attempt)
        else:
            self._start_gang(statuses, secrets)
        # Not before: if nothing starts there, the run still belongs to the hosts that it ran on.
        self._records.persist(lambda: write_json(self._layout.cluster, self._cluster.to_json()))

    def _require_no_order(self) -> None:
        """What was told to end before it began is not started; raises RunFailed. A guard may still come up: its
        supervisor died as it started it. It finds an order, too.
        """
        self._user_order = read_order(self._layout, attempt=self._attempt)
        if self._user_order is None:
            return
        self._backend.stop(self.request, self._transports, now=True, epoch=self.epoch)
        self._conclude("stopped", None, left=self._clean_up(self._poll()))
        raise RunFailed(
            f"{self._layout.run_id} was told to stop before it began",
            seen=f"an order to {self._user_order} attempt {self._attempt}",
            fix=f"nothing was started; to start it: gangline resume {self._layout.run_id}",
        )

    def _start_gang(self, statuses: Sequence[HostStatus], secrets: Mapping[str, str] | None) -> None:
        try:
            for status in statuses:
                if status.phase == "unreachable":
                    raise HostUnreachable(f"{status.host} does not answer", seen=status.why, fix="nothing was started")
            self._backend.start(self.request, self._transports, epoch=self.epoch, secrets=secrets)
        except GanglineError as error:
            self._conclude("failed", error.to_json(), left=self._clean_up(self._poll()))
            raise
        self._records.event("started", hosts=list(self.request.names))

    def _has_begun(self, statuses: Sequence[HostStatus]) -> bool:
        """Whether an earlier supervisor has started the gang; of hosts that do not answer only the state can tell."""
        phases = {status.phase for status in statuses}
        if phases - {"starting", "unreachable"}:
            return True
        return "unreachable" in phases and RunState.load(self._layout).phase in {"running", "stopping"}

    def watch(self) -> Outcome:
        """Look after the gang until it has ended, then write outcome.json and state.json."""
        while True:
            self._records.beat()
            with self._troubles.borne():
                outcome = self._look_once()
                if outcome is not None:
                    return outcome
            time.sleep(self._pace.poll_s)

    def _look_once(self) -> Outcome | None:
        """Look, and do what follows from it; the outcome once the gang has ended."""
        statuses = self._poll()
        self._require_charge(statuses)
        news = (*self._presence.note(statuses), *self._heartbeats.note(statuses), *self._follow_start(statuses))
        for event, details in (*news, *self._follow_first_step(statuses), *self._follow_output(statuses)):
            self._records.event(event, **details)
        self._pass_on_order()
        self._end_failed(statuses)
        self._tell(statuses)
        self._commit(statuses)
        if not self._is_over(statuses):
            return None
        left = self._clean_up(statuses)
        self._commit(statuses, last=True)
        self._compare(statuses)
        return self._judge(statuses, left)

    def _poll(self) -> list[HostStatus]:
        return self._backend.poll(self.request, self._transports)

    def _require_charge(self, statuses: Sequence[HostStatus]) -> None:
        self._records.require_charge(RunState.load(self._layout).epoch)
        for event, details in self._claims.note(statuses, epoch=self.epoch):
            self._records.event(event, **details)
        self._records.require_charge(self._claims.believed)

    def _follow_start(self, statuses: Sequence[HostStatus]) -> list[tuple[str, dict[str, Any]]]:
        events = list(self._start.note(statuses))
        if self._start.is_due() or events:
            self._records.board(self._start.to_json())
        return events

    def _follow_first_step(self, statuses: Sequence[HostStatus]) -> list[tuple[str, dict[str, Any]]]:
        """What ranks do that have joined; those that were told to leave do not begin any more."""
        if self._order is not None or not self._start.done:
            return []
        return list(self._first_step.note(statuses))

    def _follow_output(self, statuses: Sequence[HostStatus]) -> list[tuple[str, dict[str, Any]]]:
        """Whether the user's own program prints; ranks that were told to leave may be silent."""
        if self._order is not None:
            return []
        events = list(self._stall.note(statuses, joined=self._start.done))
        for _, details in events:
            self._records.set_quiet(details.get("since"))
        return events

    def _pass_on_order(self) -> None:
        order = read_order(self._layout, attempt=self._attempt)
        if order is None or self._user_order in {order, "kill"}:
            return
        self._user_order = order
        self._give(order)
        self._records.event("stopping", order=order)
        self._records.set_phase("stopping")

    def _end_failed(self, statuses: Sequence[HostStatus]) -> None:
        """End the rest of a gang of which a part failed: ranks first, after the grace everything."""
        if self._user_order == "kill":
            return
        if self._failed_at is None:
            late = None if self._order else self._start.failure()
            has_failed = any(_has_failed(status) for status in statuses)
            self._failure = late or (None if self._order or has_failed else self._stall.failure())
            if self._failure is None and not has_failed:
                return
            self._failed_at = time.monotonic()
            # Ranks that wait for each other to join, or do not run yet, have nothing to save.
            self._give("kill" if late or self._start.board.is_before_ranks else "stop")
            self._records.event("failing", what=(self._cause(statuses) or {}).get("what", ""))
            self._records.set_phase("stopping")
        elif self._order != "kill" and time.monotonic() > self._failed_at + self._pace.failure_grace_s:
            self._give("kill")

    def _give(self, order: Order) -> None:
        self._order = "kill" if self._order == "kill" else order
        self._ordered_at = time.monotonic()
        self._untold = set(self.request.names)

    def _tell(self, statuses: Sequence[HostStatus]) -> None:
        """Tell the guards what they are to do, and those that do not answer as soon as they do."""
        reachable = self._untold - {status.host for status in statuses if status.phase == "unreachable"}
        if reachable:
            self._untold -= self._telling.tell(reachable, self._order)

    def _tell_one(self, host: str, order: Order | None) -> bool:
        """Whether its guard was told."""
        part = self.request.on({host})
        if order is None:
            return not self._backend.announce(part, self._transports, epoch=self.epoch)
        return not self._backend.stop(part, self._transports, now=order == "kill", epoch=self.epoch)

    def _commit(self, statuses: Sequence[HostStatus], *, last: bool = False) -> None:
        if any(status.phase == "unreachable" for status in statuses):
            return  # it takes all hosts, and asking one that is silent takes long
        try:
            found = self._committing.finish() if last else [self._committing.do() or []]
            for commit in chain.from_iterable(found):
                self._records.event("committed", step=commit.step, hosts=sorted(commit.parts))
        except Exception as error:  # noqa: BLE001  (a full disk, a lost connection, a lying host: the next tries again)
            self._records.complain(f"cannot commit: {error}")

    def _compare(self, statuses: Sequence[HostStatus]) -> None:
        """Keep where time went, and the plan beside what came of it; the end of the run does not depend on it."""
        head = self._cluster.head.name
        silent = {status.host for status in statuses if status.phase == "unreachable"}
        if self.request.hosts[0].program == "command" or head in silent:
            return
        try:
            found = self._comparing.do()
        except Exception as error:  # noqa: BLE001  (figures that are missing or damaged, a host that is gone)
            self._records.complain(f"the plan is not compared with the run: {type(error).__name__}: {error}")
            return
        if found is None:
            self._records.complain(f"the plan is not compared with the run: its figures on {head} are read too slowly")
            return
        if found.problem is not None:
            self._records.complain(f"the plan is not compared with the run: {found.problem}")
        if found.times is not None:
            self._records.times(found.times)
        if found.comparison is not None:
            self._records.comparison(found.comparison)

    def _compared(self) -> LookBack:
        head = self._transports[self._cluster.head.name]
        return look_back(self._layout, self._attempt, cluster=self._cluster, head=head)

    def _is_over(self, statuses: Sequence[HostStatus]) -> bool:
        """Whether nothing more comes of this attempt by itself, as far as hosts answer."""
        hopeless = time.monotonic() > self._ordered_at + self._pace.abandon_s
        given_up = self._heartbeats.stalled if hopeless else set()
        phases = {status.phase for status in statuses if status.phase != "running" or status.host not in given_up}
        if "running" in phases:
            return False
        if "unreachable" not in phases:
            return True
        # The ranks that are out of sight cannot go on without the others, and their guard knows what to do then.
        silence_s = self._presence.silence_s()
        if phases == {"unreachable"}:
            return self._order is not None and silence_s > self._pace.abandon_s
        return silence_s > self._pace.silence_s

    def _clean_up(self, statuses: Sequence[HostStatus]) -> list[Leftover]:
        """End what is left on the hosts; what is left then, and the hosts where nobody could look."""
        silent = {status.host for status in statuses if status.phase == "unreachable"}
        unknown = [Leftover(host=host, kind="unknown", what="does not answer") for host in sorted(silent)]
        part = self.request.on(set(self.request.names) - silent)
        if any(status.phase == "lost" for status in statuses):
            self._backend.stop(part, self._transports, now=True, epoch=self.epoch)  # ends what a lost guard has left
        verify_s, beat = self._pace.verify_s, self._records.beat
        found = clean(self._backend, part, self._transports, epoch=self.epoch, verify_s=verify_s, beat=beat)
        return found + unknown

    def _cause(self, statuses: Sequence[HostStatus]) -> dict[str, Any] | None:
        error = self._failure.to_json() if self._failure is not None else None
        error = error or first_cause(self.request, statuses, ordered=self._user_order is not None)
        return self._heartbeats.as_evidence(error) if error else None

    def _judge(self, statuses: Sequence[HostStatus], left: Sequence[Leftover]) -> Outcome:
        error = self._cause(statuses)
        if error is None and self._said_finished(statuses):
            return self._conclude("finished", None, statuses, left)
        if error is None or (self._user_order == "kill" and self._failed_at is None):
            return self._conclude("stopped", None, statuses, left)
        return self._conclude("failed", error, statuses, left)

    def _said_finished(self, statuses: Sequence[HostStatus]) -> bool:
        """Whether rank 0 left because all was done. A stop may come from the user, from a guard whose machine shuts
        down, or from whoever signals a rank, and an order may come after the last step: only rank 0 knows.
        The user's own program does not tell; it has finished if nobody told it to leave.
        """
        head = self.request.hosts[0]
        if head.program == "command":
            return all(status.reason == "finished" for status in statuses)
        path = PurePath(head.rank_files) / self._layout.result(self._attempt).name
        try:
            said = json.loads(self._transports[head.host].read(path))
        except (OSError, ValueError, GanglineError) as error:
            self._records.complain(f"{head.host} does not say how rank 0 left: {error}")
            return False
        return isinstance(said, dict) and said.get("result") == "finished"

    def _conclude(
        self,
        result: Phase,
        error: dict[str, Any] | None,
        statuses: Sequence[HostStatus] = (),
        left: Sequence[Leftover] = (),
    ) -> Outcome:
        assert result in {"finished", "stopped", "failed"}
        outcome = Outcome(
            result=result,
            hosts={status.host: HostOutcome(phase=status.phase, returncode=status.returncode) for status in statuses},
            error=error,
            failures=tuple(gather_failures(statuses)),
            left=tuple(f"{each.host}: {each.what}" for each in left if each.kind != "unknown"),
            unverified=tuple(sorted({each.host for each in left if each.kind == "unknown"})),
        )
        self._records.outcome(outcome)
        details: dict[str, Any] = {"what": error["what"]} if error else {}
        if result == "stopped" and self._user_order is None:
            details = {"why": "its ranks were told to leave by a signal, not by gangline stop"}
        details |= {"left": outcome.left} if outcome.left else {}
        details |= {"unverified": outcome.unverified} if outcome.unverified else {}
        self._records.event(result, **details)
        self._records.set_phase(result, error=error)
        return outcome


def _has_failed(status: HostStatus) -> bool:
    if status.phase in {"lost", "starting"} or any(failure["error"] is not None for failure in status.failures):
        return True
    return status.phase == "ended" and status.returncode != 0


def _is_done(layout: RunLayout, attempt: int) -> bool:
    """Whether an earlier supervisor has seen all ranks join."""
    try:
        return bool(read_json(layout.attempt(attempt) / "board.json")["done"])
    except (FileNotFoundError, ValueError, KeyError):
        return False
