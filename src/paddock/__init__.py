"""Paddock serves environments to LLM agents over HTTP, WebSocket and MCP.

Importing this package loads no server and no client: the names below are fetched when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.distribution import VERSION
from paddock.lazy import lazy_exports

if TYPE_CHECKING:
    from paddock.client.client import Client as Client
    from paddock.client.reconnect import Reconnect as Reconnect
    from paddock.client.reconnect import Timeouts as Timeouts
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
    "Reconnect": "paddock.client.reconnect",
    "State": "paddock.types",
    "StepResult": "paddock.types",
    "SyncClient": "paddock.client.sync",
    "Timeouts": "paddock.client.reconnect",
    "ToolEnvironment": "paddock.env",
    "ToolReturn": "paddock.tools",
    "VectorClient": "paddock.client.vector",
    "create_app": "paddock.server.app",
    "serve": "paddock.server.run",
    "tool": "paddock.env",
}
__all__ = [*_HOMES, "__version__"]
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
