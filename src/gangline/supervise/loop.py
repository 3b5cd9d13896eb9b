"""The supervisor of one attempt: starts the gang or finds it running, watches it, and writes down how it ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import Backend, HostStatus, Request
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster
from gangline.runs.events import append_event
from gangline.runs.files import read_json, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.state import HostOutcome, Order, Outcome, Phase, RunState, clear_order, read_order
from gangline.supervise.cause import first_cause, gather_failures
from gangline.supervise.commit import Committer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the supervisor looks, and how long it waits."""

    poll_s: float = 0.3
    failure_grace_s: float = 15.0
    """What is left of a gang that failed may take this long to leave by itself."""
    disk_s: float = 60.0
    """How long a file that cannot be written is tried again."""
    lock_s: float = 2.0
    """A look at the lock by somebody else is no reason to refuse."""


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
    ) -> None:
        self._layout = layout
        self._attempt = attempt
        self._backend = backend
        self._connect = connect
        self._cluster = Cluster.of_attempt(layout, attempt)
        self._transports = connect(self._cluster)
        self._pace = pace or Pace()
        self.request = Request.from_json(read_json(layout.attempt(attempt) / "request.json"))
        self._committer = Committer(
            self._cluster,
            self._transports,
            run_id=layout.run_id,
            hosts=tuple(part.host for part in self.request.hosts),
            attempt=attempt,
        )
        self._ordered: Order | None = None
        """What the user ordered and was passed on."""
        self._failed_at: float | None = None
        """When a failure was first seen (monotonic)."""
        self._gave_up = False
        self._complaints: set[str] = set()

    def begin(self) -> None:
        """Say that we are here, and start the gang unless it runs; raises what `Backend.start` raises."""
        self._clear_earlier()
        running = any(status.phase != "starting" for status in self._poll())
        if not running:
            clear_order(self._layout)
        self._set_phase("running", supervisor=ProcessId.current())
        if not running:
            try:
                self._backend.start(self.request, self._transports)
            except GanglineError as error:
                self._conclude("failed", error.to_json())
                raise
            self._event("started", hosts=[part.host for part in self.request.hosts])
        # Not before: if nothing starts there, the run still belongs to the hosts that it ran on.
        self._persist(lambda: write_json(self._layout.cluster, self._cluster.to_json()))

    def _clear_earlier(self) -> None:
        """End what attempts without an outcome have left; raises RunFailed if one of them still runs."""
        for number in range(1, self._attempt):
            folder = self._layout.attempt(number)
            if (folder / "outcome.json").exists() or not (folder / "request.json").exists():
                continue
            request = Request.from_json(read_json(folder / "request.json"))
            transports = self._connect(Cluster.of_attempt(self._layout, number))
            statuses = self._backend.poll(request, transports)
            if any(status.phase == "running" for status in statuses):
                raise RunFailed(
                    f"{self._layout.run_id} is running already",
                    seen=f"attempt {number} has guards that run",
                    fix=f"gangline stop {self._layout.run_id}",
                )
            self._backend.stop(request, transports, now=True)
            for transport in transports.values():
                transport.close()

    def watch(self) -> Outcome:
        """Look after the gang until it has ended, then write outcome.json and state.json."""
        while True:
            statuses = self._poll()
            self._forward_order()
            self._end_failed(statuses)
            self._commit()
            if all(status.phase != "running" for status in statuses):
                break
            time.sleep(self._pace.poll_s)
        if any(status.phase == "lost" for status in statuses):
            self._backend.stop(self.request, self._transports, now=True)  # ends what a lost guard has left
        self._commit()
        return self._judge(statuses)

    def _poll(self) -> list[HostStatus]:
        return self._backend.poll(self.request, self._transports)

    def _forward_order(self) -> None:
        order = read_order(self._layout)
        if order is None or self._ordered in {order, "kill"}:
            return
        self._ordered = order
        self._backend.stop(self.request, self._transports, now=order == "kill")
        self._event("stopping", order=order)
        self._set_phase("stopping")

    def _end_failed(self, statuses: Sequence[HostStatus]) -> None:
        """End the rest of a gang of which a part failed: ranks first, after the grace everything."""
        if self._ordered == "kill":
            return
        if self._failed_at is None and any(_has_failed(status) for status in statuses):
            self._failed_at = time.monotonic()
            self._backend.stop(self.request, self._transports, now=False)
            cause = first_cause(self.request, statuses) or {}
            self._event("failing", what=cause.get("what", ""))
            self._set_phase("stopping")
        if self._failed_at is None or self._gave_up:
            return
        if time.monotonic() > self._failed_at + self._pace.failure_grace_s:
            self._gave_up = True
            self._backend.stop(self.request, self._transports, now=True)

    def _commit(self) -> None:
        try:
            for commit in self._committer.sweep():
                self._event("committed", step=commit.step, hosts=sorted(commit.parts))
        except OSError as error:  # a full disk: the next sweep tries again
            self._complain(f"cannot commit: {error}")

    def _judge(self, statuses: Sequence[HostStatus]) -> Outcome:
        error = first_cause(self.request, statuses)
        if error is None and self._said_finished():
            return self._conclude("finished", None, statuses)
        if error is None or (self._ordered == "kill" and self._failed_at is None):
            return self._conclude("stopped", None, statuses)
        return self._conclude("failed", error, statuses)

    def _said_finished(self) -> bool:
        """Whether rank 0 left because all was done. A stop may come from the user, from a guard whose machine shuts
        down, or from whoever signals a rank, and an order may come after the last step: only rank 0 knows.
        """
        head = self.request.hosts[0]
        path = PurePath(head.rank_files) / self._layout.result(self._attempt).name
        try:
            said = json.loads(self._transports[head.host].read(path))
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(said, dict) and said.get("result") == "finished"

    def _conclude(self, result: Phase, error: dict[str, object] | None, statuses: Sequence[HostStatus] = ()) -> Outcome:
        assert result in {"finished", "stopped", "failed"}
        outcome = Outcome(
            result=result,
            hosts={status.host: HostOutcome(phase=status.phase, returncode=status.returncode) for status in statuses},
            error=error,
            failures=tuple(gather_failures(statuses)),
        )
        self._persist(lambda: outcome.save(self._layout.attempt(self._attempt) / "outcome.json"))
        details = {"what": error["what"]} if error else {}
        if result == "stopped" and self._ordered is None:
            details = {"why": "its ranks were told to leave by a signal, not by gangline stop"}
        self._event(result, **details)
        self._set_phase(result, error=error)
        return outcome

    def _set_phase(self, phase: Phase, **changes: object) -> None:
        state = replace(RunState.load(self._layout), phase=phase, attempt=self._attempt, **changes)  # type: ignore[arg-type]
        self._persist(lambda: state.save(self._layout))

    def _event(self, event: str, **details: object) -> None:
        try:
            append_event(self._layout.events, event, source="supervisor", attempt=self._attempt, **details)
        except OSError as error:
            self._complain(f"cannot write event {event}: {error}")

    def _persist(self, write: Callable[[], None]) -> None:
        """Write, and try again for a while: a full disk may get room once the ranks have ended."""
        deadline = time.monotonic() + self._pace.disk_s
        while True:
            try:
                return write()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise
                self._complain(str(error))
            time.sleep(self._pace.poll_s)

    def _complain(self, words: str) -> None:
        """One line for supervisor.log, once."""
        if words not in self._complaints:
            self._complaints.add(words)
            log.warning("%s: %s", self._layout.run_id, words)


def _has_failed(status: HostStatus) -> bool:
    if status.phase in {"lost", "starting"} or any(failure["error"] is not None for failure in status.failures):
        return True
    return status.phase == "ended" and status.returncode != 0
