"""Coding-agent rollouts as an environment: `paddock serve opencode`.

Its tools start, watch, stop and collect rollouts of OpenCode. The rollouts belong to the server process:
they go on when the session that started them ends, and what they leave behind is in the store.
"""

from __future__ import annotations

from paddock.envs.opencode.environment import OpenCodeEnvironment

__all__ = ["OpenCodeEnvironment"]
