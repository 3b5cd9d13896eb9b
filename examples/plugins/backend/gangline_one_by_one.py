"""The backend `one-by-one`: each host agent is started when the one before it stands.

For a login server between here and the hosts that takes few connections at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gangline.launch.agents import AgentBackend, Started, start_agent
from gangline.launch.backend import LaunchRequest, Promises
from gangline.transport.transport import Transport


class OneByOne(AgentBackend):
    """As `direct`, which starts the agents of all hosts but the first at once."""

    name: ClassVar[str] = "one-by-one"
    promises: ClassVar[Promises] = Promises()

    def start_agents(
        self, request: LaunchRequest, transports: Mapping[str, Transport], asked: Mapping[str, Any], begun: Started
    ) -> None:
        """Start the agents; raise at the first that does not stand."""
        for name in request.names:
            self.start_all(request.on([name]), begun, lambda part: start_agent(part, transports[part.host], asked))
