"""Tensor parallelism inside a host, data parallelism across hosts.

The ranks of a host have one copy of the model between them, cut by columns and rows, and all of them
do the same micro-batches. Hidden states are summed over them twice in every layer, forward and back, so they want the
links between GPUs of one machine; hosts do other micro-batches, as ranks do under DDP.

Gradients of what is cut are each rank's own: DDP sums them over the ranks of the same place on all hosts. Of what is
whole (embeddings, norms, the head, one half of every adapter) every rank has a part of the gradient; those are summed
over all ranks once a step, and come to the same bits on the ranks of a host.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gangline.errors import ModelError, UsageError
from gangline.strategies.ddp.train import Ddp
from gangline.worker import compat
from gangline.worker.batch import Batch
from gangline.worker.buckets import ACROSS, INSIDE, by_host, sum_gradients, sum_over
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, trainable
from gangline.worker.optimizer import gradients_of
from gangline.worker.strategy import Strategy, StrategySetup, agree_weights, gather_shards

# One slice of a transformers model: the ranks of a host have the columns and rows of its layers between them.
#
# Which linears are cut, and how, says the model's own plan (`tp_plan` of transformers): by columns where all ranks
# have what goes in and each makes some of what comes out, by rows where each has some of what goes in and all need
# the sum. The model's own code runs as it is, on fewer heads and a narrower feed-forward layer. Embeddings, norms and
# the head are whole on every rank; but behind the decoder every rank takes its share of the positions with a target,
# so that the head is computed once, too.
#
# Names of weights stay those of the whole model. An adapter of a linear is cut where the linear is: its B by columns,
# or its A by rows; the other one is whole, and each rank has a part of its gradient.
#
# Where tensors go into layers that several ranks have between them, and come out of these: forward and backward.
#
# What all ranks have is called whole, what each has its columns of is called parted; columns are of the last
# dimension. Of a whole tensor every rank has the same gradient, but where it enters: there each has a part of the sum
# (Shoeybi et al., Megatron-LM, 2019, section 3, whose f and g are `entering` and `summed`).


COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Words of a plan for a cut by columns; whether what comes out is put together."""
ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""For a cut by rows; whether what goes in is whole."""
NARROW_NORM = "replicated_with_grad_allreduce"
"""For a norm over one head: whole, but used on this rank's heads only."""
KEPT = {"replicate"}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class ColumnSplit:
    """What one rank has of a model that its host's ranks have between them."""

    tp_group: TensorParallelGroup
    mesh: DeviceMesh
    """[hosts, ranks of each]: the ranks of a row have a model between them."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a weight -> the dimension along which it is cut."""
    alike: set[str] = field(default_factory=set)
    """Names of trained weights that are whole, and whose gradient every rank has computed whole."""

    def share(self, trained: torch.Tensor) -> torch.Tensor:
        """This rank's share of the positions that have a target."""
        return trained.tensor_split(self.tp_group.count)[self.tp_group.index]

    def elsewhere(self, model: nn.Module) -> int:
        """Weights of the model that the other ranks of this host have."""
        return (self.tp_group.count - 1) * sum(
            parameter.numel() for name, parameter in model.named_parameters() if name in self.cuts
        )

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A live part with the shape that it has in the whole model; anything else as it is."""
        if name not in self.cuts or tensor.ndim <= self.cuts[name]:
            return tensor
        return DTensor.from_local(tensor, self.mesh[INSIDE], [Shard(self.cuts[name])], run_check=False)


@torch.no_grad()
def split_columns(model: nn.Module, tp_group: TensorParallelGroup, mesh: DeviceMesh) -> ColumnSplit:
    """Take from a model what the other ranks of the host have. mesh: see `ColumnSplit`.

    Raises ModelError for a model without a plan, or with one that asks for more than linears that are cut; UsageError
    for a number of ranks that divides some of it unevenly, and for adapters of which none is cut.
    """
    cutter = _Cutter(model, ColumnSplit(tp_group, mesh))
    cutter.cut()
    return cutter.made


class _Cutter:
    """Works on one model."""

    def __init__(self, model: nn.Module, made: ColumnSplit) -> None:
        self.made = made
        self._model = model
        self._core: Any = base_of(model)
        self._tp_group = made.tp_group
        self._shared_input = _SharedInput(made.tp_group)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._summed: set[str] = set()
        """Whole, and every rank has a part of the gradient."""

    def cut(self) -> None:
        plan = self._plan()
        modules = [(module, word) for name, module in self._core.named_modules() if (word := plan.get(name))]
        linears = [(module, word) for module, word in modules if word in COLUMNS or word in ROWS]
        for place in {name.rpartition(".")[0] for name, word in plan.items() if word in COLUMNS}:
            # always: recomputation leaves a layer by an exception when it has all that it needs
            self._core.get_submodule(place).register_forward_hook(self._shared_input.close, always_call=True)
        if not linears:
            raise _without_plan(self._core)
        self._require_even(linears, plan)
        for module, word in modules:
            if word in COLUMNS:
                self._by_columns(module, word)
            elif word in ROWS:
                self._by_rows(module, word)
            else:
                self._summed |= self._own(module)
        self._around()
        trained = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        if not trained & self.made.cuts.keys():
            raise _idle()
        self.made.alike = trained - self.made.cuts.keys() - self._summed

    def _plan(self) -> dict[str, str]:
        """Name of a module inside the decoder -> word. The table and the head stay whole, whatever the plan says."""
        words: Mapping[str, str] = compat.TP_PLAN.of(self._core) or {}
        around = (self._core.get_input_embeddings(), self._core.get_output_embeddings())
        found: dict[str, str] = {}
        strange: dict[str, str] = {}
        modules = [(name, part) for name, part in self._core.named_modules() if ".base_layer" not in name]
        for name, part in [*modules, *self._core.named_parameters()]:
            word = words.get(_NUMBER.sub(".*", _plain(name)))
            if word is None or word in KEPT or any(part is each for each in around):
                continue
            known = word == NARROW_NORM or ((word in COLUMNS or word in ROWS) and isinstance(_base(part), nn.Linear))
            (found if known else strange)[name] = word
        if strange:
            raise _strange(self._core, strange)
        return found

    def _require_even(self, linears: list[tuple[Any, str]], plan: Mapping[str, str]) -> None:
        config, count = self._core.config.get_text_config(), self._tp_group.count
        figures: dict[str, int] = {}
        if any(word == "colwise" and "att" in name for name, word in plan.items()):
            heads = getattr(config, "num_attention_heads", None)
            figures["attention heads"] = heads or count
            figures["key-value heads"] = getattr(config, "num_key_value_heads", None) or heads or count
        for module, word in linears:
            base = _base(module)
            if word in COLUMNS:
                figures[f"outputs of {self._name_of(base)}"] = base.out_features
            else:
                figures[f"inputs of {self._name_of(base)}"] = base.in_features
        uneven = [f"{number} {what}" for what, number in figures.items() if number % count]
        if uneven:
            raise _uneven(uneven, count)

    def _name_of(self, linear: nn.Module) -> str:
        """`q_proj` or the like."""
        name = _plain(self._names[id(linear.weight)]).removesuffix(".weight")  # type: ignore[index]
        return name.rpartition(".")[2]

    def _by_columns(self, module: Any, word: str) -> None:
        tp_group, base = self._tp_group, _base(module)
        self._take(base, "weight", 0)
        self._take(base, "bias", 0)
        base.out_features //= tp_group.count
        for first, last in _adapters(module):
            self._take(last, "weight", 0)
            last.out_features //= tp_group.count
            self._summed |= self._own(first)
        shared_input = self._shared_input
        module.register_forward_pre_hook(lambda _module, given: (shared_input(given[0]), *given[1:]))
        if COLUMNS[word]:
            module.register_forward_hook(lambda _module, _given, made: tp_group.gathered(made))

    def _by_rows(self, module: Any, word: str) -> None:
        tp_group, base = self._tp_group, _base(module)
        self._take(base, "weight", 1)
        base.in_features //= tp_group.count
        if base.bias is not None:
            self._summed.add(self._names[id(base.bias)])
            if tp_group.index:  # in a sum it counts once
                base.forward = lambda given: F.linear(given, base.weight)
        for first, last in _adapters(module):
            self._take(first, "weight", 1)
            first.in_features //= tp_group.count
            self._summed |= self._own(last)
        dropouts = getattr(module, "lora_dropout", {})
        for name, dropout in dropouts.items():
            if isinstance(dropout, nn.Dropout):
                dropouts[name] = PartedDropout(dropout.p, tp_group)
        if ROWS[word]:
            module.register_forward_pre_hook(lambda _module, given: (tp_group.parted(given[0]), *given[1:]))
        module.register_forward_hook(lambda _module, _given, made: tp_group.summed(made))

    def _around(self) -> None:
        """Behind the decoder each rank takes some positions; the first alone counts the table's own gradient."""
        tp_group, core, decoder = self._tp_group, self._core, self._core.base_model
        table = core.get_input_embeddings()

        def enter(_module: nn.Module, _given: Any, made: Any) -> Any:
            made.last_hidden_state = tp_group.entering(made.last_hidden_state)
            return made

        table.register_forward_hook(lambda _module, _given, made: tp_group.counted_once(made))
        decoder.register_forward_hook(enter)
        inside = {id(parameter) for parameter in decoder.parameters()}
        behind = {name for name, each in self._model.named_parameters() if id(each) not in inside}
        self._summed |= self._own(table) | behind

    def _own(self, module: nn.Module) -> set[str]:
        return {self._names[id(parameter)] for parameter in module.parameters() if id(parameter) in self._names}

    def _take(self, module: nn.Module, which: str, dim: int) -> None:
        """Leave of a weight this rank's part."""
        whole = getattr(module, which)
        if whole is None:
            return
        name = self._names.pop(id(whole))
        part = nn.Parameter(self._tp_group.part_of(whole, dim).clone(), requires_grad=whole.requires_grad)
        setattr(module, which, part)
        self._names[id(part)] = name
        self.made.cuts[name] = dim


