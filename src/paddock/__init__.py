"""Paddock serves environments to LLM agents over HTTP, WebSocket and MCP.

Importing this package loads no server and no client: the names below are fetched when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddock.distribution import VERSION

if TYPE_CHECKING:
    from paddock.client.client import Client as Client
    from paddock.client.policy import Reconnect as Reconnect
    from paddock.client.policy import Timeouts as Timeouts
    from paddock.client.sync import SyncClient as SyncClient
    from paddock.client.vector import VectorClient as VectorClient
    from paddock.env import Environment as Environment
    from paddock.env import ToolEnvironment as ToolEnvironment
    from paddock.env import tool as tool
    from paddock.errors import PaddockError as PaddockError
    from paddock.server.app import create_app as create_app
    from paddock.server.run import serve as serve
    from paddock.tools import ToolReturn as ToolReturn
    from paddock.types import Action as Action
    from paddock.types import CallResult as CallResult
    from paddock.types import Observation as Observation
    from paddock.types import State as State
    from paddock.types import StepResult as StepResult

__version__ = VERSION

_HOMES = {
    "Action": "paddock.types",
    "CallResult": "paddock.types",
    "Client": "paddock.client.client",
    "Environment": "paddock.env",
    "Observation": "paddock.types",
    "PaddockError": "paddock.errors",
    "Reconnect": "paddock.client.policy",
    "State": "paddock.types",
    "StepResult": "paddock.types",
    "SyncClient": "paddock.client.sync",
    "Timeouts": "paddock.client.policy",
    "ToolEnvironment": "paddock.env",
    "ToolReturn": "paddock.tools",
    "VectorClient": "paddock.client.vector",
    "create_app": "paddock.server.app",
    "serve": "paddock.server.run",
    "tool": "paddock.env",
}
__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paddock' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
