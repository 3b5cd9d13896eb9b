"""Forward passes of answers that are made at the same time: each answer has a slot with its keys and values.

`BatchedPasses` puts answers of unlike lengths into one pass. Row r of the cache holds answer r from its column 0 on, so
no token moves when another answer joins or leaves; masks and positions are given per row. `SinglePasses` makes a pass
for each answer, with the cache that transformers has for its architecture. `open_passes` takes batches where they have
the logits of single passes on numbers, not by the names of models.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from transformers import DynamicCache

from gangline.errors import UsageError, error_summary
from gangline.worker.model import base_of

CHUNK_TOKENS = 256
"""Tokens of prompts in one pass; answers that are on their way wait for it at most."""
TRIED_LENGTHS = (5, 9)
TRIED_WINDOW = 64
"""A sliding window up to this length is tried beyond its end."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
HALF_TOLERANCE = 0.1
"""Of the largest logit, in 16 bits: a wrong mask or position changes logits by about their own size."""
MOVING_ROPE = {"dynamic", "longrope"}
"""Frequencies that follow the longest row of a pass."""
MORE_KEPT = "its layers keep more than keys and values"
"""Why several answers cannot share a pass."""

log = logging.getLogger(__name__)


class Passes(Protocol):
    """Forward passes with the keys and values of each answer in a slot of its own."""

    together: bool
    """Whether answers share passes."""
    chunk_tokens: int | None
    """Tokens of prompts that a pass may take; None: a prompt is taken whole."""

    def open(self) -> int:
        """A free slot, empty."""
        ...

    def close(self, slot: int) -> None:
        """Give a slot back."""
        ...

    def step(self, model: Any, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> torch.Tensor:
        """Pass the next tokens of each slot through the model; the logits after the last ones: (slots, vocabulary)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Keys and values of one token in one layer."""

    keys: tuple[int, int]
    """Heads and their size."""
    values: tuple[int, int]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes for one token."""
        return (self.keys[0] * self.keys[1] + self.values[0] * self.values[1]) * self.dtype.itemsize


LayerShapes: TypeAlias = Mapping[int, LayerShape]
"""By the number of the layer."""


@torch.inference_mode()
def layer_shapes(model: Any, *, own: range | None = None) -> LayerShapes | None:
    """What each layer keeps of a token, seen in a pass of two; None where layers keep other states as well.

    own: the layers that the model has, where others are elsewhere; None: all.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=_tried(model, 2), use_cache=True, **{_cache_name(model): cache})
    found = {}
    for number, layer in enumerate(cache.layers):
        if own is not None and number not in own:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or hasattr(layer, "conv_states") or keys.ndim != 4 or keys.shape[2] != 2:
            return None
        keys_shape, values_shape = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        found[number] = LayerShape(keys=keys_shape, values=values_shape, dtype=keys.dtype)
    return found or None


def open_passes(model: Any, *, num_rows: int, context: int, shapes: LayerShapes | None) -> tuple[Passes, str]:
    """Passes for a model, and the reason where they are single ones."""
    if num_rows == 1:
        return SinglePasses(model), "one answer at a time was asked for"
    if shapes is None or (alone := why_alone(model)):
        return SinglePasses(model), MORE_KEPT if shapes is None else alone
    try:
        reason = _difference(model, shapes)
    except Exception as error:  # any that an architecture raises for masks it does not know
        log.debug("batches were tried", exc_info=True)
        reason = error_summary(error)
    if reason:
        return SinglePasses(model), f"a batch was tried: {reason}"
    return BatchedPasses(model, num_rows=num_rows, context=context, shapes=shapes), ""


def why_alone(model: Any) -> str:
    """Why several answers cannot share a pass, by the model's configuration; "": nothing there is against it."""
    config = model.config.get_text_config()
    if moving := _rope_types(config) & MOVING_ROPE:
        return f"its positions are those of {min(moving)}, which follow the longest answer"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):  # longer than what is tried
        return "its attention is by chunks"
    return ""


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions: transformers keeps one set of parameters, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {each["rope_type"] for each in (rope, *rope.values()) if isinstance(each, dict) and "rope_type" in each}


@torch.inference_mode()
def _difference(model: Any, shapes: LayerShapes) -> str:
    """How logits of a batch of two prompts, in chunks and one token on, differ from single passes; "" if not."""
    prompts = tried_prompts(model)
    single = SinglePasses(model)
    batched = BatchedPasses(model, num_rows=len(prompts), context=max(map(len, prompts)), shapes=shapes)
    apart, slots = [single.open() for _ in prompts], [batched.open() for _ in prompts]
    for begin, end in ((0, 3), (3, -1), (-1, None)):
        fresh = [prompt[begin:end] for prompt in prompts]
        expected, seen = single.step(model, apart, fresh), batched.step(model, slots, fresh)
        largest = float(expected.abs().max())
        off = float((seen - expected).abs().max()) / (largest or 1.0)
        if not off <= TOLERANCE.get(next(iter(shapes.values())).dtype, HALF_TOLERANCE):  # NaN is a difference, too
            return f"its logits are off by {off:.1e} of the largest one"
    return ""


