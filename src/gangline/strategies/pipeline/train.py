"""Layers divided among ranks: every micro-batch passes through all of them, several at a time.

A rank needs a link to the one before and the one after it, and nothing else in the network is used for a step: hidden
states go forward and their gradients back, in the format of products. Of a step's micro-batches a stage does some
forward (runs/formulas.py), and from then on one backward and one forward in turn, so it holds the activations of no
more of them than that. The gradient is that of one process: micro-batches are added in the same order.

Every rank reads the same micro-batches, so what travels has no header: both ends know its shape. They may all be of
other lengths, which is why torch.distributed.pipelining is not what runs here (docs/decisions/0015).

Several pipelines side by side do other micro-batches of a step each. Their machines may be unlike, and their layers cut
otherwise: gradients are summed weight by weight among the ranks that have it, once a step, after the last backward
pass. So is that of a table which is embedding and head, in the first and in the last stage. Nothing of that stands
between two passes, and a rank sums when all that it sends within its pipeline has been received; so neither waits for
the other.

Other trained weights and the optimizer's states are a stage's own. They are put together for a checkpoint only.

Which ranks train the same weights, and the sums of their gradients.

Every set of ranks that has some weights in common has a group of its own. All ranks go through their sets in the same
order, so that whoever waits in one of them waits for ranks that are on their way to it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import ModelError, UsageError
from gangline.runs.formulas import ahead
from gangline.runs.gang import held_by
from gangline.worker.agree import gather_json
from gangline.worker.batch import Batch, begin_draws
from gangline.worker.buckets import in_buckets, joined, spread, sum_gradients
from gangline.worker.checkpoint import send, shards_of_host
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, layers_of, trainable, weights_dtype
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup, agree_weights

# One stage of a pipeline: a transformers model of which other ranks have most of the layers.
#
# The model's own code runs as it is. Where a layer is elsewhere, hidden states pass through unchanged; so a stage is
# called with the hidden states of the stage before it in place of embeddings, and masks, positions and whatever else
# the decoder prepares for its layers are prepared by the decoder, in every stage from the same positions. Names of
# weights stay those of the whole model.
#
# That is right for a decoder that hands embeddings to its first layer as they are. Where it does something to them
# first (position tables, as in GPT-2), the stage finds other hidden states in front of its layers than it was given,
# and says so: see `Stage.require_plain`.


class AbsentLayer(nn.Module):
    """Stands for a part of the model that another rank has; as a layer it lets hidden states through."""

    def __init__(self, like: nn.Module | None = None, *, keeps: bool = False) -> None:
        """like: the layer in whose place it is. keeps: what passes is kept until it is taken."""
        super().__init__()
        self.attention_type = getattr(like, "attention_type", None)  # some decoders choose the mask by it
        self._keeps = keeps
        self._seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *_words: object, **_options: object) -> torch.Tensor:
        """The hidden states themselves."""
        if self._keeps:
            self._seen = hidden
        return hidden

    def take(self) -> torch.Tensor:
        """What passed last."""
        seen, self._seen = self._seen, None
        assert seen is not None, "the decoder has not come to this layer"
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """What one rank of a pipeline has."""

    number: int
    stages: tuple[int, ...]
    """Layers of each."""
    before: AbsentLayer | None
    """The layer in front of the first own one; None in the first stage."""
    after: AbsentLayer | None
    """The layer behind the last own one; None in the last stage."""
    stream: torch.dtype
    """Of hidden states between layers."""
    width: int
    """Numbers in the hidden state of a token."""

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.before is None

    @property
    def is_last(self) -> bool:
        """Whether it has the norm and the head, and so the loss."""
        return self.after is None

    def drawn(self, input_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Hidden states for a stage that is tried without those before it: drawn by token, the same each time."""
        table = torch.randn(int(input_ids.max()) + 1, self.width, generator=torch.Generator().manual_seed(1))
        return table.to(device, self.stream)[input_ids]

    def require_plain(self, given: torch.Tensor) -> None:
        """Raises ModelError where the decoder has changed what the stage was given, before it came to its layers."""
        if self.before is not None and self.before.take() is not given:
            raise ModelError(
                "strategy: pipeline cannot split this model",
                seen="its decoder does something to embeddings before the first layer, and would do it in every stage",
                fix="write strategy: fsdp, or ddp where every device holds the model",
            )


