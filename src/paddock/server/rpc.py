"""The JSON-RPC methods that Paddock answers, whichever way a call came.

A `Caller` says which session is meant; the table `METHODS` says what is done in it.
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
from paddock.protocol.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, Call, RpcError
from paddock.sessions.dispatch import tools_of
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    from paddock.server.service import Service

Left = Callable[[], Awaitable[None]]
BATCH_TOO_BIG = "not executed: the answers to this batch are larger than the largest message already"
logger = logging.getLogger("paddock.server")


class Caller(Protocol):
    """Who calls, and therefore which session is meant."""

    is_gone: bool
    """Whether it is known to have left."""
    speaks_mcp: bool
    """Whether it began as the MCP spec has it. There a failing tool is a result, and nothing optional is null."""

    @property
    def left(self) -> Left | None:
        """Something that returns when the caller has gone away, if that can be noticed."""

    def owns(self, token: str) -> bool:
        """Whether the call came through the socket of this very session."""
        ...

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]: ...
    def known_session(self, params: dict[str, Any]) -> Session | None: ...
    async def initialize(self) -> None: ...
    async def create(self) -> str: ...


class SocketCaller:
    """A call inside a socket acts in that socket's own session, whatever id it names."""

    left: Left | None = None
    is_gone = False

    def __init__(self, session: Session, *, speaks_mcp: bool = False) -> None:
        self.own = session
        self.speaks_mcp = speaks_mcp

    def owns(self, token: str) -> bool:
        return token in (self.own.id, self.own.token)

    def session(self, params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        return nullcontext(self.own)

    def known_session(self, params: dict[str, Any]) -> Session | None:
        return self.own

    async def initialize(self) -> None:
        self.speaks_mcp = True

    async def create(self) -> str:
        """The socket's own session: by a name that opens nothing, unless it was made to be attached to."""
        return self.own.token if self.own.door is Door.CREATED else self.own.id


async def answer(
    service: Service, caller: Caller, document: Any, timeout: float | None = None
) -> dict[str, Any] | None:
    """Answer one parsed JSON-RPC document; None for a notification."""
    try:
        call = jsonrpc.read(document)
    except RpcError as error:
        return jsonrpc.failure(error)
    return await respond(service, caller, call, timeout)


async def respond(
    service: Service, caller: Caller, call: Call, timeout: float | None = None
) -> dict[str, Any] | None:
    """Carry out one call. Raises ClientDisconnect if its caller left: all other errors are answers here.

    `timeout` is how many seconds its caller grants the environment, if that is less than the server does.
    """
    try:
        method = METHODS.get(call.method)
        if call.is_notification or call.method.startswith("notifications/"):
            _notified(caller, call)
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


async def respond_to_batch(service: Service, caller: Caller, calls: list[Call | RpcError]) -> list[orjson.Fragment]:
    """Carry out a batch in its order; the answers are JSON already. Raises ClientDisconnect if its caller left.

    All answers leave together, so nothing else bounds them: once they are as large as the largest message may be,
    the calls that are left are not executed.
    """
    limit = service.config.limits.message_bytes
    size, answers = 0, []
    for call in calls:
        if caller.is_gone:
            raise ClientDisconnect
        answer: dict[str, Any] | None
        if isinstance(call, RpcError):
            answer = jsonrpc.failure(call)
        elif size > limit and not call.is_notification:
            answer = jsonrpc.failure(MessageTooBig(BATCH_TOO_BIG, hint="send fewer calls in a batch"), call.id)
        else:
            answer = await respond(service, caller, call)
        if answer is not None:
            text = written(answer)
            size += len(text)
            answers.append(orjson.Fragment(text))
    return answers


def written(document: Any) -> bytes:
    """The JSON of an answer. What cannot be written is an error itself."""
    try:
        return encode(document)
    except PaddockError as error:
        return encode(jsonrpc.failure(error, document.get("id") if isinstance(document, dict) else None))


def respond_at_once(service: Service, caller: Caller, call: Call) -> dict[str, Any] | None:
    """Like `respond`, for a call of a tool that answers at once. None for any other, and then nothing was done."""
    if call.method != "tools/call" or call.is_notification or mcp.is_stateless(call.params):
        return None
    try:
        request = _tool_request(call)
        session = caller.known_session(call.params)
        if session is None or not service.dispatch.answers_at_once(session):
            return None
        answers: list[Any] = []
        service.dispatch.submit(session, request, lambda _, answer: answers.append(answer), number=("rpc", call.id))
        answer = answers[0]
        if isinstance(answer, ToolFailure):
            answer = _failed(caller, call, answer)
        if isinstance(answer, PaddockError):
            raise answer
        return jsonrpc.result(_told(caller, call, answer), call.id)
    except PaddockError as error:
        return jsonrpc.failure(error, call.id)


async def _initialize(service: Service, caller: Caller, call: Call, _: float | None) -> dict[str, Any]:
    await caller.initialize()
    return {
        "protocolVersion": mcp.choose_version(call.params.get("protocolVersion")),
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": server_info(service),
    }


async def _ping(_service: Service, caller: Caller, call: Call, _: float | None) -> dict[str, Any]:
    caller.known_session(call.params)
    return {}


async def _list_tools(service: Service, caller: Caller, call: Call, timeout: float | None) -> dict[str, Any]:
    # As in OpenEnv, an unknown session is told before an environment without tools is.
    caller.known_session(call.params)
    tools = tools_of(service.blueprint)
    if tools is None:
        async with caller.session(call.params) as session:
            tools = await service.dispatch.ask(session, ListTools(), timeout=timeout, left=caller.left)
    return _told(caller, call, {"tools": tools, **mcp.COMPLETE})


async def _call_tool(service: Service, caller: Caller, call: Call, timeout: float | None) -> Any:
    request = _tool_request(call)
    async with caller.session(call.params) as session:
        try:
            result = await service.dispatch.ask(
                session, request, number=("rpc", call.id), timeout=timeout, left=caller.left
            )
        except ToolFailure as error:
            result = _failed(caller, call, error)
        return _told(caller, call, result)


def _tool_request(call: Call) -> CallTool:
    name, arguments = call.params.get("name"), call.params.get("arguments")
    if not name:
        raise RpcError(INVALID_PARAMS, "Missing 'name' in params")
    if not isinstance(name, str) or not isinstance(arguments, (dict, type(None))):
        raise RpcError(INVALID_PARAMS, "Invalid params: name is a string, arguments an object")
    return CallTool(name, arguments or {})


def _failed(caller: Caller, call: Call, error: ToolFailure) -> dict[str, Any]:
    """The result of a tool that ran and failed, for those to whom that is a result. Raises all other errors."""
    if not _keeps_to_spec(caller, call) or isinstance(error, (ToolNotFound, InvalidToolArguments)):
        raise error
    return mcp.tool_failure(error.message)


def _told(caller: Caller, call: Call, result: dict[str, Any]) -> dict[str, Any]:
    """A result in the form of whoever asked."""
    return mcp.for_mcp(result) if _keeps_to_spec(caller, call) else result


def _keeps_to_spec(caller: Caller, call: Call) -> bool:
    return caller.speaks_mcp or mcp.is_stateless(call.params)


async def _create_session(_service: Service, caller: Caller, *_: Any) -> dict[str, Any]:
    return {"session_id": await caller.create()}


async def _close_session(service: Service, caller: Caller, call: Call, _: float | None) -> dict[str, Any]:
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


async def _discover(service: Service, _caller: Caller, call: Call, _: float | None) -> dict[str, Any]:
    return mcp.discovery(server_info(service), call.params)


METHODS: dict[str, Callable[[Any, Any, Call, float | None], Awaitable[Any]]] = {
    "initialize": _initialize,
    "ping": _ping,
    "server/discover": _discover,
    "tools/list": _list_tools,
    "tools/call": _call_tool,
    "openenv/session/create": _create_session,
    "openenv/session/close": _close_session,
}


def server_info(service: Service) -> dict[str, Any]:
    return {"name": f"paddock:{service.blueprint.name}", "version": paddock.__version__}


def _check_version(call: Call) -> None:
    """A request of a revision without `initialize` names its own; refuse those we do not speak."""
    asked = mcp.stateless_version(call.params)
    if asked is not None and asked not in mcp.VERSIONS:
        raise mcp.unsupported(asked)


def _notified(caller: Caller, call: Call) -> None:
    """Of all notifications only a cancellation asks for something."""
    if call.method != "notifications/cancelled":
        return
    try:
        session = caller.known_session(call.params)
    except SessionError:
        return
    if session is not None:
        session.cancel(("rpc", call.params.get("requestId")))
