"""Adapters by peft: a job's method as peft's own configuration, put around the linears of a model.

Nothing is computed here that peft computes; the numbers are those of `get_peft_model` with the same `LoraConfig`. What
peft leaves out in silence (a pattern that names nothing, a layer that is not there) is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import ModelError, error_summary
from gangline.runs.job import REGEX, MethodJob
from gangline.worker.process_group import ProcessGroup

ALL_LINEAR = ("all-linear",)
WRAPPED = "base_model.model."
"""What peft puts in front of a name of the base model."""
ADAPTER = "default"
"""What peft calls the adapter that is trained."""


def attach_adapters(model: Any, method: MethodJob, *, compute: torch.dtype, trained: torch.dtype, seed: int) -> Any:
    """The model wrapped by peft, with what is trained in the dtype `trained`. Raises ModelError.

    compute: of frozen weights, and of what an embedding table that is trained hands on.
    """
    from peft import get_peft_model

    names = [name for name, _ in model.named_modules()]
    _require_layers(model, names, method.layers)
    _require_saved(names, method.modules_to_save)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads a name that transformers 5.23 calls old
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            wrapped = get_peft_model(model, lora_config(model, method))
    except ValueError as error:
        raise _unmatched(model, method, error) from error
    _require_patterns(wrapped, method)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    if trained != compute and (table := wrapped.get_input_embeddings()) is not None and _is_saved(table):
        table.register_forward_hook(lambda _module, _given, made: made.to(compute))
    return wrapped


def lora_config(model: Any, method: MethodJob) -> Any:
    """What peft is told: every option under peft's own name."""
    from peft import LoraConfig

    targets: str | list[str] = _expression(method.targets) or list(method.targets)
    layers = list(method.layers)
    if method.targets == ALL_LINEAR:
        targets, layers = "all-linear", []
        if method.layers:  # peft takes layers beside names alone, and passes them over for whole names
            targets = list(_linears(model, method.layers))
    return LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,  # type: ignore[arg-type]  # a float is as good
        lora_dropout=method.dropout,
        target_modules=targets,
        exclude_modules=_expression(method.exclude) or list(method.exclude) or None,
        layers_to_transform=layers or None,
        rank_pattern=dict(method.rank_pattern),
        alpha_pattern=dict(method.alpha_pattern),
        use_rslora=method.rslora,
        use_dora=method.dora,
        init_lora_weights=True if method.init == "default" else method.init,  # type: ignore[arg-type]
        modules_to_save=list(method.modules_to_save) or None,
        ensure_weight_tying=_saves_tied(model, method.modules_to_save),
        task_type="CAUSAL_LM",
    )


