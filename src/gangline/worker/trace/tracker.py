"""How many bytes are allocated at every moment, counted over fake tensors.

A storage counts from the operation that made it until nothing refers to it any more. What a kernel allocates inside
itself and frees before it returns is not seen; where that matters, `kernels` allocates it on purpose.

What a GPU would do otherwise than the CPU that traces: attention kernels, and the size of the loss's chunks.

Flash and memory-efficient attention keep query, key, value, output and one fp32 number per row of scores; the plain
("math") kernel keeps the scores. Which one torch takes follows its own conditions (`sdp_utils.cpp`): flash needs 16-bit
numbers, no mask and heads of 256 at the most; the memory-efficient one takes fp32 and masks, but no grouped heads.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gangline.worker import compat, loss
from gangline.worker.trace.order import AttentionKernel

FAKE_TENSOR = compat.FAKE_TENSOR.get()
UNSET_FAKE = compat.UNSET_FAKE.get()
READ_SCALAR, GROUPED_PRODUCT = compat.READ_SCALAR.get(), compat.GROUPED_PRODUCT.get()
DispatchMode: Any = compat.DISPATCH_MODE.get()
"""Sees every operation inside of it."""
COLLECT_EVERY = 100
"""Operations between two collections: tensors in reference cycles live until one finds them."""


class ByteTracker(DispatchMode):
    """Counts the storages of everything that is computed inside it; entered after (inside) a FakeTensorMode.

    Tensors with real data (the tokens of a batch, and the masks that follow from them) are computed for real, so that
    decisions which depend on them are those of a real step. A value that is read from a fake tensor is 0, or true.
    """

    def __init__(self, *, rounding_bytes: int = 1) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, int] = {}
        self._rounding_bytes = rounding_bytes
        self._instant = ""
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.num_operations = 0

    def instant(self, name: str) -> None:
        """From now on peaks count for the instant `name`; "" is none."""
        if name and name != self._instant:
            gc.collect()
        self._instant = name
        self._measure()

    def num_bytes(self, storage: torch.UntypedStorage) -> int:
        """Size of a storage as the allocator gives it out."""
        return -(-storage.nbytes() // self._rounding_bytes) * self._rounding_bytes

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        key, size = id(storage), self.num_bytes(storage)
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
            self.live_bytes += size
            self._measure()
        elif known[1] != size:
            self._sizes[key] = (known[0], size)
            self.live_bytes += size - known[1]
            self._measure()

    def __enter__(self) -> ByteTracker:
        # what is there already lives as long as the trace: collections need not look at it
        gc.collect()
        gc.freeze()
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it gives back."""
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        fake = [tensor for tensor in tensors if isinstance(tensor, FAKE_TENSOR)]
        if fake and func is READ_SCALAR:
            return _neutral(fake[0].dtype)
        self.num_operations += 1
        if self.num_operations % COLLECT_EVERY == 0:
            gc.collect()
        if tensors and not fake:
            with UNSET_FAKE():
                result = func(*args, **kwargs)
        elif func is GROUPED_PRODUCT:
            result = _grouped_product(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self.add(tensor.untyped_storage())
        return result

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)[1]

    def _measure(self) -> None:
        if self._instant and self.live_bytes > self.peaks.get(self._instant, 0):
            self.peaks[self._instant] = self.live_bytes

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self.add(storage)
            return result

        return resize_


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments or the results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Experts in fp32, too: the kernels take them, only the rule for their shapes insists on bf16 (torch 2.13)."""
    half = [value.to(torch.bfloat16) for value in args[:2]]
    result: torch.Tensor = func(*half, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def _neutral(dtype: torch.dtype) -> bool | int | float:
    """What a trace reads from a fake tensor: no overflow, nothing found, every question answered with yes."""
    if dtype is torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0


_FLASH_MOST_HEAD = 256
_FLASH_ROWS = 128


class KeptRows(torch.autograd.Function):
    """Attention that keeps no scores: shapes and bytes of the fused kernels, no numbers.

    query [b, h, s, d], key [b, g, t, d] and value [b, g, t, e] with g dividing h; returns [b, h, s, e].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The output lies as [b, s, h, e], as the kernels write it."""
        batch, heads, rows, _ = query.shape
        output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        row_sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Gradients, beside what the kernels take meanwhile."""
        query, key, value, output, row_sums, _ = ctx.saved_tensors
        taken = [torch.empty_like(row_sums)]
        if query.element_size() == 2:
            taken.append(_flash_sums(query))
        if key.shape[1] != query.shape[1]:
            # flash adds the gradients of a group's heads at the end
            taken += [tensor.new_empty(*query.shape[:2], *tensor.shape[2:]) for tensor in (key, value)]
        del grad_outputs, output
        gradients = [_like_rows_first(tensor) for tensor in (query, key, value)]
        return (*gradients, None)


def _flash_sums(query: torch.Tensor) -> torch.Tensor:
    """The query's gradient in fp32, rows and heads rounded up as FlashAttention 2 does."""
    batch, heads, rows, width = query.shape
    step = 32 if width <= 128 else 64
    return query.new_empty(
        batch, heads, -(-rows // _FLASH_ROWS) * _FLASH_ROWS, -(-width // step) * step, dtype=torch.float32
    )


def _like_rows_first(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty(batch, rows, heads, width).transpose(1, 2)


@contextmanager
def kernels_of(kind: AttentionKernel) -> Iterator[None]:
    """Take the kernels of `kind` inside. For "flash" and "math" the loss takes its chunks as on a GPU, too."""
    if kind == "cpu":
        yield
        return
    own, chunk = F.scaled_dot_product_attention, loss.CHUNK_NUMBERS["cpu"]
    F.scaled_dot_product_attention = _fused(own) if kind == "flash" else _plain(own)
    loss.CHUNK_NUMBERS["cpu"] = loss.CHUNK_NUMBERS["cuda"]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own
        loss.CHUNK_NUMBERS["cpu"] = chunk


def _plain(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return own(*args, **kwargs)

    return attention


def _fused(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    plain = _plain(own)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        query, key, value = (_cast(tensor) for tensor in (query, key, value))
        flash = query.element_size() == 2 and attn_mask is None and query.shape[-1] <= _FLASH_MOST_HEAD
        grouped = key.shape[1] != query.shape[1]
        if query.ndim != 4 or (grouped and not flash) or options.get("dropout_p"):
            return plain(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # torch makes numbers of it for the kernel, which keeps these
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        result: torch.Tensor = KeptRows.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return result

    return attention


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Autocast knows the real function only."""
    if tensor.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor
