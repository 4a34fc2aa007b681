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
    from paddock.errors import AgentError as AgentError
    from paddock.errors import CapacityReached as CapacityReached
    from paddock.errors import ClientError as ClientError
    from paddock.errors import ClusterError as ClusterError
    from paddock.errors import ConcurrencyConfigurationError as ConcurrencyConfigurationError
    from paddock.errors import ConfigError as ConfigError
    from paddock.errors import ConnectFailed as ConnectFailed
    from paddock.errors import DeadlineExceeded as DeadlineExceeded
    from paddock.errors import EnvironmentCrashed as EnvironmentCrashed
    from paddock.errors import EnvironmentFailure as EnvironmentFailure
    from paddock.errors import EpisodeLost as EpisodeLost
    from paddock.errors import FactoryError as FactoryError
    from paddock.errors import Forbidden as Forbidden
    from paddock.errors import HostLost as HostLost
    from paddock.errors import ImageError as ImageError
    from paddock.errors import InvalidJSON as InvalidJSON
    from paddock.errors import InvalidMessage as InvalidMessage
    from paddock.errors import InvalidToolArguments as InvalidToolArguments
    from paddock.errors import MessageTooBig as MessageTooBig
    from paddock.errors import ModelError as ModelError
    from paddock.errors import NotSupported as NotSupported
    from paddock.errors import OutcomeUnknown as OutcomeUnknown
    from paddock.errors import PaddockError as PaddockError
    from paddock.errors import QueueTimeout as QueueTimeout
    from paddock.errors import ReplyExpired as ReplyExpired
    from paddock.errors import RequestError as RequestError
    from paddock.errors import RolloutError as RolloutError
    from paddock.errors import SandboxError as SandboxError
    from paddock.errors import ServerDraining as ServerDraining
    from paddock.errors import ServerError as ServerError
    from paddock.errors import SessionBusy as SessionBusy
    from paddock.errors import SessionClosed as SessionClosed
    from paddock.errors import SessionError as SessionError
    from paddock.errors import SessionNotFound as SessionNotFound
    from paddock.errors import SessionTaken as SessionTaken
    from paddock.errors import StepCancelled as StepCancelled
    from paddock.errors import StepTimeout as StepTimeout
    from paddock.errors import StoreError as StoreError
    from paddock.errors import StreamError as StreamError
    from paddock.errors import TargetError as TargetError
    from paddock.errors import TaskError as TaskError
    from paddock.errors import ToolFailure as ToolFailure
    from paddock.errors import ToolNotFound as ToolNotFound
    from paddock.errors import Unauthorized as Unauthorized
    from paddock.errors import UnknownType as UnknownType
    from paddock.errors import VerifierError as VerifierError
    from paddock.errors import WorkerUnavailable as WorkerUnavailable
    from paddock.server.app import create_app as create_app
    from paddock.server.run import serve as serve
    from paddock.tools import ToolReturn as ToolReturn
    from paddock.types import Action as Action
    from paddock.types import CallResult as CallResult
    from paddock.types import Observation as Observation
    from paddock.types import State as State
    from paddock.types import StepResult as StepResult

__version__ = VERSION

_ERRORS = (
    "AgentError",
    "CapacityReached",
    "ClientError",
    "ClusterError",
    "ConcurrencyConfigurationError",
    "ConfigError",
    "ConnectFailed",
    "DeadlineExceeded",
    "EnvironmentCrashed",
    "EnvironmentFailure",
    "EpisodeLost",
    "FactoryError",
    "Forbidden",
    "HostLost",
    "ImageError",
    "InvalidJSON",
    "InvalidMessage",
    "InvalidToolArguments",
    "MessageTooBig",
    "ModelError",
    "NotSupported",
    "OutcomeUnknown",
    "PaddockError",
    "QueueTimeout",
    "ReplyExpired",
    "RequestError",
    "RolloutError",
    "SandboxError",
    "ServerDraining",
    "ServerError",
    "SessionBusy",
    "SessionClosed",
    "SessionError",
    "SessionNotFound",
    "SessionTaken",
    "StepCancelled",
    "StepTimeout",
    "StoreError",
    "StreamError",
    "TargetError",
    "TaskError",
    "ToolFailure",
    "ToolNotFound",
    "Unauthorized",
    "UnknownType",
    "VerifierError",
    "WorkerUnavailable",
)
_MODULES = {
    **dict.fromkeys(_ERRORS, "paddock.errors"),
    "Action": "paddock.types",
    "CallResult": "paddock.types",
    "Client": "paddock.client.client",
    "Environment": "paddock.env",
    "Observation": "paddock.types",
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
__all__ = [*_MODULES, "__version__"]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
