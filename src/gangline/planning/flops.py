"""Floating-point operations of one token, with frozen weights and recomputation. Pure.

A product with a matrix of n numbers takes 2n per token. Backward needs as much for the gradient of what goes in, and
as much again for the gradient of the matrix, unless that is frozen: a full fine-tune takes 3 times the forward pass (4
with recomputation), adapters 2 times (3) and 6 per number of their own. Attention has no weights of its own, so its
backward is the whole one whatever is trained. Embedding tables are looked up, not multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.planning.architecture import Architecture, Layer
from gangline.planning.lora import adapted
from gangline.planning.training import Training

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
        recompute += layer.count * (weights + inner + adapters - _left_out(layer, training))
    head = 2 * architecture.hidden * architecture.vocabulary
    head_back = (2 if full else 1) * head
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
    return sum(training.rank * (linear.inputs + linear.outputs) * linear.active for linear in found)


def _left_out(layer: Layer, training: Training) -> float:
    """FLOPs that recomputation leaves out.

    torch stops when the last kept tensor is there again. The product that ends a dense layer comes after it, unless
    an adapter on it keeps something of its own.
    """
    if layer.experts or not layer.linears:
        return 0.0
    last = layer.linears[-1]
    if last.part != "mlp" or (training.method != "full" and last in adapted(layer, training.targets)):
        return 0.0
    return 2 * last.inputs * last.outputs * last.active
