"""The supervisor of one attempt: starts the gang or finds it running, watches it, and writes down how it ended."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, Literal

from gangline.diagnose.rank_ends import Failure
from gangline.errors import CheckpointError, GanglineError, HostUnreachable, RunFailed
from gangline.launch.backend import HostStatus, LaunchRequest, Leftover, SupervisorCommand
from gangline.runs.checkpoints import part_folder, step_folder
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, Commit, commit_record
from gangline.runs.record_versions import decode_record, load_if_there, load_record, write_record
from gangline.runs.state import AttemptOutcome, HostOutcome, ProcessId, RunState, StopOrder, read_order
from gangline.supervise.attempt_records import AttemptFigures, PollErrors, Records, read_figures
from gangline.supervise.background import Background
from gangline.supervise.cause import (
    first_cause,
    gather_failures,
    leaves_doubt,
    left_as_ordered,
    of_memory,
    only_terminated,
)
from gangline.supervise.clean import end_earlier
from gangline.supervise.gang_control import NO_SSH_AGENT, GangControl, SupervisedRun, with_leftovers
from gangline.supervise.gang_view import GangView, Statuses
from gangline.supervise.lead import Lead
from gangline.supervise.liveness import EpochClaims
from gangline.supervise.lost_hosts import Partition, find_partition
from gangline.transport.transport import Transport, read_if_there

# The orders to the host agents of an attempt, and their delivery.


AgentOrder = Literal["yield", "break", "stop", "kill"]
"""yield: save at the next step, exit, and wait for the next attempt. break: the gang has failed; save the last complete
step, exit, and wait. stop: save at the next step and end. kill: end."""
STRENGTH: tuple[AgentOrder, ...] = ("yield", "break", "stop", "kill")
"""Weakest first; a stronger order replaces a weaker one."""


class OrderDelivery:
    """The orders of one attempt to its host agents."""

    def __init__(self, gang: GangControl, *, patience_s: float) -> None:
        self.given: AgentOrder | None = None
        """The strongest order so far."""
        self.given_at = float("inf")
        """When, by the monotonic clock."""
        self._gang = gang
        self._sending = Background[tuple[AgentOrder | None, bool]](patience_s=patience_s)
        self._open: set[str] = set()
        """Hosts that have not received the last order."""

    def give(self, order: AgentOrder) -> None:
        """Order all host agents; a stronger order from before stays in force."""
        if self.given is None or STRENGTH.index(order) >= STRENGTH.index(self.given):
            self.given = order
        self.given_at = time.monotonic()
        self.announce()

    def announce(self) -> None:
        """Deliver the epoch of this supervisor, and the order, to all host agents."""
        self._open = set(self._gang.request.names)

    def deliver(self, statuses: Sequence[HostStatus]) -> None:
        """Send the order to the host agents that lack it; a silent host gets it once it answers."""
        reachable = self._open - {status.host for status in statuses if status.phase == "unreachable"}
        for host in reachable:
            self._sending.start(host, partial(self._send, host, self.given))
        for host, (order, is_received) in self._sending.results().items() if reachable else ():
            if is_received and order == self.given:
                self._open.discard(host)

    def _send(self, host: str, order: AgentOrder | None) -> tuple[AgentOrder | None, bool]:
        """The order, and whether the host agent has received it."""
        part = self._gang.on({host})
        if order is None:
            return order, not part.announce()
        return order, not part.stop(now=order in {"break", "kill"}, resting=order in {"yield", "break"})


# The command with which the host agent beside this supervisor restarts it.


GAVE_UP = "ranks lost another one, or gave up waiting for it: all are asked where they stand"
"""Of the user's own program, before it is known which one it was."""
JOB_NOTICE_S = 2.0
"""How much later than ranks their supervisor may hear that Slurm ends the job."""
RESTART_ENV = ("PATH", "HOME", "PYTHONPATH", "PYTHONSAFEPATH", "GANGLINE_OWN_PATH", "GANGLINE_HOME", "SSH_AUTH_SOCK")
"""Variables that a supervisor needs to find its code and to reach other hosts."""


