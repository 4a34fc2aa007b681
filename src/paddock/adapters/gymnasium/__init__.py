"""Gymnasium both ways: its environments behind our server, and our server behind its interface.

`paddock serve gymnasium:CartPole-v1` serves one; `RemoteEnv(url)` is a `gymnasium.Env` again.
"""

from __future__ import annotations

from paddock.adapters.gymnasium.environment import GymnasiumEnvironment
from paddock.adapters.gymnasium.remote import RemoteEnv, RemoteVectorEnv

__all__ = ["GymnasiumEnvironment", "RemoteEnv", "RemoteVectorEnv"]
