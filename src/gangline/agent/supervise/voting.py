"""Votes on who leads a run: one host's voice, and its watch over the leader.

    vote < {"folder", "host", "term", "candidate", "membership": [term, number], "trial": bool, "afresh": bool}
        -> {"granted", "why", "term", "hears", "membership", "records", "over"}

The leader is the one supervisor that may command; terms count leaders. In the folder `lead/<host>` of a run, on every
host that has a voice:

    heartbeat-<term>.json            by the leader of that term, every HEARTBEAT_S; {"over": true} at the end of the run
    membership-<term>-<number>.json  by the same: the hosts with a voice
    records-<term>-<number>.json     by the same: the records of the run that a successor needs
    history-<term>-<start>.json      by the same: lines of metrics.jsonl from this byte on, of the host of rank 0
    history.jsonl, history.json      by the host itself: these lines; per host of rank 0, how many of its bytes they are
    promise.json                     by the host itself: the highest term for which it has voted, and for whom
    heard.json                       by the host itself: the last heartbeat, and when it came by this machine's clock;
                                     on a witness, which has no host agent, when it was first asked after it came

The highest number counts: a write that is late, and comes after a newer one, must not take its place.

A host votes once per term, for a term above all that it knows, and only if it has heard no other leader for HEARD_S.
A leader counts a heartbeat only if it reads no higher promise there after it was written; the vote is written before
the heartbeat is read again. So of a heartbeat and a vote at the same time at least one is void.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from gangline.agent.host_files import read_record, read_text, stamped, write_record
from gangline.agent.supervise.detach import start_detached
from gangline.agent.verbs import VerbFailed

LEAD = "lead"
HEARD_S = 13.0
"""A host that has heard a leader within this time votes for nobody else. The leader holds its majority for less
(gangline.supervise.leadership.HOLD_S), counted from before it sent a heartbeat."""
KEPT = 3
EPOCHS = 1_000_000
"""Epochs of one term: a supervisor raises its epoch by one with each attempt, and never gets this far."""
NUMBERED = re.compile(r"(heartbeat|membership|records|history)-(\d{1,6})(?:-(\d{1,15}))?\.json")

# The rule, without files and clocks.


class Known:
    """What a host knows when it is asked for its vote.

    promised: the highest term that it voted in, and for whom. leader: the leader of the last heartbeat, its term, and
    seconds since that came; None: it never heard one. membership: term and number of the newest that it has.
    """

    def __init__(
        self,
        *,
        promised: Tuple[int, str] = (0, ""),
        leader: Optional[Tuple[str, int, float]] = None,
        membership: Tuple[int, int] = (0, 0),
        over: bool = False,
    ) -> None:
        self.promised = promised
        self.leader = leader
        self.membership = membership
        self.over = over

    @property
    def term(self) -> int:
        """The highest term of which it knows."""
        return max(self.promised[0], self.leader[1] if self.leader else 0)

    @property
    def hears(self) -> Optional[str]:
        """The leader that lives, as far as this host knows."""
        lives = self.leader is not None and self.leader[2] < HEARD_S and not self.over
        return self.leader[0] if lives and self.leader is not None else None


def refusal(known: Known, asked: Mapping[str, Any]) -> str:
    """Why a host does not give its vote; "": it does."""
    term, candidate, leader = int(asked["term"]), str(asked["candidate"]), known.leader
    reasons = {
        f"it hears {known.hears}": known.hears not in (None, candidate),
        f"it has voted for {known.promised[1]} in term {known.promised[0]}": known.promised[0] >= term,
        f"{leader[0] if leader else None} led in a term as high": leader is not None and leader[1] >= term,
        "the run has ended": known.over and not asked.get("afresh"),
        "the hosts with a voice have changed since": known.membership > tuple(asked["membership"])
        and not asked.get("afresh"),
    }
    return next((why for why, holds in reasons.items() if holds), "")


# The files of one host.


class HostVoice:
    """The voice of this host in one run. folder: the run's on this host. clock: of this machine, not of the world."""

    def __init__(self, folder: Path, host: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder / LEAD / host  # hosts may share the run's folder without anybody having said so
        self._clock = clock
        self.membership: Dict[str, Any] = {}
        """The newest record of it, as `known` found it."""
        self._boot = read_text("/proc/sys/kernel/random/boot_id") or ""

    def highest(self, kind: str) -> Tuple[int, Dict[str, Any]]:
        """The record of a kind with the highest term and number, and that term; (0, {}) where there is none."""
        for term, _, path in reversed(self._numbered(kind)):
            if record := read_record(path):
                return term, record
        return 0, {}

    def _numbered(self, kind: str) -> List[Tuple[int, int, Path]]:
        with contextlib.suppress(OSError):
            found = [(NUMBERED.fullmatch(path.name), path) for path in self.folder.iterdir()]
            named = [(match, path) for match, path in found if match and match.group(1) == kind]
            return sorted((int(match.group(2)), int(match.group(3) or 0), path) for match, path in named)
        return []

    def prune(self) -> None:
        """Remove what newer files have replaced, but for the last few."""
        for kind in ("membership", "records"):
            for _, _, path in self._numbered(kind)[:-KEPT]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def keep_history(self) -> None:
        """Append what the leader has sent of the history of rank 0. Raises OSError.

        A crash in between may repeat lines, which whoever uses the copy leaves out.
        """
        for _, start, path in self._numbered("history"):
            sent, positions = read_record(path), read_record(self.folder / "history.json")
            head, data = str(sent.get("head")), str(sent.get("lines", "")).encode("utf-8", "surrogateescape")
            there = int(positions.get(head, 0))
            if start <= there < start + len(data):
                with (self.folder / "history.jsonl").open("ab") as stream:
                    stream.write(data[there - start :])
                write_record(self.folder / "history.json", {**positions, head: start + len(data)})
            path.unlink()

    def listen(self) -> Optional[float]:
        """Note the newest heartbeat; seconds since it came, None where there never was one. Raises OSError."""
        term, beat = self.highest("heartbeat")
        if not beat:
            return None
        now, heard = self._clock(), read_record(self.folder / "heard.json")
        mark = [term, beat.get("number"), self._boot]
        if heard.get("mark") != mark or now < float(heard["at"]):
            # Not synced: after a power cut it is another boot, and the waiting begins anew.
            heard = {"mark": mark, "at": now}
            fresh = self.folder / f".heard.{os.getpid()}.tmp"
            fresh.write_text(json.dumps(stamped(heard)), encoding="utf-8")
            fresh.replace(self.folder / "heard.json")
        return now - float(heard["at"])

    def known(self) -> Known:
        """What this host knows now. Raises OSError."""
        silent_s = self.listen()
        term, beat = self.highest("heartbeat")
        promise = read_record(self.folder / "promise.json")
        in_term, membership = self.highest("membership")
        self.membership = membership
        return Known(
            promised=(int(promise.get("term", 0)), str(promise.get("candidate", ""))),
            leader=None if silent_s is None else (str(beat.get("leader")), term, silent_s),
            membership=(in_term, int(membership.get("number", 0))),
            over=beat.get("over") is True,
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process votes here."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "vote.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Give no vote any more, but to a candidate that a person has started. Raises VerbFailed."""
        term, beat = self.highest("heartbeat")
        if not beat or beat.get("over") is True:
            return
        try:
            write_record(self.folder / f"heartbeat-{term + 1}.json", {"leader": "", "number": 0, "over": True})
        except OSError as error:
            raise VerbFailed("this host cannot write that the run is led otherwise", seen=str(error)) from error

    def vote(self, asked: Mapping[str, Any]) -> Dict[str, Any]:
        """Give the vote of this host, or refuse it; raises OSError where the promise cannot be written."""
        with self.alone():
            known = self.known()
            self.prune()
            why = refusal(known, asked)
            if not why and not asked.get("trial"):
                promise = {"term": int(asked["term"]), "candidate": str(asked["candidate"])}
                write_record(self.folder / "promise.json", promise)
                # A heartbeat that came meanwhile may have been counted by its sender: then this vote is void.
                now = self.known()
                now.promised = known.promised
                why = refusal(now, asked)
            records, found = self.highest("records")
            return {
                "kind": "result",
                "granted": not why,
                "why": why,
                "term": known.term,
                "hears": known.hears,
                "membership": self.membership,
                "records": [records, int(found.get("number", 0))],
                "over": known.over,
            }


def vote(asked: Dict[str, Any]) -> Dict[str, Any]:
    """The verb; raises VerbFailed where this host cannot keep a promise."""
    try:
        return HostVoice(Path(asked["folder"]), str(asked["host"])).vote(asked)
    except OSError as error:
        raise VerbFailed("this host cannot vote", seen=str(error), fix="look at its disk") from error


def require_charge(request: Mapping[str, Any], epoch: int) -> None:
    """Raise VerbFailed for a start that is ordered by a supervisor whose term is over.

    One that nobody voted for was started by a person: from then on nobody may succeed a leader of before.
    """
    voice = HostVoice(Path(request["rank_files"]).parents[1], str(request["host"]))
    if not request.get("led"):
        voice.end()
        return
    term = max(int(read_record(voice.folder / "promise.json").get("term", 0)), voice.highest("heartbeat")[0])
    if epoch // EPOCHS < term:
        raise VerbFailed(
            "another supervisor leads this run",
            seen=f"its term is {term}, this start is of term {epoch // EPOCHS}",
            fix="nothing to do: ask for the run again, gangline ps",
        )


# A deputy: a program on this host that asks for the votes once the leader is silent.


WAKE_S = 6.0
"""A deputy needs a while to start, and ends by itself if the leader is heard again."""
PAUSE_S = 20.0


class Deputise:
    """Starts the deputy of this host where the leader of its run is not heard.

    request: the part of this host; its "deputy" is the command, None where this host cannot lead. secrets: more
    environment of ranks, for the attempts that a successor starts; kept in memory only.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        *,
        secrets: Mapping[str, str],
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = request.get("deputy")
        self._secrets = dict(secrets)
        self._complain = complain
        self._clock = clock
        self._not_before = float("-inf")
        self._voice: Optional[HostVoice] = None
        if request.get("led"):
            folder = Path(request["rank_files"]).parents[1]
            self._voice = HostVoice(folder, str(request["host"]), clock=clock)

    def look(self) -> None:
        """Look once, and start a deputy if the leader is silent; costs a few small reads."""
        if self._voice is None:
            return
        try:
            with self._voice.alone():
                silent_s = self._voice.listen()
                self._voice.prune()
                self._voice.keep_history()
        except OSError:
            return  # a host that cannot keep a promise does not lead
        if self._words is None or silent_s is None or silent_s < WAKE_S or self._clock() < self._not_before:
            return
        if self._voice.highest("heartbeat")[1].get("over") is True:
            return
        self._not_before = self._clock() + PAUSE_S
        self._complain(f"the leader of the run has not been heard for {silent_s:.0f} s: starting a deputy")
        words = dict(self._words, argv=[sys.executable, *self._words["argv"]])
        try:
            start_detached(words, json.dumps({"secrets": self._secrets}).encode())
        except OSError as error:
            self._complain(f"the deputy cannot be started: {error}")
