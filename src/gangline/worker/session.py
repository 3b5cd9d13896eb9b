"""Everything that a training loop needs, built once per attempt."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import nn

from gangline.errors import ModelError, RunFailed, UsageError
from gangline.kernel_table import PACKED_ATTENTION
from gangline.runs.gang import total_steps
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.step_schedule import in_steps
from gangline.strategies.base import Asked, Machines, PlanHalf, extras_of, violations
from gangline.strategies.table import STRATEGIES, plan_half
from gangline.worker import documents
from gangline.worker.adapters import initialise, load_adapter
from gangline.worker.batch import SampleOrder, TokenSource
from gangline.worker.dropout import drops_attention, random_parts
from gangline.worker.kernels.choice import KernelPlace, Kernels, leave_unused, put_in_kernels
from gangline.worker.loss import CausalLoss, sees_other_documents
from gangline.worker.model import base_of, load_model
from gangline.worker.optimizer import state_tensors
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.process_group import ProcessGroup, connecting
from gangline.worker.strategy import Strategy, StrategySetup
from gangline.worker.weights import Files, is_tied, materialize, meta_model, read_parts

# The torch half of a strategy, imported when a rank asks for it by the kind that its gang names.


def train_half(kind: str) -> type[Strategy]:
    """The torch half of a strategy. Raises UsageError for an unknown kind, PluginError for a plug-in without one."""
    module, _, name = plan_half(kind).train.partition(":")
    with STRATEGIES.guard(kind):
        half: type[Strategy] = getattr(importlib.import_module(module), name)
    return half


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The built parts of one attempt on one rank."""

    job: Job
    world: ProcessGroup
    precision: Precision
    loss: CausalLoss
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    train_set: TokenSource
    evaluation_set: TokenSource | None
    order: SampleOrder
    total_steps: int
    kernels: Kernels

    @property
    def model(self) -> nn.Module:
        """The model itself, inside its loss."""
        return self.loss.model

    @property
    def draws_by_sample(self) -> bool:
        """Whether dropout masks belong to samples, whatever rows share a pass; else to micro-batches."""
        return self.job.draws == "sample" and self.strategy.draws_by_sample

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by name; see `Strategy.state_tensors`."""
        return {**state_tensors(self.model, self.optimizer), **self.strategy.state_tensors()}


def make_strategy(setup: StrategySetup) -> Strategy:
    """The strategy of the gang; the base, which exchanges nothing, where there are too few ranks for it.

    Raises UsageError for a job that the strategy does not train on these ranks.
    """
    half: type[Strategy] = train_half(setup.world.gang.strategy)
    has_enough = setup.world.size >= half.min_ranks
    _require_capable(setup, setup.world.gang.half if has_enough else None)
    with connecting():
        return half(setup) if has_enough else Strategy(setup)


def _require_capable(setup: StrategySetup, half: PlanHalf | None) -> None:
    """The capabilities of a strategy again: before a start neither the precision nor every GPU was known."""
    job, gang = setup.job, setup.world.gang
    asked = Asked(
        method=job.method.kind,
        precision=setup.precision.name,
        parameters="fp32" if setup.precision.parameters is torch.float32 else "compute",
        optimizer=job.optimizer.kind,
        extras=extras_of(job.method, compiles=job.compile),
    )
    ranks = {host: gang.num_ranks(host) for host in gang.hosts}
    found = violations(half, asked, Machines(ranks=ranks, sharing=gang.hosts if gang.shares_gpus else ()))
    if found:
        first = found[0]
        what, seen = f"cannot train this job: {first.what}", f"{first.seen}; expected {first.expected}"
        raise UsageError(what, seen=seen, fix=first.fix)


def build_session(
    job: Job,
    world: ProcessGroup,
    *,
    train_set: TokenSource,
    evaluation_set: TokenSource | None,
    beat: Callable[[], None] = lambda: None,
) -> Session:
    """Load the model and put the parts together; collective when there are several ranks.

    beat: called within long phases, so that they are not taken for a hang.
    """
    precision = agree_precision(job, world.device, world_size=world.size)
    strategy = make_strategy(StrategySetup(job=job, world=world, precision=precision, beat=beat))
    found = _without_weights(strategy)
    loss = _load(strategy) if found is None else _prepare(strategy, found[0])
    session = assemble(loss, strategy, train_set=train_set, evaluation_set=evaluation_set)
    if found is not None:
        read_parts(*found, targets=strategy.read_targets())
        strategy.loaded()
        loss.look()
    leave_unused(session.kernels, _place(loss, strategy), world_size=world.size)
    _require_same_draws(session)
    if strategy.layout == "split":
        _require_split(session)
    inside = (job.data.packing or world.device.type == "cuda") and _attends_inside_documents(session)
    if job.data.packing and not inside:
        if PACKED_ATTENTION in session.kernels.taken:
            session.kernels.leave(PACKED_ATTENTION, "a model whose documents are kept apart without a mask")
        _require_isolation(session)
    strategy.reshard()
    return session


def _without_weights(strategy: Strategy) -> tuple[nn.Module, Files] | None:
    """The model on the meta device, this rank's part of it, where the files can be read by parts."""
    job = strategy.job
    if not strategy.meta_init and job.method.kind != "qlora":
        return None
    found = meta_model(job, compute=strategy.precision.compute, prepare=strategy.split, begin=partial(_begin, strategy))
    return None if found is not None and not strategy.keeps_ties and is_tied(found[0]) else found


