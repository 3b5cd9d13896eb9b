"""How long an optimizer step takes: computation of every rank, and what of the exchanges it does not hide. Pure.

A micro-batch of T tokens in documents of s tokens takes max(floor, a + b T + c T s). The floor is the time that the
processor needs to ask for all kernels. Of N ranks that do k_i micro-batches of t_i seconds each:

    ddp           max(k_i t_i) + exposed + update. Gradients travel in buckets while the last micro-batch of a rank
                  runs backward; the slowest to have a bucket ready decides, and nothing hides the last one
    zero-1        max(k_i t_i) + exchange + update: DeepSpeed's one bucket waits for all of backward
    zero-2        the same after every micro-batch, together
    fsdp, zero-3  k * sum over layers of max(computation, gathering of the next layer's weights), backward with the
                  exchange of gradients on the same link
    pipeline      the longest of what cannot be shorter (runs/schedule.py); where sending takes no time, that is
                  sum(t_i) + (k - 1) * max(t_i): (k + stages - 1) t for equal stages (the bubble); of several the
                  slowest, and then their exchange
    tp            max(k_i (t_i / n + x)) + exposed + update. The n ranks of a host compute a micro-batch together, and
                  wait for the sums x inside its layers; across hosts as ddp. The floor stays: as many kernels run
    local-sgd     max(k_i t_i) + update + exchange / H; inside a host as ddp
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gangline.catalog.efficiency import FLOOR_S_PER_LAYER, default_efficiency
from gangline.catalog.gpus import GpuSpec
from gangline.planning.architecture import Architecture
from gangline.planning.block import residual_width
from gangline.planning.flops import flops_per_token, squared_flops
from gangline.planning.links import Fabric, LinkModel, exchange_s
from gangline.planning.traffic import Exchange, Traffic, linear_bytes, trained_weights
from gangline.planning.training import BYTES, Strategy, Training
from gangline.runs import schedule
from gangline.runs.buckets import AllReduce, Window, choose_buckets

WITHOUT_RECOMPUTATION = 0.75
WIDE_NUMBERS, WIDE_SPREAD = 4.0, 1.0
"""Products in fp32 take so many times as long as in 16 bits: 2 on GeForce, 16 on an A100, and so the interval."""
OPTIMIZER_BYTES = {"adamw": 7.0, "adamw-8bit": 4.0, "paged-adamw-8bit": 4.0}
"""Read and written per trained number, in numbers of its format: weight and both states twice, gradient once."""
HOST_LINK_BYTES_PER_S = 15e9
"""Between a card and its machine's memory: what cards behind PCIe 4.0 x16 pass on through it (catalog/links). Copies
alone may be faster; NOT VERIFIED for them, nor known by machine. What the processor takes to update is not counted."""


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


def copies_s(architecture: Architecture, training: Training) -> float:
    """Per token, of a card that has layers' inputs in its machine's memory: out in forward and back in backward, each
    copy in the row of what is computed.
    """
    if not training.offloading:
        return 0.0
    return 2 * architecture.num_layers * architecture.hidden * residual_width(training) / HOST_LINK_BYTES_PER_S


def copy_s(exchange: Exchange, strategy: Strategy) -> float:
    """Of a rank's part to the card before it is gathered, or back after gradients are summed; 0 where it is there."""
    moved = exchange.what.startswith("weights") or "optimizer" in strategy.offload
    cut = exchange.operation in ("all_gather", "reduce_scatter")
    if strategy.kind not in ("fsdp", "hsdp") or "parameters" not in strategy.offload or not (moved and cut):
        return 0.0
    return exchange.num_bytes / max(1, exchange.ranks) / HOST_LINK_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank does in a step."""

    compute: ComputeModel
    micro_batches: int


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


def uncalibrated(
    spec: GpuSpec, architecture: Architecture, training: Training, *, power_limit_w: float | None = None
) -> ComputeModel:
    """An estimate from a data sheet and the part of it that published runs reached, with an interval to match.

    power_limit_w: what a laptop's card is given, as the driver says it.
    """
    low, likely, high = default_efficiency(
        spec, method=training.method, num_parameters=architecture.num_parameters, power_limit_w=power_limit_w
    )
    wide = BYTES[training.compute] > 2
    peak, bytes_per_s = spec.tflops * 1e12 / (WIDE_NUMBERS if wide else 1), spec.bandwidth_gb_s * 1e9
    length = training.sequence_length
    whole = flops_per_token(architecture, training, length=length)
    squared = squared_flops(architecture, training, length=length)
    per_flop_s = 1 / (peak * likely)
    passes = 3 if training.checkpointing else 2
    quantised = architecture.linear_weights if training.method == "qlora" else 0
    packed = sum(layer.count * linear_bytes(layer, training) for layer in architecture.layers) if quantised else 0.0
    plain = architecture.num_parameters - quantised
    weights = packed + plain * BYTES[training.compute]
    optimizer = trained_weights(architecture, training) * BYTES[training.parameters]
    launches_s = FLOOR_S_PER_LAYER[training.method] * architecture.num_layers
    return ComputeModel(
        per_token_s=(whole.total - whole.head - squared * length) * per_flop_s + copies_s(architecture, training),
        per_token2_s=squared * per_flop_s,
        head_per_token_s=whole.head * per_flop_s,
        # quantised weights are read and written out in 16 bits for every pass, and read again
        overhead_s=passes * (packed + 4 * quantised) / bytes_per_s,
        floor_s=max(
            launches_s * (1 if training.checkpointing else WITHOUT_RECOMPUTATION), passes * weights / bytes_per_s
        ),
        optimizer_s=optimizer * OPTIMIZER_BYTES[training.optimizer] / bytes_per_s,
        backward_share=whole.backward_share,
        source="estimated from data sheets",
        spread=max(likely / low, high / likely) - 1 + (WIDE_SPREAD if wide else 0),
    )


def step_time(
    strategy: Strategy, traffic: Traffic, ranks: Sequence[RankWork], fabric: Fabric, *, tokens: float, length: float
) -> StepTime:
    """Seconds of an optimizer step of ranks that may be unlike; `tokens` of a micro-batch, in documents of `length`."""
    ranks = _own(strategy, ranks)
    whole = _Ask(strategy, traffic, _unlike(strategy, ranks), fabric, tokens, length)
    ask = _cut(whole)
    total_s, optimizer_s = _total_s(ask), _optimizer_s(ask)
    free_s = _total_s(dataclasses.replace(ask, traffic=dataclasses.replace(traffic, exchanges=())))
    bounds = []
    for sign in (-1, 1):
        bent = _cut(_bent(whole, sign))
        bounds.append(_total_s(bent) + _optimizer_s(bent))
    return StepTime(
        compute_s=_compute_s(dataclasses.replace(ask, ranks=ranks)),
        communication_s=sum(each.times * ask.once(each) for each in ask.traffic.exchanges),
        exposed_s=max(0.0, total_s - free_s),
        optimizer_s=optimizer_s,
        total_s=total_s + optimizer_s,
        low_s=bounds[0],
        high_s=bounds[1],
        inside_s=ask.spent("in-layer"),
    )


def step_s(
    strategy: Strategy, traffic: Traffic, ranks: Sequence[RankWork], fabric: Fabric, *, tokens: float, length: float
) -> float:
    """`StepTime.total_s` of the same arguments, which is what decides between ways."""
    ranks = _own(strategy, ranks)
    ask = _cut(_Ask(strategy, traffic, _unlike(strategy, ranks), fabric, tokens, length))
    return _total_s(ask) + _optimizer_s(ask)


def _own(strategy: Strategy, ranks: Sequence[RankWork]) -> Sequence[RankWork]:
    """What each rank computes of its micro-batches; equal devices keep equal models."""
    if strategy.kind != "tp":
        return ranks
    models = {id(rank.compute): rank.compute.sliced(strategy.shard_size) for rank in ranks}
    return [RankWork(compute=models[id(rank.compute)], micro_batches=rank.micro_batches) for rank in ranks]


def _unlike(strategy: Strategy, ranks: Sequence[RankWork]) -> Sequence[RankWork]:
    """One of each: where all are waited for, it does not matter how many do the same. A pipeline is a row of all."""
    if strategy.kind == "pipeline":
        return ranks
    return list({(id(rank.compute), rank.micro_batches): rank for rank in ranks}.values())


@dataclass(frozen=True, slots=True)
class _Ask:
    """The arguments of `step_time`."""

    strategy: Strategy
    traffic: Traffic
    ranks: Sequence[RankWork]
    fabric: Fabric
    tokens: float
    length: float

    def once(self, exchange: Exchange) -> float:
        copied_s = copy_s(exchange, self.strategy)
        return exchange_s(exchange, self.fabric, shard_size=self.traffic.shard_size) + copied_s

    def spent(self, *hides: str) -> float:
        """Seconds of the step's exchanges that hide so."""
        return sum(each.times * self.once(each) for each in self.traffic.exchanges if each.hides in hides)

    def micro_s(self, rank: RankWork) -> float:
        return rank.compute.micro_batch_s(self.tokens, self.length)

    def busy_s(self, rank: RankWork) -> float:
        """Of all micro-batches; a rank without any sends one token through the model to join the others."""
        return rank.micro_batches * self.micro_s(rank) or rank.compute.micro_batch_s(1, 1)

    def window(self, rank: RankWork) -> Window:
        busy_s = self.busy_s(rank)
        return Window(busy_s=busy_s, backward_s=min(busy_s, self.micro_s(rank)) * rank.compute.backward_share)


