"""One host's part of one attempt: its folder and files, its ranks, what was ordered of it, and how it ended."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from gangline.agent import names, processes
from gangline.agent.leaving import Leaving
from gangline.agent.memory_kills import MemoryKills
from gangline.agent.orders import Orders
from gangline.agent.ranks import Ranks, reported_exits, tail
from gangline.agent.records import write_at_last, write_whole
from gangline.agent.seats import Seats
from gangline.agent.signs import Signs
from gangline.agent.silence import Silence
from gangline.agent.status import Status

RESERVE = "reserve"
"""A file that keeps room for the guard's last words; it goes when they are written."""
RESERVE_BYTES = 64 << 10
SPENT_S = 5.0
"""Processes that stand by, and do not say within this time how their ranks ended, cannot: the disk is full."""
COPIED_BYTES = 1 << 20
LEFT_AS_TOLD = (None, 0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that did no more than to leave when they were told to."""


class Part:
    """Seen from its guard. seats: of the processes that stand by for its ranks, if any do.

    kills: of which ranks the kernel has killed for memory; what was before this part is forgotten.
    words_of: the console of a launcher that was started in an earlier attempt. What it says from now on is this one's.
    """

    def __init__(
        self,
        request: Dict[str, Any],
        *,
        epoch: int,
        seats: Optional[Seats],
        kills: MemoryKills,
        complain: Callable[[str], None],
        words_of: Optional[Path] = None,
    ) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.console = self.folder / names.CONSOLE_LOG
        self.ranks = Ranks(Path(request["rank_files"]), set(request.get("ranks", ())), stand_by=seats is not None)
        self.orders = Orders(self.folder, epoch=epoch, complain=complain)
        self.leaving = Leaving(request, self.ranks, seats=seats)
        self.is_unjoined = False
        """Its ranks were ended because they had not joined in time."""
        self._is_unlaunched = False
        self._seats = seats
        self._kills = kills
        kills.begin()
        self._signs = Signs(request, self.ranks)
        self._silence = Silence(request, self.ranks)
        self._failures: List[Dict[str, Any]] = []
        self._slots: List[str] = []
        self._started = time.monotonic()
        self._gone_since: Optional[float] = None
        self._words_of: Optional[Tuple[Path, int]] = (words_of, _size(words_of)) if words_of is not None else None

    def stand(self, guard: Mapping[str, Any], *, slots: List[str]) -> None:
        """Write the first status, and guard.json: from now on it stands. Raises OSError."""
        self._slots = slots
        self._status = Status(self.folder, {"pid": guard["pid"], "start_ticks": guard["start_ticks"]})
        self._status.write(self._facts())
        write_whole(self.folder / names.AGENT_RECORD, dict(guard, started=time.time(), host=self.request["host"]))
        with contextlib.suppress(OSError):  # what is full already has nothing to keep
            (self.folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))

    def look(self, launcher: processes.Process, *, told: Optional[str]) -> None:
        """Look once at everything, take the next step towards what was ordered, and tell. told: by a signal to us."""
        if self.ranks.scan(ordered=self.leaving.order is not None):
            self._failures = self._failed({})
        self.leaving.take(self.orders.read())
        self.leaving.take(told)
        self.leaving.go_on(launcher)
        if self._status.is_due():
            self._signs.look(launcher)
            self._silence.look()
            self._expire()
        self._status.tell(self._facts())

    def lose_launcher(self) -> None:
        """The launcher above the guard has ended, and nothing was ordered before that."""
        self._is_unlaunched = self.leaving.order is None

    def look_last(self) -> None:
        """See how its ranks have ended, before whatever is left of them is ended."""
        self.ranks.scan(ordered=self.leaving.order is not None, last=True)

    def is_spent(self, launcher: processes.Process) -> bool:
        """Whether its ranks have ended, and the launcher goes on: processes that stand by wait for the next ones.

        A launcher of an earlier attempt may wait even where no process does: for those of other hosts, which it met
        then and which may not be there any more.
        """
        if self._seats is None or self.leaving.order == "kill" or not self.ranks.are_gone:
            return False
        if self.ranks.codes is not None:
            return self.may_rest or self._words_of is not None
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        return time.monotonic() > self._gone_since + SPENT_S and self._seats.any_stands(launcher)

    @property
    def may_rest(self) -> bool:
        """Whether all its ranks have said how they ended, and neither was all done, nor is all to end."""
        codes = self.ranks.codes
        if self._seats is None or codes is None or self.leaving.order in ("stop", "kill"):
            return False
        return self.leaving.rests or any(codes)

    def record(self, code: Optional[int], *, exits: Mapping[int, int], left: int) -> Dict[str, Any]:
        """How it ended, for exit.json.

        code: of the launcher; None: it still runs. exits: of our own children, by pid. left: processes that we cannot
        end.
        """
        self._gather_words()
        known = {**exits, **reported_exits(self.console)}
        failures = [] if code == 0 else self._failed(known)
        returncode = code if code is not None else self._code_of_ranks(failures)
        errors = [failure["error"] for failure in failures if failure["error"] is not None]
        return {
            "returncode": returncode,
            "reason": self._reason(returncode, by_launcher=code is not None),
            "left": left,
            "error": errors[0] if errors else None,
            "failures": failures,
            "console_tail": [] if returncode == 0 else tail(self.console),
            "epoch": self.orders.epoch,
            "ended": time.time(),
        }

    def close(self, record: Mapping[str, Any]) -> None:
        """Write exit.json; raises OSError if there is no room for it for a minute."""
        (self.folder / RESERVE).unlink(missing_ok=True)
        write_at_last(self.folder / names.EXIT, record)

    def _failed(self, exits: Mapping[int, int]) -> List[Dict[str, Any]]:
        failures = self.ranks.failures(dict(exits))
        self._kills.note(failures)
        return failures

    def _facts(self) -> Dict[str, Any]:
        facts = {"epoch": self.orders.epoch, "order": self.leaving.order, "failures": self._failures}
        return dict(facts, start=self._signs.seen, silence=self._silence.seen, leases=self._slots)

    def _expire(self) -> None:
        """Nobody may be there to see it: ranks that do not join are ended by their guard, too."""
        limit_s = self.request.get("join_timeout_s")
        if limit_s is None or self._signs.joined or self.leaving.order is not None:
            return
        if time.monotonic() > self._started + float(limit_s):
            self.is_unjoined = True
            self.leaving.take("kill")

    def _code_of_ranks(self, failures: List[Dict[str, Any]]) -> int:
        """0 if all left well or as they were told; else that of one that was killed, for others fail when they lose it;
        else that of the first that did not.
        """
        bad = [failure["exit"] or 1 for failure in failures if not self._left_as_told(failure)]
        return next((code for code in bad if code < 0), bad[0] if bad else 0)

    def _left_as_told(self, failure: Mapping[str, Any]) -> bool:
        if not failure["ordered"]:
            return False
        return self.leaving.order == "break" or (failure["error"] is None and failure["exit"] in LEFT_AS_TOLD)

    def _reason(self, code: int, *, by_launcher: bool) -> str:
        """finished: by itself, well or badly. stopped: by order, in order. killed: by order. broken: by order, because
        the gang had failed elsewhere. signalled: by others. late: its ranks had not joined in time. unlaunched: the
        launcher above its guard has ended.
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

    def _gather_words(self) -> None:
        """Copy what an earlier attempt's launcher has said in this one; what finds no room is not copied."""
        if self._words_of is None:
            return
        console, offset = self._words_of
        with contextlib.suppress(OSError), console.open("rb") as source, self.console.open("wb") as target:
            source.seek(max(offset, source.seek(0, 2) - COPIED_BYTES))
            target.write(source.read(COPIED_BYTES))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