def _begin(strategy: Strategy, model: nn.Module, weight_of: Callable[[str], torch.Tensor] | None = None) -> None:
    """Set what adapters take from weights, or from another adapter, unless a checkpoint brings it."""
    method, world = strategy.job.method, strategy.world
    if world.gang.resume_step is not None:
        return
    if method.adapter is not None:
        load_adapter(model, method.adapter)
    elif method.splits or (method.dora and weight_of is not None):
        initialise(model, method, seed=strategy.job.seed, weight_of=weight_of, world=world, beat=strategy.setup.beat)


def _prepare(strategy: Strategy, model: nn.Module) -> CausalLoss:
    """The loss of a model on the meta device; with memory on this rank's, unless `wrap` divides it first."""
    loss = strategy.make_loss(model, is_meta=True)
    if strategy.layout == "split" or not strategy.meta_init:
        materialize(loss, strategy.device)
    return loss


def _load(strategy: Strategy) -> CausalLoss:
    """The loss of the whole model, with its weights: on the CPU first where no single device may hold them."""
    whole = strategy.layout == "whole"
    device = strategy.device if whole else torch.device("cpu")
    model = load_model(strategy.job, device=device, compute=strategy.precision.compute)
    if strategy.job.method.kind != "full":
        _begin(strategy, model)
    strategy.split(model)
    return strategy.make_loss(model.to(strategy.device) if strategy.layout == "split" else model)


def assemble(
    loss: CausalLoss, strategy: Strategy, *, train_set: TokenSource, evaluation_set: TokenSource | None = None
) -> Session:
    """The session of a model that is loaded already; collective when there are several ranks."""
    job, world, precision = strategy.job, strategy.world, strategy.precision
    steps = total_steps(len(train_set), job.batch, epochs=job.epochs, steps=job.steps)
    with connecting():
        kernels = put_in_kernels(_place(loss, strategy), world_size=world.size)
        strategy.agree(loss)
        strategy.wrap(loss)
    return Session(
        job=dataclasses.replace(job, schedule=in_steps(job.schedule, steps)),
        world=world,
        precision=precision,
        loss=loss,
        strategy=strategy,
        optimizer=strategy.make_optimizer(),
        scaler=_make_scaler(world.device) if precision.scaled else None,
        train_set=train_set,
        evaluation_set=evaluation_set,
        order=SampleOrder(num_samples=len(train_set), batch=job.batch, micro_batch=job.micro_batch, seed=job.seed),
        total_steps=steps,
        kernels=kernels,
    )


def _place(loss: CausalLoss, strategy: Strategy) -> KernelPlace:
    """Where kernels are put in."""
    job, world = strategy.job, strategy.world
    by_module = world.size > 1 and plan_half(world.gang.strategy).capabilities.weights_by_module
    return KernelPlace(loss=loss, job=job, device=world.device, precision=strategy.precision, by_module=by_module)


def _make_scaler(device: torch.device) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type)
    # the loop multiplies by get_scale() itself; the scaler makes its tensors at the first call of scale()
    scaler.scale(torch.zeros((), device=device))
    return scaler


def open_sets(layout: RunLayout) -> tuple[TokenSource, TokenSource | None]:
    """The token sets that `inputs` prepared for this run. Raises RunFailed when they are not on this host."""
    from gangline.worker.data.tokens import TokenSet

    names = load_record(layout.inputs, dict)
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


def _require_same_draws(session: Session) -> None:
    """Where dropout masks are drawn by micro-batch, ranks that join several in a pass would draw others."""
    gang = session.world.gang
    if session.draws_by_sample or max(gang.pass_lengths(session.order.micro_batch)) == 1:
        return
    if drops := list(islice(random_parts(session.model, base_of(session.model).config), 4)):
        raise UsageError(
            "micro_batch: ranks with sizes of their own train without dropout",
            seen=f"dropout in {', '.join(drops)}, whose masks are drawn by micro-batch in this run",
            fix="write method.dropout: 0, or give all ranks the micro_batch of the job",
        )


@torch.no_grad()
def _require_split(session: Session) -> None:
    """A few tokens go through this rank's part: some decoders want more of their layers than their part can give."""
    strategy, device = session.strategy, session.world.device
    tokens = torch.arange(4, device=device)[None]
    try:
        with session.precision.autocast(device):
            strategy.probe(tokens, tokens)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"strategy: {session.world.gang.strategy} cannot split this model",
            seen=f"expected layers that {strategy.expects_of_layers}; {type(error).__name__}: {error}",
            fix="write strategy: fsdp, or ddp where every device holds the model",
        ) from error


def _attends_inside_documents(session: Session) -> bool:
    """Whether no mask is needed to keep packed documents apart: tried on a few tokens, as borders are.

    Rows that are not packed attend so on a GPU, too: before it makes no mask, transformers asks their positions, which
    makes every pass wait for the GPU.
    """
    core = base_of(session.model)
    if session.draws_by_sample and drops_attention(core.config):
        return False  # masks of dropout are of whole rows
    at_once = session.job.data.packing and PACKED_ATTENTION in session.kernels.taken
    if not documents.keep_apart(core, length=session.job.data.sequence_length, at_once=at_once):
        return False
    try:
        if not _leaks(session):
            return True
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):  # a model whose attention is not told the positions
        pass
    documents.use_masks(core)
    return False


def _leaks(session: Session) -> bool:
    with session.precision.autocast(session.world.device):
        return sees_other_documents(session.loss, session.strategy.probe)


def _require_isolation(session: Session) -> None:
    if _leaks(session):
        raise ModelError(
            f"data.packing: {session.job.model.path} sees across the borders of packed documents",
            seen="a token's logits changed when another document was put before it in the same sample",
            fix="set data.packing: false",
        )
