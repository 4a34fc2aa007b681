"""The client: an episode behind `reset`, `step` and `state`, tools behind `tools` and `call_tool`.

Speaks to Paddock, to OpenEnv's own servers, or to an environment class in this process. Dicts in and
dicts out, or typed observations if it is told (or, in memory, knows) their types.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ValidationError

from paddock.client.outgoing import authorization, fields_of
from paddock.client.ownership import Ownership
from paddock.client.policy import Reconnect, Timeouts
from paddock.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidMessage,
    PaddockError,
    ServerError,
    SessionError,
    ToolFailure,
    from_wire,
    tool_error_class,
)
from paddock.protocol import jsonrpc, mcp
from paddock.types import CallResult, StepResult, ToolInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.client.transports import Transport

ObservationT = TypeVar("ObservationT")
KNOWN_TO_ALL = frozenset(("seed", "episode_id"))
SERVER_ERROR = -32000
"""The first of the numbers that JSON-RPC leaves to servers."""
BY_NUMBER: dict[Any, type[PaddockError]] = {
    jsonrpc.PARSE_ERROR: ServerError,
    jsonrpc.INVALID_REQUEST: SessionError,
    jsonrpc.METHOD_NOT_FOUND: ServerError,
    SERVER_ERROR: ServerError,
}
"""For servers that give only a number. INVALID_REQUEST means the session refused: our requests are well formed."""


class UnknownResetArgument(UserWarning):
    """An argument of `reset` that the environment will pass by: often a typing error."""


class Client(Generic[ObservationT]):
    """One session with one environment. Use it in `async with`, or call `close` when done.

    `target` is a URL, or an environment class to run in memory. `observation` and `state` are the
    model classes to return; without them a client of a URL returns dicts.
    """

    def __init__(
        self,
        target: str | Callable[[], Any],
        *,
        observation: type[ObservationT] | None = None,
        state: type[BaseModel] | None = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Reconnect | None = None,
        queue_timeout: float | None = None,
        on_queue: Callable[[int], None] | None = None,
        transport: Transport | str = "ws",
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self._observation: Any = observation
        self._reset_observation: Any = observation
        self._state: Any = state
        self._calls = itertools.count(1)
        self._ownership = Ownership()
        self._reset_takes: frozenset[str] | None = None
        """Names that `reset` takes; None if any. Known once `_asked_about_reset`."""
        self._asked_about_reset = False
        self._transport: Transport
        if isinstance(target, str):
            given = {**authorization(token), **(headers or {})}
            self._transport = _transport_for(
                target, transport, given, self.timeouts, reconnect, queue_timeout=queue_timeout, on_queue=on_queue
            )
        else:
            _refuse_in_memory(
                token=token, headers=headers, reconnect=reconnect, queue_timeout=queue_timeout, on_queue=on_queue,
                transport=None if transport == "ws" else transport,
            )  # fmt: skip
            self._transport = self._in_memory(target)

    @classmethod
    async def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """A client that is connected already. Raises ConnectFailed."""
        return await cls(target, **options).__aenter__()

    async def __aenter__(self) -> Self:
        self._check_owner()
        try:
            await self._transport.open()
        except BaseException:
            # It holds nothing, so it may be tried again anywhere.
            self._ownership.release(None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def transport(self) -> Transport:
        return self._transport

    async def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        """Begin a new episode, also after the last one was lost."""
        self._check_owner()
        limit = self.timeouts.request if timeout is None else timeout
        if unusual := arguments.keys() - KNOWN_TO_ALL:
            limit = await self._warn_of_unknown(unusual, limit)
        reply = await self._transport.request({"type": "reset", "data": arguments}, limit)
        return self._result(reply["data"], self._reset_observation)

    async def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        """Act. `action` is a dict or an action model.

        Raises InvalidMessage for an action that does not fit (nothing was done), EnvironmentFailure if
        the environment failed, EpisodeLost if the connection dropped for good.
        """
        reply = await self._request({"type": "step", "data": fields_of(action)}, timeout)
        return self._result(reply["data"], self._observation)

    async def state(self, *, timeout: float | None = None) -> Any:
        """The state of the episode, as a dict or the `state` model. Raises InvalidMessage if it does not fit."""
        data = (await self._request({"type": "state"}, timeout))["data"]
        return data if self._state is None else _as_model(self._state, data, "state")

    async def tools(self, *, timeout: float | None = None) -> list[ToolInfo]:
        """The tools of the environment."""
        result = await self._call("tools/list", {}, timeout)
        return [
            ToolInfo(
                name=tool["name"],
                description=tool.get("description") or "",
                input_schema=tool.get("inputSchema") or {"type": "object"},
            )
            for tool in result["tools"]
        ]

    async def call_tool(self, name: str, /, **arguments: Any) -> CallResult:
        """Call a tool: its value, and the reward and end of the episode that the call brought.

        Every keyword is the tool's, so the deadline is `timeouts.request`; `asyncio.timeout` around the call sets a
        shorter one, and stops the tool. Raises ToolFailure if the call failed, ToolNotFound or InvalidToolArguments
        if the server says that it was that, SessionError if the session takes no call, and what `step` raises.
        """
        result = await self._call("tools/call", {"name": name, "arguments": arguments}, None)
        if result.get("isError") or result.get("is_error"):
            raise ToolFailure(_text_of(result), tool_name=name)
        return call_result(result)

    async def schema(self) -> dict[str, Any]:
        """JSON Schemas of the environment's action, observation and state."""
        self._check_owner()
        schemas: dict[str, Any] = await self._transport.fetch("/schema")
        return schemas

    async def metadata(self) -> dict[str, Any]:
        self._check_owner()
        described: dict[str, Any] = await self._transport.fetch("/metadata")
        return described

    async def close(self) -> None:
        """End the session."""
        if self._ownership.release(getattr(self._transport, "abandon", None)):
            await self._transport.close()

    # -- inside -----------------------------------------------------------------------------------

    def _check_owner(self) -> None:
        """A transport that the caller made may know no `abandon`: then it is the caller's to let go of."""
        self._ownership.check(self, getattr(self._transport, "abandon", None))

    async def _request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        self._check_owner()
        return await self._transport.request(message, self.timeouts.request if timeout is None else timeout)

    async def _call(self, method: str, params: dict[str, Any], timeout: float | None) -> Any:
        call = {"jsonrpc": "2.0", "id": next(self._calls), "method": method, "params": params}
        response = (await self._request({"type": "mcp", "data": call}, timeout))["data"]
        if "error" in response:
            raise _rpc_error(response["error"], params.get("name"))
        return response["result"]

    def _result(self, data: dict[str, Any], kind: Any) -> StepResult[ObservationT]:
        result = result_of(data)
        if kind is None:
            return result
        whole = {**result.observation, "reward": result.reward, "done": result.done}
        return replace(result, observation=_as_model(kind, whole, "observation"))

    def _in_memory(self, make: Callable[[], Any]) -> Transport:
        from paddock.client.transports.memory import MemoryTransport

        transport = MemoryTransport(make)
        blueprint = transport.blueprint
        if self._observation is None and blueprint.tools is None:
            self._observation = blueprint.observation_type
            self._reset_observation = blueprint.reset_observation_type
            self._state = self._state or blueprint.state_type
        return transport

    async def _warn_of_unknown(self, given: set[str], timeout: float | None) -> float | None:
        """Say which arguments the environment does not know, where the server publishes what it knows.

        Returns what is left of the time.
        """
        began = monotonic()
        if not self._asked_about_reset:
            try:
                async with asyncio.timeout(timeout):
                    described = (await self._transport.fetch("/schema")).get("reset")
            except TimeoutError:
                raise DeadlineExceeded(f"no answer to /schema within {timeout} s") from None
            open_ended = described is None or described.get("additionalProperties", True)
            self._reset_takes = None if open_ended else frozenset(described["properties"])
            self._asked_about_reset = True
        if self._reset_takes is not None:
            for name in sorted(given - self._reset_takes):
                known = ", ".join(sorted(self._reset_takes))
                warnings.warn(
                    f"reset({name}=...) is unknown to this environment and has no effect; it knows: {known}",
                    UnknownResetArgument,
                    stacklevel=3,
                )
        return None if timeout is None else max(0.0, timeout - (monotonic() - began))


