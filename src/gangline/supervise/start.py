"""Following a start: the board on disk, probes where it is stuck, and the error that ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gangline.errors import HostUnreachable, RunFailed
from gangline.launch.backend import HostStatus, Request
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Cluster
from gangline.supervise.board import Board, Limits, Row, sentence

WRITE_EVERY_S = 1.0
PROBE_EVERY_S = 10.0
PROBE_S = 3.0
PROBE_TIMEOUT_S = 15.0
TARGETS = 4
"""How many of the places that give no answer are tried from each host."""
WORDS = {
    "timed out": "packets are dropped on the way, as by a firewall",
    "refused": "nobody listens there",
    "no route": "there is no way to that network",
    "open": "the port is open, so the program itself hangs",
}


@dataclass(slots=True, kw_only=True)
class _Probing:
    """Probes that run beside the supervisor, which has more to do than wait for them."""

    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=4))
    running: dict[str, Future[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    begun: float = float("-inf")

    def take(self) -> None:
        """Take in those that have ended."""
        for host, future in list(self.running.items()):
            if future.done():
                del self.running[host]
                self.said[host] = future.result()


class Start:
    """Follows the start of one attempt until all ranks have joined."""

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = Board(request, limits=limits, clock=clock)
        self._clock = clock
        self._transports = transports
        self._meet = request.hosts[0].meet
        self._places = {host.address: host.name for host in cluster.hosts}
        self._probing = _Probing()
        self._sentence: str | None = None
        self._told: tuple[str | None, tuple[str, ...]] | None = None
        self._written_at = float("-inf")
        self.done = False

    @property
    def head(self) -> str:
        """The host where the launchers meet."""
        return next(iter(self.board.rows))

    def note(self, statuses: Sequence[HostStatus]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say now; what is new, as events with their details."""
        if self.done and self.board.is_final:
            return
        was_done, self.done = self.done, self._have_joined(statuses)
        if self.done:
            self._sentence = self._told = None
            if self.board.is_told and not was_done:
                yield "joined", {"seconds": round(self.board.seconds, 1)}
        elif self.board.is_late():
            self._probe()
            self._sentence = self._say()
            if (news := self._news()) != self._told:
                self._told = news
                yield "waiting", {"what": self._sentence}

    def _have_joined(self, statuses: Sequence[HostStatus]) -> bool:
        self.board.note(statuses)
        return self.board.stage is None

    def is_due(self) -> bool:
        """Whether board.json is a second old; its reader sees the time go by."""
        if self.done or self._clock() < self._written_at + WRITE_EVERY_S:
            return False
        self._written_at = self._clock()
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain data for board.json."""
        return self.board.to_json(sentence=self._sentence)

    def failure(self) -> RunFailed | None:
        """Why the start has to be given up, if it has."""
        if self.done or not self.board.is_overdue():
            return None
        lagging = self.board.lagging
        names = " and ".join(row.host for row in lagging)
        return RunFailed(
            f"the start was given up: {self._say()}",
            seen=f"nothing moved for {self.board.stage_seconds:.0f} s at the stage {self.board.stage!r} of {names}",
            fix=self._fix(),
        )

    def _news(self) -> tuple[str | None, tuple[str, ...]]:
        """What makes a sentence another one, unlike its seconds."""
        hosts = [f"{row.host} {row.is_silent} {self._probing.said.get(row.host, '')}" for row in self.board.lagging]
        return self.board.stage, tuple(hosts)

    def _say(self) -> str:
        meet = f"{self.head} at {self._meet[0]}, port {self._meet[1]}" if self._meet else self.head
        return sentence(self.board, meet=meet, places=self._places, probes=self._probing.said)

    def _fix(self) -> str:
        said = " ".join(self._probing.said.values())
        waits = any(row.waits_for for row in self.board.lagging)
        if WORDS["timed out"] in said or waits:
            return "let the hosts of the cluster reach each other on all TCP ports; gangline check tries every pair"
        if self.board.stage in {"launcher", "torch"}:
            return "a slow or shared disk? import torch there by hand once; the ranks' logs: gangline logs"
        return "gangline check looks at every host and pair; the ranks' logs: gangline logs"

    def _probe(self) -> None:
        """Ask the hosts that are behind to connect to what they do not reach, every few seconds."""
        probing = self._probing
        probing.take()
        if probing.running or self._clock() - probing.begun < PROBE_EVERY_S:
            return
        probing.said = {host: words for host, words in probing.said.items() if host in self._lagging_names()}
        wanted = {row.host: targets for row in self.board.lagging if (targets := self._targets(row))}
        if wanted:
            probing.begun = self._clock()
        for host, targets in wanted.items():
            probing.running[host] = probing.pool.submit(self._try, host, targets)

    def _lagging_names(self) -> set[str]:
        return {row.host for row in self.board.lagging}

    def _targets(self, row: Row) -> list[tuple[str, int]]:
        if row.is_silent:
            return []
        if self.board.stage == "port" and self._meet:
            return [self._meet]
        if self.board.stage != "joined":
            return []
        pairs = [endpoint.rpartition(":") for endpoint in row.waits_for]
        return [(address, int(port)) for address, _, port in pairs][:TARGETS]

    def _try(self, host: str, targets: Sequence[tuple[str, int]]) -> str:
        stdin = json.dumps({"targets": targets, "timeout_s": PROBE_S}).encode()
        try:
            result = self._transports[host].run((AGENT, "connect"), stdin=stdin, timeout_s=PROBE_TIMEOUT_S)
            outcomes = json.loads(result.stdout)["outcomes"]
        except (HostUnreachable, OSError) as error:
            return f"{host} cannot be asked: {str(error).splitlines()[0]}"
        except (ValueError, KeyError):
            return ""
        tried = sorted(zip(outcomes, targets, strict=True), key=lambda pair: pair[0] == "open")
        outcome, (address, port) = tried[0]
        place = self._places.get(address, address)
        return f"a connection from {host} to {place} ({address}, port {port}): {outcome}: {WORDS.get(outcome, 'tried')}"
