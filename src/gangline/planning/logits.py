"""The output head and the loss: usually the largest tensors of a step, and the first instant of backward."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.planning.architecture import Architecture
from gangline.planning.training import BYTES, Training

FP32 = 4
MIN_CHUNK_ROWS = 64
"""As in `worker.loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """What the head and the loss need beside the layers' activations."""

    peak: int
    """The highest point, forward or backward."""
    after: int
    """What is left of it when the last layer's backward begins: the gradient of the hidden states, and logits that
    the caller still holds."""
    formula: str


def head_bytes(architecture: Architecture, training: Training, *, hidden_width: int, parts: int = 1) -> HeadBytes:
    """Peak of head and loss over the tokens of a micro-batch; `hidden_width`: bytes of a number that comes out of the
    last norm. parts: ranks that have the tokens between them, where the loss is fused (tp).
    """
    kind = training.stack.loss
    if kind == "fused" and not architecture.linear_head:
        kind = "plain"
    hidden = training.tokens * architecture.hidden * hidden_width
    if kind == "fused":
        return _fused(architecture, training, hidden=hidden, width=hidden_width, parts=parts)
    if kind == "chunked":
        return _chunked(architecture, training, hidden=hidden)
    return _whole(architecture, training, hidden=hidden, inplace=kind == "inplace")


def _head_copy(architecture: Architecture, training: Training) -> int:
    """The head in the width of products, if it is stored wider."""
    cast = training.method == "full" and training.parameters != training.compute
    return architecture.hidden * architecture.vocabulary * BYTES[training.compute] if cast else 0


def _fused(architecture: Architecture, training: Training, *, hidden: int, width: int, parts: int) -> HeadBytes:
    """`worker.loss.LinearCrossEntropy`: hidden states, this rank's rows of them, their gradient, a chunk of logits.

    For a trained head its gradient as well, beside one product of it.
    """
    compute, vocabulary = BYTES[training.compute], architecture.vocabulary
    rows = min(-(-training.tokens // parts), max(MIN_CHUNK_ROWS, training.stack.chunk_numbers // vocabulary))
    each = vocabulary * (max(FP32, compute) + (compute if compute < FP32 else 0))
    chunk = rows * each
    head, stored = architecture.hidden * vocabulary, BYTES[training.parameters]
    kept = head * stored if training.method == "full" else 0
    # the head's gradient is a product beside a wider sum
    logits = kept + chunk + (head * compute if kept and stored > compute else 0)
    each_has = "3" if parts == 1 else f"(1 + 2/{parts})"
    part = hidden // (training.tokens * width) * rows * compute if width > compute else 0
    return HeadBytes(
        peak=hidden + 2 * hidden // parts + part + logits + _head_copy(architecture, training),
        after=hidden + kept,
        formula=f"{each_has} T·h·{width} + a chunk of {rows} rows of logits"
        + (" + the head's gradient" if kept else ""),
    )


def _chunked(architecture: Architecture, training: Training, *, hidden: int) -> HeadBytes:
    """Logits of a chunk of tokens, their log-softmax and two gradients; the hidden states and their gradient.

    What is kept of all chunks is there when backward begins; the first chunk then adds its two gradients, and next to
    the narrow one of its logits a quantised head is unpacked.
    """
    stack, compute, vocabulary = training.stack, BYTES[training.compute], architecture.vocabulary
    rows = min(training.tokens, max(1, stack.chunk_numbers // vocabulary))
    each = 2 * FP32 if stack.kept_softmax_bytes else compute + 3 * FP32
    logits = rows * vocabulary * each
    if training.method == "qlora" and stack.quantises_head:
        unpacked = stack.unpacked_copies * architecture.hidden * vocabulary * compute
        logits = max(logits, unpacked + rows * vocabulary * (compute - stack.kept_softmax_bytes))
    weight = architecture.hidden * vocabulary * BYTES[training.parameters]
    kept = weight if training.method == "full" else 0
    held = training.tokens * vocabulary * stack.kept_logits_bytes
    softmax = training.tokens * vocabulary * stack.kept_softmax_bytes
    return HeadBytes(
        peak=2 * hidden + logits + 2 * kept + held + softmax + _head_copy(architecture, training),
        after=hidden + kept + held,
        formula=f"2 T·h + chunk of {rows} tokens · V · {each}",
    )


def _whole(architecture: Architecture, training: Training, *, hidden: int, inplace: bool) -> HeadBytes:
    """log_softmax, the gradient of the loss and of log_softmax, 4 bytes each, beside the logits that are held."""
    stack, numbers = training.stack, training.tokens * architecture.vocabulary
    each = stack.logit_bytes + (0 if inplace else stack.kept_logits_bytes)
    each += BYTES[training.compute] if architecture.capped_logits else 0
    head = architecture.hidden * architecture.vocabulary
    kept = head * BYTES[training.parameters] if training.method == "full" else 0
    return HeadBytes(
        peak=hidden + numbers * each + _head_copy(architecture, training),
        after=hidden + numbers * stack.kept_logits_bytes + kept,
        formula=f"T·V·{each}: logits as held, log-softmax, gradients",
    )
