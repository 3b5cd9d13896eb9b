"""Attention inside the documents of a packed sample, without a mask: memory grows with the length, not with its square.

transformers keeps documents apart by a mask of length x length, 32 GiB for a sample of 131,072 tokens in 16 bits, for
which torch has no flash kernel, and computes all of the square. Here every document is attended to by itself, with
torch's causal kernels; borders are where positions go back, as in transformers. On a GPU in 16 bits all documents of
all rows go through one call instead (`kernels`): a document of 50 tokens keeps no GPU busy.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gangline.worker.borders import Borders, borders_of
from gangline.worker.compat import ATTENTION

NAME = "gangline-documents"
"""What transformers knows this attention as. It is told no mask for it, and makes none."""
OWN_MASKS = {"falcon", "gpt_bigcode", "opt"}
"""Families whose attention is not told the positions, or is no function of transformers' table."""
WHOLE = {"full_attention", "sliding_attention"}
"""Kinds of layers that see all of a document that is no longer than their window."""
AT_ONCE = "gangline-documents-at-once"
PLAIN = ("sdpa", NAME, AT_ONCE)
"""Attention that these functions can stand for."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""Numbers in a head, as flash attention takes them."""


def keep_apart(model: nn.Module, *, length: int, at_once: bool = False) -> bool:
    """Have a model attend inside documents of at most `length` tokens; False where only a mask can do it.

    at_once: all documents in one call, where a layer's attention fits it.
    """
    config: Any = model.config
    text = config.get_text_config()
    if ATTENTION.of(config) not in PLAIN or text.model_type in OWN_MASKS or not _sees_all(text, length):
        return False
    name = AT_ONCE if at_once else NAME
    AttentionInterface.register(name, FUNCTIONS[name])
    model.set_attn_implementation(name)  # type: ignore[operator]
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
    """softmax(q k) v of every document, one after the other; heads [m, heads, t, d], result [m, t, heads, d]."""
    borders = _borders(query, key, attention_mask, options)
    if not borders.packed:
        return sdpa_attention_forward(module, query, key, value, None, **options)
    parts = [
        torch.cat([sdpa_attention_forward(module, *one, None, **options)[0] for one in documents], dim=1)
        for documents in (
            zip(*(row[None].split(sizes, dim=2) for row in rows), strict=True)
            for sizes, rows in zip(
                borders.lengths, zip(query.unbind(), key.unbind(), value.unbind(), strict=True), strict=True
            )
        )
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), None


def attend_at_once(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The same as `attend`, all documents of all rows in one call of torch's attention for sequences of any length."""
    borders = _borders(query, key, attention_mask, options)
    if not borders.packed or not _fits(module, query, value, options):
        return attend(module, query, key, value, attention_mask, **options)
    rows, heads, length, size = query.shape
    dtype = _dtype(query)
    flat = (each.transpose(1, 2).reshape(rows * length, -1, size).to(dtype) for each in (query, key, value))
    found = varlen(*flat, borders=borders, scale=options.get("scaling"))
    return found.view(rows, length, heads, size), None


FUNCTIONS: Mapping[str, Callable[..., tuple[torch.Tensor, None]]] = {NAME: attend, AT_ONCE: attend_at_once}
"""By the name that transformers knows them under."""


def _borders(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> Borders:
    positions = options.get("position_ids")
    if mask is not None or positions is None or query.shape[2] != key.shape[2]:
        raise RuntimeError("attention inside documents needs positions, and no mask")
    return borders_of(positions, rows=query.shape[0])


def _fits(module: nn.Module, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether flash attention computes this: 16 bits, heads of one size up to 256, causal, and nothing between the
    product and the softmax, nor behind it.
    """
    size = query.shape[-1]
    causal = options.get("is_causal")
    return (
        _dtype(query) in SIXTEEN_BITS
        and size == value.shape[-1]
        and size <= LARGEST_HEAD
        and size % 8 == 0
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and not any(options.get(name) for name in ("dropout", "softcap", "output_attentions"))
        and options.get("position_bias") is None
        and options.get("s_aux") is None
    )


def _dtype(query: torch.Tensor) -> torch.dtype:
    """What autocast gives torch's own attention, which takes no part in it by itself here."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, borders: Borders, scale: float | None
) -> torch.Tensor:
    """Causal attention inside documents; query [tokens, heads, d], key and value [tokens, heads or fewer, d].

    scale: of the products before the softmax; None: 1 / sqrt(d). In the words of torch 2.10, of 2.11 and 2.12, and of
    2.13; the kernel itself takes fewer heads of keys in all of them.
    """
    attention, words = _varlen_attention()
    given: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in words else {"is_causal": True}
    if "enable_gqa" in words:
        given["enable_gqa"] = query.shape[1] != key.shape[1]
    if scale is not None and "scale" in words:
        given["scale"] = scale
    elif scale is not None:
        query = query * (scale * math.sqrt(query.shape[-1]))
    starts, longest = borders.starts, borders.longest
    found: torch.Tensor = attention(query, key, value, starts, starts, longest, longest, **given)
    return found


@cache
def _varlen_attention() -> tuple[Callable[..., Any], frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def has_varlen() -> bool:
    """Whether this torch has attention for sequences of any length."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None
