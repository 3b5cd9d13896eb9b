"""Dropout by sample: a mask depends on (seed, step, sample, place in the model), whatever rows share a forward pass.

Each dropout of a pass draws its place, one number, from the processor's generator, which begins with (seed, step).
Recomputation sets that generator back to where forward had it (torch.utils.checkpoint), and so finds the same places.
A mask is a hash of (place, sample, coordinates) in integers of 32 bits, whose results are the same on every device:
neither padding nor other rows nor the number of threads change it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from gangline.errors import ModelError, UsageError
from gangline.worker.batch import Indices, begin_draws, micro_batch_seed, sent

RATES = ("dropout", "pdrop", "drop_rate", "jitter_noise")
"""Ends of the keys of config.json that say how much a model draws at random."""
DRAWN = frozenset(
    {
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.bernoulli, torch.normal, torch.multinomial),
        *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.bernoulli_, torch.Tensor.bernoulli),
        *(F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu),
    }
)
"""What draws at random in a way that does not know of rows."""
ODD = -1640531527
"""2^32 / golden ratio, odd, as a signed number: multiples of it fill 32 bits evenly."""


def random_parts(model: nn.Module, config: Any) -> Iterator[str]:
    """What of a model draws at random while it trains: its dropout modules, and keys of its configuration."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield name
    for key, value in getattr(config, "to_dict", dict)().items():
        if key.endswith(RATES) and isinstance(value, float) and value > 0:
            yield key


def drops_attention(config: Any) -> bool:
    """Whether a model drops weights of attention while it trains, as the keys of its configuration say."""
    values: dict[str, object] = getattr(config, "to_dict", dict)()
    return any(
        "att" in key and key.endswith(RATES) and isinstance(rate, float) and rate > 0 for key, rate in values.items()
    )


_entered: list[SampleDropout] = []
"""The innermost one last."""


def recomputation_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Around forward and recomputation, as torch.utils.checkpoint takes them: backward sets modes of forward aside."""
    return nullcontext(), _entered[-1] if _entered else nullcontext()


class SampleDropout(TorchFunctionMode):
    """Within it, forward and backward of one pass drop by sample; it begins the random seeds of the pass."""

    def __init__(self, samples: Indices, *, seed: int, step: int, device: torch.device, joined: bool) -> None:
        """samples: of the rows, in order. joined: ranks join other numbers of rows in a pass, so what draws without
        knowing of rows is refused, as a UsageError.
        """
        super().__init__()
        words = [hashlib.blake2b(f"{seed}/{step}/{sample}".encode(), digest_size=8).digest() for sample in samples]
        keys = np.frombuffer(b"".join(words), dtype="<i4").reshape(-1, 2).astype(np.int32)
        self._keys = sent(torch.from_numpy(keys), device)
        self._noise = int.from_bytes(words[0], "little") >> 1
        self._device, self._joined = device, joined
        begin_draws(self._noise, device)
        torch.default_generator.manual_seed(micro_batch_seed(seed, step, -1))

    def __enter__(self) -> SampleDropout:
        """Drop so from here on."""
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """And no more."""
        super().__exit__(*error)
        _entered.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Dropout of our own; everything else as it is."""
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            return self._attention(*args, **kwargs)
        if func in DRAWN and kwargs.get("generator") is None:
            return self._drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """As torch.nn.functional.dropout. The first dimension of x is rows, or rows times something."""
        if not training or p == 0:
            return x
        keep = self._mask(x.shape, p)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return x.mul_(keep).mul_(scale) if inplace else x * keep * scale

    def _mask(self, shape: torch.Size, p: float) -> torch.Tensor:
        """Which numbers are kept, bool [shape]."""
        count = len(self._keys)
        if not shape or shape[0] % count:
            raise ModelError(
                "dropout: a layer of this model drops in a tensor without rows",
                seen=f"expected a first dimension that is a multiple of {count} rows, found {tuple(shape)}",
                fix="set the dropout of the model's configuration to 0",
            )
        middle = [*([] if shape[0] == count else [shape[0] // count]), *shape[1:-1]]
        last = shape[-1] if len(shape) > 1 else shape[0] // count
        middle = middle if len(shape) > 1 else []
        place = int(torch.randint(1 << 62, (), device="cpu"))
        low, high = (_mixed(self._keys[:, half] ^ _signed(place >> 32 * half)) for half in (0, 1))
        for length in middle:
            low = _mixed(low[..., None] + self._numbers(length))
        high = _mixed(high[:, None] + self._numbers(last)).view(count, *(1 for _ in middle), last)
        drawn = (low | 1)[..., None] * (high | 1)
        return (drawn >= round(p * (1 << 32)) - (1 << 31)).view(shape)

    def _numbers(self, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.int32, device=self._device) * ODD

    def _attention(  # noqa: PLR0913 - the arguments of torch
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As torch.nn.functional.scaled_dot_product_attention, by its formula: a fused kernel draws its own masks."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
        weights = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.size(-1)))
        if is_causal:
            allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            weights = weights.masked_fill(~allowed, -math.inf)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            weights = weights.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            weights = weights + attn_mask
        return self._dropout(weights.softmax(-1).to(value.dtype), dropout_p) @ value

    def _drawn(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What does not know of rows: with a seed of its place and the pass."""
        if self._joined:
            raise UsageError(
                f"micro_batch: this model draws at random by {getattr(func, '__name__', func)} while it trains",
                seen="ranks take passes of unlike sizes, under which other numbers would be drawn",
                fix="switch that off in the model's configuration, or give all ranks the micro_batch of the job",
            )
        place = int(torch.randint(1 << 62, (), device="cpu"))
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            begin_draws(self._noise ^ place, self._device)
            return func(*args, **kwargs)


def _signed(number: int) -> int:
    """The lowest 32 bits, as a signed number."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of int32 to int32, one to one: lowbias32 by Chris Wellons (nullprogram.com/blog/2018/07/31)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
