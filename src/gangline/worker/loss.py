"""The loss of a micro-batch: summed cross-entropy over the trained positions, without ever holding all logits.

Only positions with a target go through the output head, a chunk at a time, and a chunk's gradient is computed while
its logits are there (the idea of fused linear cross-entropy, in plain torch, so that it runs on any device).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from gangline.worker.data.tokens import NO_TARGET
from gangline.worker.model import base_of, output_head

# Logits held at once. A CPU is fastest with chunks that stay in its caches (4 MiB in fp32; four times as many cost 6 %
# of this function); a GPU needs large products to be busy (512 MiB in fp32).
CHUNK_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 27}
MIN_CHUNK_ROWS = 64
"""Fewer rows make products so thin that the weight's gradient is read and written more than it is computed."""


class RowsLoss(Protocol):
    """What computes the losses [n] of logits [n, V] and puts the gradient of their sum in place of these."""

    def __call__(self, logits: torch.Tensor, goal: torch.Tensor, *, gradient: bool) -> torch.Tensor:
        """Goal [n]: the targets. gradient: whether it is asked for."""
        ...


class LinearCrossEntropy(torch.autograd.Function):
    """sum over rows of cross_entropy(hidden @ weight.T + bias, targets), chunk by chunk.

    hidden [n, h], weight [V, h], bias [V] or None, targets [n]; returns a scalar in fp32 (fp64 for fp64 input).
    """

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0913 - autograd passes tensors by position
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        compute: torch.dtype,
        with_gradients: bool,
        rows_loss: RowsLoss | None = None,
    ) -> torch.Tensor:
        """Loss now, and the gradients that backward will hand out. rows_loss: in place of torch's operators."""
        need_hidden, need_weight, need_bias = (with_gradients and need for need in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias) if need_bias and bias is not None else None
        head = weight.to(compute)
        total = hidden.new_zeros((), dtype=_wide(compute))
        rows = max(MIN_CHUNK_ROWS, CHUNK_NUMBERS.get(weight.device.type, 1 << 20) // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows].to(compute)
            goal = targets[start : start + rows, None]
            logits = part @ head.t()
            if rows_loss is not None and bias is None:
                delta, loss = logits, rows_loss(logits, goal[:, 0], gradient=need_hidden or need_weight)
            else:
                logits = logits.to(_wide(compute))
                if bias is not None:
                    logits += bias
                delta, loss = _delta_and_loss(logits, goal, gradient=need_hidden or need_weight)
            total += loss.sum()
            if not (need_hidden or need_weight):
                continue
            if grad_bias is not None:
                grad_bias += delta.sum(0)
            delta = delta.to(compute)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = delta @ head
            if need_weight:
                grad_weight = _add_product(grad_weight, delta, part, dtype=weight.dtype)
            del logits, delta, part  # else they live on while the next chunk is made: 0.75 GiB of 2^27 logits
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Scale what forward prepared."""
        grad = grad_outputs[0]
        scaled = [None if saved is None else saved.mul_(grad.to(saved.dtype)) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


def _delta_and_loss(logits: torch.Tensor, goal: torch.Tensor, *, gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the logits the gradient of the sum of their losses, if it is asked for, and the losses [n, 1]."""
    chosen = logits.gather(1, goal)
    # softmax by hand and in place: logsumexp would copy the logits and take every exponential twice
    top = logits.amax(dim=1, keepdim=True)
    delta = logits.sub_(top).exp_()
    mass = delta.sum(dim=1, keepdim=True)
    loss = mass.log() + top - chosen
    if gradient:
        delta.div_(mass).scatter_add_(1, goal, torch.full_like(chosen, -1.0))
    return delta, loss


def _add_product(
    target: torch.Tensor | None, delta: torch.Tensor, part: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Sum of target and delta.T @ part, in place but for the first chunk, which needs no zeros to add to."""
    if target is None:
        return (delta.t() @ part).to(dtype)
    if dtype == delta.dtype:
        return target.addmm_(delta.t(), part)
    target += delta.t() @ part
    return target


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class CausalLoss(nn.Module):
    """A causal model with its loss: what a strategy wraps, so that the whole of it runs inside DDP's forward.

    forward(input_ids, targets, position_ids, trained), all int64, three of [m, t] and the indices [n] of the trained
    positions in the flattened batch, gives the loss summed over these.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: torch.dtype,
        own_positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
        is_meta: bool = False,
    ) -> None:
        """own_positions: picks this rank's share of the trained positions, where several ranks have them between them,
        and each adds up the loss of its own. is_meta: its weights are on the meta device; `look` once they are read.
        """
        super().__init__()
        self.model = model
        self.compute = compute
        self.fused = False
        self.rows_loss: RowsLoss | None = None
        """A kernel for the losses of a chunk; None: torch's operators."""
        self.is_meta = is_meta
        self._own_positions = own_positions
        if not is_meta:
            self.look()

    def look(self) -> None:
        """Find out how the loss of this model is computed; collective where the model is in parts."""
        self.is_meta = False
        self.fused = self._can_fuse()

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor,
        trained: torch.Tensor,
        *,
        entered: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Summed loss over the positions whose target is not NO_TARGET.

        entered [m, t, h]: hidden states that come in place of embeddings (the last stage of a pipeline).
        """
        if self._own_positions is not None:
            trained = self._own_positions(trained)
            targets = _only(targets, trained)
        if not self.fused:
            logits = self.logits(input_ids, position_ids, entered=entered)
            logits = logits.to(_wide(logits.dtype))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        core = base_of(self.model)
        hidden = core.base_model(**_inputs(input_ids, position_ids, entered))[0]
        return self._fused_loss(core, hidden, targets, trained)

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, entered: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All logits [m, t, V]. entered: see `forward`."""
        return self.model(**_inputs(input_ids, position_ids, entered)).logits  # type: ignore[no-any-return]

    def _fused_loss(
        self, core: Any, hidden: torch.Tensor, targets: torch.Tensor, trained: torch.Tensor
    ) -> torch.Tensor:
        rows, goal = hidden.flatten(0, 1).index_select(0, trained), targets.flatten().index_select(0, trained)
        head = output_head(core)
        loss: torch.Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, head.weight, head.bias, goal, self.compute, torch.is_grad_enabled(), self.rows_loss
        )
        return loss

    @torch.no_grad()
    def _can_fuse(self) -> bool:
        """Whether decoder + linear head really give the model's own logits.

        Some models scale or cap logits, or have no plain linear head; they take the plain path. Decided by trying,
        on a few tokens, not by a list of names.
        """
        core = base_of(self.model)
        head = output_head(core)
        if type(head) is not nn.Linear or getattr(core, "base_model", core) is core:
            return False
        was_training = self.model.training
        self.model.eval()
        try:
            return head_is_plain(core, head)
        except torch.OutOfMemoryError:  # a RuntimeError, and no sign of how the model is made
            raise
        except (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
            return False
        finally:
            self.model.train(was_training)


def _only(targets: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """The targets of these positions, and of no others."""
    kept = torch.full_like(targets, NO_TARGET).flatten()
    return kept.index_copy(0, trained, targets.flatten().index_select(0, trained)).view_as(targets)


def _inputs(input_ids: torch.Tensor, position_ids: torch.Tensor, entered: torch.Tensor | None) -> dict[str, Any]:
    """What a model is called with. use_cache=False: with a cache, packed documents would see each other."""
    tokens = {"input_ids": input_ids} if entered is None else {"inputs_embeds": entered}
    return {**tokens, "position_ids": position_ids, "use_cache": False}


def head_is_plain(core: Any, head: nn.Linear) -> bool:
    """Compare on hidden states made so large that logits reach about 100: a cap is the identity near zero.

    Shapes are the module's: its weight may be in parts, and have none.
    """
    probe = torch.arange(8, device=head.weight.device)[None] % head.out_features
    positions = torch.arange(8, device=head.weight.device)[None]
    entered = None
    if not hasattr(core.get_input_embeddings(), "weight"):  # the last stage of a pipeline
        entered = torch.eye(8, head.in_features, dtype=head.weight.dtype, device=head.weight.device)[None]
    inputs = _inputs(probe, positions, entered)
    hidden = core.base_model(**inputs)[0]
    hidden = hidden * (100 / head(hidden).abs().max().clamp_min(1e-6))

    def enlarge(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    hook = core.base_model.register_forward_hook(enlarge)
    try:
        own = core(**inputs).logits.float()
    finally:
        hook.remove()
    return own.shape == (1, 8, head.out_features) and torch.allclose(own, head(hidden).float(), rtol=1e-2, atol=0.1)


@torch.no_grad()
def sees_other_documents(
    loss: CausalLoss, through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> bool:
    """Whether a token's logits change with another document packed before it: then packing would mix documents.

    through: what to look at in place of the logits, from the same arguments.
    """
    through = loss.logits if through is None else through
    was_training = loss.model.training
    loss.model.eval()
    device = next(loss.model.parameters()).device
    vocabulary = int(base_of(loss.model).config.vocab_size)  # type: ignore[union-attr, arg-type]
    # two rows: some attention kernels find the borders in a single row only
    alone = torch.stack([torch.arange(1, 7, device=device), torch.arange(11, 17, device=device)]) % vocabulary
    packed = torch.cat([(alone + 7) % vocabulary, alone], dim=1)
    positions = torch.arange(6, device=device).expand(2, 6)
    try:
        one = through(alone, positions)
        two = through(packed, torch.cat([positions, positions], dim=1))[:, 6:]
    finally:
        loss.model.train(was_training)
    scale = one.float().abs().max().clamp_min(1e-6)
    tolerance = 0.05 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((one.float() - two.float()).abs().max() > tolerance * scale)
