"""`python -m gangline.supervise.deputy RUN_FOLDER HOST`: the successor of a supervisor that is not heard any more.

The host agent starts it (gangline.agent.supervise.voting), with {"secrets": {name: value}} on stdin. It ends by itself
once the leader is heard again. Where a majority of the hosts votes for it, it ends what is left of the attempt on the
hosts that answer, and goes on as the supervisor of the run, with the next attempt.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import decode_record, load_if_there, read_regular, write_record
from gangline.runs.state import AttemptOutcome, HostOutcome, RunState, append_event
from gangline.supervise.__main__ import supervise
from gangline.supervise.gang_control import PAUSE_S, GangControl, SupervisedRun, with_leftovers
from gangline.supervise.lead import Deputies, Lead, files_of, newest
from gangline.supervise.leadership import Campaign
from gangline.supervise.lock import supervisor_lock
from gangline.supervise.own_session import fork_again, write_to
from gangline.transport.connect import connect_all
from gangline.units import listed

SILENT_S = 13.0
"""So long the leader was not heard before anybody votes for another one; HEARD_S of gangline.agent.supervise.voting."""
ON_SILENT_S = 30.0
"""The same where the leader's host is on: its own host agent may start its supervisor again."""
TURN_S = 4.0
"""How much later each candidate tries than the one before it."""
CONNECT_S = 2.0
TRY_S, LONGEST_PAUSE_S = 1.0, 15.0
GIVE_UP_S = 3600.0
"""A deputy without a majority ends then; the host agent starts another one as long as there is any."""
END_S = 40.0
ANSWER_S = 3.0
"""How long a winner waits for hosts that gave no vote: they may have answered late."""
log = logging.getLogger(__name__)


def main(words: list[str]) -> int:
    """Entry point; goes on in a process of its own."""
    os.umask(0o077)
    layout, own = RunLayout.of(Path(words[0])), words[1]
    secrets = json.loads(sys.stdin.buffer.read() or b"{}").get("secrets", {})
    if os.fork() == 0:
        fork_again(lambda: _go_on(layout, own, secrets))
    return 0


