"""How many bytes are allocated at every moment, counted over fake tensors.

A storage counts from the operation that made it until nothing refers to it any more. What a kernel allocates inside
itself and frees before it returns is not seen; where that matters, `kernels` allocates it on purpose.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
COLLECT_EVERY = 100
"""Operations between two collections: tensors in reference cycles live until one finds them."""


class ByteTracker(TorchDispatchMode):
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
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fake and func is aten._local_scalar_dense.default:
            return _neutral(fake[0].dtype)
        self.num_operations += 1
        if self.num_operations % COLLECT_EVERY == 0:
            gc.collect()
        if tensors and not fake:
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        elif func is aten._grouped_mm.default:
            result = _grouped_product(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value.untyped_storage())
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
