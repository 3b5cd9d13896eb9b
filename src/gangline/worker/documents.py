"""Attention inside the documents of a packed sample, without a mask: memory grows with the length, not with its square.

transformers keeps documents apart by a mask of length x length, 32 GiB for a sample of 131,072 tokens in 16 bits, for
which torch has no flash kernel, and computes all of the square. Here every document is attended to by itself, with
torch's causal kernels; borders are where positions go back, as in transformers.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gangline.worker.compat import ATTENTION

NAME = "gangline-documents"
"""What transformers knows this attention as. It is told no mask for it, and makes none."""
OWN_MASKS = {"falcon", "gpt_bigcode", "opt"}
"""Families whose attention is not told the positions, or is no function of transformers' table."""
WHOLE = {"full_attention", "sliding_attention"}
"""Kinds of layers that see all of a document that is no longer than their window."""
Lengths = tuple[tuple[int, ...], ...]
"""Tokens of the documents of every row."""

_lengths: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of the positions that layers are called with, which they all share: found once, for a GPU has to be waited for."""


def keep_apart(model: nn.Module, *, length: int) -> bool:
    """Have a model attend inside documents of at most `length` tokens; False where only a mask can do it."""
    config: Any = model.config
    text = config.get_text_config()
    if ATTENTION.of(config) != "sdpa" or text.model_type in OWN_MASKS or not _sees_all(text, length):
        return False
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    return True


def use_masks(model: nn.Module) -> None:
    """Have transformers make its masks again."""
    model.set_attn_implementation("sdpa")  # type: ignore[operator]


def _sees_all(text: Any, length: int) -> bool:
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds == {"full_attention"}:
        return True
    windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size", "window_size")]
    return kinds <= WHOLE and all(not each or (isinstance(each, int) and each >= length) for each in windows)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """softmax(q k) v of every document; heads [m, heads, t, d], result [m, t, heads, d]."""
    positions = options.get("position_ids")
    if attention_mask is not None or positions is None or query.shape[2] != key.shape[2]:
        raise RuntimeError("attention inside documents needs positions, and no mask")
    lengths = lengths_of(positions, rows=query.shape[0])
    if all(len(each) == 1 for each in lengths):
        return sdpa_attention_forward(module, query, key, value, None, **options)
    parts = [
        torch.cat([sdpa_attention_forward(module, *one, None, **options)[0] for one in documents], dim=1)
        for documents in (
            zip(*(row[None].split(sizes, dim=2) for row in rows), strict=True)
            for sizes, rows in zip(lengths, zip(query.unbind(), key.unbind(), value.unbind(), strict=True), strict=True)
        )
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), None


def lengths_of(positions: torch.Tensor, *, rows: int) -> Lengths:
    """Tokens of every document, by row; a document begins where positions do not go on by 1."""
    found: Lengths | None = _lengths.get(positions)
    if found is None:
        found = tuple(_row_lengths(row) for row in positions.expand(rows, -1).tolist())
        _lengths[positions] = found
    return found


def _row_lengths(row: list[int]) -> tuple[int, ...]:
    borders = [0, *(at for at in range(1, len(row)) if row[at] != row[at - 1] + 1), len(row)]
    return tuple(end - begin for begin, end in itertools.pairwise(borders))
