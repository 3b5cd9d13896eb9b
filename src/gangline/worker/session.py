"""Everything that a training loop needs, built once per attempt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gangline.errors import ModelError, RunFailed
from gangline.runs.deal import total_steps
from gangline.runs.files import read_json
from gangline.runs.job import ZERO, Job
from gangline.runs.layout import RunLayout
from gangline.worker.batch import TokenSource
from gangline.worker.loss import CausalLoss, sees_other_documents
from gangline.worker.mesh import by_host
from gangline.worker.model import load_model, trainable, weights_dtype
from gangline.worker.optimizer import make_optimizer
from gangline.worker.order import Order
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.regions import Side
from gangline.worker.slice import Slice, slice_up
from gangline.worker.stage import Stage, cut
from gangline.worker.strategy.base import Strategy
from gangline.worker.strategy.ddp import Ddp, agree_weights
from gangline.worker.strategy.fsdp import Fsdp
from gangline.worker.strategy.local_sgd import LocalSgd
from gangline.worker.strategy.pipeline import Pipeline
from gangline.worker.strategy.single import Single
from gangline.worker.strategy.tensor_parallel import TensorParallel, require_slices
from gangline.worker.strategy.zero import Zero, ZeroOptimizer
from gangline.worker.strategy.zero_engine import takes_parts
from gangline.worker.stream import hollow, is_tied, make_room, read_parts
from gangline.worker.world import World

IN_PARTS = ("fsdp", "hsdp", "tp", "pipeline", *ZERO)
"""No device has all of the model, or of its optimizer's state."""
_PARTLY = {
    "pipeline": "take hidden states and give hidden states",
    "tp": "compute with some of their heads and columns alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The built parts of one attempt on one rank."""

    job: Job
    world: World
    precision: Precision
    loss: CausalLoss
    strategy: Strategy
    optimizer: torch.optim.Optimizer | ZeroOptimizer
    scaler: torch.amp.GradScaler | None
    train_set: TokenSource
    evaluation_set: TokenSource | None
    order: Order
    total_steps: int

    @property
    def model(self) -> nn.Module:
        """The model itself, inside its loss."""
        return self.loss.model


def build_session(job: Job, world: World, *, train_set: TokenSource, evaluation_set: TokenSource | None) -> Session:
    """Load the model and put the parts together; collective when there are several ranks."""
    precision = agree_precision(job, world.device, world_size=world.size)
    in_parts = world.size > 1 and world.gang.strategy in IN_PARTS
    divided = in_parts and (world.gang.strategy not in ZERO or takes_parts(job, world))
    cutting = _Cutting(job, world, precision)
    found = None
    if divided or job.method.kind == "qlora":
        found = hollow(job, compute=precision.compute, prepare=cutting.cut)
        if found is not None and world.gang.strategy in ("fsdp", "hsdp") and is_tied(found[0]):
            found = None  # a table that is divided twice would not be one any more
    if found is None:
        # what no single device holds is divided layer by layer on its way there
        device = torch.device("cpu") if in_parts else world.device
        model = load_model(job, device=device, compute=precision.compute)
        cutting.cut(model)
        model = model.to(world.device) if cutting.is_done else model
        loss = CausalLoss(model, compute=precision.compute, stage=cutting.stage, sliced=cutting.sliced)
    else:
        model, files = found
        loss = CausalLoss(model, compute=precision.compute, stage=cutting.stage, sliced=cutting.sliced, is_hollow=True)
        if cutting.is_done or not divided:
            make_room(loss, world.device)
    session = assemble(loss, job, world, precision=precision, train_set=train_set, evaluation_set=evaluation_set)
    if found is not None:
        strategy = session.strategy
        stretches = strategy.stretches() if isinstance(strategy, Zero) else None
        read_parts(model, files, sliced=cutting.sliced, stretches=stretches)
        if isinstance(strategy, Zero):
            strategy.filled()
        loss.look()
    if cutting.is_done:
        _require_cut(session)
    if job.data.packing:
        _require_isolation(session)
    session.strategy.put_away()
    return session


class _Cutting:
    """Takes from a model what this rank does not have, where layers or their columns are divided among ranks."""

    def __init__(self, job: Job, world: World, precision: Precision) -> None:
        self._job = job
        self._world = world
        self._precision = precision
        self.stage: Stage | None = None
        self.sliced: Slice | None = None

    @property
    def is_done(self) -> bool:
        """Whether the model has this rank's part alone."""
        return self.stage is not None or self.sliced is not None

    def cut(self, model: nn.Module) -> None:
        """Of the model that was made last."""
        world = self._world
        if world.gang.strategy == "pipeline" and world.size > 1:
            stream = weights_dtype(self._job, self._precision.compute)
            row = world.gang.row_of(world.rank)
            stages = world.gang.stages[row.start : row.stop]
            self.stage = cut(model, number=world.rank - row.start, stages=stages, stream=stream)
        if world.gang.strategy == "tp" and world.size > 1:
            require_slices(self._job, self._precision, world)
            self.sliced = slice_up(model, Side.of(self._mesh, wire=self._precision.compute), self._mesh)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return by_host(self._world)


def assemble(
    loss: CausalLoss,
    job: Job,
    world: World,
    *,
    precision: Precision,
    train_set: TokenSource,
    evaluation_set: TokenSource | None = None,
) -> Session:
    """The session of a model that is loaded already; collective when there are several ranks."""
    strategy = _make_strategy(loss, job, precision, world)
    # DeepSpeed's optimizer has the weights, too
    optimizer = strategy.optimizer if isinstance(strategy, Zero) else make_optimizer(loss.model, job.optimizer)
    return Session(
        job=job,
        world=world,
        precision=precision,
        loss=loss,
        strategy=strategy,
        optimizer=optimizer,
        scaler=_make_scaler(world.device) if precision.scaled else None,
        train_set=train_set,
        evaluation_set=evaluation_set,
        order=Order(num_samples=len(train_set), batch=job.batch, micro_batch=job.micro_batch, seed=job.seed),
        total_steps=total_steps(len(train_set), job.batch, epochs=job.epochs, steps=job.steps),
    )


def _make_scaler(device: torch.device) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type)
    # the loop multiplies by get_scale() itself; the scaler makes its tensors at the first call of scale()
    scaler.scale(torch.zeros((), device=device))
    return scaler


