"""Stragglers of an attempt, named while it runs: which host, and whether it computes, reads or sends slowly.

Rank 0 keeps the statistics. Whether the network is the cause is asked of the network itself, by all ranks at the end
of the step in whose report rank 0 wished for it (see `probe`): nothing done together hangs on arithmetic of each rank.

How long messages take between hosts right now, pair by pair; and which host became slow, by two such looks.

They go over the processes' CPU group (gloo): where gradients have a fabric of their own (NCCL over InfiniBand), this
is not what they take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gangline.worker.agree import RankTimes
from gangline.worker.process_group import ProcessGroup
from gangline.worker.run_io import RunIO
from gangline.worker.step_statistics import StepStatistics, StepWork, Straggler

log = logging.getLogger(__name__)

WARM_UP = 3
"""Steps of an attempt that say nothing of those that follow."""


class Stragglers:
    """Watches the steps of one attempt; rank 0 tells."""

    def __init__(self, world: ProcessGroup, outlets: RunIO) -> None:
        self._world = world
        self._out = outlets
        self._hosts = world.gang.hosts
        self._statistics = StepStatistics([rank.host for rank in world.gang.ranks])
        self._num_steps = 0
        self._before: PairTimes = {}
        self._slow: list[Slow] = []
        self._suspicion: Straggler | None = None

    @property
    def wants_look(self) -> bool:
        """Whether this rank wishes that all look at the links."""
        return self._suspicion is not None

    def begin(self) -> None:
        """Look at the links as they are now; collective where there are several hosts."""
        if len(self._hosts) > 1:
            self._before = probe(self._world)

    def learn(
        self, times: Sequence[RankTimes], work_split: Sequence[Sequence[int]], tokens: Sequence[int], *, step: int
    ) -> None:
        """Take in a step that nothing but the step itself made longer.

        split: micro-batches by rank. tokens: of every micro-batch.
        """
        self._num_steps += 1
        if not self._world.is_head or self._world.size == 1 or self._num_steps <= WARM_UP or self.wants_look:
            return
        work = StepWork(
            micro_batches=tuple(map(len, work_split)),
            tokens=tuple(sum(tokens[index] for index in mine) for mine in work_split),
            data_s=tuple(each.data_s for each in times),
            compute_s=tuple(each.compute_s for each in times),
            wait_s=tuple(each.wait_s for each in times),
        )
        for finding in self._statistics.learn(work):
            if finding.what == "suspected":
                self._suspicion = finding
            elif finding.cause == "network":
                self._tell_links_over(step)
            else:
                self._tell(finding, step)

    def look(self, *, step: int) -> None:
        """Which links are slower than at the start? Collective; rank 0 tells."""
        now = probe(self._world)
        finding, self._suspicion = self._suspicion, None
        if finding is None:
            return
        self._slow = blame(self._before, now, num_hosts=len(self._hosts))
        self._statistics.judge(is_slow=bool(self._slow))
        for slow in self._slow:
            what = network_words(slow, finding, self._hosts)
            self._say("straggler", step, self._who(slow), cause="network", factor=round(slow.factor, 2), what=what)

    def _tell_links_over(self, step: int) -> None:
        for slow in self._slow:
            what = f"{_links(slow, self._hosts)}: exchanges take as long as before"
            self._say("straggler-over", step, self._who(slow), cause="network", what=what)
        self._slow = []

    def _who(self, slow: Slow) -> dict[str, object]:
        """The host and its first rank, and the other end of a single link; nobody where all links are slow."""
        if not slow.hosts:
            return {}
        names = [self._hosts[host] for host in slow.hosts]
        ranks = [rank.host for rank in self._world.gang.ranks]
        return {"host": names[-1], "rank": ranks.index(names[-1]), **({"peer": names[0]} if len(names) > 1 else {})}

    def _tell(self, finding: Straggler, step: int) -> None:
        host = self._world.gang.ranks[finding.rank].host
        who: dict[str, object] = {"host": host, "rank": finding.rank}
        name = host if self._world.gang.num_ranks(host) == 1 else f"{host}, rank {finding.rank},"
        if finding.what == "over":
            verb = "computes" if finding.cause == "compute" else "gets its samples"
            self._say("straggler-over", step, who, cause=finding.cause, what=f"{name} {verb} as fast as before")
            return
        if finding.cause == "compute":
            what = compute_words(finding, name, has_gpu=self._world.device.type == "cuda")
        else:
            what = data_words(finding, name)
        self._say("straggler", step, who, cause=finding.cause, factor=round(finding.factor, 2), what=what)

    def _say(self, event: str, step: int, who: dict[str, object], **details: object) -> None:
        log.info("step %d: %s", step, details["what"])
        self._out.event(event, step=step, **who, **details)


def compute_words(finding: Straggler, name: str, *, has_gpu: bool) -> str:
    """What is slow, and where to look."""
    look = "nvidia-smi -q -d PERFORMANCE" if has_gpu else "top"
    suspects = "heat, a power limit or another program" if has_gpu else "heat or another program"
    return (
        f"{name} computes {finding.factor:.2f} x as slowly as before "
        f"({finding.before_s:.3g} -> {finding.now_s:.3g} s per micro-batch): {suspects}? {look} there says more"
    )


def data_words(finding: Straggler, name: str) -> str:
    """What is slow, and where to look."""
    return (
        f"{name} waits for its samples ({finding.before_s:.2g} -> {finding.now_s:.2g} s per micro-batch), "
        f"which makes it {finding.factor:.2f} x as slow: its disk or network share? iostat -x 1 there says more"
    )


def network_words(slow: Slow, finding: Straggler, hosts: Sequence[str]) -> str:
    """What is slow, and where to look."""
    mbit = [2 * 8 * message_bytes(len(hosts)) / seconds / 1e6 for seconds in (slow.before_s, slow.now_s)]
    longer_s = finding.now_s - finding.before_s
    return (
        f"{_links(slow, hosts)}: {slow.factor:.1f} x as slow as before ({mbit[0]:.0f} -> {mbit[1]:.0f} Mbit/s), steps "
        f"take {longer_s:.2g} s longer: other traffic, Wi-Fi, a cable? gangline check measures it"
    )


def _links(slow: Slow, hosts: Sequence[str]) -> str:
    names = [hosts[host] for host in slow.hosts]
    if not names:
        return "the links between all hosts"
    return f"the link of {names[0]}" if len(names) == 1 else f"the link between {names[0]} and {names[1]}"


MESSAGE_BYTES = 1 << 20
MANY_HOSTS = 16
TRIES, BUDGET_S = (3, 6), 1.0
"""Messages to and fro per pair: so many at least and at most, and no more once the pair's part of the time is over."""
SLOWER = 1.2
"""Times as long as before: less may be noise."""

