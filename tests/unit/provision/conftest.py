"""The agent within the process of the tests."""

from tests.fakes.agent import agent_here, real_agent

__all__ = ["agent_here", "real_agent"]
