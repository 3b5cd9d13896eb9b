"""A model whose computation is EMULATED, in gangline's own loop: for benchmarks of unlike machines on one computer.

Three ranks on two processors would measure each other, so a micro-batch sleeps to absolute deadlines, layer by layer,
forward and backward, inside a real autograd graph. What is real: the adapters (LoRA on q and v of every layer, 33.6 MB
at 32 layers, 4,096 wide, rank 16), their gradients, which come layer by layer as those of a real model do, the loss,
the optimizer, the exchange. What is not: the frozen base model, which takes its time and computes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gangline.runs.gang import Gang, GangRank, split_whole
from gangline.runs.job import (
    CheckpointJob,
    DataJob,
    EvaluationJob,
    Job,
    MethodJob,
    ModelJob,
    OptimizerJob,
    SourceJob,
    StrategyJob,
)
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.session import Session, assemble, make_strategy
from gangline.worker.strategy import StrategySetup

FACTORS = (1.0, 1 / 0.55, 1 / 0.45)
"""Times of a micro-batch: speeds are as 1 : 0.55 : 0.45."""
BACKWARD = 2 / 3
VOCABULARY, TOKENS = 64, 4
_LATE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The adapters: numbers of layers, width, rank."""

    layers: int = 32
    hidden: int = 4096
    rank: int = 16

    @property
    def num_bytes(self) -> int:
        """Of all of them, in fp32."""
        return self.layers * 2 * 2 * self.rank * self.hidden * 4


@dataclass(slots=True)
class Clock:
    """Busy until what was asked for has passed, by the wall clock.

    A deadline follows the one before, so that what the processor really does in a micro-batch costs nothing extra as
    long as it fits; whoever waited, or is late, begins anew.
    """

    micro_batch_s: float
    factor: Callable[[int], float]
    """Of the optimizer step (from 0): how many times as long a micro-batch takes."""
    step: int = 0
    deadline: float = 0.0

    def begin(self) -> None:
        """A micro-batch begins."""
        now = time.perf_counter()
        if now - self.deadline > _LATE_S:
            self.deadline = now

    def work(self, part: float) -> None:
        """Be busy for that part of a micro-batch."""
        self.deadline += part * self.micro_batch_s * self.factor(self.step)
        time.sleep(max(0.0, self.deadline - time.perf_counter()))

    def stepped(self) -> None:
        """An optimizer step is done: whatever comes next begins after it."""
        self.step += 1
        self.deadline = 0.0


class _Work(torch.autograd.Function):
    """The identity, that takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, part: float) -> torch.Tensor:  # type: ignore[override]
        """The same, later."""
        ctx.clock, ctx.part = clock, part
        clock.work(part * (1 - BACKWARD))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The same, later."""
        ctx.clock.work(ctx.part * BACKWARD)
        return grads[0], None, None


class _Adapters(nn.Module):
    """LoRA pairs of one layer, over a base that is the identity."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        scale = shape.hidden**-0.5
        self.down = nn.ParameterList([torch.randn(shape.rank, shape.hidden, dtype=dtype) * scale for _ in "qv"])
        self.up = nn.ParameterList([torch.zeros(shape.hidden, shape.rank, dtype=dtype) for _ in "qv"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [m, t, hidden]."""
        for down, up in zip(self.down, self.up, strict=True):
            x = x + F.linear(F.linear(x, down), up)
        return x


class _Model(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Adapters(shape, dtype) for _ in range(shape.layers)])
        self.register_buffer("table", torch.randn(VOCABULARY, shape.hidden, dtype=dtype))
        self.register_buffer("head", torch.randn(VOCABULARY, shape.hidden, dtype=dtype) * shape.hidden**-0.5)


