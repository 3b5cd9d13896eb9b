"""A model's configuration, and shallow copies of it."""

from __future__ import annotations

import copy
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gangline.errors import ModelError
from gangline.runs.job import ModelJob
from gangline.worker.model import load_config

_LONGEST_PERIOD = 16
_LEAST_LAYERS = 2


def read_config(config: dict[str, Any] | None, model: str | None, *, revision: str | None = None) -> Any:
    """The configuration, from the contents of a config.json, a folder or the hub. Raises ModelError."""
    if config is None:
        return load_config(ModelJob(path=str(model), revision=revision))
    if "model_type" not in config:
        raise ModelError(
            "model.config: this config.json names no model_type",
            seen=f"expected the name of a family, such as llama; it has {', '.join(sorted(config)[:8]) or 'nothing'}",
            fix="give the whole contents of the model's config.json",
        )
    with tempfile.TemporaryDirectory(prefix="gangline-trace-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            return load_config(ModelJob(path=folder))
        except ModelError as error:
            raise ModelError(
                f"model.config: transformers cannot read this config.json of model_type {config['model_type']}",
                seen=error.seen.replace(folder, "the model's folder"),
                fix="use a family that the installed transformers knows (a newer one may know more)",
            ) from error


def num_layers(config: Any) -> int:
    """Depth of a model. Raises ModelError."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise ModelError(
            f"model.config: {config.model_type} does not say how many layers it has",
            seen=f"expected num_hidden_layers; it is {layers!r}",
            fix="trace a model of another family, or plan this one by the closed form",
        )
    return layers


def at_depth(config: Any, layers: int) -> Any:
    """The same configuration with the first `layers` layers only."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    lists = _layer_lists(text)
    text.num_hidden_layers = layers
    for name, values in lists.items():
        setattr(text, name, [values[index % len(values)] for index in range(layers)])
    return shallow


def shallow_depths(config: Any) -> tuple[int, int]:
    """Two depths whose difference holds whole periods of the layers' kinds, after those that occur only at the start.

    A plain model gives (2, 4); one with a full-attention layer after every five others gives (6, 12).
    """
    kinds = _kinds(config)
    lead, period = min(
        (
            (lead, period)
            for lead in range(len(kinds))
            for period in range(1, _LONGEST_PERIOD + 1)
            if _repeats(kinds[lead:], period)
        ),
        key=lambda found: (found[0] + 2 * found[1], found[0]),
    )
    step = period * -(-_LEAST_LAYERS // period)
    return lead + step, lead + 2 * step


def is_even(config: Any, depths: tuple[int, ...]) -> bool:
    """Whether the layers beyond the last depth are of the kinds, in parts, that lie between the last two depths.

    Only then does a straight line through these two meet the true depth.
    """
    kinds, (shallow, deep) = _kinds(config), depths[-2:]
    step, rest = Counter(kinds[shallow:deep]), Counter(kinds[deep:])
    num_rest = len(kinds) - deep
    return num_rest <= 0 or all(
        step[kind] * num_rest == rest[kind] * (deep - shallow) for kind in step.keys() | rest.keys()
    )


def _kinds(config: Any) -> list[tuple[Any, ...]]:
    """What tells one layer from another, layer by layer."""
    text = config.get_text_config()
    lists = _layer_lists(text)
    num_dense = getattr(text, "first_k_dense_replace", None) or 0
    sparse_step = getattr(text, "decoder_sparse_step", None) or 1
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    return [
        (
            *(str(values[index]) for values in lists.values()),
            index < num_dense,
            index in dense,
            (index + 1) % sparse_step,
        )
        for index in range(num_layers(config))
    ]


def _layer_lists(text: Any) -> dict[str, list[Any]]:
    """The fields that have an entry for every layer."""
    depth = text.num_hidden_layers
    return {
        name: list(value)
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == depth > 1
    }


def _repeats(kinds: list[tuple[Any, ...]], period: int) -> bool:
    return all(kind == kinds[index % period] for index, kind in enumerate(kinds))
