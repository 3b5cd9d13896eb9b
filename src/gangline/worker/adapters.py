"""Adapters by peft: a job's method as peft's own configuration, put around the linears of a model.

Nothing is computed here that peft computes; the numbers are those of `get_peft_model` with the same `LoraConfig`. What
peft leaves out in silence (a pattern that names nothing, a layer that is not there) is refused.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import ModelError, error_summary
from gangline.runs.job import REGEX, MethodJob
from gangline.worker.process_group import ProcessGroup
from gangline.worker.quantised import multiplies

ALL_LINEAR = ("all-linear",)
WRAPPED = "base_model.model."
"""What peft puts in front of a name of the base model."""
ADAPTER = "default"
"""What peft calls the adapter that is trained."""
INITIAL = "initial"
"""An adapter of frozen factors, which is subtracted: what the trained one began with, where that is a part of the
weight (`init: pissa` or `olora`). peft takes it out of the weight itself, which would have to be saved and sent then.
"""


def attach_adapters(
    model: Any,
    method: MethodJob,
    *,
    compute: torch.dtype,
    trained: torch.dtype,
    seed: int,
    rows: list[int] | dict[str, list[int]] | None = None,
) -> Any:
    """The model wrapped by peft, with what is trained in the dtype `trained`. Raises ModelError.

    compute: of frozen weights, and of what an embedding table that is trained hands on. rows: of tables that are
    trained, as `trained_rows` has them.
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
            wrapped = get_peft_model(model, lora_config(model, method, rows))
    except ValueError as error:
        raise _unmatched(model, method, error) from error
    _require_patterns(wrapped, method)
    if method.splits:
        _add_initial(wrapped)
    for name, parameter in wrapped.named_parameters():
        if is_initial(name):
            parameter.data = parameter.data.to(trained)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    if trained != compute and (table := wrapped.get_input_embeddings()) is not None and _is_saved(table):
        table.register_forward_hook(lambda _module, _given, made: made.to(compute))
    return wrapped


def lora_config(model: Any, method: MethodJob, rows: list[int] | dict[str, list[int]] | None = None) -> Any:
    """What peft is told: every option under peft's own name. rows: see `attach_adapters`."""
    from peft import LoraConfig

    targets: str | list[str] = _expression(method.targets) or list(method.targets)
    layers, exclude = list(method.layers), _expression(method.exclude) or list(method.exclude)
    if method.targets == ALL_LINEAR:
        targets, layers = "all-linear", []
        exclude = _with_routers(exclude, model)
        if method.layers:  # peft takes layers beside names alone, and passes them over for whole names
            targets = list(_linears(model, method.layers))
    return LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,  # type: ignore[arg-type]  # a float is as good
        lora_dropout=method.dropout,
        target_modules=targets,
        exclude_modules=exclude or None,
        layers_to_transform=layers or None,
        rank_pattern=dict(method.rank_pattern),
        alpha_pattern=dict(method.alpha_pattern),
        use_rslora=method.rslora,
        use_dora=method.dora,
        init_lora_weights=method.init if method.init in ("gaussian", "orthogonal") else True,  # type: ignore[arg-type]
        modules_to_save=list(method.modules_to_save) or None,
        ensure_weight_tying=_saves_tied(model, method.modules_to_save),
        trainable_token_indices=rows,
        target_parameters=list(method.target_parameters) or None,
        task_type="CAUSAL_LM",
    )


