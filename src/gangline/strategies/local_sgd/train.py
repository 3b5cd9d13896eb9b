"""Hosts that train apart for a round: inside a host gradients are exchanged in every step, between hosts once a round.

`rounds.py` moves hosts apart and together again; this file has the groups that talk to each other, and the state.
A collective that waits does not say which ranks are missing: `Roll` does, by a key of every rank in the store.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gangline.errors import RunFailed
from gangline.strategies.ddp.train import Ddp
from gangline.strategies.local_sgd.outer import ExchangePeers, Outer
from gangline.worker import compat
from gangline.worker.batch import Batch
from gangline.worker.loss import CausalLoss
from gangline.worker.model import trainable
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup

if TYPE_CHECKING:
    from gangline.worker.loop import Stepper, TrainingRun

LOOK_S = 0.01
"""How often a rank that waits for slower hosts looks whether they have come."""
LATE = 4.0
"""Rounds that a host may take while another takes one, before it counts as hung."""


class LocalSgd(Strategy):
    """The gradient of a host's own batch, and the exchange of hosts.

    For the ranks of one host it is as any strategy: what `forward_backward` leaves is the sum over these only.
    """

    min_ranks = 1
    replicated = False
    """Within a round hosts have moved apart."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        world = setup.world
        self._patience_s = LATE * world.gang.collective_timeout_s * setup.job.strategy.inner_steps
        self._everyone = _everyone(world, patience_s=self._patience_s)
        self._roll = Roll(world, self._everyone) if self._everyone else None
        self._hosts = _hosts(world)
        self._inside = self._hosts.inside
        self._inner = Strategy(setup) if self._inside is None else Ddp(setup, group=self._inside, narrows=False)
        self.keeps_gradients = self._inner.keeps_gradients
        self.outer: Outer

    def wrap(self, loss: CausalLoss) -> None:
        """Wrap for the ranks of a host, and make room for what hosts agree on."""
        super().wrap(loss)
        self._inner.wrap(loss)
        self.outer = Outer(trainable(loss.model), job=self.job.strategy, hosts=self._hosts)

    def stepper(self, run: TrainingRun) -> Stepper:
        """Rounds of inner steps."""
        from gangline.strategies.local_sgd.rounds import Rounds

        return Rounds(run, self)

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch; `last` of a rank completes the exchange inside its host."""
        return self._inner.forward_backward(batch, scale=scale, last=last)

    def join(self, *, last: bool) -> None:
        """Take part in a step of this host without any work of one's own."""
        self._inner.join(last=last)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The outer momentum."""
        return self.outer.state_tensors()

    def waited_s(self) -> float:
        """For the other ranks of this host, in its last step."""
        return self._inner.waited_s()

    def all_agree(self, value: bool) -> bool:
        """Whether it is so on every rank of this host; collective inside it."""
        if self._inside is None:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._inside)
        return bool(flag.item())

    def meet(
        self, row: Sequence[float], *, waiting: Callable[[], None] = lambda: None, limit_s: float = math.inf
    ) -> list[list[float]]:
        """A few numbers of every rank, by rank; collective.

        Whoever is early waits here for the slowest host, and calls `waiting` again and again meanwhile. Raises
        RunFailed that names who has not come, once that has taken `limit_s`, or longer than any round should.
        """
        if self._roll is None:
            return [list(row)]
        self._roll.come()
        limit_s = min(limit_s, self._patience_s)
        table = torch.zeros(self.world.size, len(row), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(table, group=self._everyone, async_op=True)
        started = time.monotonic()
        while not work.is_completed():
            if time.monotonic() > started + limit_s:
                raise _hung(self._roll.missing(), waited_s=limit_s)
            waiting()
            time.sleep(LOOK_S)
        work.wait()
        rows: list[list[float]] = table.tolist()
        return rows


def _everyone(world: ProcessGroup, *, patience_s: float) -> dist.ProcessGroup | None:
    """All ranks. The group waits for longer than `meet` does, which knows who has not come."""
    if world.size == 1:
        return None
    timeout = timedelta(seconds=patience_s + world.gang.collective_timeout_s + 2 * ANSWER_S)
    return dist.new_group(list(range(world.size)), backend="gloo", timeout=timeout)


def _hung(hosts: Sequence[str] | None, *, waited_s: float) -> RunFailed:
    """hosts: who has not come; None: not known."""
    seen = f"expected all hosts to end it at about the same time, waited {waited_s:.0f} s"
    if hosts is None:
        seen += "; who has not come cannot be known, for the head does not answer"
    elif not hosts:
        seen += "; all have come, but do not hear of each other"
    return RunFailed(
        f"{', '.join(hosts or ['a host'])} did not end a round of local SGD that others have ended",
        seen=seen,
        fix="see in the logs of that host what its ranks do; if it is only slower than planned, leave the shares to "
        "gangline, or write down smaller ones for it; the run goes on from its last checkpoint",
    )


def _hosts(world: ProcessGroup) -> ExchangePeers:
    """The groups that exist; all ranks make all of them, in the same order."""
    gang = world.gang
    ranks_of = {host: [rank for rank, each in enumerate(gang.ranks) if each.host == host] for host in gang.hosts}
    leaders = [ranks[0] for ranks in ranks_of.values()]
    several = {host: ranks for host, ranks in ranks_of.items() if len(ranks) > 1}
    timeout = timedelta(seconds=gang.collective_timeout_s)
    groups = {host: dist.new_group(ranks, timeout=timeout) for host, ranks in several.items()}
    among = dist.new_group(leaders, backend="gloo", timeout=timeout) if several else None
    return ExchangePeers(
        index=gang.hosts.index(world.host),
        leaders=leaders,
        is_leader=world.is_first_of_host,
        among_leaders=among if world.is_first_of_host else None,
        inside=groups.get(world.host),
    )


ANSWER_S = 5.0
"""How long the store, which lies on the head, may take to answer; it may be the head that hangs."""


class Roll:
    """One key of every rank in the store of the process group: how many meetings it has come to."""

    def __init__(self, world: ProcessGroup, group: dist.ProcessGroup) -> None:
        """Every rank makes one for the same group. group: all ranks."""
        self._world = world
        self._store = dist.PrefixStore(f"roll/{group.group_name}", compat.DEFAULT_STORE.get()())
        self._meeting = 0

    def come(self) -> None:
        """To the next meeting. Not worth a failure: without a store nobody can be named, and that is all."""
        self._meeting += 1
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._world.rank), str(self._meeting))

    def missing(self) -> list[str] | None:
        """Hosts with a rank that has not come to this meeting; None: the store does not answer."""
        found: list[list[str]] = []
        asking = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        return found[0] if found else None

    def _ask(self) -> list[str]:
        ranks = self._world.gang.ranks
        return list(dict.fromkeys(each.host for rank, each in enumerate(ranks) if not self._has_come(rank)))

    def _has_come(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._meeting
