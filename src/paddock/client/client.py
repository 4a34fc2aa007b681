"""The client: `reset`, `step` and `state` for an episode, `tools` and `call_tool` for tools.

A request is a dict. A transport (`client/transports/`) carries it to one session: over WebSocket, over HTTP, or to an
environment class in this process. The transport handles connections, reconnects and deadlines. The server may be
Paddock's or OpenEnv's. Observations are dicts, or models if the client knows their classes.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from paddock.client.ownership import Ownership
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.client.replies import as_model, call_result, rpc_error, step_result, text_of
from paddock.client.requests import action_fields, authorization
from paddock.client.transports import ConnectOptions, make_transport
from paddock.errors import ConfigError, DeadlineExceeded, ToolFailure
from paddock.protocol.redact import mask_url
from paddock.retry import Deadline
from paddock.types import CallResult, StepResult, ToolInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pydantic import BaseModel

    from paddock.client.transports import Transport

ObservationT = TypeVar("ObservationT")
COMMON_RESET_ARGUMENTS = frozenset(("seed", "episode_id"))


class UnknownResetArgument(UserWarning):
    """An argument of `reset` that the environment ignores. Often it is a typing error."""


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
        self._target = mask_url(target) if isinstance(target, str) else getattr(target, "__name__", "environment")
        self._observation: Any = observation
        self._reset_observation: Any = observation
        self._state: Any = state
        self._call_numbers = itertools.count(1)
        self._ownership = Ownership()
        self._reset_schema: dict[str, Any] | None = None
        """The JSON Schema of `reset`, fetched when first needed; empty if the server publishes none."""
        self._transport: Transport
        if not isinstance(target, str):
            _refuse_in_memory(
                token=token, headers=headers, reconnect=reconnect, queue_timeout=queue_timeout, on_queue=on_queue,
                transport=None if transport == "ws" else transport,
            )  # fmt: skip
            self._transport = self._in_memory(target)
        elif isinstance(transport, str):
            all_headers = {**authorization(token), **(headers or {})}
            options = ConnectOptions(all_headers, self.timeouts, reconnect or Reconnect(), queue_timeout, on_queue)
            self._transport = make_transport(transport, target, options)
        else:
            self._transport = transport

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target}>"

    @classmethod
    async def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """Make a client and connect it. Raises ConnectFailed."""
        return await cls(target, **options).__aenter__()

    async def __aenter__(self) -> Self:
        self._check_owner()
        try:
            await self._transport.open()
        except BaseException:
            # Nothing was opened, so the client does not belong to this event loop yet.
            self._ownership.release(None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def transport(self) -> Transport:
        """What carries the requests."""
        return self._transport

    async def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        """Begin a new episode. If the session was lost, a new one is opened. Raises what `step` raises."""
        self._check_owner()
        limit = self.timeouts.request if timeout is None else timeout
        if uncommon := arguments.keys() - COMMON_RESET_ARGUMENTS:
            limit = await self._warn_of_unknown(uncommon, limit)
        reply = await self._transport.request({"type": "reset", "data": arguments}, limit)
        return self._result(reply["data"], self._reset_observation)

    async def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        """Apply an action, which is a dict or an action model.

        Raises InvalidMessage for an action that does not fit (it was not executed), EnvironmentFailure if the
        environment failed, EpisodeLost if the connection dropped and the session could not be resumed.
        """
        reply = await self._request({"type": "step", "data": action_fields(action)}, timeout)
        return self._result(reply["data"], self._observation)

    async def state(self, *, timeout: float | None = None) -> Any:
        """The state of the episode, as a dict or the `state` model. Raises InvalidMessage if it does not fit."""
        data = (await self._request({"type": "state"}, timeout))["data"]
        return data if self._state is None else as_model(self._state, data, "state")

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
        """Call a tool. Returns its value, its reward, and whether it ended the episode.

        All keywords are arguments of the tool, so there is no `timeout`: the deadline is `timeouts.request`. Use
        `asyncio.timeout` around the call for a shorter one; it also cancels the tool. Raises ToolFailure if the call
        failed (its subclasses ToolNotFound and InvalidToolArguments if the server says so), SessionError if the
        session accepts no calls, and what `step` raises.
        """
        result = await self._call("tools/call", {"name": name, "arguments": arguments}, None)
        if result.get("isError") or result.get("is_error"):
            raise ToolFailure(text_of(result), tool_name=name)
        return call_result(result)

    async def schema(self) -> dict[str, Any]:
        """JSON Schemas of the environment's action, observation and state."""
        self._check_owner()
        schemas: dict[str, Any] = await self._transport.fetch("/schema")
        return schemas

    async def metadata(self) -> dict[str, Any]:
        """Name, version and description of the environment."""
        self._check_owner()
        metadata: dict[str, Any] = await self._transport.fetch("/metadata")
        return metadata

    async def close(self) -> None:
        """End the session."""
        if self._ownership.release(getattr(self._transport, "abandon", None)):
            await self._transport.close()

    # -- helpers ----------------------------------------------------------------------------------

    def _check_owner(self) -> None:
        """Raises ClientError in another event loop or process. A custom transport may have no `abandon`."""
        self._ownership.check(self, getattr(self._transport, "abandon", None))

    def _request(self, message: dict[str, Any], timeout: float | None) -> Awaitable[dict[str, Any]]:
        self._check_owner()
        return self._transport.request(message, self.timeouts.request if timeout is None else timeout)

    async def _call(self, method: str, params: dict[str, Any], timeout: float | None) -> Any:
        call = {"jsonrpc": "2.0", "id": next(self._call_numbers), "method": method, "params": params}
        response = (await self._request({"type": "mcp", "data": call}, timeout))["data"]
        if "error" in response:
            raise rpc_error(response["error"], params.get("name"))
        return response["result"]

    def _result(self, data: dict[str, Any], observation: Any) -> StepResult[ObservationT]:
        result = step_result(data)
        if observation is None:
            return result
        fields = {**result.observation, "reward": result.reward, "done": result.done}
        return replace(result, observation=as_model(observation, fields, "observation"))

    def _in_memory(self, make: Callable[[], Any]) -> Transport:
        from paddock.client.transports.memory import MemoryTransport

        transport = MemoryTransport(make)
        spec = transport.spec
        if self._observation is None and spec.tools is None:
            self._observation = spec.observation_type
            self._reset_observation = spec.reset_observation_type
            self._state = self._state or spec.state_type
        return transport

    async def _warn_of_unknown(self, names: set[str], timeout: float | None) -> float | None:
        """Warn of arguments that the server does not list among those of `reset`. Returns the seconds left."""
        deadline = None if timeout is None else Deadline(timeout)
        if self._reset_schema is None:
            try:
                async with asyncio.timeout(timeout):
                    self._reset_schema = (await self._transport.fetch("/schema")).get("reset") or {}
            except TimeoutError:
                raise DeadlineExceeded(f"no answer to /schema within {timeout} s") from None
        if not self._reset_schema.get("additionalProperties", True):
            accepted = self._reset_schema["properties"]
            for name in sorted(names - accepted.keys()):
                warnings.warn(
                    f"reset({name}=...) is unknown to this environment and has no effect; "
                    f"it knows: {', '.join(sorted(accepted))}",
                    UnknownResetArgument,
                    stacklevel=3,
                )
        return None if deadline is None else max(0.0, deadline.seconds_left)


def _refuse_in_memory(**options: Any) -> None:
    """Raises ConfigError for options that would have no effect without a server."""
    if useless := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"an environment in memory has no use for {', '.join(useless)}",
            hint="leave that out, or give the URL of a server instead of a class",
        )
