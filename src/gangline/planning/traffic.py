"""What ranks send each other in one optimizer step, by strategy: operations, buffers, bytes. Pure.

Symbols: N ranks, k micro-batches, P weights, P_t trained ones, b bytes of a number, c = (N-1)/N. Sent by every rank:

    ddp               2c * P_t * b
    zero-1            2c * P_t * b + c * P_t * b           zero-2    k*2c * P_t * b + c * P_t * b
                                                           (DeepSpeed sums buckets of all ranks, and each keeps its own)
    zero-3, fsdp      k*c * (2 * P * b + P_t * b)          without resharding: k*c * (P * b + P_t * b)
    hsdp              inside a shard as fsdp, and across 2(M-1)/M * P_t / G * b (M copies of G ranks each)
    tp                inside a host k * 2(n-1)/n * 4 * L * tokens * hidden * b for L layers (n ranks of a host; one sum
                      more behind the layers, and with recomputation one more in each), and for what is whole on every
                      rank as hsdp; across 2(M-1)/M * P_t / n * b (M hosts)
    pipeline          k * 2 * tokens * hidden * b at each boundary; between M pipelines of G ranks
                      2(M-1)/M * P_t / G * b (as if each rank had as many weights as the others)
    local-sgd         2(M-1)/M * P_t * q / H               (M hosts, H optimizer steps between two exchanges, q bytes
                                                            of the payload); and inside a host as ddp

torch keeps the weights outside layers (embedding, head) between forward and backward whatever `reshard` says; they are
counted twice all the same, which is 1.3 % too much for Llama-2-7B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gangline.planning.architecture import Architecture, Layer
from gangline.planning.lora import layer_adapters, lora_parameters
from gangline.planning.padding import padded_experts
from gangline.planning.slices import sliced
from gangline.planning.states import DOUBLE_SCALE_BYTES, PACKED_BYTES, ROW_SCALE_BYTES
from gangline.planning.training import BYTES, Strategy, Training

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
Backend = Literal["nccl", "gloo"]
"""nccl: rings. gloo (torch 2.13, counted on the interface: tests/lab/test_traffic.py): rings, too, but a reduce_scatter
is a whole all_reduce of which each rank keeps its part, and the root of a broadcast sends the buffer log2(N) times."""
Among = Literal["world", "shard", "replicas", "next", "previous", "ends"]
"""Who takes part in one: all ranks; the neighbours that hold one copy; those with the same part of all copies; a rank
and the one after it (or before it) in its copy, everywhere at once; the first and the last rank of all copies."""
Hides = Literal["nothing", "in-layer", "last-backward", "forward-layer", "backward-layer", "stages"]
"""Behind which computation it can run: none; none, and a layer waits for it in every micro-batch; backward of a rank's
last micro-batch; the layer before (in forward or backward); other micro-batches of a pipeline."""

PAYLOAD_BYTES = {"int8": 1 + 4 / 256, "bf16": 2.0, "fp32": 4.0}
"""Of one changed weight on the wire; int8 with an fp32 scale per 256 (worker/strategy/quantise)."""
NF4_BYTES = PACKED_BYTES + DOUBLE_SCALE_BYTES
"""Of one weight, with the block scales quantised in their turn (QLoRA, "double quantisation")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One kind of collective, as often as a step does it."""

    what: str
    """For people: what travels."""
    operation: Operation
    num_bytes: int
    """Of one buffer: what a rank puts in (all_reduce, reduce_scatter, broadcast, send) or ends up with (all_gather)."""
    times: float
    """In one optimizer step."""
    ranks: int
    """That take part in one."""
    number: str
    """Format of the numbers: bf16, fp32, nf4, int8."""
    among: Among = "world"
    hides: Hides = "nothing"
    backend: Backend = "nccl"

    @property
    def once_bytes(self) -> float:
        """Sent by one rank for one of them."""
        return collective_bytes(self.operation, self.num_bytes, self.ranks, backend=self.backend)

    @property
    def sent_bytes(self) -> float:
        """Sent by one rank in one step."""
        return self.times * self.once_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Everything that ranks exchange in one optimizer step."""

    world_size: int
    shard_size: int
    micro_batches: float
    exchanges: tuple[Exchange, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """By the rank that sends most, in one step."""
        wire = wire_bytes(self, (1,) * self.world_size)
        return max(wire.between, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Bytes that ranks send in one optimizer step, by rank."""

    inside: tuple[float, ...]
    """To ranks of the same host."""
    between: tuple[float, ...]
    """To other hosts."""
    out: tuple[float, ...]
    """Of each host, over its network link."""


def collective_bytes(operation: Operation, num_bytes: float, world_size: int, *, backend: Backend = "nccl") -> float:
    """What one rank sends for one operation (the root, for a broadcast); `num_bytes` as in `Exchange`."""
    if world_size < 2:
        return 0.0
    part = (world_size - 1) / world_size
    if operation == "all_reduce" or (operation == "reduce_scatter" and backend == "gloo"):
        return 2 * part * num_bytes
    if operation == "broadcast" and backend == "gloo":
        return math.ceil(math.log2(world_size)) * num_bytes
    return part * num_bytes if operation in {"all_gather", "reduce_scatter"} else num_bytes


def traffic(
    architecture: Architecture,
    training: Training,
    strategy: Strategy,
    *,
    micro_batches: float,
    backend: Backend = "nccl",
) -> Traffic:
    """The exchanges of one optimizer step in which every rank does `micro_batches` (in a pipeline: all go through it).

    Where ranks do unequal numbers of them (ddp, local-sgd, zero-1) the bytes are the same. Raises ModelError for
    adapters that find no place in the model.
    """
    size = strategy.world_size
    found: list[Exchange] = []
    if size > 1:
        ask = _Ask(architecture, training, strategy, micro_batches)
        kinds = {
            "ddp": _ddp,
            "zero-1": _zero,
            "zero-2": _zero,
            "tp": _tp,
            "pipeline": _pipeline,
            "local-sgd": _local_sgd,
        }
        every = kinds.get(strategy.kind, _sharded)(ask)
        found = [replace(each, backend=backend) for each in every if each.num_bytes and each.ranks > 1]
    shard = strategy.shard_size if strategy.kind in {"hsdp", "tp", "local-sgd"} else size // strategy.replicas
    return Traffic(world_size=size, shard_size=shard, micro_batches=micro_batches, exchanges=tuple(found))


def wire_bytes(traffic: Traffic, slots: Sequence[int]) -> Wire:
    """Bytes by rank and host; `slots`: ranks of every host, in rank order, so that a host's ranks are neighbours.

    A ring over all ranks then leaves every host once, whatever the number of its ranks.
    """
    host_of = [host for host, count in enumerate(slots) for _ in range(count)]
    inside, between = [0.0] * traffic.world_size, [0.0] * traffic.world_size
    for exchange in traffic.exchanges:
        for source, target in edges(exchange.among, traffic.world_size, traffic.shard_size):
            kind = inside if host_of[source] == host_of[target] else between
            kind[source] += exchange.sent_bytes
    out = [0.0] * len(slots)
    for rank, host in enumerate(host_of):
        out[host] += between[rank]
    return Wire(inside=tuple(inside), between=tuple(between), out=tuple(out))


def edges(among: Among, world_size: int, shard_size: int) -> list[tuple[int, int]]:
    """Who sends to whom: (source, target) for every ring or pair of an exchange."""
    befores = [rank for rank in range(world_size) if (rank + 1) % shard_size]
    if among == "next":
        return [(rank, rank + 1) for rank in befores]
    if among == "previous":
        return [(rank + 1, rank) for rank in befores]
    rings: list[Sequence[int]] = [range(world_size)]
    if among == "ends":
        rings = [[rank for rank in range(world_size) if rank % shard_size in (0, shard_size - 1)]]
    elif among == "shard":
        rings = [range(first, first + shard_size) for first in range(0, world_size, shard_size)]
    elif among == "replicas":
        rings = [range(first, world_size, shard_size) for first in range(shard_size)]
    return [edge for ring in rings if len(ring) > 1 for edge in zip(ring, (*ring[1:], ring[0]), strict=True)]


def trained_weights(architecture: Architecture, training: Training) -> int:
    """Numbers that are trained: all, or those of the adapters. Raises ModelError if no adapter finds a place."""
    if training.method == "full":
        return architecture.num_parameters
    return lora_parameters(architecture, training.rank, training.targets)


@dataclass(frozen=True, slots=True)
class _Ask:
    """The arguments of `traffic`."""

    architecture: Architecture
    training: Training
    strategy: Strategy
    micro_batches: float

    @property
    def size(self) -> int:
        return self.strategy.world_size


def _ddp(ask: _Ask) -> Iterator[Exchange]:
    """All gradients, while backward runs, and the embedding table's of a full fine-tune, which is ready when it ends.

    In how many buckets they travel depends on links and devices: see `speed.step_time`.
    """
    number = ask.training.exchange or ask.training.parameters
    table = ask.architecture.embedding_weights if ask.training.method == "full" else 0
    whole = Exchange(
        what="gradients",
        operation="all_reduce",
        num_bytes=(trained_weights(ask.architecture, ask.training) - table) * BYTES[number],
        times=1,
        ranks=ask.size,
        number=number,
        hides="last-backward",
    )
    yield whole
    if table:
        yield replace(whole, what="gradients of the embedding table", num_bytes=table * BYTES[number], hides="nothing")


def _zero(ask: _Ask) -> Iterator[Exchange]:
    """Optimizer states in parts, and with them (zero-2) gradients, which are then summed after every micro-batch.

    Of up to 500 million numbers at once, so that next to nothing of it hides behind the backward pass.
    """
    number, kept = ask.training.compute, ask.training.exchange or ask.training.parameters
    num_weights = trained_weights(ask.architecture, ask.training)
    every = ask.strategy.kind == "zero-2"
    yield Exchange(
        what="gradients",
        operation="all_reduce",  # DeepSpeed's use_multi_rank_bucket_allreduce
        num_bytes=num_weights * BYTES[kept],
        times=ask.micro_batches if every else 1,
        ranks=ask.size,
        number=kept,
    )
    yield Exchange(
        what="new weights",
        operation="all_gather",
        num_bytes=num_weights * BYTES[number],
        times=1,
        ranks=ask.size,
        number=number,
    )


def _local_sgd(ask: _Ask) -> Iterator[Exchange]:
    """Halves of an all-reduce, of which only the first ranks of hosts take part: the same bytes as a part by each."""
    inside, payload = ask.strategy.shard_size, ask.strategy.payload
    num_weights = trained_weights(ask.architecture, ask.training)
    width = max(PAYLOAD_BYTES[payload], BYTES[ask.training.parameters] if payload == "fp32" else 0)
    if inside > 1:
        yield from (replace(each, ranks=inside, among="shard") for each in _ddp(ask))
    yield Exchange(
        what="changes of weights",
        operation="all_reduce",
        num_bytes=int(num_weights * width / inside),
        times=1 / ask.strategy.inner_steps,
        ranks=ask.size // inside,
        number=payload,
        among="replicas" if inside > 1 else "world",
    )


def _tp(ask: _Ask) -> Iterator[Exchange]:
    """Hidden states and their gradients inside a host, for every micro-batch; gradients of weights once a step.

    Of two sums forward and two back in a layer, recomputation does the first one again: torch stops before the second.
    One more is behind the layers. In front of the first adapter nothing goes back, unless activations are recomputed:
    transformers then asks for gradients of the embeddings, frozen or not.
    """
    training, parts, depth = ask.training, ask.strategy.shard_size, ask.architecture.num_layers
    states = Exchange(
        what="hidden states",
        operation="all_reduce",
        num_bytes=training.tokens * ask.architecture.hidden * BYTES[training.compute],
        times=ask.micro_batches * depth * (3 if training.checkpointing else 2),
        ranks=parts,
        number=training.compute,
        among="shard",
        hides="in-layer",
    )
    yield states
    back = 2 * depth + (1 if training.method == "full" or training.checkpointing else 0)
    yield replace(states, what="their gradients", times=ask.micro_batches * back)
    own = trained_weights(sliced(ask.architecture, parts), training)
    total = trained_weights(ask.architecture, training)
    cut = (total - own) // (parts - 1)  # on each rank; what is left of its own is whole
    number = training.exchange or training.parameters
    gradients = Exchange(
        what="gradients",
        operation="all_reduce",
        num_bytes=cut * BYTES[number],
        times=1,
        ranks=ask.size // parts,
        number=number,
        among="replicas",
        hides="last-backward",
    )
    yield gradients
    kept = number if ask.size > parts else training.parameters
    whole = (own - cut) * BYTES[kept]
    part = replace(gradients, what="gradients of what is whole", hides="nothing", number=kept)
    inside = replace(part, operation="reduce_scatter", num_bytes=whole, ranks=parts, among="shard")
    yield inside
    yield replace(part, num_bytes=whole // parts)
    yield replace(inside, what="their sums", operation="all_gather")


def _pipeline(ask: _Ask) -> Iterator[Exchange]:
    """The residual stream forward, its gradient back; a tied table is on the first and the last rank of each."""
    both = ask.architecture.tied and ask.training.method == "full"
    number = ask.training.compute
    forward = Exchange(
        what="activations",
        operation="send",
        num_bytes=ask.training.tokens * ask.architecture.hidden * BYTES[number],
        times=ask.micro_batches,
        ranks=2,
        number=number,
        among="next",
        hides="stages",
    )
    yield forward
    yield replace(forward, what="their gradients", among="previous")
    if ask.strategy.replicas > 1:
        kept = ask.training.exchange or ask.training.parameters
        table = ask.architecture.embedding_weights if both else 0
        weights = trained_weights(ask.architecture, ask.training) - table
        part = weights / (ask.size // ask.strategy.replicas)
        yield Exchange(
            what="gradients between pipelines",
            operation="all_reduce",
            num_bytes=round(part * BYTES[kept]),
            times=1,
            ranks=ask.strategy.replicas,
            number=kept,
            among="replicas",
        )
    if both:
        kept = ask.training.exchange or ask.training.parameters
        yield Exchange(
            what="gradients of the tied table",
            operation="all_reduce",
            num_bytes=ask.architecture.hidden * ask.architecture.vocabulary * BYTES[kept],
            times=1,
            ranks=2 * ask.strategy.replicas,
            number=kept,
            among="ends",
        )


def _sharded(ask: _Ask) -> Iterator[Exchange]:
    """fsdp, hsdp, zero-3: weights are put together layer by layer, gradients summed into parts, every micro-batch."""
    whole = _has_whole_adapters(ask)
    for layer in padded_experts(ask.architecture, ask.training, ask.strategy).layers:
        adapters = 0 if whole else layer_adapters(layer, ask.training.rank, ask.training.targets)
        trained = layer.num_parameters if ask.training.method == "full" else adapters
        yield from _unit(ask, _gathered_bytes(layer, ask.training, adapters=adapters), trained, count=layer.count)
    outside = ask.architecture.embedding_weights + ask.architecture.head_weights + ask.architecture.vectors
    trained = outside if ask.training.method == "full" else 0
    yield from _unit(ask, outside * _plain_bytes(ask.training), trained, count=0)
    if whole:
        yield from _whole_adapters(ask)
    elif ask.strategy.kind == "hsdp":
        kept = ask.training.exchange or ask.training.parameters
        shard = trained_weights(ask.architecture, ask.training) * BYTES[kept] / ask.strategy.shard_size
        yield Exchange(
            what="gradients between copies",
            operation="all_reduce",
            num_bytes=round(shard),
            times=1,
            ranks=ask.size // ask.strategy.shard_size,
            number=kept,
            among="replicas",
            hides="last-backward",
        )


def _unit(ask: _Ask, gathered: float, trained: int, *, count: int) -> Iterator[Exchange]:
    """The exchanges of `count` layers of one shape; 0: of what is outside layers, which hides behind nothing."""
    training = ask.training
    kept = training.exchange or training.parameters
    gather = Exchange(
        what="weights for forward",
        operation="all_gather",
        num_bytes=round(gathered),
        times=ask.micro_batches * max(1, count),
        ranks=ask.strategy.shard_size if ask.strategy.kind == "hsdp" else ask.size,
        number=_frozen_format(training) if count else training.compute,
        among="shard",
        hides="forward-layer" if count else "nothing",
    )
    yield gather
    late: Hides = "backward-layer" if count else "nothing"
    if ask.strategy.reshard:
        yield replace(gather, what="weights for backward", hides=late)
    num_bytes = trained * BYTES[kept]
    yield replace(gather, what="gradients", operation="reduce_scatter", num_bytes=num_bytes, number=kept, hides=late)


def _has_whole_adapters(ask: _Ask) -> bool:
    """Whether every rank has all adapters, while the frozen weights are in parts."""
    sharded = ask.strategy.kind in {"fsdp", "hsdp"}
    return sharded and ask.training.method != "full" and ask.training.stack.whole_adapters


def _whole_adapters(ask: _Ask) -> Iterator[Exchange]:
    """Their gradients, once a step, when nothing is left to hide them; hsdp: first among the ranks of every host."""
    number, inside = ask.training.exchange or ask.training.parameters, ask.strategy.shard_size
    num_bytes = trained_weights(ask.architecture, ask.training) * BYTES[number]
    summed = Exchange(
        what="gradients", operation="all_reduce", num_bytes=num_bytes, times=1, ranks=ask.size, number=number
    )
    if ask.strategy.kind == "fsdp":
        yield summed
        return
    part = replace(summed, ranks=inside, among="shard")
    yield replace(part, operation="reduce_scatter")
    across = ask.size // inside
    yield replace(
        summed,
        what="gradients between copies",
        num_bytes=round(num_bytes / inside),
        ranks=across,
        among="replicas",
    )
    yield replace(part, what="their sums", operation="all_gather")


def _gathered_bytes(layer: Layer, training: Training, *, adapters: int) -> float:
    """Of one layer's weights as they travel: in the format of computation, or in 4 or 8 bits where they are kept so.

    adapters: numbers in those that travel with it.
    """
    plain, each = _plain_bytes(training), BYTES[training.compute]
    if training.method == "full":
        return layer.num_parameters * each
    adapters *= each
    if training.method == "lora":
        return layer.num_parameters * each + adapters
    return linear_bytes(layer, training) + (layer.num_parameters - layer.linear_weights) * plain + adapters


def linear_bytes(layer: Layer, training: Training) -> float:
    """Of the quantised linears of one layer, scales included."""
    if training.bits == 8:
        return float(layer.linear_weights + layer.linear_rows * ROW_SCALE_BYTES)
    return layer.linear_weights * NF4_BYTES


def _frozen_format(training: Training) -> str:
    if training.method != "qlora":
        return training.compute
    return "nf4" if training.bits == 4 else "int8"


def _plain_bytes(training: Training) -> int:
    """Of a frozen number that is not quantised."""
    upcast = training.method == "qlora" and training.stack.upcasts
    return 4 if upcast else BYTES[training.compute]
