"""The backend `direct`: every host agent is started by itself, on this computer or over ssh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gangline.launch.agents import AgentBackend, Started, stand_by, start_agent
from gangline.launch.backend import HostRequest, LaunchRequest, Promises
from gangline.transport.transport import Transport


class DirectBackend(AgentBackend):
    """One connection per host starts the host agent there; then the agent needs nobody."""

    name: ClassVar[str] = "direct"
    promises: ClassVar[Promises] = Promises()

    def start_agents(
        self, request: LaunchRequest, transports: Mapping[str, Transport], asked: Mapping[str, Any], begun: Started
    ) -> None:
        """See `AgentBackend.start_agents`.

        The head is first and alone: of many runs that want the same hosts, one gets the head's slots, then all others.
        """
        for names in (request.names[:1], request.names[1:]):
            self.start_all(request.on(names), begun, lambda part: start_agent(part, transports[part.host], asked))

    def stand_by(
        self,
        part: HostRequest,
        transport: Transport,
        *,
        epoch: int = 1,
        secrets: Mapping[str, str] | None = None,
    ) -> HostRequest:
        """See `StandbyBackend.stand_by`."""
        return stand_by(part, transport, {"epoch": epoch, "secrets": dict(secrets or {})})