def _go_on(layout: RunLayout, own: str, secrets: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        (layout.lead / own).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_to(layout.lead / own / "deputy.log")
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
        code = succeed(layout, own, secrets)
    except GanglineError as error:
        log.warning("%s", error)
    except BaseException:
        log.exception("the deputy failed")
        raise
    finally:
        logging.shutdown()
        os._exit(code)


def succeed(layout: RunLayout, own: str, secrets: Mapping[str, str]) -> int:
    """Wait until the leader is heard again, or take over the run and supervise it to its end; the exit code.

    Raises GanglineError where it cannot go on although it was elected.
    """
    deputies = known_deputies(layout, own)
    lead = Lead(layout, deputies, own, connect_all(deputies.seen_from(own)))
    lead.await_records()
    watch = LeaderWatch(layout, lead, deputies)
    threading.Thread(target=lead.ask_witness, daemon=True, name="gangline witness").start()
    while _await_turn(watch):
        with supervisor_lock(layout) as beat:  # a second process of this host would have its vote, too
            tried = lead.campaign(quiet=(watch.leader,))
            if tried.term is not None:
                log.info("elected in term %d, after %.1f s", tried.term, watch.silent_s)
                return take_over(lead, WonLead(leader=watch.leader, campaign=tried), secrets, beat=beat)
        log.info("not elected: %s", tried.why)
        if tried.over or tried.leader not in (None, watch.leader):
            break
        watch.pause()
    return 0


def _await_turn(watch: LeaderWatch) -> bool:
    """Wait until this host is to ask for votes; False where the leader is heard again, or after a long time."""
    deadline = time.monotonic() + GIVE_UP_S
    while watch.is_silent() and time.monotonic() < deadline:
        if watch.is_due():
            return True
        time.sleep(0.2)
    return False


def known_deputies(layout: RunLayout, own: str) -> Deputies:
    """Those in the records that the leader has sent here; raises RunFailed where it has sent none."""
    found = newest(layout.lead / own, "records")
    if found is None:
        raise RunFailed(f"{layout.run_id} cannot be led from here", seen="its leader has sent no records")
    return decode_record(
        files_of(read_regular(found), layout)[layout.deputies.name].encode(), layout.deputies, Deputies
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WonLead:
    """The lead that was won, and the host that had it before."""

    leader: str
    campaign: Campaign


class LeaderWatch:
    """Whether the leader lives, as far as this host can tell, and whose turn it is to follow."""

    def __init__(self, layout: RunLayout, lead: Lead, deputies: Deputies) -> None:
        self._folder = layout.lead / lead.own
        self._beat = self._read()
        self._since = time.monotonic() - _heard_before_s(self._folder)
        self.leader = str(self._beat[1])
        order = [name for name in deputies.candidates if name != self.leader]
        self._turn_s = TURN_S * order.index(lead.own) if lead.own in order else TURN_S * len(order)
        host = {each.name: each for each in deputies.cluster.hosts}.get(self.leader)
        self._target = (host.address, host.ssh_port or 22) if host is not None else None
        self._tried_at = float("-inf")
        self._is_on = False
        self._pause_s = TRY_S
        self._not_before = float("-inf")

    @property
    def silent_s(self) -> float:
        """Since when the leader was not heard."""
        return time.monotonic() - self._since

    def pause(self) -> None:
        """Wait before this host asks again: longer each time."""
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 1.5)

    def is_silent(self) -> bool:
        """Whether no heartbeat has come since the deputy was started."""
        return self._read() == self._beat

    def is_due(self) -> bool:
        """Whether it is this host's turn to ask for votes."""
        if self.silent_s < SILENT_S + self._turn_s or time.monotonic() < self._not_before:
            return False
        if self.silent_s < ON_SILENT_S + self._turn_s and time.monotonic() > self._tried_at + CONNECT_S:
            self._is_on = self._reaches()
            self._tried_at = time.monotonic()
        return not self._is_on or self.silent_s >= ON_SILENT_S + self._turn_s

    def _reaches(self) -> bool:
        """Whether the host of the leader is on. A connection that is refused is an answer, too."""
        if self._target is None:
            return False
        try:
            socket.create_connection(self._target, timeout=CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def _read(self) -> tuple[str, object, object]:
        found = newest(self._folder, "heartbeat")
        said: dict[str, Any] = (load_if_there(found, dict) if found is not None else None) or {}
        return (found.name if found is not None else "", said.get("leader"), said.get("number"))


def _heard_before_s(folder: Path) -> float:
    """How long ago the host agent has noted the last heartbeat. Both are of this machine's clock."""
    said: dict[str, Any] = load_if_there(folder / "heard.json", dict) or {}
    return max(0.0, time.monotonic() - float(said.get("at", time.monotonic())))


# What the winner does.


def take_over(lead: Lead, taken: WonLead, secrets: Mapping[str, str], *, beat: Callable[[], None]) -> int:
    """End what is left of the last attempt on the hosts that answer, and supervise the run from here on.

    beat: touches the lock of the run's supervisor, which is held.
    """
    lead.start()
    layout, run = lead.layout, SupervisedRun(layout=lead.layout, beat=beat)
    leader, tried = taken.leader, taken.campaign

    def is_ordered() -> bool:  # nobody can order an end here yet
        beat()
        return False

    if not lead.await_hold(is_ordered, limit_s=60.0):
        raise RunFailed(f"{lead.own} was elected, but reaches no majority of the hosts of {layout.run_id}")
    lead.unpack(_fetch(lead, tried))
    state = RunState.load(layout)
    if state.phase in {"finished", "stopped", "failed"}:
        log.info("the run has ended: %s", state.phase)
        lead.end()
        return 0
    # More than a majority is not waited for when votes are counted: whoever hears the leader now is there, too.
    late = {host.name for host in lead.deputies.cluster.hosts} - tried.records.keys()
    away = sorted(lead.await_heard(late, within_s=ANSWER_S))
    beat()
    lead.raise_epoch()
    write_to(layout.supervisor_log(state.attempt))
    append_event(layout.events, "elected", source="supervisor", host=lead.own, term=lead.term, lost=leader)
    epoch = RunState.load(layout).epoch
    request = load_if_there(layout.request(state.attempt), LaunchRequest)
    if request is not None and not layout.outcome(state.attempt).exists():
        _end_attempt(run, request, away=away, epoch=epoch)
        _record_end(layout, request, leader=leader, away=away)
    said = load_if_there(layout.base(state.attempt), dict) or {"attempt": state.attempt}
    write_record(layout.base(state.attempt), {**said, "away": sorted({*said.get("away", ()), *away})})
    dataclasses.replace(RunState.load(layout), phase="restarting", supervisor=None).save(layout)
    return supervise(layout, state.attempt, secrets=secrets, won=(lead, beat))


def _fetch(lead: Lead, tried: Campaign) -> bytes:
    """The newest records of all that have answered: a majority of the hosts had them before an attempt began."""
    version, host = tried.newest
    return lead.records_of(host, version)


def _end_attempt(run: SupervisedRun, request: LaunchRequest, *, away: Collection[str], epoch: int) -> None:
    """Have ranks save their last complete step and leave, on all hosts that answer; host agents wait if they can."""
    present = request.on([name for name in request.names if name not in away])
    rests = any(part.warm_pool for part in present.hosts)
    with run.attempt(present, epoch=epoch) as gang:
        statuses = gang.poll()
        gang.stop(now=True, resting=rests)
        _await_end(gang, run.beat)
        if not rests:
            gang.clean()
    before = load_if_there(run.layout.request(request.attempt - 1), LaunchRequest)
    if before is not None and all(status.phase == "starting" for status in statuses):
        # Its host agents were still to be told of this attempt.
        with run.attempt(before.on(present.names), epoch=epoch) as gang:
            gang.end_resting()


def _await_end(gang: GangControl, beat: Callable[[], None]) -> None:
    deadline = time.monotonic() + END_S
    while any(status.phase == "running" for status in gang.poll()):
        beat()
        if time.monotonic() > deadline:
            gang.stop(now=True)
            gang.clean()
            return
        time.sleep(PAUSE_S)


def _record_end(layout: RunLayout, request: LaunchRequest, *, leader: str, away: Collection[str]) -> None:
    error = RunFailed(
        f"{leader}, which supervised the run, was not heard any more",
        seen="the other hosts have elected a successor"
        + (f", without {listed(sorted(away))}" if away else f"; {leader} itself answers"),
        fix="look at that host: is it on, and does the network reach it?",
        details={"host": leader},
    )
    hosts = {name: HostOutcome(phase="unreachable" if name in away else "ended") for name in request.names}
    outcome = AttemptOutcome(result="failed", hosts=hosts, error=error.to_json(), unverified=tuple(sorted(away)))
    with_leftovers(outcome, ()).save(layout.outcome(request.attempt))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
