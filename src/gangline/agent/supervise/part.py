"""One host's part of one attempt: its folder and files, its ranks, what was ordered of it, and how it ended."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from gangline.agent import host_files
from gangline.agent.host_files import DISK_S, read_record, size_bytes, stamped, write_record
from gangline.agent.supervise import processes, room
from gangline.agent.supervise.memory_kills import MemoryKills
from gangline.agent.supervise.ranks import Ranks, Signs, Silence, reported_exits, tail
from gangline.agent.supervise.script_figures import figures_of
from gangline.agent.supervise.stacks import LastStacks
from gangline.agent.supervise.warm_pool import PreforkedProcesses

# Orders to a host agent, and who may give them.


ORDER_FILE = re.compile(r"order-(\d{1,9})\.json")
STRENGTH = ("yield", "break", "stop", "kill")
"""A later one takes the place of an earlier one, and never the other way round."""


class Orders:
    """What the host agent of a folder was ordered.

    epoch: of who started the host agent. complain: gets one line for each order that is refused.
    """

    def __init__(self, folder: Path, *, epoch: int, complain: Callable[[str], None]) -> None:
        self.epoch = epoch
        self._folder = folder
        self._complain = complain
        self._seen: Set[Tuple[int, str]] = set()
        """Orders that were valid when they were seen, or have been refused."""

    def read(self) -> Optional[str]:
        """The order that counts now; None if there is none."""
        given = self._given()
        self.epoch = max([self.epoch, *given])
        for epoch, order in sorted(given.items()):
            if order is None or (epoch, order) in self._seen:
                continue
            self._seen.add((epoch, order))
            if epoch < self.epoch:
                self._complain(f"refused: {order} of epoch {epoch}; epoch {self.epoch} is in charge")
        return given.get(self.epoch)

    def _given(self) -> Dict[int, Optional[str]]:
        found: Dict[int, Optional[str]] = {}
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError:  # the folder was removed: whoever did that shall not end the ranks
            return {}
        for name in names:
            match = ORDER_FILE.fullmatch(name)
            record = read_record(self._folder / name) if match else {}
            if match and record.get("epoch") == int(match.group(1)):
                order = record.get("order")
                found[int(match.group(1))] = order if isinstance(order, str) and order in STRENGTH else None
        return found


def outweighs(order: Optional[str], other: Optional[str]) -> bool:
    """Whether an order takes the place of another one."""
    return order is not None and (other is None or STRENGTH.index(order) > STRENGTH.index(other))


# How the ranks of one part are made to leave, as ordered: ranks first, then torchrun, then everything.


LEAVE_S = 10.0
"""How long torchrun may take to leave after SIGTERM, and ranks after SIGKILL, before everything is killed."""
BREAK_S = 10.0
"""Ranks whose gang is broken have nothing to wait for: how long they may show no progress before they are killed."""
RESTING = ("yield", "break")
"""Orders that end ranks, and not the prefork processes."""


class Leaving:
    """What was ordered of a part, and how far that has come. pool: None: it has no warm pool."""

    def __init__(
        self,
        request: Mapping[str, Any],
        ranks: Ranks,
        *,
        pool: Optional[PreforkedProcesses],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order: Optional[str] = None
        self.is_late = False
        """The ranks had their time, and were ended."""
        self._request = request
        self._ranks = ranks
        self._pool = pool
        self._clock = clock
        self._deadline = float("inf")
        self._progress: Any = None
        """What was last seen of the ranks' progress while they are to leave."""

    @property
    def rests(self) -> bool:
        """Whether the order in force lets the host agent rest afterwards."""
        return self.order in RESTING

    def take(self, order: Optional[str]) -> None:
        """Begin to carry out an order, unless a stronger one is in force."""
        order = self._meant(order)
        if order is None or not outweighs(order, self.order):
            return
        self.order, self.is_late, self._progress = order, False, None
        self._deadline = self._clock() + self._patience_s()
        if self._pool is not None and order in RESTING:
            self._pool.hold()
        elif self._pool is not None:
            self._pool.release()

    def go_on(self, launcher: processes.Process) -> None:
        """Take the next step; when all else has failed, the order becomes "kill"."""
        if self.order in (None, "kill"):
            return
        self._ranks.terminate(signal.SIGUSR2 if self.order == "break" else signal.SIGTERM)
        if self.order == "break":
            self._ranks.end_stopped()
        if self._pool is not None and self.order == "stop" and self._ranks.ended:
            self._pool.leave()  # as torchrun ends the others when one has failed
        if not self.is_late:
            self._extend()
        if self._clock() < self._deadline:
            return
        if self.is_late:
            self.order = "kill"
            return
        self.is_late = True
        self._deadline = self._clock() + LEAVE_S
        if self.order == "stop":
            processes.send(launcher, signal.SIGTERM)
        else:
            self._ranks.terminate(signal.SIGKILL)

    def _meant(self, order: Optional[str]) -> Optional[str]:
        """What an order means here: nothing rests without a warm pool, and only our ranks know how to break off."""
        if order == "yield" and self._pool is None:
            return "stop"
        if order == "break" and self._request.get("program", "worker") == "command":
            return "kill"
        return order

    def _extend(self) -> None:
        """Their time begins anew with every sign of progress: a long step or a large save is no hang."""
        signs = self._ranks.signs(logs=self._request.get("program") == "command")
        if signs != self._progress:
            self._progress = signs
            self._deadline = self._clock() + self._patience_s()

    def _patience_s(self) -> float:
        return BREAK_S if self.order == "break" else float(self._request.get("grace_s", 120.0))