def with_restart(request: LaunchRequest, cluster: Cluster, layout: RunLayout) -> LaunchRequest:
    """The same request, in which the host agent on this computer gets the command that restarts the supervisor.

    Only one host agent has it: two would start two supervisors.
    """
    here = next((host.name for host in cluster.hosts if host.transport == "local" and host.name in request.names), None)
    words = SupervisorCommand(
        argv=(sys.executable, "-m", "gangline.supervise", str(layout.folder), str(request.attempt), "--detach"),
        env={name: os.environ[name] for name in RESTART_ENV if name in os.environ},
        folder=str(layout.folder),
    )
    hosts = [dataclasses.replace(part, supervisor=words) if part.host == here else part for part in request.hosts]
    return dataclasses.replace(request, hosts=tuple(hosts))


def with_deputies(request: LaunchRequest, cluster: Cluster, lead: Lead) -> LaunchRequest:
    """The same request, in which the host agents of hosts that can lead get the command that does."""
    parts = []
    for part in request.hosts:
        host, folder = cluster.host(part.host), str(PurePath(part.rank_files).parents[1])
        own = {} if host.code is None else {"PYTHONPATH": host.code, "GANGLINE_OWN_PATH": host.code}
        words = SupervisorCommand(
            argv=("-m", "gangline.supervise.deputy", folder, part.host), env={**NO_SSH_AGENT, **own}, folder=folder
        )
        can_lead = part.host in lead.deputies.candidates and part.host != lead.own
        parts.append(dataclasses.replace(part, led=True, deputy=words if can_lead else None))
    return dataclasses.replace(request, hosts=tuple(parts))


# Commit checkpoints: once every host of the attempt has its part, place the record on every host.


STEP = re.compile(r"step-(\d{8,})")


class Committer:
    """Commits the checkpoints of one attempt.

    The record is placed by files and not by a collective among ranks, which may be dying.
    """

    def __init__(self, cluster: Cluster, gang: GangControl) -> None:
        request = gang.request
        self._folders: dict[str, Path] = {
            name: RunLayout(Path(cluster.host(name).workdir), request.run_id).checkpoints for name in request.names
        }
        self._transports = gang.transports
        self._attempt = request.attempt
        self._done: set[bytes] = set()
        """Records that every host has. A step whose record was removed by retention is not committed again."""

    def sweep(self) -> list[Commit]:
        """Commit every step that is complete now; the new commits, oldest first."""
        return [commit for step in self._candidates() if (commit := self._commit(step)) is not None]

    def _candidates(self) -> list[int]:
        """Steps that have a folder on every host."""
        names = [set(self._transports[host].names(folder)) for host, folder in self._folders.items()]
        return sorted(int(found[1]) for name in set.intersection(*names) if (found := STEP.fullmatch(name)))

    def _commit(self, step: int) -> Commit | None:
        record = self._record(step)
        if record is None or record in self._done:
            return None
        commit = Commit.from_bytes(record)
        if commit.attempt != self._attempt or commit.step != step:
            return None
        fresh = [self._place(host, step, record) for host in self._folders]
        self._done.add(record)
        return commit if any(fresh) else None

    def _record(self, step: int) -> bytes | None:
        parts: dict[str, bytes] = {}
        for host, folder in self._folders.items():
            part = read_if_there(self._transports[host], part_folder(folder, step, host) / PART_FILE)
            if part is None:
                return None
            parts[host] = part
        try:
            return commit_record(parts)
        except CheckpointError:  # parts of different attempts: some host has not written its new one yet
            return None

    def _place(self, host: str, step: int, record: bytes) -> bool:
        path = step_folder(self._folders[host], step) / COMMIT_FILE
        if read_if_there(self._transports[host], path) == record:
            return False
        self._transports[host].write(path, record)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt without processes on the hosts that answer."""

    outcome: AttemptOutcome
    statuses: tuple[HostStatus, ...] = ()
    user_order: StopOrder | None = None
    """The order of the user."""
    stop_ordered: bool = False
    """Host agents had the order to stop or to kill, so their end is no sign of a shutdown of their machines."""
    yielded_because: str | None = None
    """Why it had to save and end in favour of the next attempt; None: it had not."""
    step: int | None = None
    """The last completed step that was seen."""
    joined: bool = False
    """Its ranks had joined."""
    noticed_at: float | None = None
    """When a failure was first seen (monotonic)."""
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Hosts that did not answer at its end, and for how long."""
    cut: tuple[str, ...] = ()
    """Hosts that answered, but were cut off from the others."""