class _SharedInput:
    """Where hidden states go into linears cut by columns: those that take the same tensor have one gradient to sum."""

    def __init__(self, tp_group: TensorParallelGroup) -> None:
        self._tp_group = tp_group
        self._given: Any = lambda: None
        self._entered: torch.Tensor | None = None

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        if self._entered is None or self._given() is not given:
            self._given, self._entered = weakref.ref(given), self._tp_group.entering(given)
        return self._entered

    def close(self, *_: object) -> None:
        """Whatever is around these linears has been left: what is held on holds all that it came from."""
        self._entered = None


def _base(module: Any) -> Any:
    """The linear inside what peft puts around it, or the module itself."""
    return getattr(module, "base_layer", module)


def _plain(name: str) -> str:
    """Without what peft adds."""
    return name.replace(".base_layer", "").removeprefix("base_model.model.")


def _adapters(module: Any) -> list[tuple[nn.Linear, nn.Linear]]:
    """(A, B) of every adapter of a linear."""
    return [(module.lora_A[name], module.lora_B[name]) for name in getattr(module, "lora_A", {})]


def _without_plan(core: nn.Module) -> ModelError:
    return ModelError(
        "strategy: tp cannot split this model",
        seen=f"transformers has no plan to cut the linears of {type(core).__name__} by columns and rows",
        fix="write strategy: hsdp (or fsdp), or ddp where every device holds the model",
    )