def tried_prompts(model: Any) -> list[list[int]]:
    """Two prompts with which a batch is tried: beyond the end of a short sliding window, where there is one."""
    windows = _windows(model).values()
    longer = max((window + 4 for window in windows if window is not None and window <= TRIED_WINDOW), default=0)
    lengths = [max(length, longer + number) for number, length in enumerate(TRIED_LENGTHS)]
    return [_tried(model, length + 1)[0].tolist() for length in lengths]


def _tried(model: Any, num_tokens: int) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(num_tokens, device=model.device)[None] * 7 + 3) % vocabulary


class SinglePasses:
    """A pass for each answer. See `Passes`."""

    together: bool = False
    chunk_tokens: int | None = None

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config()
        self._last_only = {"logits_to_keep": 1} if keeps_logits(model) else {}
        self._cache_name = _cache_name(model)
        self._caches: dict[int, DynamicCache] = {}
        self._next = 0

    def open(self) -> int:
        """See `Passes`."""
        self._next += 1
        self._caches[self._next] = DynamicCache(config=self._config)
        return self._next

    def close(self, slot: int) -> None:
        """See `Passes`."""
        del self._caches[slot]

    def step(self, model: Any, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Passes`."""
        found = []
        for slot, tokens in zip(slots, fresh, strict=True):
            ids = torch.tensor([tokens], device=model.device)
            cache = {self._cache_name: self._caches[slot]}
            output = model(input_ids=ids, use_cache=True, **cache, **self._last_only)
            found.append(output.logits[:, -1].float())
        return torch.cat(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLayout:
    """How the tokens of some answers lie in one pass."""

    order: list[int]
    """The answers' numbers, in the order of their rows."""
    lasts: list[int]
    """The column of each row's last token."""
    words: dict[str, Any]
    """What the model is called with beside the tokens."""

    @property
    def kept(self) -> list[int]:
        """The columns of which logits are wanted."""
        return sorted(set(self.lasts))

    def last_logits(self, made: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
        """Of the last token of each answer, in the order of answers: (answers, vocabulary).

        made: (rows, columns, vocabulary). is_kept: it has the columns `kept` alone.
        """
        kept, back = self.kept, sorted(range(len(self.order)), key=self.order.__getitem__)
        columns = [kept.index(last) if is_kept else last for last in self.lasts]
        return made[back, [columns[number] for number in back]].float()

    def fill(self, fresh: Sequence[Sequence[int]], *, device: torch.device) -> torch.Tensor:
        """The tokens of the answers, filled up on the right: (rows, tokens)."""
        width = max(self.lasts) + 1
        tokens = [list(fresh[number]) for number in self.order]
        return torch.tensor([each + [0] * (width - len(each)) for each in tokens], device=device)


class BatchedPasses:
    """One pass for all answers. See `Passes`."""

    together: bool = True
    chunk_tokens: int | None = CHUNK_TOKENS

    def __init__(self, model: Any, *, num_rows: int, context: int, shapes: LayerShapes) -> None:
        self._cache = RowCache(shapes, num_rows=num_rows, context=context, device=model.device)
        self._context, self._device = context, model.device
        self._windows = _windows(model)
        self._keeps_logits = keeps_logits(model)
        self._row_of: dict[int, int] = {}  # slot -> row: the rows in use are always the first ones
        self._lengths = [0] * num_rows
        self._next = 0
        self._mask_type = next(iter(shapes.values())).dtype

    def open(self) -> int:
        """See `Passes`."""
        self._next += 1
        row = self._row_of[self._next] = len(self._row_of)
        self._lengths[row] = 0
        return self._next

    def close(self, slot: int) -> None:
        """Give a slot back; the last row takes its place, so that a pass of all rows copies nothing."""
        row, last = self._row_of.pop(slot), len(self._row_of)
        reached = max(self._lengths[row], self._lengths[last])
        if row != last:
            moved = next(each for each, place in self._row_of.items() if place == last)
            self._cache.move(last, row, length=reached)
            self._lengths[row], self._row_of[moved] = self._lengths[last], row
        self._cache.clear(last, length=reached)

    def step(self, model: Any, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Passes`. Rows with fewer tokens than others are filled up on the right, into a column nobody reads."""
        laid = self.lay_out(slots, [len(each) for each in fresh])
        kept = laid.kept
        output = model(
            input_ids=laid.fill(fresh, device=model.device),
            **laid.words,
            **({"logits_to_keep": torch.tensor(kept, device=model.device)} if self._keeps_logits else {}),
        )
        return laid.last_logits(output.logits, is_kept=self._keeps_logits)

    def lay_out(self, slots: Sequence[int], counts: Sequence[int]) -> PassLayout:
        """Make room for the next `counts` tokens of each slot, and say how a pass of them is called."""
        order = sorted(range(len(slots)), key=lambda number: self._row_of[slots[number]])
        rows = [self._row_of[slots[number]] for number in order]
        num_tokens = [counts[number] for number in order]
        begins = torch.tensor([self._lengths[row] for row in rows], device=self._device)[:, None]
        columns = torch.arange(max(num_tokens), device=self._device)
        places = begins + columns
        is_real = columns < torch.tensor(num_tokens, device=self._device)[:, None]
        for row, number in zip(rows, num_tokens, strict=True):
            self._lengths[row] += number
        length = max(self._lengths[row] for row in rows)
        self._cache.select(rows, places.where(is_real, self._context), length)
        return PassLayout(
            order=order,
            lasts=[number - 1 for number in num_tokens],
            words={
                "position_ids": places.clamp(max=self._context - 1),
                "attention_mask": self._masks(places, length),
                "past_key_values": self._cache,
                "use_cache": True,
            },
        )

    def _masks(self, places: torch.Tensor, length: int) -> Any:
        """Added to the scores: (rows, 1, tokens, keys); by kind of layer where a model has several kinds."""
        columns = torch.arange(length, device=places.device)
        distance = places[:, :, None] - columns
        found = {}
        for kind, window in self._windows.items():
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            shut = torch.zeros((), dtype=self._mask_type, device=places.device)
            found[kind] = shut.where(seen, torch.finfo(self._mask_type).min)[:, None]
        return found if len(found) > 1 else next(iter(found.values()))


class RowCache(DynamicCache):
    """Keys and values of a fixed number of rows, all taken from the device at once.

    Each layer has (rows, heads, context + 1, head size): the last column takes what fills up rows, and is never read.
    """

    def __init__(self, shapes: LayerShapes, *, num_rows: int, context: int, device: torch.device) -> None:
        super().__init__()

        def room(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
            # zeros: a number that is masked out is multiplied by 0, and 0 * NaN is NaN
            return torch.zeros(num_rows, heads, context + 1, size, dtype=dtype, device=device)

        self._keys = {number: room(*shape.keys, shape.dtype) for number, shape in shapes.items()}
        self._values = {number: room(*shape.values, shape.dtype) for number, shape in shapes.items()}
        self._rows: torch.Tensor | slice = slice(0)
        self._into: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def select(self, rows: Sequence[int], places: torch.Tensor, length: int) -> None:
        """Say what the next pass is of: its rows, ascending, the columns of its tokens, and how many columns it reads.

        places: (rows, tokens).
        """
        numbers = torch.tensor(rows, device=places.device)
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        self._rows = slice(rows[0], rows[-1] + 1) if side_by_side else numbers
        self._into = (numbers[:, None], places)
        self._length = length

    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy the first columns of a row into another one."""
        for layer in (*self._keys.values(), *self._values.values()):
            layer[target, :, :length] = layer[source, :, :length]

    def clear(self, row: int, *, length: int) -> None:
        """Set the first columns of a row to zeros: an answer that had NaN leaves none to the next one."""
        for layer in (*self._keys.values(), *self._values.values()):
            layer[row, :, :length] = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by attention: takes in the keys and values of the pass's tokens, gives those of its rows."""
        assert self._into is not None
        rows, places = self._into
        found = []
        for layer, states in ((self._keys[layer_idx], key_states), (self._values[layer_idx], value_states)):
            layer[rows, :, places] = states.transpose(1, 2)
            found.append(layer[self._rows, :, : self._length])
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the base class gives it
        """The columns that the pass reads; positions are given per row."""
        return self._length


def _windows(model: Any) -> dict[str, int | None]:
    """The length of the sliding window, by kind of layer as transformers calls them; None: all that was before.

    Kinds that are not known here count as full attention: a batch that is tried shows the difference.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _cache_name(model: Any) -> str:
    """The argument of the cache. Another name would be ignored, and each token would be alone."""
    known = inspect.signature(base_of(model).forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in known:
            return name
    raise UsageError(
        "this architecture cannot be served",
        seen=f"{type(base_of(model)).__name__} takes no cache of transformers",
        fix="gangline chat talks with it, by transformers' own generate",
    )


def keeps_logits(model: Any) -> bool:
    """Whether it makes the logits of some columns alone."""
    return "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