def initialise(
    model: Any,
    method: MethodJob,
    *,
    weight_of: Callable[[str], torch.Tensor],
    world: ProcessGroup | None = None,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """What adapters take from the weights under them, which were not there when they were made.

    weight_of: the weight of a layer, by its name in the base model. world: the ranks, each of which computes some
    layers and sends them to all; None: this process computes all. Collective then.
    """
    if not method.dora:
        return
    layers = adapted_layers(model)
    size, own = (1, 0) if world is None else (world.size, world.rank)
    for start in range(0, len(layers), size):
        turn = layers[start : start + size]
        if own < len(turn):
            name, layer = turn[own]
            _set_magnitude(layer, weight_of(f"{name.removeprefix(WRAPPED)}.weight"))
        for source, (_, layer) in enumerate(turn):
            if world is not None and size > 1:
                _send(layer.lora_magnitude_vector[ADAPTER].weight, source=source, device=world.device)
        beat()


@torch.no_grad()
def _set_magnitude(layer: Any, weight: torch.Tensor) -> None:
    """By peft's own function, with the weight in the layer's place for a moment."""
    base, vector = layer.get_base_layer(), layer.lora_magnitude_vector[ADAPTER]
    placeholder, dtype = base.weight, vector.weight.dtype
    base.weight = nn.Parameter(weight.to(placeholder.dtype), requires_grad=False)
    factors = {"lora_A": layer.lora_A[ADAPTER].weight, "lora_B": layer.lora_B[ADAPTER].weight}
    vector.update_layer(base_layer=base, scaling=layer.scaling[ADAPTER], **factors)
    vector.weight.data = vector.weight.data.to(dtype)
    base.weight = placeholder


def _send(tensor: torch.Tensor, *, source: int, device: torch.device) -> None:
    """To all ranks, in place."""
    sent = tensor.detach().to(device)
    dist.broadcast(sent, src=source)
    tensor.data.copy_(sent)


def adapted_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers that carry an adapter, with their names."""
    from peft.tuners.lora import LoraLayer

    return [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer)]


def saved_module(module: Any) -> Any:
    """The copy that is trained, of a module that `modules_to_save` names; any other module itself."""
    return module.modules_to_save[ADAPTER] if _is_saved(module) else module


def round_saved(model: Any, dtype: torch.dtype) -> None:
    """Give copies that were trained whole the dtype of the base model, in which plain peft loads them."""
    for module in model.modules():
        if _is_saved(module):
            module.modules_to_save.to(dtype)


def _is_saved(module: Any) -> bool:
    return ADAPTER in getattr(module, "modules_to_save", ())


def _saves_tied(model: Any, names: tuple[str, ...]) -> bool:
    """Whether a table that is embedding and head is trained whole: then both have one copy."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or table is None or head.weight is not table.weight:
        return False
    tied = [name for name, part in model.named_modules() if part is table or part is head]
    return any(f".{name}".endswith(f".{wanted}") for name in tied for wanted in names)


def _expression(words: tuple[str, ...]) -> str:
    """The regular expression that a list of words is; "" for names."""
    return words[0].removeprefix(REGEX) if words and words[0].startswith(REGEX) else ""


def _linears(model: Any, layers: Iterable[int]) -> Iterator[str]:
    """Whole names of the linears of these layers."""
    from transformers.pytorch_utils import Conv1D

    wanted = set(layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and layer_number(name) in wanted:
            yield name


def layer_number(name: str) -> int | None:
    """The layer that a module is in, by its whole name: the first number in it, as peft has it."""
    found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(found[1]) if found else None


def _require_layers(model: Any, names: Iterable[str], layers: tuple[int, ...]) -> None:
    depth = 1 + max((number for name in names if (number := layer_number(name)) is not None), default=-1)
    beyond = [number for number in layers if number >= depth]
    if beyond:
        raise ModelError(
            f"method.layers: {type(model).__name__} has no layer {beyond[0]}",
            seen=f"its layers have the numbers 0 to {depth - 1}",
            fix="name layers that are there",
        )


def _require_saved(names: Iterable[str], wanted: Iterable[str]) -> None:
    known = {name.rpartition(".")[2] for name in names if name}
    ends = [name for name in wanted if name.rpartition(".")[2] not in known]
    if ends:
        raise ModelError(
            f"method.modules_to_save: {', '.join(ends)} is no module of this model",
            seen=f"expected names among {', '.join(sorted(name for name in known if not name.isdigit()))}",
            fix="name some of these; the output head is often lm_head, the embedding table embed_tokens",
        )


def _require_patterns(wrapped: Any, method: MethodJob) -> None:
    names = [name.removeprefix(WRAPPED) for name, _ in adapted_layers(wrapped)]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(method, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                raise ModelError(
                    f"method.{key}: {pattern} names no module with an adapter",
                    seen=f"expected the end of names such as {', '.join(names[:2])}",
                    fix=f"put the name right, or delete it from {key}",
                )


def _unmatched(model: Any, method: MethodJob, error: ValueError) -> ModelError:
    if "lora_dropout" in str(error):
        return ModelError(
            "method.dropout: adapters of experts take none",
            seen=f"dropout {method.dropout:g} with targets that hold experts in one tensor; {error_summary(error)}",
            fix="set method.dropout: 0, or name targets outside the experts, such as those of attention",
        )
    names = sorted({name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    if "is not supported" in str(error):
        return ModelError(
            f"method.targets: {', '.join(method.targets)} matches modules that take no adapter",
            seen=f"expected linears: {', '.join(names)}; {error_summary(error)}",
            fix=r"name linears alone, such as regex:.*\.mlp\.(up|down)_proj",
        )
    if method.exclude or method.layers:
        layers = ", ".join(map(str, method.layers)) or "all"
        return ModelError(
            f"method.targets: {', '.join(method.targets)} matches nothing that exclude and layers leave",
            seen=f"exclude: {', '.join(method.exclude) or 'none'}; layers: {layers}; "
            f"expected names among {', '.join(names)}",
            fix="leave something to train",
        )
    return ModelError(
        f"method.targets: {', '.join(method.targets)} matches nothing in this model",
        seen=f"expected names among {', '.join(names)}",
        fix="name some of these, or set targets: all-linear",
    )
