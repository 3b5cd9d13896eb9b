"""What guards say of another supervisor with a higher epoch: what one host alone says is not obeyed. Pure.

Who takes a run over writes it into state.json, or tells every guard that answers (`gangline stop --now`, where the
keeper does not). A guard that alone has heard of it may have been told, for all we know; or its host lies, or is
damaged. Not to obey does no harm: guards themselves refuse the orders of the lower epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gangline.launch.backend import HostStatus

DOUBT_S = 15.0
"""The others hear of it within seconds, if it is true."""
WITNESSES = 2


class Claims:
    """The claims of one attempt's guards. num_hosts: of the attempt; one host alone needs no second one."""

    def __init__(
        self, *, num_hosts: int, doubt_s: float = DOUBT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.believed: int | None = None
        """The epoch of who is in charge in our place; None: nobody is."""
        self._needed = min(WITNESSES, num_hosts)
        self._doubt_s = doubt_s
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def note(self, statuses: Sequence[HostStatus], *, epoch: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in what the hosts say now, beside our own epoch; what is new, as events with their details."""
        claims = {status.host: status.epoch for status in statuses if status.epoch is not None and status.epoch > epoch}
        ordered = sorted(claims.values(), reverse=True)
        self.believed = ordered[self._needed - 1] if len(ordered) >= self._needed else None
        self._since = {host: self._since.get(host, self._clock()) for host in claims}
        for host, since in self._since.items():
            if self.believed is None and self._clock() - since >= self._doubt_s and host not in self._told:
                self._told.add(host)
                what = f"it alone says that another supervisor (epoch {claims[host]}) is in charge: not believed"
                yield "doubted", {"host": host, "epoch": claims[host], "what": what}