@torch.no_grad()
def split_stages(model: nn.Module, *, number: int, stages: Sequence[int], stream: torch.dtype) -> PipelineStage:
    """Take from the model what stage `number` does not have. stages: layers of each; stream: see `Stage`.

    The first stage has the embeddings, the last one what comes after the layers; a table that is both is in both, which
    have to sum its gradient. Raises ModelError for a model whose parts cannot be found; UsageError for stages of
    another model, and for one that would train nothing.
    """
    core: Any = base_of(model)
    layers = layers_of(core)
    if len(layers) != sum(stages) or min(stages) < 1:
        raise UsageError(
            f"strategy: pipeline over stages of {'/'.join(map(str, stages))} layers",
            seen=f"the model has {len(layers)}; expected one layer or more in each, and all of them in one",
            fix="gangline plan divides them anew; then gangline train",
        )
    begin, end = list(itertools.accumulate((0, *stages)))[number : number + 2]
    beside = {begin - 1, end}
    others = [index for index in range(len(layers)) if not begin <= index < end]
    gone = {index: AbsentLayer(layers[index], keeps=index in beside) for index in others}
    _cut_ends(core, layers, is_first=number == 0, is_last=number == len(stages) - 1)
    for index, stand_in in gone.items():
        layers[index] = stand_in
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _idle(number)
    return PipelineStage(
        number=number,
        stages=tuple(stages),
        before=gone.get(begin - 1),
        after=gone.get(end),
        stream=stream,
        width=int(core.config.get_text_config().hidden_size),
    )


def _cut_ends(core: Any, layers: nn.ModuleList, *, is_first: bool, is_last: bool) -> None:
    """Embeddings belong to the first stage, and whatever else is around the layers to the last one."""
    table, head = core.get_input_embeddings(), core.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    own = {id(parameter) for parameter in layers.parameters()}
    own |= {id(parameter) for parameter in table.parameters()} if is_first else set()
    if not is_first and not (is_last and tied):
        core.set_input_embeddings(AbsentLayer())
    elif not is_first and not table.weight.requires_grad:  # the first stage trains what adapters it has
        table.requires_grad_(False)
    if is_last:
        return
    if head is not None:
        core.set_output_embeddings(AbsentLayer())
    for parameter in core.parameters():  # the last stage trains the norm
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def _idle(number: int) -> UsageError:
    return UsageError(
        f"strategy: pipeline leaves rank {number} nothing to train",
        seen="none of its layers has a module that method.targets names",
        fix="name targets that every layer has, or set targets: all-linear",
    )


_ODD, _SEEDS = 0x9E3779B97F4A7C15, 1 << 63
"""Stages draw dropout from seeds of their own: with the same one the first layers of all would have the same masks."""


@dataclass(slots=True)
class _Waiting:
    """A micro-batch of this rank, and what is kept of it between forward and backward."""

    batch: Batch
    scale: float
    seed: int
    given: torch.Tensor | None = None
    made: torch.Tensor | None = None