def result_of(data: dict[str, Any]) -> StepResult[Any]:
    """The result in the `data` of an observation, with the observation as a dict."""
    fields = data["observation"]
    metadata = data.get("metadata") or fields.get("metadata") or {}
    return StepResult(fields, data.get("reward"), bool(data.get("done")), metadata)


def call_result(result: dict[str, Any]) -> CallResult:
    """What a `tools/call` result says, in Paddock's, OpenEnv's or the spec's form."""
    structured = result.get("structuredContent")
    value = result["data"] if "data" in result else structured if structured is not None else _text_of(result)
    known = result.get("_meta") or result.get("meta")
    told = dict(known) if isinstance(known, dict) else {}
    reward, done = told.pop(mcp.REWARD_KEY, None), bool(told.pop(mcp.DONE_KEY, False))
    return CallResult(value, reward, done, result.get("content") or [], told)


def _transport_for(
    url: str,
    wanted: Transport | str,
    headers: dict[str, str],
    timeouts: Timeouts,
    reconnect: Reconnect | None,
    *,
    queue_timeout: float | None,
    on_queue: Callable[[int], None] | None,
) -> Transport:
    """The way to a server. Each kind is imported when it is wanted."""
    if not isinstance(wanted, str):
        return wanted
    if wanted == "http":
        from paddock.client.transports.http import HttpTransport

        return HttpTransport(url, headers=headers, timeouts=timeouts, reconnect=reconnect)
    if wanted != "ws":
        raise ConfigError(f"no transport is called {wanted!r}", hint="use ws or http")
    from paddock.client.transports.ws import WebSocketTransport

    socket = WebSocketTransport(
        url, headers=headers, timeouts=timeouts, reconnect=reconnect, queue_timeout=queue_timeout, on_queue=on_queue
    )
    if reconnect is None or not reconnect.replay:
        return socket
    from paddock.client.replay import ReplayTransport

    return ReplayTransport(socket)


