"""Work that is done once, however many threads want it at the same time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def once(function: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """`functools.cache` for threads: that alone has all who come before the first answer do the work, too."""
    lock = threading.Lock()
    kept = functools.cache(function)

    @functools.wraps(function)
    def ask(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        with lock:
            return kept(*args, **kwargs)  # type: ignore[arg-type]

    return ask