def open_sets(layout: RunLayout) -> tuple[TokenSource, TokenSource | None]:
    """The token sets that `inputs` prepared for this run. Raises RunFailed when they are not on this host."""
    from gangline.worker.data.tokens import TokenSet

    names = read_json(layout.inputs)
    found: list[TokenSource | None] = []
    for name in (names["train"], names["evaluation"]):
        folder = layout.token_set(name) if name else None
        if folder is not None and not folder.is_dir():
            raise RunFailed(
                f"the token set {name} is not on this host",
                seen=f"expected the folder {folder}",
                fix="start the run again: it brings the data to every host",
            )
        found.append(TokenSet.open(folder) if folder else None)
    train, evaluation = found
    assert train is not None
    return train, evaluation


def _make_strategy(loss: CausalLoss, job: Job, precision: Precision, world: World) -> Strategy:
    sent_as = torch.bfloat16 if job.exchange == "bf16" else None
    if loss.stage is not None:
        return Pipeline(loss, loss.stage, precision=precision, world=world, sent_as=sent_as)
    if loss.sliced is not None:
        return TensorParallel(loss, loss.sliced, precision=precision, world=world, sent_as=sent_as)
    if world.size > 1:
        agree_weights(trainable(loss).values())
    return _of_whole_layers(loss, job, precision, world, sent_as)


def _of_whole_layers(
    loss: CausalLoss, job: Job, precision: Precision, world: World, sent_as: torch.dtype | None
) -> Strategy:
    if world.gang.strategy == "local-sgd":
        return LocalSgd(loss, precision=precision, world=world, job=job.strategy)
    if world.size == 1:
        return Single(loss, precision=precision, device=world.device)
    if world.gang.strategy in ("fsdp", "hsdp"):
        offload = "parameters" in job.strategy.offload
        return Fsdp(loss, precision=precision, world=world, sent_as=sent_as, offload=offload)
    if world.gang.strategy in ZERO:
        return Zero(loss, precision=precision, world=world, job=job)
    return Ddp(loss, precision=precision, device=world.device, sent_as=sent_as)


@torch.no_grad()
def _require_cut(session: Session) -> None:
    """A few tokens go through this rank's part: some decoders want more of their layers than their part can give."""
    strategy, device = session.strategy, session.world.device
    kind = session.world.gang.strategy
    through = strategy.through if isinstance(strategy, Pipeline) else session.loss.logits
    tokens = torch.arange(4, device=device)[None]
    try:
        with session.precision.autocast(device):
            through(tokens, tokens)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"strategy: {kind} cannot cut this model",
            seen=f"expected layers that {_PARTLY[kind]}; {type(error).__name__}: {error}",
            fix="write strategy: fsdp, or ddp where every device holds the model",
        ) from error


def _require_isolation(session: Session) -> None:
    strategy = session.strategy
    with session.precision.autocast(session.world.device):
        leaks = sees_other_documents(session.loss, strategy.through if isinstance(strategy, Pipeline) else None)
    if leaks:
        raise ModelError(
            f"data.packing: {session.job.model.path} sees across the borders of packed documents",
            seen="a token's logits changed when another document was put before it in the same sample",
            fix="set data.packing: false",
        )
