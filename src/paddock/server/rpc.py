"""The JSON-RPC methods that Paddock answers, for every transport.

An `RpcCaller` says which session a call is for; the table `METHODS` maps each method to its handler.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from starlette.requests import ClientDisconnect

import paddock
from paddock.errors import (
    InvalidToolArguments,
    MessageTooBig,
    PaddockError,
    SessionError,
    ToolFailure,
    ToolNotFound,
)
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.codec import encode
from paddock.protocol.episode import CallTool, ListTools
from paddock.protocol.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    RpcCall,
    RpcError,
)
from paddock.sessions.dispatch import tools_of
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    from paddock.server.service import Service

DisconnectWait = Callable[[], Awaitable[None]]
BATCH_TOO_BIG = "not executed: the answers to this batch are larger than the largest message already"
logger = logging.getLogger("paddock.server")


class RpcCaller(Protocol):
    """The peer that calls. Each transport has its own way to name the session of a call."""

    is_disconnected: bool
    """Whether it was seen to disconnect."""
    speaks_mcp: bool
    """Whether it sent `initialize`. Then a failing tool is a result, and optional fields are omitted, not null."""

    @property
    def disconnect_wait(self) -> DisconnectWait | None:
        """A function that returns when the caller has disconnected; None if that cannot be noticed."""

    def owns(self, token: str) -> bool:
        """Whether the call came through the socket of the session with this token."""
        ...

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]: ...
    def find_session(self, params: dict[str, Any]) -> Session | None: ...
    async def initialize(self) -> None: ...
    async def create_session(self) -> str: ...


class SocketCaller:
    """A call inside a socket acts in that socket's own session, whatever id it names."""

    disconnect_wait: DisconnectWait | None = None
    is_disconnected = False

    def __init__(self, session: Session, *, speaks_mcp: bool = False) -> None:
        self._session = session
        self.speaks_mcp = speaks_mcp

    def owns(self, token: str) -> bool:
        return token in (self._session.id, self._session.token)

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self._session)

    def find_session(self, params: dict[str, Any]) -> Session | None:
        return self._session

    async def initialize(self) -> None:
        self.speaks_mcp = True

    async def create_session(self) -> str:
        """The token of the socket's own session if it was made to be attached to; else its id, which opens none."""
        return self._session.token if self._session.origin is Origin.CREATED else self._session.id


async def answer(
    service: Service, caller: RpcCaller, document: Any, timeout: float | None = None
) -> dict[str, Any] | None:
    """Answer one parsed JSON-RPC document; None for a notification."""
    try:
        call = jsonrpc.read(document)
    except RpcError as error:
        return jsonrpc.failure(error)
    return await respond(service, caller, call, timeout)


async def respond(
    service: Service, caller: RpcCaller, call: RpcCall, timeout: float | None = None
) -> dict[str, Any] | None:
    """Carry out one call. Raises ClientDisconnect if its caller left: all other errors are answers here.

    `timeout` is how many seconds its caller grants the environment, if that is less than the server does.
    """
    try:
        method = METHODS.get(call.method)
        if call.is_notification or call.method.startswith("notifications/"):
            _handle_notification(caller, call)
            return None
        if method is None:
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: {call.method}")
        _check_version(call)
        return jsonrpc.result(await method(service, caller, call, timeout), call.id)
    except PaddockError as error:
        return jsonrpc.failure(error, call.id)
    except ClientDisconnect:
        raise
    except Exception as error:
        logger.exception("%s failed", call.method)
        return jsonrpc.failure(RpcError(INTERNAL_ERROR, f"Internal error: {type(error).__name__}"), call.id)


async def respond_to_batch(
    service: Service, caller: RpcCaller, calls: list[RpcCall | RpcError]
) -> list[orjson.Fragment]:
    """Carry out a batch in its order; the answers are JSON already. Raises ClientDisconnect if its caller left.

    All answers leave together, so nothing else bounds them: once they are as large as the largest message may be,
    the remaining calls are not executed.
    """
    limit = service.config.limits.message_bytes
    size, answers = 0, []
    for call in calls:
        if caller.is_disconnected:
            raise ClientDisconnect
        answer: dict[str, Any] | None
        if isinstance(call, RpcError):
            answer = jsonrpc.failure(call)
        elif size > limit and not call.is_notification:
            answer = jsonrpc.failure(MessageTooBig(BATCH_TOO_BIG, hint="send fewer calls in a batch"), call.id)
        else:
            answer = await respond(service, caller, call)
        if answer is not None:
            text = encode_response(answer)
            size += len(text)
            answers.append(orjson.Fragment(text))
    return answers


def encode_response(document: Any) -> bytes:
    """The JSON of an answer. What cannot be written is an error itself."""
    try:
        return encode(document)
    except PaddockError as error:
        return encode(jsonrpc.failure(error, document.get("id") if isinstance(document, dict) else None))