PairTimes = Mapping[tuple[int, int], float]
"""Seconds of a message there and back, by the numbers of two hosts, the lower one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """What became slow."""

    hosts: tuple[int, ...]
    """One: all its links. Two: the link between them. (): all links."""
    factor: float
    before_s: float
    now_s: float


def message_bytes(num_hosts: int) -> int:
    """Size of a message: smaller where there are many pairs."""
    return MESSAGE_BYTES if num_hosts <= MANY_HOSTS else MESSAGE_BYTES // 4


def probe(world: ProcessGroup) -> PairTimes:
    """Seconds of a message there and back between the first ranks of every two hosts; collective, about a second.

    A host that does not answer ends it as it ends every exchange: by the group's timeout.
    """
    num_hosts = len(world.gang.hosts)
    seconds = torch.zeros(num_hosts, num_hosts, dtype=torch.float64)
    if world.is_first_of_host:
        me = world.gang.hosts.index(world.host)
        rounds = list(pairings(num_hosts))
        for pairing in rounds:
            for low, high in pairing:
                if me == low:
                    seconds[low, high] = _ask(_first_rank(world, high), num_hosts, budget_s=BUDGET_S / len(rounds))
                elif me == high:
                    _answer(_first_rank(world, low), num_hosts)
    dist.all_reduce(seconds)
    return {(low, high): float(seconds[low, high]) for low in range(num_hosts) for high in range(low + 1, num_hosts)}


def pairings(num_hosts: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs in rounds in which nobody is in two: everybody round a table, the first one keeps its seat."""
    seats = [*range(num_hosts + num_hosts % 2)]
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = ((min(pair), max(pair)) for pair in opposite)
        yield [(low, high) for low, high in pairs if high < num_hosts]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def blame(before: PairTimes, now: PairTimes, *, num_hosts: int) -> list[Slow]:
    """Hosts whose links all became slower, or all links, or single ones; [] where none did.

    Next to a link that became four times as slow, one that became 1.3 times as slow does not count: by the logarithm
    it must be half as bad.
    """
    factors = {pair: seconds / before[pair] for pair, seconds in now.items()}
    least = max(SLOWER, max(factors.values()) ** 0.5)
    slow = {pair for pair, factor in factors.items() if factor >= least}
    links = {host: {pair for pair in now if host in pair} for host in range(num_hosts)}
    hosts = [host for host in links if links[host] <= slow]
    if num_hosts > 2 and len(hosts) == num_hosts:
        return [_slow((), slow, before, now)]
    if num_hosts > 2 and hosts:
        return [_slow((host,), links[host], before, now) for host in hosts]
    return [_slow(pair, {pair}, before, now) for pair in sorted(slow)]


def _slow(hosts: Sequence[int], links: set[tuple[int, int]], before: PairTimes, now: PairTimes) -> Slow:
    """By the median of these links."""
    middle = sorted(links, key=lambda pair: now[pair] / before[pair])[len(links) // 2]
    return Slow(hosts=tuple(hosts), factor=now[middle] / before[middle], before_s=before[middle], now_s=now[middle])


def _ask(peer: int, num_hosts: int, *, budget_s: float) -> float:
    """The second best of several tries: the best one may be luck. The first byte says that there are no more."""
    message = torch.zeros(message_bytes(num_hosts), dtype=torch.uint8)
    took: list[float] = []
    _meet(peer, is_first=True)
    began = time.perf_counter()
    least, most = TRIES
    while not message[0]:
        is_late = time.perf_counter() - began > budget_s
        message[0] = len(took) + 1 == most or (is_late and len(took) + 1 >= least)
        started = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        took.append(time.perf_counter() - started)
    return sorted(took)[1]


def _answer(peer: int, num_hosts: int) -> None:
    message = torch.zeros(message_bytes(num_hosts), dtype=torch.uint8)
    _meet(peer, is_first=False)
    while not message[0]:
        dist.recv(message, peer)
        dist.send(message, peer)


def _meet(peer: int, *, is_first: bool) -> None:
    """Wait until the other one is there: it may still be with somebody else."""
    word = torch.zeros(1, dtype=torch.uint8)
    for step in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
        step(word, peer)


def _first_rank(world: ProcessGroup, host: int) -> int:
    return world.gang.ranks_on(world.gang.hosts[host])[0]
