"""Errors of a fleet client, classified by type, status and structured body.

The text of an error counts in one place only (`http`): where a server has no other way to say that a later attempt
may succeed.

FleetError
├── Unreachable            no connection: the request did not run
├── AnswerLost             the connection broke after the request left: it may have run
├── FleetTimeout           no answer in time: it may have run
├── PlaneError             an HTTP answer that is an error
│   └── InstanceLimit
├── RequestRefused         an HTTP 200 with `success: false`: the request did not run
├── ProtocolError          an answer that cannot be parsed
│   ├── Unsendable         a request that is not JSON
│   └── RpcFailure         a JSON-RPC error
├── InstanceGone           the instance ended: nothing can be retried
├── ProvisioningFailed     no instance could be created
├── ToolsUnavailable       no endpoint has a tool for the agent
├── UnknownTool
├── ToolCallFailed
│   └── ToolOutcomeUnknown  the call may have run; repeating it is not safe
├── VerifierInvalid        the verifier has no clear entry point
└── EpisodeState           a step without an episode

Every error has three attributes that decide on a retry: `ran` (False: provably not; None: unknown), `transient` (the
same request may succeed later) and `retry_after` (the seconds in the server's header).
"""

from __future__ import annotations

from typing import Any

from paddock.errors import PaddockError


class FleetError(PaddockError):
    """A failure of Fleet: the plane, an instance, or the way to them."""

    code = "FLEET_ERROR"
    http_status = 502

    ran: bool | None = False
    transient: bool = False
    retry_after: float | None = None


class Unreachable(FleetError, ConnectionError):
    """No connection could be made, so nothing was executed."""

    code = "FLEET_UNREACHABLE"
    transient = True


class AnswerLost(FleetError, ConnectionError):
    """The connection broke after the request was sent."""

    code = "FLEET_ANSWER_LOST"
    ran: bool | None = None
    transient = True


class FleetTimeout(FleetError, TimeoutError):
    """No answer came within the deadline."""

    code = "FLEET_TIMEOUT"
    ran: bool | None = None
    transient = True


class PlaneError(FleetError):
    """The server answered with an error status."""

    code = "FLEET_PLANE_ERROR"

    def __init__(
        self,
        message: str,
        /,
        *,
        status: int,
        detail: Any = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, status=status)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after
        # An error status below 500 refuses the request; above, the work may have been done before it failed.
        self.ran = False if status < 500 else None
        self.transient = status in TRANSIENT_STATUSES if retryable is None else retryable


TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524))


class InstanceLimit(PlaneError):
    """The plane runs as many instances as its limit allows."""

    code = "FLEET_INSTANCE_LIMIT"


class RequestRefused(FleetError):
    """A successful status, and a body that says that the request did not run."""

    code = "FLEET_REQUEST_REFUSED"

    def __init__(self, message: str, /, *, detail: Any = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.detail = detail
        self.transient = retryable


class ProtocolError(FleetError, ValueError):
    """The answer is not what the protocol requires."""

    code = "FLEET_PROTOCOL_ERROR"
    ran: bool | None = None


class Unsendable(ProtocolError):
    """The request cannot be written as JSON, so it was not sent."""

    code = "FLEET_UNSENDABLE"
    ran: bool | None = False


class RpcFailure(ProtocolError):
    """The server answered a JSON-RPC request with an error."""

    code = "FLEET_RPC_FAILURE"

    def __init__(self, message: str, number: int, details: Any = None) -> None:
        super().__init__(message, rpc_code=number)
        self.number = number
        self.details = details
        if number in NOT_RUN_CODES:
            self.ran = False


NOT_RUN_CODES = frozenset((-32700, -32600, -32601, -32602))
"""JSON-RPC codes of a request that did not run."""


class InstanceGone(FleetError, ConnectionError):
    """The instance has ended."""

    code = "FLEET_INSTANCE_GONE"


class ProvisioningFailed(FleetError, RuntimeError):
    """No instance could be created, or it did not become ready."""

    code = "FLEET_PROVISIONING_FAILED"


class ToolsUnavailable(FleetError, RuntimeError):
    """No endpoint of the instance has a tool for the agent."""

    code = "FLEET_TOOLS_UNAVAILABLE"


class UnknownTool(FleetError, ValueError, LookupError):
    """The instance has no tool of this name."""

    code = "FLEET_UNKNOWN_TOOL"


class ToolCallFailed(FleetError, RuntimeError):
    """A tool call could not be made."""

    code = "FLEET_TOOL_CALL_FAILED"


class ToolOutcomeUnknown(ToolCallFailed):
    """A tool call was sent and its answer is lost: it may have been executed."""

    code = "FLEET_OUTCOME_UNKNOWN"
    ran: bool | None = None


class VerifierInvalid(FleetError, ValueError):
    """The source of a verifier cannot be used."""

    code = "FLEET_VERIFIER_INVALID"


class EpisodeState(FleetError, RuntimeError):
    """The method cannot be called in this state of the episode."""

    code = "FLEET_EPISODE_STATE"