def initialise(
    model: Any,
    method: MethodJob,
    *,
    seed: int,
    weight_of: Callable[[str], torch.Tensor] | None = None,
    world: ProcessGroup | None = None,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """What adapters take from the weights under them, and peft does not set or could not: these were not there.

    weight_of: the weight of a layer, by its name in the base model; None: it is in its place. world: the ranks, each of
    which computes some layers and sends them to all, which is collective; None: this process computes all.
    """
    layers = adapted_layers(model)
    size, own = (1, 0) if world is None else (world.size, world.rank)
    for start in range(0, len(layers), size):
        turn = layers[start : start + size]
        if own < len(turn):
            name, layer = turn[own]
            place = f"{name.removeprefix(WRAPPED)}.weight"
            weight = layer.get_base_layer().weight if weight_of is None else weight_of(place)
            torch.manual_seed(seed + start + own)  # a fast decomposition draws, whoever computes it
            (_split if method.splits else _set_magnitude)(layer, weight, method.init)
        for source, (_, layer) in enumerate(turn):
            if world is not None and size > 1:
                for tensor in _begun(layer):
                    _send(tensor, source=source, device=world.device)
        beat()


def load_adapter(model: Any, folder: str) -> None:
    """Begin with the values of an adapter in peft's format. Raises ModelError where it is not one of this shape."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        values = load_peft_weights(folder, device="cpu")
        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        wrong = sorted(set(values) ^ set(wanted)) or [
            name for name, value in values.items() if value.shape != wanted[name].shape
        ]
        if wrong:
            raise ValueError(f"they differ in {wrong[0]} and {len(wrong) - 1} more")
        set_peft_model_state_dict(model, values)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"method.adapter: {folder} does not fit this model",
            seen=f"expected the tensors that its configuration asks for; {error_summary(error)}",
            fix="name the base model that it was trained over as model.path, or another adapter",
        ) from error


def is_initial(name: str) -> bool:
    """Whether a parameter belongs to what adapters began with."""
    return f".{INITIAL}." in name


def _begun(layer: Any) -> list[torch.Tensor]:
    """Tensors of a layer that `initialise` sets."""
    if INITIAL not in layer.lora_A:
        return [layer.lora_magnitude_vector[ADAPTER].weight]
    return [part[name].weight for part in (layer.lora_A, layer.lora_B) for name in (ADAPTER, INITIAL)]


def _add_initial(wrapped: Any) -> None:
    from peft.tuners.lora import Linear

    config = replace(wrapped.peft_config[ADAPTER], lora_dropout=0.0)
    for name, layer in adapted_layers(wrapped):
        if not isinstance(layer, Linear):
            raise ModelError(
                f"method.init: {name.removeprefix(WRAPPED)} is no linear, whose weight could be split",
                seen="expected adapters of linears alone",
                fix="set init: default, or name linears as targets",
            )
        layer.update_layer(INITIAL, layer.r[ADAPTER], layer.lora_alpha[ADAPTER], config=config)
        layer.set_adapter([ADAPTER, INITIAL])
        layer.scaling[INITIAL] = -layer.scaling[ADAPTER]
        for part in (layer.lora_A, layer.lora_B):
            part[INITIAL].requires_grad_(False)


@torch.no_grad()
def _split(layer: Any, weight: torch.Tensor, init: str) -> None:
    """By peft's own function, over a copy of the weight in fp32: A and B, and the same as what is subtracted."""
    base, dtype = layer.get_base_layer(), layer.lora_A[ADAPTER].weight.dtype
    own = base.weight
    base.weight = nn.Parameter(weight.to(torch.float32), requires_grad=False)
    if init == "olora":
        layer.olora_init(ADAPTER)
    else:
        layer.pissa_init(ADAPTER, init)
    base.weight = own
    for part in (layer.lora_A, layer.lora_B):
        found = part[ADAPTER].weight.data.to(own.device if not own.is_meta else "cpu", dtype).contiguous()
        part[ADAPTER].weight.data = found
        part[INITIAL].weight.data = found.clone()


@torch.no_grad()
def fold_initial(model: Any) -> None:
    """Make what adapters began with a part of them, as peft converts such an adapter: factors of twice the rank, which
    are right for the base model as it is.
    """
    layers = [(name, layer) for name, layer in adapted_layers(model) if INITIAL in layer.lora_A]
    for _, layer in layers:
        for part, dim, sign in ((layer.lora_A, 0, 1.0), (layer.lora_B, 1, -1.0)):
            both = torch.cat([part[ADAPTER].weight, sign * part[INITIAL].weight], dim=dim)
            part[ADAPTER].weight = nn.Parameter(both)
        layer.delete_adapter(INITIAL)
        layer.r[ADAPTER] *= 2
        layer.lora_alpha[ADAPTER] *= _widening(layer.use_rslora[ADAPTER])
        for linear, side in ((layer.lora_A[ADAPTER], "out_features"), (layer.lora_B[ADAPTER], "in_features")):
            setattr(linear, side, layer.r[ADAPTER])
    if layers:
        config = model.peft_config[ADAPTER]
        more = _widening(config.use_rslora)
        config.r, config.lora_alpha = 2 * config.r, more * config.lora_alpha
        config.rank_pattern = {key: 2 * rank for key, rank in config.rank_pattern.items()}
        config.alpha_pattern = {key: more * alpha for key, alpha in config.alpha_pattern.items()}


def _widening(rslora: bool) -> float:
    """By what alpha grows with a rank that is doubled, for the scale to stay."""
    return math.sqrt(2) if rslora else 2.0


@torch.no_grad()
def _set_magnitude(layer: Any, weight: torch.Tensor, _init: str) -> None:
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
    return ADAPTER in (getattr(module, "modules_to_save", None) or ())


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


def _with_routers(exclude: str | list[str], model: Any) -> str | list[str]:
    """With the names of linears that give more than their product (Llama 4's routers), which peft's layer breaks."""
    odd = {name.rpartition(".")[2] for name, part in model.named_modules() if _is_odd(part)}
    if isinstance(exclude, str):
        return "|".join((f"({exclude})", *(rf".*\.{re.escape(name)}" for name in sorted(odd))))
    return [*exclude, *sorted(odd)]


def _is_odd(part: nn.Module) -> bool:
    own = type(part).__module__.startswith(("transformers.models.", "transformers_modules."))
    return own and isinstance(part, nn.Linear) and not multiplies(type(part))


def _linears(model: Any, layers: Iterable[int]) -> Iterator[str]:
    """Whole names of the linears of these layers."""
    from transformers.pytorch_utils import Conv1D

    wanted = set(layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and layer_number(name) in wanted and not _is_odd(module):
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
    if "ound" not in str(error) and "No modules" not in str(error):
        return ModelError(
            "method: peft refuses these adapters",
            seen=error_summary(error),
            fix="leave out the option that it names",
        )
    return ModelError(
        f"method.targets: {', '.join(method.targets)} matches nothing in this model",
        seen=f"expected names among {', '.join(names)}",
        fix="name some of these, or set targets: all-linear",
    )
