"""A model cut by columns and rows: the shape of what one rank of a host has of it under tp. Pure.

transformers' plan for the family says which linears are cut (strategies/tensor_parallel/split.py): queries, keys and
values, and what makes a feed-forward layer wide, by columns; what comes after them by rows. So a rank has some of the
heads and some of the width. Where one matrix makes several of these at once, or norms see all heads at once, what comes
out is put together and is whole on every rank; of such a part only the weights are cut.
"""

from __future__ import annotations

from dataclasses import replace

from gangline.planning.architecture import Architecture, Layer, Linear
from gangline.planning.families import FAMILIES, SLICED
from gangline.planning.training import Training

_BY_HEADS = "query_key_value"
"""One matrix for three whose outputs lie head by head, so that a cut leaves heads whole."""


def sliced(architecture: Architecture, parts: int) -> Architecture:
    """What each of so many ranks has. Tables, norms and the head are whole."""
    return replace(architecture, layers=tuple(_layer(layer, parts) for layer in architecture.layers))


def unsliceable(architecture: Architecture, parts: int) -> str:
    """Why so many ranks cannot have the layers between them, in words; empty where they can."""
    if architecture.model_type in FAMILIES and architecture.model_type not in SLICED:
        return (
            f"a model of the family {architecture.model_type}, for which transformers has no plan of columns and rows"
        )
    if architecture.expert_weights:
        return "experts, which lie in one tensor"
    figures: dict[str, int] = {}
    for layer in architecture.layers:
        if not _gathers_heads(layer):
            figures |= {"attention heads": layer.heads, "key-value heads": layer.kv_heads}
        if not _gathers_width(layer):
            figures["of the feed-forward width"] = layer.width
    uneven = [f"{number:,} {what}" for what, number in figures.items() if number % parts]
    return f"{', '.join(uneven)}, which {parts} ranks do not divide evenly" if uneven else ""


def lacking_of_tp(architecture: Architecture, training: Training, parts: int) -> str:
    """What of tp gangline's own trainer does not do, in words; empty where it does."""
    if training.compute == "fp16":
        return "tp in fp16"
    if training.method == "qlora":
        return f"tp with weights of {training.bits} bits"
    why = unsliceable(architecture, parts)
    return f"tp with {why}" if why else ""


def _layer(layer: Layer, parts: int) -> Layer:
    heads, width = 1 if _gathers_heads(layer) else parts, 1 if _gathers_width(layer) else parts
    linears: list[Linear] = []
    for part, cut in (("attention", heads), ("mlp", width)):
        group = [each for each in layer.linears if each.part == part]
        linears += [_linear(each, parts, by_rows=each is group[-1], whole=cut == 1) for each in group]
    return replace(
        layer,
        linears=tuple(linears),
        heads=max(1, layer.heads // heads),
        kv_heads=max(1, layer.kv_heads // heads),
        width=max(1, layer.width // width),
    )


def _linear(linear: Linear, parts: int, *, by_rows: bool, whole: bool) -> Linear:
    if whole:
        return replace(linear, parts=parts, active=linear.active / parts)
    if by_rows:
        return replace(linear, inputs=max(1, linear.inputs // parts))
    return replace(linear, outputs=max(1, linear.outputs // parts))


def _gathers_heads(layer: Layer) -> bool:
    attention = [each.name for each in layer.linears if each.part == "attention"]
    return layer.qk_norm == "projection" or (len(attention) == 2 and attention[0] != _BY_HEADS)


def _gathers_width(layer: Layer) -> bool:
    return layer.gated and sum(each.part == "mlp" for each in layer.linears) == 2
