"""Tools that return their arguments: the smallest tool environment, and a check of the wire."""

from __future__ import annotations

from typing import Any

from paddock.env import ToolEnvironment, tool
from paddock.types import Observation


class Echo(ToolEnvironment):
    """Says back what it is told."""

    concurrent_sessions = True
    inline = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation(reward=0.0, metadata={"status": "ready", "message": "Echo environment ready!"})

    @tool(read_only=True, idempotent=True)
    def echo_message(self, message: str) -> str:
        """Say the message back."""
        return message

    @tool(read_only=True, idempotent=True)
    def echo_with_length(self, message: str) -> dict[str, Any]:
        """Say the message back, with its length."""
        return {"message": message, "length": len(message)}
