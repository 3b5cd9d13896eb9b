"""Shapes of well-known models by their hub names, so that a plan needs neither network nor weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

Value = int | float | bool | str | list[int] | dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of this catalogue."""

    name: str
    """On the hub: owner/name."""
    config: dict[str, Value]
    """What its config.json says, as far as memory and time depend on it."""
    source: str
    """Where that was seen."""


def known_model(name: str) -> KnownModel | None:
    """The model of a hub name, in any case; its last part is enough where only one model has it. None: not known.

    A copy at an owner of mirrors, or with an ending for few bits (-bnb-4bit), has the shape of its original. What
    begins with a dot or a slash is a folder, not a name.
    """
    return next(filter(None, map(_spelled, _spellings(name.strip().lower()))), None)


def _spelled(wanted: str) -> KnownModel | None:
    exact = _models().get(wanted)
    if exact or not wanted or "/" in wanted:
        return exact
    ending = [model for full, model in _models().items() if full.split("/")[1:] == [wanted]]
    originals = [model for model in ending if not _is_copy(model.name)]
    return originals[0] if originals and all(each.config == originals[0].config for each in originals) else None


def _is_copy(name: str) -> bool:
    """Whether somebody else's model has another name at an owner of mirrors."""
    return name.partition("/")[0] in _table()["mirrors"]["owners"]


def _spellings(wanted: str) -> Iterator[str]:
    """A name, without its ending, and without the owner where that owner copies models of others."""
    mirrors = _table()["mirrors"]
    owner, slash, last = wanted.rpartition("/")
    cut = min((last.removesuffix(ending.lower()) for ending in mirrors["endings"]), key=len)
    yield from dict.fromkeys((wanted, owner + slash + cut))
    if owner in {each.lower() for each in mirrors["owners"]}:
        yield from dict.fromkeys((last, cut))


def known_config(name: str) -> dict[str, Value] | None:
    """The contents of a model's config.json, a copy that may be changed; None where the catalogue lacks the model."""
    model = known_model(name)
    return copy.deepcopy(model.config) if model else None


def known_models() -> tuple[str, ...]:
    """All hub names, in order."""
    return tuple(sorted((model.name for model in _models().values()), key=str.lower))


def suggest_models(text: str, limit: int = 5) -> tuple[str, ...]:
    """Names that somebody who wrote `text` may have meant, the likeliest first; () where nothing is near."""
    wanted = text.strip().lower().rpartition("/")[2]
    rated = [(_likeness(wanted, name.lower().partition("/")[2]), name) for name in known_models() if not _is_copy(name)]
    near = sorted((pair for pair in rated if pair[0] >= 0.6), key=lambda pair: (-pair[0], pair[1].lower()))
    return tuple(name for _, name in near[:limit])


def _likeness(wanted: str, name: str) -> float:
    """From 0 to 1; what contains the other counts as near."""
    ratio = SequenceMatcher(None, wanted, name, autojunk=False).ratio()
    return max(ratio, 0.8 + 0.2 * ratio) if len(wanted) >= 3 and (wanted in name or name in wanted) else ratio


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8")))


@cache
def _models() -> dict[str, KnownModel]:
    """By name in small letters."""
    table = _table()
    found: dict[str, KnownModel] = {}
    for group in table["groups"]:
        for name, numbers in group["shapes"].items():
            columns = zip(group["columns"], numbers, strict=True)
            config = {**group["common"], **dict(columns), **group.get("apart", {}).get(name, {})}
            found[name.lower()] = KnownModel(name=name, config=config, source=group["source"])
    for name, (source, config) in table["whole"].items():
        found[name.lower()] = KnownModel(name=name, config=config, source=source)
    for name, (original, positions) in table["same"].items():
        model = found[original.lower()]
        changed = {} if positions is None else {"max_position_embeddings": positions}
        found[name.lower()] = KnownModel(name=name, config={**model.config, **changed}, source=model.source)
    return found
