"""The same work on many hosts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gangline.launch.backend import HostRequest

AT_ONCE = 32
Value = TypeVar("Value")


def on_each(parts: Iterable[HostRequest], work: Callable[[HostRequest], Value]) -> dict[str, Value | Exception]:
    """What `work` gives or raises for each part, by host; one slow host keeps nobody else waiting but the caller."""
    wanted = list(parts)

    def attempt(part: HostRequest) -> Value | Exception:
        try:
            return work(part)
        except Exception as error:  # noqa: BLE001  (handed to the caller)
            return error

    with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(wanted)))) as pool:
        return dict(zip([part.host for part in wanted], pool.map(attempt, wanted), strict=True))


def failed(outcomes: dict[str, Value | Exception]) -> dict[str, Exception]:
    """The hosts on which it failed."""
    return {host: outcome for host, outcome in outcomes.items() if isinstance(outcome, Exception)}