class EmulatedLoss(nn.Module):
    """Takes the place of `CausalLoss`: the summed loss of next tokens, late."""

    def __init__(self, shape: Shape, clock: Clock, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = _Model(shape, dtype)
        self.clock = clock

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """input_ids, targets [m, t]."""
        self.clock.begin()
        x = self.model.table[input_ids]  # type: ignore[index]
        for layer in self.model.layers:
            x = _Work.apply(layer(x), self.clock, 1 / len(self.model.layers))  # type: ignore[no-untyped-call]
        logits = F.linear(F.rms_norm(x, x.shape[-1:]), self.model.head)  # type: ignore[arg-type]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


@dataclass
class Rows:
    """A token source of short rows, made from a seed; reading one takes `read_s(index)`."""

    num: int
    seed: int = 0
    read_s: Callable[[int], float] = field(default=lambda _index: 0.0)
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        size = (self.num, self.tokens + 1)
        self._tokens = np.random.default_rng(self.seed).integers(0, self.vocabulary, size=size)
        self.lengths = np.full(self.num, self.tokens, dtype=np.int64)
        self.label_counts = self.lengths.copy()
        self.read: list[int] = []
        """Every sample that was asked for, in order."""

    def __len__(self) -> int:
        return self.num

    def sample(self, index: int) -> Any:
        """One row."""
        time.sleep(self.read_s(index))
        self.read.append(index)
        row = self._tokens[index]
        return SimpleNamespace(input_ids=row[:-1], targets=row[1:], position_ids=np.arange(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run: what every rank is told."""

    micro_batch_s: float = 0.1
    """Of the fastest rank."""
    shares: Sequence[int] = (1, 1, 1)
    moving: bool = True
    batch: int = 40
    steps: int = 5
    shape: Shape = Shape()
    fp64: bool = False
    full: bool = False
    """Called a full fine-tune: what local SGD is for. The adapters are all there is in any case."""
    strategy: StrategyJob = field(default_factory=StrategyJob)
    exchange: Literal["fp32", "bf16"] = "fp32"


def build(
    setup: Setup, rank: int, *, factor: Callable[[int], float], rows: Rows | None = None
) -> tuple[Session, Rows, Clock]:
    """The session of one rank, in a process group that exists already where there are several."""
    clock = Clock(micro_batch_s=setup.micro_batch_s, factor=factor)
    dtype = torch.float64 if setup.fp64 else torch.float32
    loss = EmulatedLoss(setup.shape, clock, dtype=dtype)
    rows = rows or Rows(setup.batch * setup.steps)
    precision = Precision(name="fp64" if setup.fp64 else "fp32", compute=dtype, parameters=dtype)
    session = assemble(
        loss,  # type: ignore[arg-type]
        make_strategy(StrategySetup(job=job(setup), world=world(setup, rank), precision=precision)),
        train_set=rows,
    )
    session.optimizer.register_step_post_hook(lambda *_: clock.stepped())
    return session, rows, clock


def world(setup: Setup, rank: int) -> ProcessGroup:
    """Every rank on a host of its own."""
    shares, size = tuple(setup.shares), len(setup.shares)
    if sum(shares) != setup.batch:  # an even split, as far as it goes
        shares = split_whole(setup.batch, [1] * size)
    ranks = tuple(GangRank(host=f"pc{number + 1}", share=share) for number, share in enumerate(shares))
    kind = "ddp" if setup.strategy.kind == "auto" else setup.strategy.kind
    gang = Gang(run_id="bench", attempt=1, ranks=ranks, moving_shares=setup.moving, strategy=kind)
    return ProcessGroup(gang=gang, rank=rank, device=torch.device("cpu"))


def job(setup: Setup) -> Job:
    """Micro-batches of one row."""
    return Job(
        name="bench",
        model=ModelJob(path="emulated", start="random"),
        method=MethodJob(kind="full" if setup.full else "lora"),
        strategy=setup.strategy,
        exchange=setup.exchange,
        data=DataJob(train=SourceJob(), packing=False),
        batch=setup.batch,
        micro_batch=1,
        epochs=None,
        steps=setup.steps,
        precision="fp64" if setup.fp64 else "fp32",
        optimizer=OptimizerJob(learning_rate=1e-4),
        evaluation=EvaluationJob(every_steps=None),
        checkpoint=CheckpointJob(every_minutes=None),
    )
