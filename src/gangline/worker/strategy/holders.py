"""Which ranks train the same weights, and the sums of their gradients.

Every set of ranks that has some weights in common has a group of its own. All ranks go through their sets in the same
order, so that whoever waits in one of them waits for ranks that are on their way to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from gangline.worker.agree import gather_text
from gangline.worker.lots import sum_gradients
from gangline.worker.strategy.base import agree_weights
from gangline.worker.world import World


@dataclass(frozen=True, slots=True)
class _Shared:
    """What some ranks have in common."""

    group: dist.ProcessGroup
    parameters: tuple[nn.Parameter, ...]


class Holders:
    """One rank's trained weights, and who else has them."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        shared: Sequence[_Shared],
        *,
        own: set[str],
        among: bool,
        sent_as: torch.dtype | None,
    ) -> None:
        """own: names of those that no rank before this one has. among: see `exchanges`. sent_as: see `Pipeline`."""
        self.exchanges = among
        """Whether any ranks have weights in common."""
        self._shared = shared
        self._own = {id(each) for name, each in trained.items() if name in own}
        self._sent_as = sent_as

    @staticmethod
    def of(trained: Mapping[str, nn.Parameter], world: World, *, sent_as: torch.dtype | None = None) -> Holders:
        """Collective."""
        ranks_of: dict[str, tuple[int, ...]] = {}
        for rank, text in enumerate(gather_text(json.dumps(list(trained)), world)):
            for name in json.loads(text):
                ranks_of[name] = (*ranks_of.get(name, ()), rank)
        timeout = timedelta(seconds=world.gang.collective_timeout_s)
        shared = []
        for ranks in (each for each in dict.fromkeys(ranks_of.values()) if len(each) > 1):
            group = dist.new_group(list(ranks), timeout=timeout)
            if world.rank in ranks:
                parameters = tuple(each for name, each in trained.items() if ranks_of[name] == ranks)
                shared.append(_Shared(group, parameters))
        own = {name for name in trained if ranks_of[name][0] == world.rank}
        among = any(len(ranks) > 1 for ranks in ranks_of.values())
        return Holders(trained, shared, own=own, among=among, sent_as=sent_as)

    def agree(self) -> None:
        """Make weights equal that ranks have in common; collective."""
        for each in self._shared:
            agree_weights(each.parameters, group=each.group)

    def own(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Gradients that are this rank's to count: those of each weight are one rank's. A zero where there are none."""
        counted = [each.grad for each in parameters if each.grad is not None and id(each) in self._own]
        return counted or [torch.zeros(1, dtype=parameters[0].dtype, device=parameters[0].device)]

    def sum(self) -> None:
        """Add up the gradients of weights that several ranks have, in place; collective."""
        for each in self._shared:
            sum_gradients(each.parameters, partial(dist.all_reduce, group=each.group), sent_as=self._sent_as)
