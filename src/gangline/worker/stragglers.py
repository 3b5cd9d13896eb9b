"""Stragglers of an attempt, named while it runs: which host, and whether it computes, reads or sends slowly.

Rank 0 keeps the books. Whether the network is the cause is asked of the network itself, by all ranks at the end of the
step in whose report rank 0 wished for it (see `pairs`): nothing done together hangs on arithmetic of each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gangline.worker import pairs
from gangline.worker.agree import RankTimes
from gangline.worker.books import Books, Finding, Work
from gangline.worker.keep import Outlets
from gangline.worker.pairs import Pairs, Slow
from gangline.worker.world import World

log = logging.getLogger(__name__)

WARM_UP = 3
"""Steps of an attempt that say nothing of those that follow."""


class Stragglers:
    """Watches the steps of one attempt; rank 0 tells."""

    def __init__(self, world: World, outlets: Outlets) -> None:
        self._world = world
        self._out = outlets
        self._hosts = world.gang.hosts
        self._books = Books([rank.host for rank in world.gang.ranks])
        self._num_steps = 0
        self._before: Pairs = {}
        self._slow: list[Slow] = []
        self._suspicion: Finding | None = None

    @property
    def wants_look(self) -> bool:
        """Whether this rank wishes that all look at the links."""
        return self._suspicion is not None

    def begin(self) -> None:
        """Look at the links as they are now; collective where there are several hosts."""
        if len(self._hosts) > 1:
            self._before = pairs.probe(self._world)

    def learn(
        self, times: Sequence[RankTimes], dealt: Sequence[Sequence[int]], tokens: Sequence[int], *, step: int
    ) -> None:
        """Take in a step that nothing but the step itself made longer.

        dealt: micro-batches by rank. tokens: of every micro-batch.
        """
        self._num_steps += 1
        if not self._world.is_head or self._world.size == 1 or self._num_steps <= WARM_UP or self.wants_look:
            return
        work = Work(
            micro_batches=tuple(map(len, dealt)),
            tokens=tuple(sum(tokens[index] for index in mine) for mine in dealt),
            data_s=tuple(each.data_s for each in times),
            compute_s=tuple(each.compute_s for each in times),
            wait_s=tuple(each.wait_s for each in times),
        )
        for finding in self._books.learn(work):
            if finding.what == "suspected":
                self._suspicion = finding
            elif finding.cause == "network":
                self._tell_links_over(step)
            else:
                self._tell(finding, step)

    def look(self, *, step: int) -> None:
        """Which links are slower than at the start? Collective; rank 0 tells."""
        now = pairs.probe(self._world)
        finding, self._suspicion = self._suspicion, None
        if finding is None:
            return
        self._slow = pairs.blame(self._before, now, num_hosts=len(self._hosts))
        self._books.judge(is_slow=bool(self._slow))
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

    def _tell(self, finding: Finding, step: int) -> None:
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


def compute_words(finding: Finding, name: str, *, has_gpu: bool) -> str:
    """What is slow, and where to look."""
    look = "nvidia-smi -q -d PERFORMANCE" if has_gpu else "top"
    suspects = "heat, a power limit or another program" if has_gpu else "heat or another program"
    return (
        f"{name} computes {finding.factor:.2f} x as slowly as before "
        f"({finding.before_s:.3g} -> {finding.now_s:.3g} s per micro-batch): {suspects}? {look} there says more"
    )


def data_words(finding: Finding, name: str) -> str:
    """What is slow, and where to look."""
    return (
        f"{name} waits for its samples ({finding.before_s:.2g} -> {finding.now_s:.2g} s per micro-batch), "
        f"which makes it {finding.factor:.2f} x as slow: its disk or network share? iostat -x 1 there says more"
    )


def network_words(slow: Slow, finding: Finding, hosts: Sequence[str]) -> str:
    """What is slow, and where to look."""
    mbit = [2 * 8 * pairs.message_bytes(len(hosts)) / seconds / 1e6 for seconds in (slow.before_s, slow.now_s)]
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
