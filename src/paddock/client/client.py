"""The client: an episode behind `reset`, `step` and `state`, tools behind `tools` and `call_tool`.

Speaks to Paddock, to OpenEnv's own servers, or to an environment class in this process. Dicts in and
dicts out, or typed observations if it is told (or, in memory, knows) their types.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ValidationError

from paddock.client.policy import Reconnect, Timeouts
from paddock.config import read_variables
from paddock.errors import ConfigError, InvalidMessage, ServerError, ToolFailure
from paddock.types import StepResult, ToolInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.client.transports import Transport

ObservationT = TypeVar("ObservationT")
KNOWN_TO_ALL = frozenset(("seed", "episode_id"))


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
        self._reset_arguments: frozenset[str] | bool | None = False
        if not isinstance(target, str):
            self._transport = self._in_memory(target)
            return
        if not target.startswith(("http://", "https://")):
            raise ConfigError(f"{target!r} is no URL", hint="give http://host:port, or an environment class")
        bearer = token or read_variables().auth_token
        given = {**({"Authorization": f"Bearer {bearer}"} if bearer else {}), **(headers or {})}
        if transport == "ws":
            from paddock.client.transports.ws import WebSocketTransport

            self._transport = WebSocketTransport(
                target, headers=given, timeouts=self.timeouts, reconnect=reconnect,
                queue_timeout=queue_timeout, on_queue=on_queue,
            )  # fmt: skip
            if reconnect is not None and reconnect.replay:
                from paddock.client.replay import ReplayTransport

                self._transport = ReplayTransport(self._transport)
        elif transport == "http":
            from paddock.client.transports.http import HttpTransport

            self._transport = HttpTransport(target, headers=given, timeouts=self.timeouts)
        elif isinstance(transport, str):
            raise ConfigError(f"no transport is called {transport!r}", hint="use ws or http")
        else:
            self._transport = transport

    @classmethod
    async def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """A client that is connected already. Raises ConnectFailed."""
        client = cls(target, **options)
        await client._transport.open()
        return client

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def transport(self) -> Transport:
        return self._transport

    async def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        """Begin a new episode, also after the last one was lost."""
        if arguments.keys() - KNOWN_TO_ALL:
            await self._warn_of_unknown(arguments.keys() - KNOWN_TO_ALL)
        reply = await self._request({"type": "reset", "data": arguments}, timeout)
        return self._result(reply["data"], self._reset_observation)

    async def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        """Act. `action` is a dict or an action model.

        Raises InvalidMessage for an action that does not fit (nothing was done), EnvironmentFailure if
        the environment failed, EpisodeLost if the connection dropped for good.
        """
        reply = await self._request({"type": "step", "data": _fields_of(action)}, timeout)
        return self._result(reply["data"], self._observation)

    async def state(self, *, timeout: float | None = None) -> Any:
        """The state of the episode, as a dict or the `state` model."""
        data = (await self._request({"type": "state"}, timeout))["data"]
        return data if self._state is None else self._state.model_validate(data, by_alias=True, by_name=True)

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

    async def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool and return its value. Raises ToolFailure, or a kind of it, with the reason."""
        result = await self._call("tools/call", {"name": name, "arguments": arguments}, None)
        if result.get("isError") or result.get("is_error"):
            raise ToolFailure(_text_of(result), tool_name=name)
        if "data" in result:
            return result["data"]
        structured = result.get("structuredContent")
        return structured if structured is not None else _text_of(result)

    async def schema(self) -> dict[str, Any]:
        """JSON Schemas of the environment's action, observation and state."""
        schemas: dict[str, Any] = await self._transport.fetch("/schema")
        return schemas

    async def metadata(self) -> dict[str, Any]:
        described: dict[str, Any] = await self._transport.fetch("/metadata")
        return described

    async def close(self) -> None:
        """End the session."""
        await self._transport.close()

    # -- inside -----------------------------------------------------------------------------------

    async def _request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        return await self._transport.request(message, self.timeouts.request if timeout is None else timeout)

    async def _call(self, method: str, params: dict[str, Any], timeout: float | None) -> Any:
        call = {"jsonrpc": "2.0", "id": next(self._calls), "method": method, "params": params}
        response = (await self._request({"type": "mcp", "data": call}, timeout))["data"]
        if "error" in response:
            raise _tool_error(response["error"], params.get("name"))
        return response["result"]

    def _result(self, data: dict[str, Any], kind: Any) -> StepResult[ObservationT]:
        fields, reward, done = data["observation"], data.get("reward"), bool(data.get("done"))
        metadata = data.get("metadata") or fields.get("metadata") or {}
        if kind is None:
            return StepResult(fields, reward, done, metadata)
        try:
            whole = {**fields, "reward": reward, "done": done}
            observation = kind.model_validate(whole, by_alias=True, by_name=True)
        except ValidationError as error:
            raise InvalidMessage(
                f"the server's observation does not fit {kind.__name__}", hint="is this the right class?",
                errors=error.errors(include_url=False, include_context=False),
            ) from error  # fmt: skip
        return StepResult(observation, reward, done, metadata)

    def _in_memory(self, make: Callable[[], Any]) -> Transport:
        from paddock.client.transports.memory import MemoryTransport

        transport = MemoryTransport(make)
        blueprint = transport.blueprint
        if self._observation is None and blueprint.tools is None:
            self._observation = blueprint.observation_type
            self._reset_observation = blueprint.reset_observation_type
            self._state = self._state or blueprint.state_type
        return transport

    async def _warn_of_unknown(self, given: set[str]) -> None:
        """Say which arguments the environment does not know, where the server publishes what it knows."""
        if self._reset_arguments is False:
            described = (await self._transport.fetch("/schema")).get("reset")
            open_ended = described is None or described.get("additionalProperties", True)
            self._reset_arguments = None if open_ended else frozenset(described["properties"])
        if isinstance(self._reset_arguments, frozenset):
            for name in sorted(given - self._reset_arguments):
                known = ", ".join(sorted(self._reset_arguments))
                warnings.warn(
                    f"reset({name}=...) is unknown to this environment and has no effect; it knows: {known}",
                    UnknownResetArgument,
                    stacklevel=3,
                )


def _fields_of(action: Any) -> dict[str, Any]:
    if isinstance(action, dict):
        return action
    if isinstance(action, BaseModel):
        return action.model_dump(mode="json", by_alias=True)
    wrong = {"type": "dict_type", "loc": ["action"], "msg": f"{action!r:.60} is neither a dict nor an action model"}
    raise InvalidMessage("Invalid message", errors=[wrong])


def _tool_error(error: dict[str, Any], name: str | None) -> Exception:
    message, number = str(error.get("message")), error.get("code")
    if name is None:
        return ServerError(message, rpc_code=number)
    return ToolFailure(message, tool_name=name, rpc_code=number)


def _text_of(result: dict[str, Any]) -> str:
    return "\n".join(block.get("text", "") for block in result.get("content") or [] if block.get("type") == "text")
