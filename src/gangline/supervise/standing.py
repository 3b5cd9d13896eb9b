"""Where the ranks of an attempt stand, as their hosts tell of them, and in words. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gangline.launch.backend import HostStatus, RankSigns
from gangline.remote.said import NONSENSE, whole
from gangline.remote.ssh_options import printable
from gangline.units import format_duration

FRESH_S = 10.0
"""A guard tells every second: what one says that has not got on for so long may be old."""
MOST_FRAMES = 60
MOST_LETTERS = 200
MOST = 8
"""How many ranks or hosts are named."""
SLACK_S = 6.0
"""What a guard says may be read late by so much: only what is newer by more is a sign of life."""
NOT_BEGUN = "importing"
"""The phase of a rank that has not said any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one process said when it was asked where it stands (gangline.agent.stacks)."""

    pid: int
    state: str
    """One letter, as in proc(5)."""
    wchan: str
    where: str
    """The innermost call that a person would look at; "": it said nothing."""
    is_ours: bool
    """That is a call of gangline's own, as where a rank waits for others."""
    frames: tuple[str, ...]
    """Of its main thread, innermost first."""
    unheard: tuple[str, ...]
    """Addresses that do not acknowledge what was sent to them."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it: it does nothing until it is continued."""
        return self.state in {"T", "t"}

    @property
    def waits_for_disk(self) -> bool:
        """Whether it sleeps in a way that no signal ends."""
        return self.state == "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank, as it was seen last. Times are by our clock."""

    host: str
    rank: int
    phase: str
    step: int
    """1-based; 0: before the first."""
    collectives: int
    """How many it has entered."""
    moved_at: float
    """When it came there."""
    told_at: float
    """When it last said anything: it may say the same anew, as a sign of life."""
    stack: Stack | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Ranks that have done less than others are what the others wait for."""
        return self.collectives, self.step

    @property
    def left(self) -> int:
        """Exchanges that it has behind it."""
        return self.collectives - (self.phase == "exchange")

    @property
    def name(self) -> str:
        """As in: rank 2 on pc3"""
        return f"rank {self.rank} on {self.host}"

    @property
    def point(self) -> str:
        """As in: `data` of step 57"""
        return f"`{self.phase}` of step {self.step}" if self.step else f"`{self.phase}`"

    def place(self, now: float) -> str:
        """Where it stands, and since when, in a sentence."""
        stack = self.stack
        where = f", at {stack.where}" if stack and stack.where else ""
        return f"{self.name} {self._does()} {self.point} since {seconds(now - self.moved_at)}{where}"

    def _does(self) -> str:
        state = self.stack.state if self.stack else ""
        if state == "D":
            return "waits for a disk or a network file system in"
        if state in {"Z", "X"}:
            return "has ended in"
        return {"T": "is stopped (SIGSTOP) in", "t": "is stopped by a debugger in"}.get(state, "stands in")


class Standings:
    """All ranks of an attempt."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_rank: dict[int, Standing] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        """The last beat of a guard, and when it was new."""
        self._silent: dict[str, float] = {}
        """Hosts of which nothing is known now, and since when."""
        self._frozen: set[str] = set()
        """Those of them that answer, but whose guard does not get on."""
        self._hosts: list[str] = []

    @property
    def seen(self) -> list[Standing]:
        """Ranks of which it is known where they stand now, and which have not ended."""
        return [each for each in self._all() if each.host not in self._silent and each.phase != "ended"]

    @property
    def is_blind(self) -> bool:
        """Whether it is not known where some ranks stand."""
        return bool(self._silent)

    def silent(self, seconds: float) -> list[str]:
        """Hosts of which nothing has been known for so long."""
        now = self._clock()
        return [host for host in self._hosts if now - self._silent.get(host, now) >= seconds]

    def is_frozen(self, host: str) -> bool:
        """Whether the host answers, but its guard does not get on."""
        return host in self._frozen

    def last_of(self, hosts: Sequence[str]) -> list[Standing]:
        """Where the ranks of some hosts were when they were seen last."""
        return [each for each in self._all() if each.host in hosts]

    def note(self, statuses: Sequence[HostStatus]) -> None:
        """Take in what the hosts say now."""
        now = self._clock()
        self._hosts = [status.host for status in statuses]
        for status in statuses:
            since = self._unknown_since(status, now)
            if since is not None:
                self._silent.setdefault(status.host, since)
                continue
            self._silent.pop(status.host, None)
            if status.phase != "running":
                self._by_rank = {rank: each for rank, each in self._by_rank.items() if each.host != status.host}
            elif status.signs is not None:
                for sign in status.signs.ranks:
                    self._by_rank[sign.rank] = _moved(self._by_rank.get(sign.rank), status.host, sign, now)

    def _unknown_since(self, status: HostStatus, now: float) -> float | None:
        """Since when nothing is known of a host; None: it tells."""
        self._frozen.discard(status.host)
        if status.phase == "unreachable":
            self._beats.pop(status.host, None)
            return now
        if status.phase != "running" or status.beat is None:
            return None
        beat, at = self._beats.setdefault(status.host, (status.beat, now))
        if beat != status.beat:
            self._beats[status.host] = status.beat, now
        elif now - at >= FRESH_S:
            self._frozen.add(status.host)
            return at
        return None

    def _all(self) -> list[Standing]:
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]


def read_stack(said: object) -> Stack | None:
    """What a host says of one rank's process; None where that is nonsense."""
    try:
        if not isinstance(said, Mapping):
            return None
        return Stack(
            pid=whole(said["pid"]),
            state=_text(said["state"])[:1],
            wchan=_text(said["wchan"]),
            where=_text(said["where"]),
            is_ours=said["is_ours"] is True,
            frames=tuple(_text(frame) for frame in list(said["stack"])[:MOST_FRAMES]),
            unheard=tuple(_text(address) for address in list(said["unheard"])[:MOST]),
        )
    except NONSENSE:
        return None


def named(standings: Sequence[Standing]) -> str:
    """As in: rank 0 on pc1 and ranks 2, 3 on pc2"""
    by_host: dict[str, list[str]] = {}
    for each in standings:
        by_host.setdefault(each.host, []).append(str(each.rank))
    words = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shortened(ranks))} on {host}"
        for host, ranks in by_host.items()
    ]
    return listed(words)


def listed(words: Sequence[str]) -> str:
    """As in: a, b and c"""
    words = shortened(words)
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def shortened(words: Sequence[str]) -> list[str]:
    """The first few."""
    return [*words[:MOST], f"{len(words) - MOST} more"] if len(words) > MOST else list(words)


def seconds(duration_s: float) -> str:
    """As in: 41 s, or 3 min 05 s"""
    return f"{duration_s:.0f} s" if duration_s < 60 else format_duration(duration_s)


def _moved(before: Standing | None, host: str, sign: RankSigns, now: float) -> Standing:
    """Where a rank stands now, as its guard says."""
    told_at = now - (sign.same_s or 0.0)
    here = Standing(
        host=host,
        rank=sign.rank,
        phase=sign.phase or NOT_BEGUN,
        step=sign.step or 0,
        collectives=sign.collectives or 0,
        moved_at=told_at,
        told_at=told_at,
    )
    if before is None:
        return here
    if (before.phase, before.progress) != (here.phase, here.progress):
        return replace(here, moved_at=max(told_at, before.moved_at))
    is_news = sign.same_s is not None and told_at > before.told_at + SLACK_S
    return replace(before, told_at=told_at) if is_news else before


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return printable(value[:MOST_LETTERS].replace("\n", " "))