# status.json: all that a host agent knows of its part, in one small file that is replaced whole.


BEAT_S = 1.0


class Status:
    """The status file of a folder. identity: what every version of it says of the host agent."""

    def __init__(self, folder: Path, identity: Dict[str, Any]) -> None:
        self._path = folder / host_files.STATUS
        self._identity = identity
        self._beat = 0
        self._written: Dict[str, Any] = {}
        self._written_at = float("-inf")

    def is_due(self) -> bool:
        """Whether a second has passed since it was written."""
        return time.monotonic() >= self._written_at + BEAT_S

    def update(self, facts: Dict[str, Any]) -> None:
        """Write new facts, or the next beat. A full disk is no error: exit.json follows."""
        if facts == self._written and not self.is_due():
            return
        with contextlib.suppress(OSError):
            self.write(facts)

    def write(self, facts: Dict[str, Any]) -> None:
        """Write now; raises OSError."""
        self._written_at = time.monotonic()
        self._beat += 1
        # Not synced: after a power cut there is no host agent whose status could matter.
        fresh = self._path.with_name(".status.tmp")
        fresh.write_text(
            json.dumps(stamped(dict(facts, beat=self._beat, time=time.time(), **self._identity))), encoding="utf-8"
        )
        fresh.replace(self._path)
        self._written = json.loads(json.dumps(facts))