def _refuse_in_memory(**options: Any) -> None:
    """Raises ConfigError for options that would have no effect without a server."""
    if useless := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"an environment in memory has no use for {', '.join(useless)}",
            hint="leave that out, or give the URL of a server instead of a class",
        )


def _as_model(kind: type[BaseModel], fields: dict[str, Any], what: str) -> BaseModel:
    try:
        return kind.model_validate(fields, by_alias=True, by_name=True)
    except ValidationError as error:
        raise InvalidMessage(
            f"the server's {what} does not fit {kind.__name__}", hint="is this the right class?",
            errors=error.errors(include_url=False, include_context=False),
        ) from error  # fmt: skip


def _rpc_error(error: dict[str, Any], tool: str | None) -> PaddockError:
    """What a JSON-RPC error stands for: the error that its data names, or else what its number allows to say."""
    number, data = error.get("code"), error.get("data")
    told = {**data} if isinstance(data, dict) else {}
    kind = type(from_wire(told))
    if kind is ToolFailure:
        kind = tool_error_class(told.get("error_type", ""))
    elif kind is ServerError:
        kind = BY_NUMBER.get(number, ServerError if tool is None else ToolFailure)
    told |= {"rpc_code": number, **({} if tool is None else {"tool_name": tool})}
    known = {name: value for name, value in told.items() if name not in ("code", "kind", "hint")}
    return kind(str(error.get("message")), hint=told.get("hint"), **known)


def _text_of(result: dict[str, Any]) -> str:
    return "\n".join(block.get("text", "") for block in result.get("content") or [] if block.get("type") == "text")