def _cut(ask: _Ask) -> _Ask:
    """Gradients in as many buckets as our trainer chooses where links and devices are what they are here."""
    exchanges = ask.traffic.exchanges
    if ask.strategy.kind != "ddp" or not exchanges:
        return ask
    gradients, *table = exchanges
    total, tail = sum(each.num_bytes for each in exchanges), sum(each.num_bytes for each in table)
    latency_s = ask.once(dataclasses.replace(gradients, num_bytes=0))
    wire = AllReduce(latency_s=latency_s, per_byte_s=(ask.once(gradients) - latency_s) / max(1, gradients.num_bytes))
    cut = choose_buckets(total, wire, [ask.window(rank) for rank in ask.ranks], tail_bytes=tail)
    each, early = (total - tail) // cut.count, cut.count if table else cut.count - 1
    last = table or [dataclasses.replace(gradients, num_bytes=total - early * each, hides="nothing")]
    several = [dataclasses.replace(gradients, num_bytes=each, times=early)] if early else []
    return dataclasses.replace(ask, traffic=dataclasses.replace(ask.traffic, exchanges=(*several, *last)))


def _compute_s(ask: _Ask) -> tuple[float, ...]:
    """Computation by rank."""
    if ask.strategy.kind == "pipeline":
        return tuple(stage.micro_batches * ask.micro_s(stage) for row in _rows(ask) for stage in row)
    return tuple(ask.busy_s(rank) for rank in ask.ranks)