def _strange(core: nn.Module, strange: Mapping[str, str]) -> ModelError:
    name, word = next(iter(strange.items()))
    experts = " (experts lie in one tensor)" if "expert" in name else ""
    return ModelError(
        "strategy: tp cannot split this model",
        seen=f"transformers' plan for {type(core).__name__} has {word} for {name}{experts}; linears are cut by "
        "columns and rows here, and nothing else",
        fix="write strategy: hsdp (or fsdp), or ddp where every device holds the model",
    )


def _uneven(uneven: list[str], count: int) -> UsageError:
    return UsageError(
        f"strategy: tp over the {count} ranks of a host",
        seen=f"{', '.join(uneven[:4])} cannot be divided by {count}",
        fix="set slots of every host to a number that divides them all, or write strategy: hsdp",
    )


def _idle() -> UsageError:
    return UsageError(
        "strategy: tp leaves the ranks of a host nothing to divide",
        seen="none of the linears that are cut has an adapter",
        fix="name targets in attention or the feed-forward layers, or set targets: all-linear",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelGroup:
    """The ranks that have the layers between them, and which of them this is."""

    group: dist.ProcessGroup
    index: int
    count: int
    wire: torch.dtype
    """In which gradients of hidden states travel, where they are wider."""

    @staticmethod
    def of(mesh: DeviceMesh, *, wire: torch.dtype) -> TensorParallelGroup:
        """This rank's, of [hosts, ranks of each]."""
        return TensorParallelGroup(
            group=mesh.get_group(INSIDE), index=mesh.get_local_rank(INSIDE), count=mesh.size(1), wire=wire
        )

    def entering(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor, of which every rank will use some: its gradient is the sum of theirs."""
        return _map(whole, _view, back=self.sum_up)

    def summed(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum of the terms of all ranks: whole."""
        return _map(terms, self.sum_up, back=lambda gradient: gradient)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks: whole."""
        return _map(part, self.put_together, back=self._own_columns)

    def parted(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a whole tensor."""
        return _map(whole, self._own_columns, back=self.put_together)

    def counted_once(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor whose gradient only the first rank passes on; that of the others is zero."""
        return _map(whole, _view, back=torch.zeros_like if self.index else lambda gradient: gradient)

    def _own_columns(self, whole: torch.Tensor) -> torch.Tensor:
        return self.part_of(whole).contiguous()

    def part_of(self, whole: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """A view of this rank's part along a dimension that divides evenly."""
        size = whole.shape[dim] // self.count
        return whole.narrow(dim, self.index * size, size)

    def sum_up(self, terms: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in the format that is narrower: its own or that of the wire."""
        sent = terms.to(self.wire) if self.wire.itemsize < terms.dtype.itemsize else terms.clone()
        sent = sent.contiguous()
        dist.all_reduce(sent, group=self.group)
        return sent.to(terms.dtype)

    def put_together(self, part: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks, in their order."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class _Mapped(torch.autograd.Function):
    """A map of a tensor whose gradient is not autograd's: `back` of the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, forth: _Map, back: _Map) -> torch.Tensor:  # type: ignore[override]
        ctx.back = back
        return forth(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def _map(given: torch.Tensor, forth: _Map, *, back: _Map) -> torch.Tensor:
    return _Mapped.apply(given, forth, back)  # type: ignore[no-any-return, no-untyped-call]


def _view(whole: torch.Tensor) -> torch.Tensor:
    return whole.view_as(whole)


class PartedDropout(nn.Module):
    """Dropout of parted activations with the mask that one process would draw for the whole of them.

    All ranks draw as many numbers as one process does, so their generators stay alike, as those of whole activations
    have to.
    """

    def __init__(self, p: float, tp_group: TensorParallelGroup) -> None:
        super().__init__()
        self.p = p
        self._tp_group = tp_group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """part: [..., columns of this rank]."""
        if not self.training or self.p == 0:
            return part
        ones = part.new_ones(*part.shape[:-1], part.shape[-1] * self._tp_group.count)
        # a copy: a view would keep the whole mask until backward
        return part * self._tp_group.part_of(F.dropout(ones, self.p)).clone()


class TensorParallel(Strategy):
    """One rank's columns and rows of a model."""

    layout = "split"
    expects_of_layers = "compute with some of their heads and columns alone"
    joins_by_empty_batch = True
    replicated = False
    draws_by_sample = False

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self._mesh = by_host(setup.world)
        tp_group = TensorParallelGroup.of(self._mesh, wire=setup.precision.compute)
        self.shard_group = tp_group.group
        self.counts_loss = tp_group.index == 0
        self._tp_group = tp_group
        self._across = self._mesh.get_group(ACROSS)
        self._several = self._mesh.size(0) > 1
        self.sliced: ColumnSplit
        """What this rank has of the model, once it is split."""
        self._whole: dict[str, nn.Parameter] = {}
        self._inner: Strategy

    def split(self, model: nn.Module) -> None:
        """Leave this rank's columns and rows of the layers."""
        self.sliced = split_columns(model, self._tp_group, self._mesh)

    def make_loss(self, model: nn.Module, *, is_meta: bool = False) -> CausalLoss:
        """Of this rank's share of the positions."""
        compute = self.precision.compute
        return CausalLoss(model, compute=compute, own_positions=self.sliced.share, is_meta=is_meta)

    def agree(self, loss: CausalLoss) -> None:
        """Parts among the ranks of the same place, what is whole among all."""
        if not loss.is_meta or any(not each.requires_grad for each in loss.parameters()):
            parts, whole = self._of(loss)
            agree_weights(parts.values(), group=self._across)
            agree_weights(whole.values())
        # else every rank reads its part of the same files, and nothing is there yet

    def wrap(self, loss: CausalLoss) -> None:
        """Exchange parts among hosts by DDP."""
        super().wrap(loss)
        parts, self._whole = self._of(loss)
        inner = Ddp(self.setup, group=self._across, only=parts.values()) if self._several else Strategy(self.setup)
        inner.wrap(loss)
        self._inner = inner
        self.keeps_gradients = inner.keeps_gradients

    def read_targets(self) -> dict[str, torch.Tensor]:
        """Rows and columns of the whole weights."""
        named = self.loss.model.named_parameters()
        return {name: self.sliced.placed(name, each.detach()) for name, each in named if name in self.sliced.cuts}

    def remote_weights(self) -> int:
        """Those of the other ranks of this host."""
        return self.sliced.elsewhere(self.loss.model)

    def idle_exchange(self) -> str:
        """Gradients travel between hosts in the job's format, and inside one in that of products."""
        return "" if self._several else "one host under tp"

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch, as all ranks of the host do now; returns the loss of this rank's share of positions."""
        loss = self._inner.forward_backward(batch, scale=scale, last=last)
        if last:
            self._sum_up()
        return loss

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's parts; those of what is whole are the first rank's of a host alone."""
        whole = set() if self.counts_loss else {id(each) for each in self._whole.values()}
        return gradients_of(each for each in parameters if id(each) not in whole)

    def as_shards(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts with the shape that they have in the whole model."""
        return {name: self.sliced.placed(_weight_of(name), tensor) for name, tensor in tensors.items()}

    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Put together what is in parts, tensor by tensor, in this machine's memory; collective inside a host."""
        return gather_shards(self.as_shards(tensors), wanted=wanted)

    def waited_s(self) -> float:
        """For the other hosts; exchanges inside a layer are not told apart from computing."""
        return self._inner.waited_s()

    def _of(self, loss: CausalLoss) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """The trained weights of which this rank has a part, and those that it has whole."""
        trained = trainable(loss.model)
        parts = {name: each for name, each in trained.items() if name in self.sliced.cuts}
        return parts, {name: each for name, each in trained.items() if name not in parts}

    def _sum_up(self) -> None:
        """Add up the gradients of what is whole; one that all ranks of a host have computed counts once."""
        for name, parameter in self._whole.items():
            if parameter.grad is not None and name in self.sliced.alike and not self.counts_loss:
                parameter.grad.zero_()
        sent_as = self.setup.sent_as if self._several else None
        sum_gradients(self._whole.values(), lambda row: sum_over(row, self._mesh), sent_as=sent_as)


def _weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to: see `optimizer.state_tensors`."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]
