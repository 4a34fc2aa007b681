"""Our environment classes in front of a process: they pass on what they are asked."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import orjson
from pydantic import WithJsonSchema
from pydantic_core import from_json

from paddock.adapters.child.schemas import inlined, published
from paddock.adapters.tools import ForeignTool
from paddock.env import Environment, ToolEnvironment
from paddock.errors import InvalidMessage, ToolFailure
from paddock.protocol.codec import encode
from paddock.sessions.isolation.remote import RemoteEnvironment, failure_of
from paddock.types import CallToolObservation, EnvironmentMetadata, ListToolsAction, Observation, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.sessions.isolation.process import Process

TASK_METHODS = ("list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")


class Remote(RemoteEnvironment):
    """What both kinds share: requests and answers are JSON."""

    process: Process
    about: ClassVar[dict[str, Any]]

    async def ask(self, kind: bytes, data: Any = None) -> Any:
        return await self.send(kind, encode(data))

    def decode(self, kind: bytes, data: bytes) -> Any:
        if kind == b"failed":
            raise failure_of(data)
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            value = from_json(data)
        if kind == b"refused":
            raise InvalidMessage("Invalid message", errors=value)
        return value

    async def reset(self, **arguments: Any) -> Any:
        await self.reopen()
        return await self.ask(b"reset", arguments)

    async def state(self) -> Any:
        return await self.ask(b"state")

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata.model_validate(self.about["metadata"])

    @classmethod
    @asynccontextmanager
    async def lifespan(cls) -> AsyncIterator[None]:
        """The process ends with the server."""
        try:
            yield
        finally:
            await asyncio.to_thread(cls.process.stop)


class HostedEnvironment(Remote, Environment[Any, Any, Any]):  # type: ignore[misc]
    """Actions and observations are dicts here: the other side knows their types, and checks them."""

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        seen: dict[str, Any] = await self.send(b"step", encode(action))
        return seen


class HostedToolEnvironment(Remote, ToolEnvironment):  # type: ignore[misc]
    """Its tools are those that the other side listed."""

    async def step_async(self, action: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            return self._tool_list()
        try:
            self._bind(action.tool_name, action.arguments)
        except ToolFailure as error:
            return self._observe_failure(action, error)
        data = {"type": "call_tool", "tool_name": action.tool_name, "arguments": action.arguments}
        seen = await self.ask(b"step", data)
        known = {name: seen[name] for name in CallToolObservation.model_fields if name in seen}
        return CallToolObservation.model_validate(known)


def environment_class(process: Process, about: dict[str, Any]) -> type[Any]:
    """The class for what a process told about itself."""
    members: dict[str, Any] = {
        "process": process,
        "about": about,
        "concurrent_sessions": about["concurrent"],
        "__doc__": about["metadata"]["description"],
        **{name: _task_method(name) for name in TASK_METHODS if name in about["methods"]},
    }
    if about.get("tools") is not None:
        cls: type[HostedToolEnvironment] = type(about["name"], (HostedToolEnvironment,), members)
        cls.tools = {tool["name"]: ForeignTool(tool) for tool in about["tools"]}
        return cls
    schemas = about["schemas"]
    # A plain dict, because it is only passed on; the other side reads it.
    members["action_type"] = Annotated[dict[str, Any], WithJsonSchema(inlined(schemas["action"]))]
    members["observation_type"] = published(Observation, "Observation", schemas["observation"])
    members["state_type"] = published(State, "State", schemas["state"])
    return type(about["name"], (HostedEnvironment,), members)


def _task_method(name: str) -> Any:
    async def ask(self: Remote, *arguments: Any) -> Any:
        return await self.ask(b"call", [name, *arguments])

    ask.__name__ = name
    return ask