def _total_s(ask: _Ask) -> float:
    """The step without the update."""
    kinds: dict[str, Callable[[_Ask], float]] = {
        "pipeline": _pipeline_s,
        "fsdp": _sharded_s,
        "hsdp": _sharded_s,
        "zero-3": _sharded_s,
        "zero-2": _every_backward_s,
        "tp": _sliced_s,
    }
    return kinds.get(ask.strategy.kind, _last_backward_s)(ask)


def _last_backward_s(ask: _Ask) -> float:
    """Buckets are ready one by one in a rank's last micro-batch, and wait for those before (see `runs.buckets`)."""
    tail_s, early_s = ask.spent("nothing"), ask.spent("last-backward")
    buckets = sum(each.times for each in ask.traffic.exchanges if each.hides == "last-backward")
    ends = []
    for window in map(ask.window, ask.ranks):
        hidden_s = window.backward_s * buckets / (buckets + 1)
        ends.append(max(window.busy_s - hidden_s + early_s, window.busy_s) + tail_s)
    return max(ends)


def _sliced_s(ask: _Ask) -> float:
    """As ddp across hosts; sums inside layers come on top of every micro-batch, and hide nothing of it."""
    inside_s = ask.spent("in-layer") / max(1.0, ask.traffic.micro_batches)
    tail_s, early_s = ask.spent("nothing"), ask.spent("last-backward")
    ends = []
    for rank in ask.ranks:
        busy_s = ask.busy_s(rank) + max(1, rank.micro_batches) * inside_s
        ends.append(max(busy_s, busy_s - ask.window(rank).backward_s + early_s) + tail_s)
    return max(ends)


