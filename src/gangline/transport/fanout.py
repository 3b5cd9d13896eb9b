"""The same question to many hosts at once; one that does not answer costs its own time limit only."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, ParamSpec, TypeVar

Target = TypeVar("Target")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult(Generic[Value]):
    """What one host gave: a value, or the error that came in its place."""

    value: Value | None = None
    error: Exception | None = None

    def get(self) -> Value:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def fan_out(
    function: Callable[[Target], Value],
    targets: Mapping[str, Target],
    *,
    timeout_s: float,
    on_outcome: Callable[[str, HostResult[Value]], None] | None = None,
) -> dict[str, HostResult[Value]]:
    """`function(target)` for every target, each in a thread of its own; by name, in the order of `targets`.

    A target that takes longer than `timeout_s` has a TimeoutError as its outcome. Its thread is left to itself, and
    does not hold up the end of the program. `on_outcome` sees every outcome as it comes, in the caller's thread.
    """
    answers: SimpleQueue[tuple[str, HostResult[Value]]] = SimpleQueue()

    def work(name: str, target: Target) -> None:
        try:
            answers.put((name, HostResult(value=function(target))))
        except Exception as error:  # noqa: BLE001  (the caller gets it, whatever it is)
            answers.put((name, HostResult(error=error)))

    for name, target in targets.items():
        threading.Thread(target=work, args=(name, target), name=f"ask {name}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    outcomes: dict[str, HostResult[Value]] = {}
    while len(outcomes) < len(targets):
        try:
            new = [answers.get(timeout=max(0.0, deadline - time.monotonic()))]
        except Empty:
            late = sorted(set(targets) - set(outcomes))
            new = [(name, HostResult(error=TimeoutError(f"{name}: no answer within {timeout_s:g} s"))) for name in late]
        for name, outcome in new:
            outcomes[name] = outcome
            if on_outcome:
                on_outcome(name, outcome)
    return {name: outcomes[name] for name in targets}


def in_parallel(function: Callable[[Target], Value], targets: Iterable[Target], *, at_once: int = 32) -> list[Value]:
    """`function(target)` for all of them, `at_once` at a time; the values in the order of the targets.

    The first error is raised, and neither that nor Ctrl-C waits for the others then.
    """
    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        return list(pool.map(function, targets))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# Work that is done once, however many threads want it at the same time.


Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")


def once(function: Callable[Parameters, Made]) -> Callable[Parameters, Made]:
    """`functools.cache` for threads: that alone has all who come before the first answer do the work, too."""
    lock = threading.Lock()
    kept = functools.cache(function)

    @functools.wraps(function)
    def ask(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Made:
        with lock:
            return kept(*args, **kwargs)  # type: ignore[arg-type]

    return ask
