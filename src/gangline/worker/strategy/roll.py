"""Who has come to a meeting of all ranks, and who has not: a collective that waits does not say."""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist

from gangline.worker.world import World

ANSWER_S = 5.0
"""How long the store, which lies on the head, may take to answer; it may be the head that hangs."""


class Roll:
    """One key of every rank in the store of the process group: how many meetings it has come to."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        """Every rank makes one for the same group. group: all ranks."""
        self._world = world
        # no other call gives the store that the process group was made with (torch 2.13)
        self._store = dist.PrefixStore(f"roll/{group.group_name}", dist.distributed_c10d._get_default_store())
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