RESERVE = "reserve"
"""A file that keeps room on the disk for exit.json; it is removed just before."""
RESERVE_BYTES = 64 << 10
SPENT_S = 5.0
"""Prefork processes that do not say within this time how their ranks ended cannot: the disk is full."""
COPIED_BYTES = 1 << 20
LEFT_AS_ORDERED = (None, 0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that only did as they were ordered."""


class HostPart:
    """Seen from its host agent. pool: the warm pool of its ranks, if it has one.

    kills: which ranks the kernel has killed for memory; kills from before this part are forgotten.
    console_of: the console of a launcher that was started in an earlier attempt; its output from now on belongs here.
    """

    def __init__(
        self,
        request: Dict[str, Any],
        *,
        epoch: int,
        pool: Optional[PreforkedProcesses],
        kills: MemoryKills,
        complain: Callable[[str], None],
        console_of: Optional[Path] = None,
    ) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.console = self.folder / host_files.CONSOLE_LOG
        self.ranks = Ranks(Path(request["rank_files"]), set(request.get("ranks", ())), preforked=pool is not None)
        self.orders = Orders(self.folder, epoch=epoch, complain=complain)
        self.leaving = Leaving(request, self.ranks, pool=pool)
        self.is_unjoined = False
        """Its ranks were ended because they had not joined in time."""
        self._is_unlaunched = False
        self._pool = pool
        self._kills = kills
        kills.begin()
        self._signs = Signs(request, self.ranks)
        self._silence = Silence(request, self.ranks)
        self._figures = figures_of(request)
        self._stacks = LastStacks(request, self.ranks)
        self._room = room.RoomWatch(room.folders_of(request, room.mounts()))
        self._failures: List[Dict[str, Any]] = []
        self._slots: List[str] = []
        self._started = time.monotonic()
        self._gone_since: Optional[float] = None
        self._console_of = (console_of, size_bytes(console_of)) if console_of is not None else None

    def stand(self, host_agent: Mapping[str, Any], *, slots: List[str]) -> None:
        """Write the first status, and agent.json: from now on it stands. Raises OSError."""
        self._slots = slots
        self._status = Status(self.folder, {"pid": host_agent["pid"], "start_ticks": host_agent["start_ticks"]})
        self._status.write(self._facts())
        write_record(
            self.folder / host_files.AGENT_RECORD, dict(host_agent, started=time.time(), host=self.request["host"])
        )
        with contextlib.suppress(OSError):  # what is full already has nothing to keep
            (self.folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))

    def look(self, launcher: processes.Process, *, signal_order: Optional[str]) -> None:
        """Look once at everything, carry out the order in force, and report. signal_order: see `HostAgent`."""
        if self.ranks.scan(ordered=self.leaving.order is not None):
            self._failures = self._failed({})
        self.leaving.take(self.orders.read())
        self.leaving.take(signal_order)
        self._stacks.look(self.leaving.order)
        self.leaving.go_on(launcher)
        if self._status.is_due():
            self._signs.look(launcher)
            self._silence.look()
            if self._figures is not None:
                self._figures.look()
            self._room.look()
            self._expire()
        self._status.update(self._facts())

    @property
    def has_met(self) -> bool:
        """Whether somebody of this part listens where the gang meets, or its ranks have joined."""
        return self._signs.joined or (self._signs.seen["met"] and bool(self.ranks.processes))

    def lose_launcher(self) -> None:
        """The launcher above the host agent has ended, and nothing was ordered before that."""
        self._is_unlaunched = self.leaving.order is None

    def look_last(self) -> None:
        """See how its ranks have ended, before whatever is left of them is ended."""
        if self._figures is not None:
            self._figures.look_last()
        self.ranks.scan(ordered=self.leaving.order is not None, last=True)

    def is_spent(self, launcher: processes.Process) -> bool:
        """Whether its ranks have ended, and the launcher goes on: prefork processes wait for the next ones.

        A launcher of an earlier attempt may wait even where no process does: for those of other hosts, which it met
        then and which may not be there any more.
        """
        if self._pool is None or self.leaving.order == "kill" or not self.ranks.are_gone:
            return False
        if self.ranks.codes is not None:
            return self.may_rest or self._console_of is not None
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        return time.monotonic() > self._gone_since + SPENT_S and self._pool.any_stands(launcher)

    @property
    def may_rest(self) -> bool:
        """Whether all its ranks have said how they ended, and neither was all done, nor is all to end."""
        codes = self.ranks.codes
        if self._pool is None or codes is None or self.leaving.order in ("stop", "kill"):
            return False
        return self.leaving.rests or any(codes)

    def record(self, code: Optional[int], *, exits: Mapping[int, int], left: int) -> Dict[str, Any]:
        """How it ended, for exit.json.

        code: of the launcher; None: it still runs. exits: of our own children, by pid. left: processes that we cannot
        end.
        """
        self._copy_console()
        known = {**exits, **reported_exits(self.console)}
        if self._stacks.has_asked:  # those that were killed have ended only now
            self.ranks.scan(ordered=True, last=True)
        failures = [] if code == 0 else self._failed(known)
        returncode = code if code is not None else self._code_of_ranks(failures)
        errors = [failure["error"] for failure in failures if failure["error"] is not None]
        return {
            "returncode": returncode,
            "reason": self._reason(returncode, by_launcher=code is not None),
            "left": left,
            "error": errors[0] if errors else None,
            "failures": failures,
            "left_early": self._left_early() if returncode == 0 else [],
            "console_tail": [] if returncode == 0 else tail(self.console),
            "epoch": self.orders.epoch,
            "ended": time.time(),
        }

    def close(self, record: Mapping[str, Any]) -> None:
        """Write exit.json; raises OSError if there is no room for it for a minute."""
        (self.folder / RESERVE).unlink(missing_ok=True)
        write_record(self.folder / host_files.EXIT, record, wait_s=DISK_S)

    def _failed(self, exits: Mapping[int, int]) -> List[Dict[str, Any]]:
        failures = self.ranks.failures(dict(exits))
        self._kills.note(failures)
        self._stacks.note(failures)
        return failures

    def _left_early(self) -> List[int]:
        """Ranks of the user's own program that left well, by themselves; others may still have needed them."""
        is_own = self.request.get("program") == "command"
        return sorted(rank for rank, entry in self.ranks.ended.items() if is_own and not entry["ordered"])

    def _facts(self) -> Dict[str, Any]:
        facts = {"epoch": self.orders.epoch, "order": self.leaving.order, "failures": self._failures}
        troubles = [trouble.row() for trouble in self._room.troubles]
        seen = {"start": self._signs.seen, "silence": self._silence.seen, "troubles": troubles}
        return dict(facts, leases=self._slots, **seen)

    def _expire(self) -> None:
        """Nobody may be there to see it: ranks that do not join are ended by their host agent, too. Their time begins
        anew as long as anything that was started works.
        """
        limit_s = self.request.get("join_timeout_s")
        if limit_s is None or self._signs.joined or self.leaving.order is not None:
            return
        if min(time.monotonic() - self._started, self._signs.idle_s) > float(limit_s):
            self.is_unjoined = True
            self.leaving.take("kill")

    def _code_of_ranks(self, failures: List[Dict[str, Any]]) -> int:
        """0 if all left well or as ordered; else that of one that was killed, for others fail when they lose it;
        else that of the first that did not.
        """
        bad = [failure["exit"] or 1 for failure in failures if not self._left_as_ordered(failure)]
        return next((code for code in bad if code < 0), bad[0] if bad else 0)

    def _left_as_ordered(self, failure: Mapping[str, Any]) -> bool:
        if not failure["ordered"]:
            return False
        return self.leaving.order == "break" or (failure["error"] is None and failure["exit"] in LEFT_AS_ORDERED)

    def _reason(self, code: int, *, by_launcher: bool) -> str:
        """finished: by itself, well or badly. stopped: by order, in order. killed: by order. broken: by order, because
        the gang had failed elsewhere. signalled: by others. late: its ranks had not joined in time. unlaunched: the
        launcher above its host agent has ended.
        """
        order = self.leaving.order
        if self.is_unjoined:
            return "late"
        if self._is_unlaunched and order == "stop":
            return "unlaunched"
        if order in ("stop", "yield"):
            return "killed" if self.leaving.is_late else "stopped"
        if order is not None:
            return "broken" if order == "break" else "killed"
        return "signalled" if by_launcher and code < 0 else "finished"

    def _copy_console(self) -> None:
        """Copy what an earlier attempt's launcher has said in this one; what finds no room is not copied."""
        if self._console_of is None:
            return
        console, offset = self._console_of
        with contextlib.suppress(OSError), console.open("rb") as source, self.console.open("wb") as target:
            source.seek(max(offset, source.seek(0, 2) - COPIED_BYTES))
            target.write(source.read(COPIED_BYTES))
