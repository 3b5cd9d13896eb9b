"""How long an optimizer step takes: computation of every rank, and what of the exchanges it does not hide. Pure.

A micro-batch of T tokens in documents of s tokens takes max(floor, a + b T + c T s). The floor is the time that the
processor needs to ask for all kernels. What a step of several ranks adds
is the strategies' (`strategies/<kind>/plan.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.planner.activations import residual_width
from gangline.planner.architecture import Architecture, Layer, adapted
from gangline.planner.traffic import (
    HOST_LINK_BYTES_PER_S,
    Exchange,
    Fabric,
    LinkModel,
    Traffic,
    exchange_s,
)
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.formulas import Window

# Floating-point operations of one token, with frozen weights and recomputation. Pure.


FLASH_BACKWARD = 2.5
"""Of the forward products of attention: four gradients, and the scores once more, which are not kept."""
MATH_BACKWARD = 2.0
WHOLE_SQUARE = ("math", "eager")
"""Attention that computes and keeps scores for all pairs of tokens, masked or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of one token through the whole model."""

    forward: float
    backward: float
    recompute: float
    """Forward products done again in backward (activation checkpointing)."""
    head: float
    """Of these three, what the output head takes."""

    @property
    def total(self) -> float:
        """What a token costs."""
        return self.forward + self.backward + self.recompute

    @property
    def backward_share(self) -> float:
        """Part of a micro-batch in which layers' gradients come to be.

        A head whose loss is fused with it computes its gradients within forward, and so is no part of it.
        """
        forward, backward = self.forward, self.backward + self.recompute
        return (backward - self.head * backward / (forward + backward)) / self.total


def flops_per_token(architecture: Architecture, training: Training, *, length: int) -> Flops:
    """FLOPs of a token in documents of `length` tokens, on average over the positions."""
    full = training.method == "full"
    forward = backward = recompute = 0.0
    for layer in architecture.layers:
        weights, inner = 2 * layer.active_weights, attention_flops(layer, training, length=length)
        adapters = 0.0 if full else 2 * _active_adapters(layer, training)
        again = MATH_BACKWARD if training.stack.attention in WHOLE_SQUARE else FLASH_BACKWARD
        forward += layer.count * (weights + inner + adapters)
        backward += layer.count * ((2 if full else 1) * weights + again * inner + 2 * adapters)
        recompute += layer.count * (weights + inner + adapters - recomputed_last(layer, training))
    head = 2 * architecture.hidden * architecture.vocabulary
    head_back = (2 if full or architecture.trains_head else 1) * head
    return Flops(
        forward=forward + head,
        backward=backward + head_back,
        recompute=recompute if training.checkpointing else 0.0,
        head=head + head_back,
    )


def squared_flops(architecture: Architecture, training: Training, *, length: int) -> float:
    """Of a token's FLOPs, what grows with every further token of its document: the c of a + b T + c T s."""
    half = flops_per_token(architecture, training, length=length // 2)
    whole = flops_per_token(architecture, training, length=length)
    return (whole.total - half.total) / (length - length // 2)


def attention_flops(layer: Layer, training: Training, *, length: int) -> float:
    """Forward FLOPs of scores and their product with the values, per token.

    A causal kernel passes over half of the square; plain products take all of it.
    """
    if training.stack.attention in WHOLE_SQUARE:
        keys = float(length)
    elif layer.window is not None and layer.window < length:
        keys = layer.window - layer.window**2 / (2 * length)
    else:
        keys = length / 2
    return 2 * layer.heads * (layer.head_dim + layer.value_dim) * keys


def _active_adapters(layer: Layer, training: Training) -> float:
    """Numbers of adapters that one token is multiplied with."""
    found = adapted(layer, training.targets)
    return sum((each.rank or training.rank) * (each.inputs + each.outputs) * each.active for each in found)


def recomputed_last(layer: Layer, training: Training) -> float:
    """FLOPs of a token that recomputation leaves out.

    torch stops when the last kept tensor is there again. The product that ends a dense layer comes after it, unless
    an adapter on it keeps something of its own.
    """
    if layer.experts or not layer.linears:
        return 0.0
    last = layer.linears[-1]
    if last.part != "mlp" or (training.method != "full" and last in adapted(layer, training.targets)):
        return 0.0
    return 2 * last.inputs * last.outputs * last.active


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Seconds of one rank for any micro-batch of one model, method and precision."""

    per_token_s: float
    """Of the layers (b)."""
    overhead_s: float = 0.0
    """Of a micro-batch of any size (a)."""
    floor_s: float = 0.0
    per_token2_s: float = 0.0
    """Per token and token of its document: attention (c)."""
    head_per_token_s: float = 0.0
    """Of the output head and the loss."""
    optimizer_s: float = 0.0
    """Of one update of everything that is trained, its norm and clipping among it."""
    backward_share: float = 2 / 3
    """Part of a micro-batch in which gradients come to be."""
    contention: float = 0.0
    """Layers become longer by this part of an exchange that hides behind them: it holds multiprocessors and memory."""
    source: str = ""
    """For people: calibrated when, or estimated from what."""
    spread: float = 0.0
    """Times may be this much shorter or longer: from t / (1 + spread) to t * (1 + spread)."""
    profile: str | None = None
    """`Profile.name` of the measurement behind it; None: nobody measured."""

    def micro_batch_s(self, tokens: float, length: float) -> float:
        """Forward and backward of `tokens` tokens in documents of `length`."""
        slope_s = self.per_token_s + self.head_per_token_s + self.per_token2_s * length
        return max(self.floor_s, self.overhead_s + slope_s * tokens)

    def tokens_per_s(self, tokens: float, length: float) -> float:
        """Speed at that micro-batch, without exchange and update."""
        return tokens / self.micro_batch_s(tokens, length)

    def scaled(self, factor: float) -> ComputeModel:
        """The same device, `factor` times as slow."""
        times = ("per_token_s", "overhead_s", "floor_s", "per_token2_s", "head_per_token_s", "optimizer_s")
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in times})

    def stage(self, part: float, *, with_head: bool) -> ComputeModel:
        """What a pipeline stage with that part of the layers takes."""
        head_s = self.head_per_token_s if with_head else 0.0
        return dataclasses.replace(self.scaled(part), head_per_token_s=head_s)

    def sliced(self, parts: int) -> ComputeModel:
        """One of so many ranks that compute every micro-batch together; a processor asks for as many kernels."""
        times = ("per_token_s", "overhead_s", "per_token2_s", "head_per_token_s", "optimizer_s")
        return dataclasses.replace(self, **{name: getattr(self, name) / parts for name in times})


def copies_s(
    architecture: Architecture, training: Training, *, host_bytes_per_s: float = HOST_LINK_BYTES_PER_S
) -> float:
    """Per token, of a card that has layers' inputs in its machine's memory: out in forward and back in backward, each
    copy in the row of what is computed.
    """
    if not training.offloading:
        return 0.0
    return 2 * architecture.num_layers * architecture.hidden * residual_width(training) / host_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank does in a step."""

    compute: ComputeModel
    micro_batches: int
    passes: int | None = None
    """Forward passes that they are joined into, about equally long; None: each is one by itself."""

    def passes_s(self, *, tokens: float, length: float) -> tuple[float, float]:
        """Seconds of all its passes, and of the last one, which is the longest; tokens: of a micro-batch.

        A rank without work sends one token through the model to join the others.
        """
        if not self.micro_batches:
            return (self.compute.micro_batch_s(1, 1),) * 2
        number = self.passes or self.micro_batches
        joined, longer = divmod(self.micro_batches, number)
        each_s = self.compute.micro_batch_s(joined * tokens, length)
        last_s = self.compute.micro_batch_s((joined + 1) * tokens, length) if longer else each_s
        return (number - longer) * each_s + longer * last_s, last_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One optimizer step."""

    compute_s: tuple[float, ...]
    """Of each rank for its micro-batches, if nobody kept it waiting."""
    communication_s: float
    """Of all exchanges, one after the other, if nothing hid them."""
    exposed_s: float
    """What exchanges make the step longer than the slowest rank's computation (a pipeline's bubble is not in it)."""
    optimizer_s: float
    total_s: float
    low_s: float
    high_s: float
    inside_s: float = 0.0
    """tp: of `exposed_s`, sums inside layers, which a rank cannot tell from computing; for the most micro-batches."""

    @property
    def communication_share(self) -> float:
        """Part of the step in which the network is what is waited for."""
        return self.exposed_s / self.total_s if self.total_s else 0.0


def step_query(
    strategy: PlannedStrategy,
    traffic: Traffic,
    ranks: Sequence[RankWork],
    fabric: Fabric,
    *,
    tokens: float,
    length: float,
) -> StepQuery:
    """A step of ranks that may be unlike; `tokens` of a micro-batch, in documents of `length`.

    It has the part of its micro-batches that each rank computes; equal devices keep equal models. One rank of each kind
    stands for all of them, for where all are waited for their number does not matter. Pipelines have all ranks.
    """
    half = strategy.half
    models = {id(rank.compute): half.compute_of(rank.compute, strategy) for rank in ranks}
    works = [dataclasses.replace(rank, compute=models[id(rank.compute)]) for rank in ranks]
    unlike = {(id(work.compute), work.micro_batches, work.passes): work for work in works}.values()
    return StepQuery(
        strategy, traffic, works if half.layers == "staged" else list(unlike), works, fabric, tokens, length
    )


def step_time(whole: StepQuery) -> StepTime:
    """Seconds of an optimizer step, and the bounds between which they may lie."""
    half, flow = whole.strategy.half, whole.traffic
    ask = half.in_buckets(whole)
    total_s, optimizer_s = ask.total_s(), ask.optimizer_s()
    free_s = dataclasses.replace(ask, traffic=dataclasses.replace(flow, exchanges=())).total_s()
    low_s, high_s = (step_s(_bent(whole, sign)) for sign in (-1, 1))
    return StepTime(
        compute_s=ask.compute_s(),
        communication_s=sum(each.times * ask.once(each) for each in ask.traffic.exchanges),
        exposed_s=max(0.0, total_s - free_s),
        optimizer_s=optimizer_s,
        total_s=total_s + optimizer_s,
        low_s=low_s,
        high_s=high_s,
        inside_s=ask.spent("in-layer"),
    )


def step_s(whole: StepQuery) -> float:
    """`StepTime.total_s` of the same step, which decides between candidates."""
    ask = whole.strategy.half.in_buckets(whole)
    return ask.total_s() + ask.optimizer_s()


@dataclass(frozen=True, slots=True)
class StepQuery:
    """One way to run a job, whose step is timed."""

    strategy: PlannedStrategy
    traffic: Traffic
    ranks: Sequence[RankWork]
    """One of each that do the same; all of them in pipelines."""
    every: Sequence[RankWork]
    """By rank."""
    fabric: Fabric
    tokens: float
    length: float

    def once(self, exchange: Exchange) -> float:
        """Seconds of one of them."""
        copied_s = self.strategy.half.copy_s(exchange, self.strategy, bytes_per_s=self.fabric.host_bytes_per_s)
        return exchange_s(exchange, self.fabric, shard_size=self.traffic.shard_size) + copied_s

    def spent(self, *hides: str) -> float:
        """Seconds of the step's exchanges that hide so."""
        return sum(each.times * self.once(each) for each in self.traffic.exchanges if each.hides in hides)

    def travelling(self, *hides: str) -> float:
        """The same without the copies to and from host memory, which take no multiprocessor."""
        shard_size = self.traffic.shard_size
        found = (each for each in self.traffic.exchanges if each.hides in hides)
        return sum(each.times * exchange_s(each, self.fabric, shard_size=shard_size) for each in found)

    def micro_s(self, rank: RankWork) -> float:
        """Of a micro-batch."""
        return rank.compute.micro_batch_s(self.tokens, self.length)

    def pass_s(self, rank: RankWork) -> float:
        """Of its longest pass."""
        return rank.passes_s(tokens=self.tokens, length=self.length)[1]

    def busy_s(self, rank: RankWork) -> float:
        """Of all micro-batches."""
        return rank.passes_s(tokens=self.tokens, length=self.length)[0]

    def window(self, rank: RankWork) -> Window:
        """In which its buckets become ready."""
        busy_s, last_s = rank.passes_s(tokens=self.tokens, length=self.length)
        return Window(busy_s=busy_s, backward_s=last_s * rank.compute.backward_share)

    def rows(self) -> list[list[RankWork]]:
        """Stages, by pipeline."""
        return works_of(self.strategy, self.ranks)

    def compute_s(self) -> tuple[float, ...]:
        """Computation by rank."""
        if self.strategy.half.layers == "staged":
            return tuple(stage.micro_batches * self.micro_s(stage) for row in self.rows() for stage in row)
        return tuple(self.busy_s(rank) for rank in self.every)

    def last_backward_s(self) -> float:
        """Buckets are ready one by one in a rank's last micro-batch, and wait for those before (see `runs.buckets`)."""
        tail_s, early_s = self.spent("nothing"), self.spent("last-backward")
        buckets = sum(each.times for each in self.traffic.exchanges if each.hides == "last-backward")
        ends = []
        for window in map(self.window, self.ranks):
            hidden_s = window.backward_s * buckets / (buckets + 1)
            ends.append(max(window.busy_s - hidden_s + early_s, window.busy_s) + tail_s)
        return max(ends)

    def total_s(self) -> float:
        """The step without the update."""
        return self.strategy.half.total_s(self)

    def optimizer_s(self) -> float:
        """Of the slowest rank; where states are in parts, each updates its own."""
        if self.strategy.half.layers == "staged":
            return max(stage.compute.optimizer_s for row in self.rows() for stage in row)
        parts = 1 if self.strategy.half.parts == "none" else self.traffic.shard_size
        return max(rank.compute.optimizer_s for rank in self.ranks) / parts


def works_of(strategy: PlannedStrategy, ranks: Sequence[RankWork]) -> list[list[RankWork]]:
    """What each rank does, by pipeline."""
    size = len(ranks) // strategy.replicas
    rows = enumerate(strategy.rows)
    return [_stages_of(ranks[number * size : (number + 1) * size], layers) for number, layers in rows]


def _stages_of(ranks: Sequence[RankWork], stages: Sequence[int]) -> list[RankWork]:
    """What the ranks of one pipeline do; ranks of the same device with as many layers are reckoned once.

    stages: layers of each.
    """
    depth, last = sum(stages), len(ranks) - 1
    known: dict[tuple[int, int, int, bool], RankWork] = {}
    found = []
    for number, (rank, layers) in enumerate(zip(ranks, stages, strict=True)):
        key = (id(rank.compute), rank.micro_batches, layers, number == last)
        if key not in known:
            model = rank.compute.stage(layers / depth, with_head=number == last)
            known[key] = RankWork(compute=model, micro_batches=rank.micro_batches)
        found.append(known[key])
    return found


def _bent(ask: StepQuery, sign: int) -> StepQuery:
    """Everything as fast (-1) or as slow (1) as it may be."""

    def link(model: LinkModel) -> LinkModel:
        return dataclasses.replace(
            model,
            latency_s=model.latency_s * (1 + model.spread) ** sign,
            bytes_per_s=model.bytes_per_s / (1 + model.spread) ** sign,
        )

    models = {id(rank.compute): rank.compute for rank in ask.ranks}
    bent = {number: model.scaled((1 + model.spread) ** sign) for number, model in models.items()}
    ranks = [dataclasses.replace(rank, compute=bent[id(rank.compute)]) for rank in ask.ranks]
    fabric = dataclasses.replace(ask.fabric, wire=link(ask.fabric.wire), inside=link(ask.fabric.inside))
    return dataclasses.replace(ask, ranks=ranks, fabric=fabric)
