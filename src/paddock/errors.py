"""Every error Paddock raises, as one tree.

    PaddockError
    ├── ConfigError                    a flag, a target or a class cannot be used as given
    │   ├── TargetError
    │   └── ConcurrencyConfigurationError
    ├── RequestError                   the message is wrong; nothing was executed
    │   ├── InvalidJSON
    │   ├── UnknownType
    │   ├── InvalidMessage
    │   ├── MessageTooBig
    │   ├── Unauthorized
    │   └── Forbidden
    ├── SessionError                   there is no session to act in
    │   ├── SessionNotFound
    │   │   └── HostLost
    │   ├── WorkerUnavailable
    │   ├── SessionTaken
    │   ├── SessionBusy
    │   ├── SessionClosed
    │   ├── ReplyExpired
    │   ├── CapacityReached
    │   │   └── QueueTimeout
    │   └── ServerDraining
    ├── EnvironmentFailure             the environment's own code failed
    │   ├── EnvironmentCrashed
    │   ├── FactoryError
    │   ├── StepTimeout
    │   ├── StepCancelled
    │   ├── NotSupported
    │   └── ToolFailure
    │       ├── ToolNotFound
    │       └── InvalidToolArguments
    ├── ClusterError                   Ray is missing, cannot be reached, or cannot place what was asked
    ├── RolloutError                   a part of a rollout broke; the name says which
    │   ├── TaskError
    │   │   └── ImageError
    │   ├── AgentError
    │   ├── ModelError
    │   ├── SandboxError
    │   ├── VerifierError
    │   ├── StoreError
    │   └── StreamError
    └── ClientError                    seen by a caller of `Client`
        ├── ConnectFailed
        ├── OutcomeUnknown
        ├── EpisodeLost
        ├── DeadlineExceeded
        └── ServerError

An error carries what every transport needs to report it: `code` crosses the wire, `http_status` and
`rpc_code` are its HTTP and JSON-RPC forms, `exit_code` is that of the command line, `hint` says what
to do about it, and `data` has the values behind the message.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PaddockError(Exception):
    """The root. Catch it to catch everything that Paddock raises on purpose."""

    code: ClassVar[str] = "PADDOCK_ERROR"
    kind: ClassVar[str | None] = None
    """Tells apart errors that share a `code` because OpenEnv has only one for all of them."""
    http_status: ClassVar[int] = 500
    rpc_code: ClassVar[int] = -32603
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, /, *, hint: str | None = None, **data: Any) -> None:
        super().__init__(message)
        self.message = str(message)
        self.hint = hint
        self.data = data
        if hint:
            self.add_note(f"hint: {hint}")

    def __str__(self) -> str:
        return self.message

    def to_wire(self) -> dict[str, Any]:
        """The `data` of an error frame: message, code, and whatever else is known."""
        optional = {"kind": self.kind, "hint": self.hint}
        present = {key: value for key, value in optional.items() if value}
        return {"message": self.message, "code": self.code, **present, **self.data}


class ConfigError(PaddockError, ValueError):
    """A setting, an option or an argument cannot be used."""

    code = "CONFIG_ERROR"
    exit_code = 2


class TargetError(ConfigError):
    """The TARGET of a command names no environment that can be loaded."""

    code = "TARGET_ERROR"


class ConcurrencyConfigurationError(ConfigError):
    """More sessions were asked for than the environment class says it can take."""

    code = "CONCURRENCY_ERROR"


class RequestError(PaddockError):
    """A request is not as it should be. It was not executed."""

    code = "REQUEST_ERROR"
    http_status = 400
    rpc_code = -32600


class InvalidJSON(RequestError):
    """A message is not JSON."""

    code = "INVALID_JSON"
    http_status = 422
    rpc_code = -32700


class UnknownType(RequestError):
    """A message has an unknown `type`."""

    code = "UNKNOWN_TYPE"


class InvalidMessage(RequestError):
    """A field is missing, unknown or wrong; `data["errors"]` names each one, and `str` lists them."""

    code = "VALIDATION_ERROR"
    http_status = 422
    rpc_code = -32602
    max_listed: ClassVar[int] = 10

    def __str__(self) -> str:
        # On the wire `message` is the same for all of them, as OpenEnv has it.
        return f"{self.message}: {'; '.join(self.problems)}" if self.problems else self.message

    @property
    def problems(self) -> list[str]:
        """Each wrong field, and what is wrong with it."""
        errors = self.data.get("errors")
        listed = errors if isinstance(errors, list) else []
        return [_problem(error) for error in listed if isinstance(error, dict)][: self.max_listed]


class MessageTooBig(RequestError):
    """A message is larger than the server accepts."""

    code = "MESSAGE_TOO_BIG"
    http_status = 413


class Unauthorized(RequestError):
    """The token is missing or wrong."""

    code = "UNAUTHORIZED"
    http_status = 401


class Forbidden(RequestError):
    """A foreign browser origin or host asked."""

    code = "FORBIDDEN"
    http_status = 403


class SessionError(PaddockError):
    """The session cannot execute the request."""

    code = "SESSION_ERROR"
    http_status = 409
    rpc_code = -32600


class SessionNotFound(SessionError, LookupError):
    """No session has this token: it never existed, was closed, or was kept too long unused."""

    kind = "not_found"
    http_status = 404
    rpc_code = -32602


class HostLost(SessionNotFound):
    """The machine or process that kept the session is gone, and the session with it."""

    kind = "host_lost"
    http_status = 410


class WorkerUnavailable(SessionError):
    """The worker that keeps the session does not answer now. The session is not lost: try again."""

    kind = "unavailable"
    http_status = 503
    rpc_code = -32000


class SessionTaken(SessionError):
    """Another socket is attached to this session."""

    kind = "taken"


class SessionBusy(SessionError):
    """An earlier step ran over its deadline and still holds the environment."""

    kind = "busy"


class SessionClosed(SessionError):
    """The session has been closed."""

    kind = "closed"
    http_status = 410


class ReplyExpired(SessionError):
    """The request was carried out, but its answer is no longer kept."""

    kind = "reply_expired"


class CapacityReached(SessionError):
    """The server has no free session."""

    code = "CAPACITY_REACHED"
    http_status = 503
    rpc_code = -32000


class QueueTimeout(CapacityReached, TimeoutError):
    """No slot became free within the time that this caller wanted to wait."""

    kind = "queue_timeout"


class ServerDraining(SessionError):
    """The server is shutting down."""

    code = "SERVER_DRAINING"
    http_status = 503
    rpc_code = -32000


class EnvironmentFailure(PaddockError):
    """The environment raised an exception, or broke its contract."""

    code = "EXECUTION_ERROR"


class EnvironmentCrashed(EnvironmentFailure):
    """The process that the environment ran in has ended, and the episode with it."""

    kind = "crashed"


class FactoryError(EnvironmentFailure):
    """The environment could not be built."""

    code = "FACTORY_ERROR"
    rpc_code = -32000


class StepTimeout(EnvironmentFailure, TimeoutError):
    """The environment did not answer within its deadline."""

    code = "STEP_TIMEOUT"
    http_status = 504


class StepCancelled(EnvironmentFailure):
    """The caller cancelled the request or disconnected before the environment answered."""

    code = "STEP_CANCELLED"
    http_status = 499


class NotSupported(EnvironmentFailure):
    """The environment does not have this ability (tools, tasks)."""

    code = "NOT_SUPPORTED"
    http_status = 501


class ToolFailure(EnvironmentFailure):
    """A tool raised. `error_type` is what a tool observation reports."""

    code = "TOOL_ERROR"
    error_type: ClassVar[str] = "execution_error"


class ToolNotFound(ToolFailure, LookupError):
    """The environment has no tool of this name."""

    error_type = "tool_not_found"
    rpc_code = -32602


class InvalidToolArguments(ToolFailure):
    """The arguments of a tool call do not fit its schema."""

    error_type = "invalid_args"
    rpc_code = -32602


def tool_error_class(error_type: str) -> type[ToolFailure]:
    """The class for the `error_type` of a tool observation."""
    classes = {kind.error_type: kind for kind in (ToolNotFound, InvalidToolArguments)}
    return classes.get(str(getattr(error_type, "value", error_type)), ToolFailure)


class ClusterError(PaddockError):
    """Ray is missing, cannot be reached, or cannot place what was asked."""

    code = "CLUSTER_ERROR"
    http_status = 503


class RolloutError(PaddockError):
    """The parts of a rollout raise these; a rollout turns them into its outcome."""

    code = "ROLLOUT_ERROR"


class TaskError(RolloutError, ValueError):
    """The task cannot be read, or its own set-up failed."""

    code = "TASK_ERROR"
    exit_code = 2


class ImageError(TaskError):
    """An image cannot be pulled, built, imported or used."""

    code = "IMAGE_ERROR"


class AgentError(RolloutError):
    """The agent program could not be installed, started or understood."""

    code = "AGENT_ERROR"


class ModelError(RolloutError):
    """The model endpoint does not answer, refuses, or breaks off."""

    code = "MODEL_ERROR"


class SandboxError(RolloutError):
    """The sandbox could not be made, broke, or is gone."""

    code = "SANDBOX_ERROR"


class VerifierError(RolloutError):
    """The verifier could not be run."""

    code = "VERIFIER_ERROR"


class StoreError(RolloutError):
    """The store cannot be opened, read or written."""

    code = "STORE_ERROR"


class StreamError(RolloutError):
    """A stream for a trainer cannot go on, or an update of the weights would make its rollouts too old."""

    code = "STREAM_ERROR"


class ClientError(PaddockError):
    """Something that the client found out, not the server."""

    code = "CLIENT_ERROR"


class ConnectFailed(ClientError, ConnectionError):
    """The server cannot be reached, or refused the connection."""

    code = "CONNECT_FAILED"


class OutcomeUnknown(ClientError, ConnectionError):
    """The request was sent and its answer is lost: it may have been executed, so a repeat may act twice."""

    code = "OUTCOME_UNKNOWN"


class EpisodeLost(ClientError, ConnectionError):
    """The connection dropped and the episode cannot be resumed: `reset()` starts a new one."""

    code = "EPISODE_LOST"


class DeadlineExceeded(ClientError, TimeoutError):
    """The server did not answer in time. What it did is unknown until it answers."""

    code = "DEADLINE_EXCEEDED"


class ServerError(ClientError):
    """An error that the server reported under a code this client does not know."""

    code = "SERVER_ERROR"


def from_wire(data: dict[str, Any]) -> PaddockError:
    """The error that an error frame's `data` describes."""
    rest = dict(data)
    code = rest.pop("code", None)
    kind = rest.pop("kind", None)
    message = str(rest.pop("message", "the server reported an error"))
    hint = rest.pop("hint", None)
    error_class = _BY_NAME.get((str(code), kind)) or _BY_NAME.get((str(code), None))
    if error_class is None:
        return ServerError(f"{message} (code: {code})", hint=hint, server_code=code, **rest)
    return error_class(message, hint=hint, **rest)


def _problem(error: dict[str, Any]) -> str:
    place = ".".join(map(str, error.get("loc") or ()))
    reason = str(error.get("msg") or "it does not fit").removeprefix("Value error, ")
    return f"{place}: {reason}" if place else reason


def _family(root: type[PaddockError]) -> list[type[PaddockError]]:
    return [root, *(descendant for child in root.__subclasses__() for descendant in _family(child))]


# The first class under a name keeps it: a parent comes before the children that add no name of their own.
_BY_NAME: dict[tuple[str, str | None], type[PaddockError]] = {}
for _class in _family(PaddockError):
    _BY_NAME.setdefault((_class.code, _class.kind), _class)