class _Links:
    """To the stages before and after, each way on a group of its own, where the backend would else serialise them."""

    def __init__(self, world: ProcessGroup) -> None:
        """Collective."""
        befores = [rank for row in world.gang.rows for rank in row[:-1]]
        pairs = [pair for rank in befores for pair in ((rank, rank + 1), (rank + 1, rank))]
        apart = world.device.type == "cuda"
        timeout = timedelta(seconds=world.gang.collective_timeout_s)
        self._world = world
        self._groups = {pair: dist.new_group(list(pair), timeout=timeout) if apart else None for pair in pairs}
        self._flying: list[tuple[dist.Work, torch.Tensor]] = []
        self.waited_s = 0.0

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to."""
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, dst=to, group=self._groups[self._world.rank, to])
        assert work is not None
        self._flying = [each for each in self._flying if not each[0].is_completed()]
        self._flying.append((work, tensor))

    def coming(self, shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype, source: int) -> Iterator[torch.Tensor]:
        """Tensors of these shapes, one by one; whoever takes one asks for the one after it.

        The next one travels while this one is worked on: gloo does not send before the receiver has asked. The first
        one is not asked for before it is wanted: NCCL connects two ranks once both have come, and each waits for that.
        """
        asked = self._ask(shapes[0], dtype, source)
        for shape in shapes[1:]:
            here = [self._arrived(*asked)]
            asked = self._ask(shape, dtype, source)
            yield here.pop()
        yield self._arrived(*asked)

    def _arrived(self, work: dist.Work, tensor: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        work.wait()
        self.waited_s += time.perf_counter() - started
        return tensor

    def _ask(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> tuple[dist.Work, torch.Tensor]:
        tensor = torch.empty(shape, dtype=dtype, device=self._world.device)
        work = dist.irecv(tensor, src=source, group=self._groups[source, self._world.rank])
        assert work is not None
        return work, tensor

    def finish(self) -> None:
        """Until all has been sent."""
        for work, _ in self._flying:
            work.wait()
        self._flying.clear()


class Pipeline(Strategy):
    """One rank's layers."""

    layout = "split"
    expects_of_layers = "take hidden states and give hidden states"
    replicated = False
    draws_by_sample = False
    finds_stragglers = False  # a slow stage makes all of them wait: the plan's layers tell which takes how long

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        world = setup.world
        self.shard_group = dist.group.WORLD
        self.spans_hosts = bool(held_by(world.gang))
        self._links = _Links(world)
        self._queue: list[_Waiting] = []
        self._before, self._behind = world.rank - 1, world.rank + 1
        self._stage: PipelineStage
        self._holders: SharedWeights

    def split(self, model: nn.Module) -> None:
        """Leave this rank's layers."""
        row = self.world.gang.row_of(self.world.rank)
        self.use_stage(
            split_stages(
                model,
                number=self.world.rank - row.start,
                stages=self.world.gang.stages[row.start : row.stop],
                stream=weights_dtype(self.job, self.precision.compute),
            )
        )

    def use_stage(self, stage: PipelineStage) -> None:
        """Train these layers, which are all that the model has."""
        self._stage = stage
        self.counts_loss = stage.is_last

    def agree(self, loss: CausalLoss) -> None:
        """Among the ranks that have a weight in common."""
        self._holders = SharedWeights(trainable(loss), self.world, sent_as=self.setup.sent_as)
        if not loss.is_meta or base_of(loss.model) is not loss.model:
            self._holders.agree()
        # else every rank reads its part of the same files, and of a model without adapters nothing is there yet

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Take a micro-batch of the step; with the `last` one all of them are done, and their loss is told.

        Then gradients are those of all pipelines.
        """
        self._queue.append(_Waiting(batch, scale, torch.initial_seed()))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        return total + self._run() if last else total

    def join(self, *, last: bool) -> None:
        """Where this pipeline has no work: take part in the sums."""
        assert last, "a pipeline without work takes part in the exchange alone"
        self._sum_up()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch in the last stage, 0 in the others; collective."""
        given = next(self._given([batch]))
        made = self._pass(given, batch)
        self._hand_on(made)
        self._links.finish()
        return made if self._stage.is_last else torch.zeros((), device=self.world.device)

    @torch.no_grad()
    def probe(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states or logits of this stage alone: [m, t, *]; later stages begin with hidden states at random."""
        entered = None
        if not self._stage.is_first:
            entered = self._stage.drawn(input_ids, self.world.device)
        if self._stage.is_last:
            logits = self.loss.logits(input_ids, position_ids, entered=entered)
            if entered is not None:
                self._stage.require_plain(entered)
            return logits
        return self._decode(entered, input_ids, position_ids)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Those of the weights that no rank before this one has; a zero where there is none."""
        return self._holders.own(parameters)

    def remote_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Names of what other ranks have; `tensors`: what this one has. Collective."""
        found = gather_json(list(tensors), self.world)
        return frozenset(name for names in found for name in names) - set(tensors)

    @torch.no_grad()
    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """What all ranks have, in this machine's memory; collective.

        Where each of several hosts has all of it, nothing passes between them, and the first rank of a host alone may
        want it.
        """
        if not self.spans_hosts and len(self.world.gang.hosts) > 1:
            return self._of_host(tensors, wanted=wanted)
        listing = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
        found: dict[str, torch.Tensor] = {}
        listings = gather_json(listing, self.world)
        for rank, rows in enumerate(listings[: len(self.world.gang.rows[0])]):  # the first pipeline has everything
            theirs = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rows}
            is_own = rank == self.world.rank
            for bucket in in_buckets(tensors.values() if is_own else theirs.values()):
                row = joined(bucket).cpu()
                dist.broadcast(row, src=rank)
                if not is_own and wanted:
                    spread(row, bucket)
            if wanted:
                found |= {name: each.detach() for name, each in tensors.items()} if is_own else theirs
        return found

    def idle_exchange(self) -> str:
        """Pipelines side by side exchange gradients, and so do two stages that share a table."""
        return "" if self._holders.exchanges else "one pipeline"

    def waited_s(self) -> float:
        """For hidden states and gradients of other stages, and for other pipelines, in the last step."""
        waited, self._links.waited_s = self._links.waited_s, 0.0
        return waited

    def _of_host(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        if not self.world.is_first_of_host:
            assert not wanted, "the first rank of a host puts together what the host has"
            send(tensors, self.world)
            return {}
        found = shards_of_host(tensors, self.world)
        return {piece.name: piece.tensor for piece in found if wanted}

    def _run(self) -> torch.Tensor:
        """All micro-batches of the step; their summed loss, 0 but in the last stage."""
        queue, self._queue = self._queue, []
        given = self._given([waiting.batch for waiting in queue])
        gradients = self._gradients_back([waiting.batch for waiting in queue])
        first = ahead(self._stage.number, len(self._stage.stages), eager=self.world.gang.eager)
        first = min(len(queue), first)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for waiting in queue[:first]:
            self._forward(waiting, next(given))
        for forth, back in zip(queue[first:], queue, strict=False):
            total += self._forward(forth, next(given))
            self._backward(back, next(gradients))
        for waiting in queue[len(queue) - first :]:
            self._backward(waiting, next(gradients))
        self._links.finish()
        self._sum_up()
        return total

    def _sum_up(self) -> None:
        started = time.perf_counter()
        self._holders.sum()
        self._links.waited_s += time.perf_counter() - started

    def _forward(self, waiting: _Waiting, given: torch.Tensor | None) -> torch.Tensor:
        self.setup.beat()
        begin_draws((waiting.seed + self._stage.number * _ODD) % _SEEDS, self.world.device)
        waiting.given = given
        waiting.made = self._pass(given, waiting.batch)
        self._hand_on(waiting.made)
        return waiting.made.detach().double() if self._stage.is_last else torch.zeros((), dtype=torch.float64)

    def _backward(self, waiting: _Waiting, gradient: torch.Tensor | None) -> None:
        self.setup.beat()
        made, given = waiting.made, waiting.given
        assert made is not None
        if gradient is None:
            (made * waiting.scale).backward()  # type: ignore[no-untyped-call]
        elif made.requires_grad:  # nothing is trained before the first adapter
            made.backward(gradient.to(made.dtype))  # type: ignore[no-untyped-call]
        if given is not None:
            assert given.grad is not None
            self._links.send(given.grad.to(self.precision.compute), self._before)
        waiting.made = waiting.given = None

    def _given(self, batches: Sequence[Batch]) -> Iterator[torch.Tensor | None]:
        """Hidden states of the stage before, [m, t, width] of each; None in the first stage."""
        if self._stage.is_first:
            return repeat(None, len(batches))
        return map(self._enter, self._coming(batches, self._before))

    def _gradients_back(self, batches: Sequence[Batch]) -> Iterator[torch.Tensor | None]:
        """Of what the stage behind was handed, [m, t, width] of each; None in the last stage."""
        if self._stage.is_last:
            return repeat(None, len(batches))
        return self._coming(batches, self._behind)

    def _coming(self, batches: Sequence[Batch], source: int) -> Iterator[torch.Tensor]:
        shapes = [(*batch.input_ids.shape, self._stage.width) for batch in batches]
        return self._links.coming(shapes, dtype=self.precision.compute, source=source)

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self._stage.stream).requires_grad_(torch.is_grad_enabled())

    def _hand_on(self, made: torch.Tensor) -> None:
        if not self._stage.is_last:
            self._links.send(made.to(self.precision.compute), self._behind)

    def _pass(self, given: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """This stage's layers: hidden states, or the loss."""
        with self.precision.autocast(self.world.device):
            if not self._stage.is_last:
                return self._decode(given, batch.input_ids, batch.position_ids)
            loss: torch.Tensor = self.loss(*batch.tensors, entered=given)
        if given is not None:
            self._stage.require_plain(given)
        return loss

    def _decode(self, given: torch.Tensor | None, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        decoder = base_of(self.loss.model).base_model
        words = {"input_ids": input_ids} if given is None else {"inputs_embeds": given}
        decoder(**words, position_ids=position_ids, use_cache=False)  # type: ignore[operator]
        if given is not None:
            self._stage.require_plain(given)
        assert self._stage.after is not None
        return self._stage.after.take()


class SharedWeights:
    """One rank's trained weights, and who else has them."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], world: ProcessGroup, *, sent_as: torch.dtype | None
    ) -> None:
        """Collective. sent_as: see `Pipeline`."""
        ranks_of: dict[str, tuple[int, ...]] = {}
        for rank, names in enumerate(gather_json(list(trained), world)):
            for name in names:
                ranks_of[name] = (*ranks_of.get(name, ()), rank)
        timeout = timedelta(seconds=world.gang.collective_timeout_s)
        self._shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        """Groups of ranks, and what they have in common."""
        several = [each for each in dict.fromkeys(ranks_of.values()) if len(each) > 1]
        for ranks in several:
            group = dist.new_group(list(ranks), timeout=timeout)
            if world.rank in ranks:
                self._shared.append((group, [each for name, each in trained.items() if ranks_of[name] == ranks]))
        self._own = {id(each) for name, each in trained.items() if ranks_of[name][0] == world.rank}
        """The weights that no rank before this one has."""
        self.exchanges = bool(several)
        """Whether any ranks have weights in common."""
        self._sent_as = sent_as

    def agree(self) -> None:
        """Make weights equal that ranks have in common; collective."""
        for group, parameters in self._shared:
            agree_weights(parameters, group=group)

    def own(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Gradients that are this rank's to count: those of each weight are one rank's. A zero where there are none."""
        counted = [each.grad for each in parameters if each.grad is not None and id(each) in self._own]
        return counted or [torch.zeros(1, dtype=parameters[0].dtype, device=parameters[0].device)]

    def sum(self) -> None:
        """Add up the gradients of weights that several ranks have, in place; collective."""
        for group, parameters in self._shared:
            sum_gradients(parameters, partial(dist.all_reduce, group=group), sent_as=self._sent_as)