def respond_inline(service: Service, caller: RpcCaller, call: RpcCall) -> dict[str, Any] | None:
    """Like `respond`, for a tool call that is answered inline. None for any other call: nothing was executed."""
    if call.method != "tools/call" or call.is_notification or mcp.is_stateless(call.params):
        return None
    try:
        request = _tool_request(call)
        session = caller.find_session(call.params)
        if session is None or not service.dispatch.answers_inline(session):
            return None
        answers: list[Any] = []
        service.dispatch.submit(session, request, lambda _, answer: answers.append(answer), number=("rpc", call.id))
        answer = answers[0]
        if isinstance(answer, ToolFailure):
            answer = _failure_result(caller, call, answer)
        if isinstance(answer, PaddockError):
            raise answer
        return jsonrpc.result(_in_form_of(caller, call, answer), call.id)
    except PaddockError as error:
        return jsonrpc.failure(error, call.id)


async def _initialize(service: Service, caller: RpcCaller, call: RpcCall, _: float | None) -> dict[str, Any]:
    await caller.initialize()
    return {
        "protocolVersion": mcp.choose_version(call.params.get("protocolVersion")),
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": server_info(service),
    }


async def _ping(_service: Service, caller: RpcCaller, call: RpcCall, _: float | None) -> dict[str, Any]:
    caller.find_session(call.params)
    return {}


async def _list_tools(service: Service, caller: RpcCaller, call: RpcCall, timeout: float | None) -> dict[str, Any]:
    # As in OpenEnv, an unknown session is reported before an environment without tools.
    caller.find_session(call.params)
    tools = tools_of(service.spec)
    if tools is None:
        async with caller.session(call.params) as session:
            tools = await service.dispatch.execute(
                session, ListTools(), timeout=timeout, disconnect_wait=caller.disconnect_wait
            )
    return _in_form_of(caller, call, {"tools": tools, **mcp.COMPLETE})


async def _call_tool(service: Service, caller: RpcCaller, call: RpcCall, timeout: float | None) -> Any:
    request = _tool_request(call)
    async with caller.session(call.params) as session:
        try:
            result = await service.dispatch.execute(
                session, request, number=("rpc", call.id), timeout=timeout, disconnect_wait=caller.disconnect_wait
            )
        except ToolFailure as error:
            result = _failure_result(caller, call, error)
        return _in_form_of(caller, call, result)


def _tool_request(call: RpcCall) -> CallTool:
    name, arguments = call.params.get("name"), call.params.get("arguments")
    if not name:
        raise RpcError(INVALID_PARAMS, "Missing 'name' in params")
    if not isinstance(name, str) or not isinstance(arguments, (dict, type(None))):
        raise RpcError(INVALID_PARAMS, "Invalid params: name is a string, arguments an object")
    return CallTool(name, arguments or {})


def _failure_result(caller: RpcCaller, call: RpcCall, error: ToolFailure) -> dict[str, Any]:
    """The result of a tool that ran and failed, for callers that follow the MCP spec. Raises the error for others."""
    if not _follows_spec(caller, call) or isinstance(error, (ToolNotFound, InvalidToolArguments)):
        raise error
    return mcp.tool_failure(error.message)


def _in_form_of(caller: RpcCaller, call: RpcCall, result: dict[str, Any]) -> dict[str, Any]:
    """A result in the form that the caller expects."""
    return mcp.for_mcp(result) if _follows_spec(caller, call) else result


def _follows_spec(caller: RpcCaller, call: RpcCall) -> bool:
    return caller.speaks_mcp or mcp.is_stateless(call.params)


async def _create_session(_service: Service, caller: RpcCaller, *_: Any) -> dict[str, Any]:
    return {"session_id": await caller.create_session()}


async def _close_session(service: Service, caller: RpcCaller, call: RpcCall, _: float | None) -> dict[str, Any]:
    token = call.params.get("session_id")
    if not token:
        raise RpcError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
    if caller.owns(str(token)):
        raise RpcError(INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method")
    session = service.manager.find(str(token))
    if session.attachment is not None:
        session.close_when_detached = True
        return {"session_id": token, "closed": False, "closing": True}
    session.close("it was closed over MCP")
    return {"session_id": token, "closed": True}


async def _discover(service: Service, _caller: RpcCaller, call: RpcCall, _: float | None) -> dict[str, Any]:
    return mcp.discovery(server_info(service), call.params)


METHODS: dict[str, Callable[[Any, Any, RpcCall, float | None], Awaitable[Any]]] = {
    "initialize": _initialize,
    "ping": _ping,
    "server/discover": _discover,
    "tools/list": _list_tools,
    "tools/call": _call_tool,
    "openenv/session/create": _create_session,
    "openenv/session/close": _close_session,
}


def server_info(service: Service) -> dict[str, Any]:
    return {"name": f"paddock:{service.spec.name}", "version": paddock.__version__}


def _check_version(call: RpcCall) -> None:
    """A request of a revision without `initialize` names its own; refuse those we do not speak."""
    version = mcp.stateless_version(call.params)
    if version is not None and version not in mcp.VERSIONS:
        raise mcp.unsupported(version)


def _handle_notification(caller: RpcCaller, call: RpcCall) -> None:
    """Only a cancellation has an effect."""
    if call.method != "notifications/cancelled":
        return
    try:
        session = caller.find_session(call.params)
    except SessionError:
        return
    if session is not None:
        session.cancel(("rpc", call.params.get("requestId")))
