"""One run as its supervisor reaches it, and the orders to the host agents of one attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gangline.launch.backend import Backend, HostStatus, LaunchRequest, Leftover
from gangline.launch.backends import backend
from gangline.launch.poll import PATIENCE_S
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.state import AttemptOutcome
from gangline.supervise.lead import Lead
from gangline.supervise.liveness import DOUBT_S, NOTICE_S, STALL_S
from gangline.supervise.startup import StartLimits
from gangline.transport.connect import connect_all
from gangline.transport.transport import Transport

PAUSE_S = 0.3
VERIFY_S = 15.0
NO_SSH_AGENT = {"SSH_AUTH_SOCK": ""}
"""An ssh agent that is forwarded with our connection ends with it: a host that leads must work without one."""
Connect = Callable[[Cluster], Mapping[str, Transport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """How often the supervisor polls, and how long it waits."""

    poll_s: float = 0.3
    patience_s: float = PATIENCE_S
    """How long a commit or an order may delay a poll: a host may die meanwhile."""
    failure_grace_s: float = 15.0
    """How long the other ranks of a failed gang may take to exit by themselves."""
    break_grace_s: float = 40.0
    """The same with a warm pool: there host agents end ranks without progress themselves, and sooner."""
    silence_s: float = 30.0
    """How long to wait for a silent host once the gang has failed or ended elsewhere."""
    ordered_silence_s: float = 30.0
    """The same, at most, after an order of the user: a job may wait for a lost host for a day."""
    abandon_s: float = 120.0
    """The same after an order where no host has ended yet, and for a host agent that does not respond."""
    notice_s: float = NOTICE_S
    stall_s: float = STALL_S
    doubt_s: float = DOUBT_S
    """After so long an event names the one host that reports another supervisor."""
    trouble_s: float = 60.0
    """How long polls may fail before the supervisor gives up."""
    verify_s: float = VERIFY_S
    """How long leftovers may take to go after the end."""
    disk_s: float = 60.0
    """How long a file that cannot be written is tried again."""
    lock_s: float = 2.0
    """Another process may hold the lock for a moment, to look at it."""
    start: StartLimits = field(default_factory=StartLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangControl:
    """Questions and orders to the host agents of one attempt. epoch: that of the orders."""

    backend: Backend
    request: LaunchRequest
    transports: Mapping[str, Transport]
    epoch: int
    verify_s: float = VERIFY_S
    beat: Callable[[], None] = lambda: None
    """Reports that the supervisor works; called often."""

    def on(self, hosts: Collection[str]) -> GangControl:
        """The same for some of the hosts."""
        return replace(self, request=self.request.on(hosts))

    def poll(self) -> list[HostStatus]:
        """The status of every host."""
        return self.backend.poll(self.request, self.transports)

    def announce(self) -> list[str]:
        """Inform the host agents of the supervisor in charge; the hosts that were not reached."""
        return self.backend.announce(self.request, self.transports, epoch=self.epoch)

    def stop(self, *, now: bool = True, resting: bool = False) -> list[str]:
        """Order the ranks to end; the hosts that were not reached."""
        return self.backend.stop(self.request, self.transports, now=now, resting=resting, epoch=self.epoch)

    def clean(self) -> list[Leftover]:
        """End leftovers until none is found, for `verify_s` at most; those that remain."""
        deadline = time.monotonic() + self.verify_s
        left = self.backend.verify(self.request, self.transports)
        while (hosts := {each.host for each in left if each.kind != "unknown"}) and time.monotonic() < deadline:
            self.beat()
            time.sleep(PAUSE_S)  # a host agent that has just written its exit record is about to leave
            self.on(hosts).stop()
            left = self.backend.verify(self.request, self.transports)
        return left

    def end_resting(self) -> None:
        """End idle host agents, and wait until they are gone, `verify_s` at most."""
        deadline = time.monotonic() + self.verify_s
        while time.monotonic() < deadline and (resting := [each.host for each in self.poll() if each.rests]):
            self.on(resting).stop()
            self.beat()
            time.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRun:
    """A run, and how its supervisor reaches the hosts."""

    layout: RunLayout
    backend: Callable[[str], Backend] = backend
    """The backend of a name."""
    connect: Connect = connect_all
    pace: PollIntervals = field(default_factory=PollIntervals)
    beat: Callable[[], None] = lambda: None
    """Reports that the supervisor works; called often."""
    deliver: Callable[[], None] = lambda: None
    """Waits a while for messages about what is written so far; called before the state says that the run has ended."""
    lead: Lead | None = None
    """None: no other host could take over the run."""

    @contextmanager
    def attempt(self, request: LaunchRequest, *, epoch: int) -> Iterator[GangControl]:
        """The host agents of an attempt, over connections that are closed at the end."""
        transports = self.connect(Cluster.of_attempt(self.layout, request.attempt))
        try:
            yield GangControl(
                backend=self.backend(request.backend), request=request, transports=transports, epoch=epoch
            )
        finally:
            for transport in transports.values():
                transport.close()


def with_leftovers(outcome: AttemptOutcome, left: Sequence[Leftover]) -> AttemptOutcome:
    """The same outcome with these leftovers, and with the hosts that could not be verified."""
    found = [f"{each.host}: {each.what}" for each in left if each.kind != "unknown"]
    unknown = {each.host for each in left if each.kind == "unknown"}
    return replace(outcome, left=(*outcome.left, *found), unverified=tuple(sorted(unknown.union(outcome.unverified))))