def _every_backward_s(ask: _Ask) -> float:
    k = max(1.0, ask.traffic.micro_batches)
    return k * max(map(ask.micro_s, ask.ranks)) + ask.spent("nothing")


def _sharded_s(ask: _Ask) -> float:
    """Layer by layer, all ranks together: the slowest one's computation against the exchange for the next layer."""
    k = max(1.0, ask.traffic.micro_batches)
    layers = [each for each in ask.traffic.exchanges if each.hides in {"forward-layer", "backward-layer"}]
    depth = sum(each.times for each in layers if each.hides == "forward-layer") / k
    micro_s = max(ask.micro_s(rank) for rank in ask.ranks)
    if not depth:  # parts of one: each rank holds all
        return _last_backward_s(ask)
    slowest = max(ask.ranks, key=ask.micro_s)
    back_s = micro_s * slowest.compute.backward_share / depth
    forward_s = micro_s / depth - back_s
    gather_s = ask.spent("forward-layer") / k / depth
    late_s = ask.spent("backward-layer") / k / depth
    both_s = depth * (max(forward_s, gather_s) + max(back_s, late_s))
    # the first gathering of each pass and the last exchange of gradients run alone
    alone_s = min(forward_s, gather_s) + min(back_s, late_s)
    between_s = max(0.0, ask.spent("last-backward") - depth * back_s)
    return k * (both_s + alone_s) + ask.spent("nothing") + between_s


def _pipeline_s(ask: _Ask) -> float:
    """Of the slowest pipeline; what they exchange begins when all have gone through, and hides behind nothing."""
    return max(_row_s(ask, row) for row in _rows(ask)) + ask.spent("nothing")


def _row_s(ask: _Ask, row: Sequence[RankWork]) -> float:
    """One pipeline; 0 without work."""
    k = row[0].micro_batches
    if not k:
        return 0.0
    stages = [(ask.micro_s(stage), stage.compute.backward_share) for stage in row]
    forward = [each_s * (1 - share) for each_s, share in stages]
    backward = [each_s * share for each_s, share in stages]
    sends = [ask.once(each) for each in ask.traffic.exchanges if each.hides == "stages"]
    return schedule.step_s(forward, backward, send_s=max(sends, default=0.0), micro_batches=k, eager=ask.strategy.eager)


def _rows(ask: _Ask) -> list[list[RankWork]]:
    return works_of(ask.strategy, ask.ranks)


def works_of(strategy: Strategy, ranks: Sequence[RankWork]) -> list[list[RankWork]]:
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


def _optimizer_s(ask: _Ask) -> float:
    """Of the slowest rank; where states are in parts, each updates its own."""
    if ask.strategy.kind == "pipeline":
        return max(stage.compute.optimizer_s for row in _rows(ask) for stage in row)
    whole = ask.strategy.kind in {"single", "ddp", "tp", "local-sgd"}  # under tp it is a part already
    return max(rank.compute.optimizer_s for rank in ask.ranks) / (1 if whole else ask.traffic.shard_size)


def _bent(ask: _Ask, sign: int) -> _Ask:
    """Everything as fast (-1) or as slow (1) as it may be."""

    def link(model: LinkModel) -> LinkModel:
        return dataclasses.replace(
            model,
            latency_s=model.latency_s * (1 + model.spread) ** sign,
            bytes_per_s=model.bytes_per_s / (1 + model.spread) ** sign,
        )

    models = {id(rank.compute): rank.compute for rank in ask.ranks}
    bent = {number: model.scaled((1 + model.spread) ** sign) for number, model in models.items()}
    ranks = [RankWork(compute=bent[id(rank.compute)], micro_batches=rank.micro_batches) for rank in ask.ranks]
    fabric = dataclasses.replace(ask.fabric, wire=link(ask.fabric.wire), inside=link(ask.fabric.inside))
    return dataclasses.replace(ask, ranks=ranks, fabric=fabric)
