"""Where adapters sit, and how many numbers they have."""

from __future__ import annotations

from gangline.errors import ModelError
from gangline.planning.architecture import Architecture, Layer, Linear

ALL_LINEAR = ("all-linear",)


def adapted(layer: Layer, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """What carries adapters in a layer; the output head never does.

    Experts that are one tensor of three dimensions carry them where peft (0.21) reaches these by the names that
    experts had as modules of their own; dense matrices of the same names then carry none.
    """
    choice = (*(each for each in layer.linears if each.name not in layer.taken_names), *layer.expert_linears)
    if targets == ALL_LINEAR:
        return choice
    names = {target.rsplit(".", 1)[-1] for target in targets}
    return tuple(linear for linear in choice if linear.name in names)


def layer_adapters(layer: Layer, rank: int, targets: tuple[str, ...]) -> int:
    """Numbers in the adapters of one layer."""
    return sum(rank * (each.inputs + each.outputs) * each.number for each in adapted(layer, targets))


def lora_parameters(architecture: Architecture, rank: int, targets: tuple[str, ...]) -> int:
    """Numbers in all adapters: rank x (inputs + outputs) for each matrix (Hu et al., LoRA, section 4.1).

    Raises ModelError, with the names that there are, if a model has none of the targets, or one without another that
    is the same tensor.
    """
    matched = sum(layer.count * layer_adapters(layer, rank, targets) for layer in architecture.layers)
    if not matched or _halves(architecture, targets):
        raise ModelError(
            f"method.targets: {', '.join(targets)} "
            + ("names one half of a tensor that holds two matrices" if matched else "matches nothing in this model"),
            seen=f"expected names among {', '.join(_names(architecture))}",
            fix="name some of these, or set targets: all-linear",
        )
    return matched


def _names(architecture: Architecture) -> list[str]:
    return sorted({each.name for layer in architecture.layers for each in adapted(layer, ALL_LINEAR)})


def _halves(architecture: Architecture, targets: tuple[str, ...]) -> bool:
    """Whether only one of gate and up is named where both are one tensor."""
    for layer in architecture.layers:
        pair = {each.name for each in layer.expert_linears[:2]}
        if len(pair & {each.name for each in adapted(layer, targets)}) == 1:
            return True
    return False