class Supervisor:
    """Supervises one attempt until none of its processes runs.

    If the attempt runs already (an earlier supervisor was killed), it is taken over and not started again.
    """

    def __init__(
        self,
        run: SupervisedRun,
        attempt: int,
        *,
        transports: Mapping[str, Transport] | None = None,
        reason_to_yield: Callable[[], str | None] = lambda: None,
    ) -> None:
        layout, pace = run.layout, run.pace
        self._run = run
        self._deliver = run.deliver
        self._layout = layout
        self.attempt = attempt
        self._pace = pace
        self._cluster = Cluster.of_attempt(layout, attempt)
        self._transports = run.connect(self._cluster) if transports is None else transports
        lead = run.lead
        least_epoch = (lambda: lead.least_epoch) if lead is not None else (lambda: 0)
        self.records = Records(
            layout, attempt, disk_s=pace.disk_s, pause_s=pace.poll_s, beat=run.beat, least_epoch=least_epoch
        )
        self.request = load_record(layout.request(attempt), LaunchRequest)
        self.gang = GangControl(
            backend=run.backend(self.request.backend),
            request=self.request,
            transports=self._transports,
            epoch=self.records.epoch,
            verify_s=pace.verify_s,
            beat=run.beat,
        )
        self._sweep = Committer(self._cluster, self.gang).sweep
        self._committing = Background[list[Commit]](patience_s=pace.patience_s)
        self._comparing = Background[AttemptFigures](patience_s=pace.patience_s)
        self._claims = EpochClaims(num_hosts=len(self.request.hosts), doubt_s=pace.doubt_s)
        self._reason_to_yield = reason_to_yield
        self._yielded_because: str | None = None
        self.ended: Ended | None = None
        """Its end, once it has ended; then another attempt follows, or `close` ends the run."""
        self._orders = OrderDelivery(self.gang, patience_s=pace.patience_s)
        self._poll_errors = PollErrors(self.records, patience_s=pace.trouble_s)
        is_quiet = RunState.load(layout).quiet_since is not None
        self.followed = GangView(self.request, self._cluster, self._transports, pace=pace, is_quiet=is_quiet)
        self._user_order: StopOrder | None = None
        """The order of the user that was passed on."""
        self._failed_at: float | None = None
        """When a failure was first seen (monotonic)."""
        self._failing: list[str] = []
        """Hosts with failures, in the order in which they were seen."""
        self._cut: tuple[str, ...] = ()
        """Hosts that were cut off from the others, found after the end."""
        self._failure: GanglineError | None = None
        """Why this supervisor ended the attempt: a start or a step took too long."""

    @property
    def epoch(self) -> int:
        """Of two supervisors of a run, the one with the higher epoch is in charge."""
        return self.records.epoch

    def begin(self, secrets: Mapping[str, str] | None = None) -> None:
        """`start`, once what attempts before have left is ended; where it raises, the run has ended."""
        end_earlier(self._run, self.attempt, hosts=self.request.names, epoch=self.epoch)
        try:
            self.start(secrets)
        except GanglineError:
            if self.ended is not None:
                self.close(self.ended)
            raise

    def start(self, secrets: Mapping[str, str] | None = None) -> None:
        """Say that we are here, and start the gang unless it runs; raises what `Backend.start` raises.

        secrets: more environment for the ranks of a gang that is started.
        """
        statuses = self.gang.poll()
        has_begun = self._has_begun(statuses)
        if not has_begun:
            self._require_no_order()
        self.records.set_phase("running", supervisor=ProcessId.current())
        if has_begun:
            self._orders.announce()
            self._orders.deliver(statuses)
            if _is_done(self._layout, self.attempt):
                self.followed.take_for_joined()
        else:
            self._start_gang(statuses, secrets)
        # Not before: if nothing starts there, the run still belongs to the hosts that it ran on.
        self.records.persist(lambda: write_record(self._layout.cluster, self._cluster.to_json()))

    def _require_no_order(self) -> None:
        """What was told to end before it began is not started; raises RunFailed. A host agent may still come up: its
        supervisor died as it started it. It finds an order, too.
        """
        self._user_order = read_order(self._layout, attempt=self.attempt)
        if self._user_order is None:
            return
        self.gang.stop()
        self._conclude("stopped", None, left=self._clean_up(self.gang.poll()))
        raise RunFailed(
            f"{self._layout.run_id} was stopped before it began",
            seen=f"an order to {self._user_order} attempt {self.attempt}",
            fix=f"nothing was started; to start it: gangline resume {self._layout.run_id}",
        )

    def _start_gang(self, statuses: Statuses, secrets: Mapping[str, str] | None) -> None:
        try:
            for status in statuses:
                if status.phase == "unreachable":
                    raise HostUnreachable(f"{status.host} does not answer", seen=status.why, fix="nothing was started")
            request = with_restart(self.request, self._cluster, self._layout)
            if self._run.lead is not None:
                request = with_deputies(request, self._cluster, self._run.lead)
            self.gang.backend.start(request, self._transports, epoch=self.epoch, secrets=secrets)
        except GanglineError as error:
            self._conclude("failed", error.to_json(), left=self._clean_up(self.gang.poll()))
            raise
        self.records.event("started", hosts=list(self.request.names))

    def _has_begun(self, statuses: Statuses) -> bool:
        """Whether an earlier supervisor has started the gang; for silent hosts the state decides."""
        phases = {status.phase for status in statuses}
        if phases - {"starting", "unreachable"}:
            return True
        return "unreachable" in phases and RunState.load(self._layout).phase in {"running", "stopping"}

    def watch(self) -> AttemptOutcome:
        """Supervise the gang until it has ended, and end the run with it."""
        ended = self.supervise_again()
        self.close(ended)
        return ended.outcome

    def supervise_again(self) -> Ended:
        """Supervise the gang until it has ended; outcome.json is written then."""
        while True:
            self.records.beat()
            with self._poll_errors.tolerated():
                ended = self._look_once()
                if ended is not None:
                    return ended
            time.sleep(self._pace.poll_s)

    def close(self, ended: Ended, *, why: str = "") -> None:
        """Write the end of the run into events and state. why: the reason why no attempt follows a failure."""
        self._compare(ended.statuses)
        if self._rests:  # no attempt follows
            self.gang.end_resting()
        outcome = ended.outcome
        details: dict[str, Any] = {"what": outcome.error["what"]} if outcome.error else {}
        if outcome.result == "stopped" and ended.user_order is None:
            details = {"why": "a signal ended its ranks, not gangline stop"}
        details |= {"left": outcome.left} if outcome.left else {}
        details |= {"unverified": outcome.unverified} if outcome.unverified else {}
        details |= {"why": why} if why else {}
        self.records.event(outcome.result, **details)
        self._deliver()
        self.records.set_phase(outcome.result, error=outcome.error)

    def ended_before(self, away: Collection[str]) -> Ended:
        """Its end as it is written down, by an earlier supervisor. away: hosts that did not answer then."""
        outcome = load_record(self._layout.outcome(self.attempt), AttemptOutcome)
        has_yielded = outcome.result == "stopped" and read_order(self._layout, attempt=self.attempt) is None
        return Ended(
            outcome=outcome,
            joined=True,
            silent_s=dict.fromkeys(away, float("inf")),
            yielded_because="its hosts were to change" if has_yielded else None,
        )

    def _look_once(self) -> Ended | None:
        """Poll the hosts and react; the end of the attempt, once it has ended."""
        statuses = self.gang.poll()
        self._require_charge(statuses)
        self._follow(statuses)
        self._pass_on_order()
        if self._leads:
            self._yield_if_asked()
        self._end_failed(statuses)
        self._orders.deliver(statuses)
        self._commit(statuses)
        if not self._is_over(statuses):
            return None
        left = self._clean_up(statuses)
        self._commit(statuses, last=True)
        return self._judge(statuses, left)

    @property
    def _leads(self) -> bool:
        """Whether it may command. Without a majority it ends its own attempt at most, which is never wrong."""
        return self._run.lead is None or self._run.lead.holds

    def _require_charge(self, statuses: Statuses) -> None:
        lead = self._run.lead
        self.records.require_charge(RunState.load(self._layout).epoch)  # first: another one of this host votes as we do
        if lead is not None:
            lead.check()
        for event, details in self._claims.note(statuses, epoch=self.epoch):
            self.records.event(event, **details)
        if lead is not None and self._claims.believed is not None:
            raise lead.give_way(self._claims.believed)  # nobody else ends what is left on this host
        self.records.require_charge(self._claims.believed)

    def _follow(self, statuses: Statuses) -> None:
        events = self.followed.note(statuses, ordered=self._orders.given is not None)
        start = self.followed.start
        if start.is_due() or any(event in {"joined", "waiting"} for event, _ in events):
            self.records.figures(self._layout.board(self.attempt), start.to_json())
        for event, details in events:
            if event in {"quiet", "printing"}:
                self.records.set_quiet(details.get("since"))
            self.records.event(event, **details)

    def _pass_on_order(self) -> None:
        order = read_order(self._layout, attempt=self.attempt)
        if order is None or self._user_order in {order, "kill"}:
            return
        self._user_order = order
        self._orders.give(order)
        self.records.event("stopping", order=order)
        self.records.set_phase("stopping")

    def _yield_if_asked(self) -> None:
        """Have ranks save and exit where the next attempt is to have other hosts."""
        if self._orders.given is not None or not self.followed.joined:
            return
        self._yielded_because = self._reason_to_yield()
        if self._yielded_because is not None:
            self._orders.give("yield")
            self.records.event("leaving", what=self._yielded_because)

    def _end_failed(self, statuses: Statuses) -> None:
        """End the other ranks of a failed gang: first in good order, after the grace by force."""
        if (
            self._user_order is not None
        ):  # a script that dies of it, and torchrun with it, takes no time from the others
            statuses = [status for status in statuses if not left_as_ordered(status)]
        failing = [status.host for status in statuses if _has_failed(status) and status.host not in self._failing]
        self._failing += failing
        if self._user_order == "kill":
            return
        given = self._orders.given
        if self._failed_at is None:
            self._failure = self._find_failure(statuses)
            if self._failure is None and not any(map(_has_failed, statuses)):
                return
            self._failed_at = time.monotonic()
            self._orders.give(self._order_after_failure())
            is_open = self._failure is None and self.request.hosts[0].program == "command" and leaves_doubt(statuses)
            known = GAVE_UP if is_open else (self._cause(statuses) or {}).get("what", "")
            self.records.event("failing", what=known)
            self.records.set_phase("stopping")
        elif given != "kill" and time.monotonic() > self._failed_at + self._failure_grace_s:
            self._orders.give("kill")

    def _find_failure(self, statuses: Statuses) -> GanglineError | None:
        """The error that ends the gang though no rank has failed; None: there is none."""
        if self._orders.given is not None:
            return None
        late = self.followed.start.failure() or (self._run.lead.failure() if self._run.lead is not None else None)
        return late or (None if any(map(_has_failed, statuses)) else self.followed.failure())

    def _order_after_failure(self) -> AgentOrder:
        if self._rests:
            return "break"
        return "stop" if self.followed.has_something_to_save else "kill"

    @property
    def _rests(self) -> bool:
        return any(part.warm_pool for part in self.request.hosts)

    @property
    def _failure_grace_s(self) -> float:
        return self._pace.break_grace_s if self._rests else self._pace.failure_grace_s

    def _commit(self, statuses: Statuses, *, last: bool = False) -> None:
        if not self._leads or any(status.phase == "unreachable" for status in statuses):
            return  # a commit needs all hosts, and asking a silent one takes long
        try:
            found = self._committing.finish(self._sweep) if last else [self._committing.do(self._sweep) or []]
            for commit in chain.from_iterable(found):
                self.records.event("committed", step=commit.step, hosts=sorted(commit.parts))
        except Exception as error:  # noqa: BLE001  (a full disk, a lost connection, a lying host: the next tries again)
            self.records.complain(f"cannot commit: {error}")

    def _compare(self, statuses: Statuses) -> None:
        """Write the figures of the attempt, if they can be read; the end of the run does not depend on them."""
        head = self._cluster.head.name
        silent = {status.host for status in statuses if status.phase == "unreachable"}
        if self.request.hosts[0].program == "command" or head in silent:
            return
        try:
            found = self._comparing.do(self._compared)
        except Exception as error:  # noqa: BLE001  (figures that are missing or damaged, a host that is gone)
            self.records.complain(f"the plan is not compared with the run: {type(error).__name__}: {error}")
            return
        if found is None:
            self.records.complain(f"the plan is not compared with the run: its figures on {head} are read too slowly")
            return
        if found.problem is not None:
            self.records.complain(f"the plan is not compared with the run: {found.problem}")
        for path, value in (
            (self._layout.times(self.attempt), found.times),
            (self._layout.comparison, found.comparison),
        ):
            if value is not None:
                self.records.figures(path, value)

    def _compared(self) -> AttemptFigures:
        head = self._transports[self._cluster.head.name]
        return read_figures(self._layout, self.attempt, cluster=self._cluster, head=head)

    def _is_over(self, statuses: Statuses) -> bool:
        """Whether the attempt has ended on all hosts that answer, and the others were waited for long enough."""
        hopeless = time.monotonic() > self._orders.given_at + self._pace.abandon_s
        given_up = self.followed.liveness.stalled if hopeless else set()
        phases = {status.phase for status in statuses if status.phase != "running" or status.host not in given_up}
        if "running" in phases:
            return False
        if "unreachable" not in phases:
            return True
        # Ranks on silent hosts cannot continue without the others, and their host agent ends them.
        silence_s = self.followed.liveness.silence_s()
        if phases == {"unreachable"}:
            return self._orders.given is not None and silence_s > self._pace.abandon_s
        pace = self._pace
        ordered_s = min(pace.silence_s, pace.ordered_silence_s)
        return silence_s > (pace.silence_s if self._user_order is None else ordered_s)

    def _clean_up(self, statuses: Statuses) -> list[Leftover]:
        """End leftovers on the hosts; those that remain, and the hosts that could not be verified."""
        silent = {status.host for status in statuses if status.phase == "unreachable"}
        unknown = [Leftover(host=host, kind="unknown", what="does not answer") for host in sorted(silent)]
        part = self.gang.on(set(self.request.names) - silent)
        if lost := {status.host for status in statuses if status.phase == "lost"}:
            part.on(lost).stop()  # ends the processes that dead host agents have left
        return part.clean() + unknown

    def _cause(self, statuses: Statuses) -> dict[str, Any] | None:
        error = self._failure.to_json() if self._failure is not None else None
        error = error or first_cause(
            self.request,
            statuses if self._user_order is None else self._not_killed_by_us(statuses),
            ordered=self._user_order is not None,
            seen=self._failing,
            explain=self._out_of_memory,
        )
        if error is None:
            return None
        return self.followed.troubles.as_evidence(self.followed.liveness.as_evidence(error))

    def _not_killed_by_us(self, statuses: Statuses) -> Statuses:
        """Without hosts that were killed because others had failed: that is no cause."""
        if self._orders.given != "kill" or self._failed_at is None:
            return statuses
        return [status for status in statuses if status.reason != "killed"]

    def lacks_of_memory(self, failures: Sequence[Failure]) -> list[dict[str, Any]]:
        """The errors of those ranks among `AttemptOutcome.failures` that ran out of memory, by rank."""
        found = [(failure, self._out_of_memory(failure)) for failure in failures]
        lacks = [{**error.to_json(), "rank": failure["rank"]} for failure, error in found if error is not None]
        return sorted(lacks, key=lambda lack: int(lack["rank"]))

    def _out_of_memory(self, failure: Failure) -> RunFailed | None:
        """The out-of-memory error of a rank, with the forecast of the plan; None: it ended otherwise."""
        with suppress(OSError, ValueError, LookupError, TypeError):  # of another version, perhaps
            plan, job = (load_if_there(path, dict) or {} for path in (self._layout.plan, self._layout.job))
            gang = load_record(self._layout.gang(self.attempt), Gang)
            rank = gang.ranks[failure["rank"]]
            size, again = rank.micro_batch_size or gang.micro_batch, rank.activation_checkpointing
            own = {"micro_batch": size, "activation_checkpointing": again}
            return of_memory(failure, plan, {**job, **{key: value for key, value in own.items() if value is not None}})
        return None

    def _find_partition(self, statuses: Statuses) -> Partition | None:
        """Hosts that are cut off from the others, where that may explain the failure."""
        if self._user_order is not None or not (self._failure is not None or leaves_doubt(statuses)):
            return None
        silent = {status.host for status in statuses if status.phase == "unreachable"}
        hosts = [host for host in self._cluster.hosts if host.name not in silent]
        looking = Background[list[Partition | None]](patience_s=self._pace.poll_s)
        look = partial(find_partition, hosts, self._cluster, self._transports, port=self.request.port)
        with suppress(GanglineError, OSError):
            while (found := looking.do(lambda: [look()])) is None:
                self.records.beat()
                time.sleep(self._pace.poll_s)
            return found[0]
        return None

    def _judge(self, statuses: Statuses, left: Sequence[Leftover]) -> Ended:
        self._await_notice(statuses)
        error = self._cause(statuses)
        if error is not None and (cut := self._find_partition(statuses)) is not None:
            self._cut = cut.hosts
            error = cut.to_json()
        if error is None and self._said_finished(statuses):
            return self._conclude("finished", None, statuses, left)
        if error is None or (self._user_order == "kill" and self._failed_at is None):
            return self._conclude("stopped", None, statuses, left)
        return self._conclude("failed", error, statuses, left)

    def _await_notice(self, statuses: Statuses) -> None:
        """Slurm ends the ranks of its job and this supervisor by the same signal, one step after the other: what only
        looks like a failure until the notice is here, an order to stop.
        """
        deadline = time.monotonic() + JOB_NOTICE_S
        in_job = any(host.allocation is not None for host in self._cluster.hosts)
        while in_job and self._failure is None and self._user_order is None and time.monotonic() < deadline:
            if not only_terminated(self.request, statuses, self._not_killed_by_us(statuses)):
                return
            self._user_order = read_order(self._layout, attempt=self.attempt)
            self.records.beat()
            time.sleep(self._pace.poll_s)

    def _said_finished(self, statuses: Statuses) -> bool:
        """Whether rank 0 completed the run. A stop may come from the user, from a host agent whose machine shuts down,
        or from a signal to a rank, and an order may come after the last step: only rank 0 knows. The user's own program
        does not report it; it has finished unless it was ordered to exit.
        """
        head = self.request.hosts[0]
        if head.program == "command":
            return all(status.reason == "finished" and not status.returncode for status in statuses)
        path = PurePath(head.rank_files) / self._layout.result(self.attempt).name
        try:
            said = decode_record(self._transports[head.host].read(path), path, dict, host=head.host)
        except (OSError, ValueError, GanglineError) as error:
            self.records.complain(f"{head.host} does not say how rank 0 left: {error}")
            return False
        return said.get("result") == "finished"

    def _conclude(
        self,
        result: Literal["finished", "stopped", "failed"],
        error: dict[str, Any] | None,
        statuses: Statuses = (),
        left: Sequence[Leftover] = (),
    ) -> Ended:
        outcome = AttemptOutcome(
            result=result,
            hosts={status.host: HostOutcome(phase=status.phase, returncode=status.returncode) for status in statuses},
            error=error,
            failures=tuple(gather_failures(statuses, seen=self._failing)),
        )
        outcome = with_leftovers(outcome, left)
        self.records.outcome(outcome)
        self.ended = Ended(
            outcome=outcome,
            statuses=tuple(statuses),
            user_order=self._user_order,
            stop_ordered=self._orders.given in {"stop", "kill"},
            yielded_because=self._yielded_because,
            step=self.followed.step,
            joined=self.followed.joined,
            noticed_at=self._failed_at,
            silent_s=self.followed.liveness.silent(),
            cut=self._cut,
        )
        return self.ended


def _has_failed(status: HostStatus) -> bool:
    if status.phase in {"lost", "starting"} or any(failure["error"] is not None for failure in status.failures):
        return True
    return status.phase == "ended" and status.returncode != 0


def _is_done(layout: RunLayout, attempt: int) -> bool:
    """Whether an earlier supervisor has seen all ranks join."""
    try:
        return bool(load_record(layout.board(attempt), dict)["done"])
    except (FileNotFoundError, ValueError, KeyError):
        return False
