"""One stage of a pipeline: a transformers model of which other ranks have most of the layers.

The model's own code runs as it is. Where a layer is elsewhere, hidden states pass through unchanged; so a stage is
called with the hidden states of the stage before it in place of embeddings, and masks, positions and whatever else the
decoder prepares for its layers are prepared by the decoder, in every stage from the same positions. Names of weights
stay those of the whole model.

That is right for a decoder that hands embeddings to its first layer as they are. Where it does something to them first
(position tables, as in GPT-2), the stage finds other hidden states in front of its layers than it was given, and says
so: see `Stage.require_plain`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gangline.errors import ModelError, UsageError
from gangline.worker.model import base_of, layers_of


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
