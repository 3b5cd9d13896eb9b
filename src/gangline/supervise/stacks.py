"""Asking hosts where their ranks stand, beside the supervisor: one that does not answer keeps nobody waiting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gangline.errors import GanglineError
from gangline.launch.backend import HostRequest, Request
from gangline.remote.said import NONSENSE
from gangline.remote.transport import AGENT, Transport

AT_ONCE = 32
TIMEOUT_S = 10.0


class StackAsking:
    """Stacks of all ranks of an attempt, asked for once per suspicion. Not for several threads."""

    def __init__(self, request: Request, transports: Mapping[str, Transport]) -> None:
        self._request = request
        self._transports = transports
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline stacks")
        self._suspicion: int | None = None
        self._asked: dict[str, Future[Any]] = {}

    def about(self, suspicion: int) -> dict[str, Any]:
        """What hosts have said so far, for `Hang.take`; a suspicion with another number has all of them asked anew."""
        if suspicion != self._suspicion:
            self._suspicion = suspicion
            self._asked = {part.host: self._pool.submit(self._ask, part) for part in self._request.hosts}
        said = {host: future.result() for host, future in self._asked.items() if future.done()}
        return {host: answer for host, answer in said.items() if answer is not None}

    def _ask(self, part: HostRequest) -> Any:
        """What the host says; None if it says nothing."""
        request = {"rank_files": part.rank_files, "ranks": part.ranks, "program": part.program}
        stdin = json.dumps({"request": request}).encode()
        try:
            result = self._transports[part.host].run((AGENT, "stacks"), stdin=stdin, timeout_s=TIMEOUT_S)
            return json.loads(result.stdout)
        except (GanglineError, OSError, *NONSENSE):
            return None
