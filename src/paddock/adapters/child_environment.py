"""Environments of another ecosystem in child processes under their own interpreter, as environment classes of ours.

`sessions/isolation` is the mechanism: it starts the processes, forks sessions, and carries requests. The child runs a
loader, a file that needs nothing of Paddock (`openenv_loader.py`, `verifiers_loader.py`). This module is what the
server sees of it: requests and answers are JSON, and schemas are those that the loader described.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict, WithJsonSchema, create_model
from pydantic_core import from_json

from paddock.adapters.tools import ForeignTool
from paddock.env import Environment, ToolEnvironment
from paddock.errors import InvalidMessage, ToolFailure
from paddock.protocol.codec import encode
from paddock.sessions.isolation.remote import RemoteEnvironment, read_failure
from paddock.types import CallToolObservation, EnvironmentMetadata, ListToolsAction, Observation, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.sessions.isolation.process import HostProcess

MAX_REFERENCE_DEPTH = 20
TASK_METHODS = ("list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")


class ChildEnvironment(RemoteEnvironment):
    """What typed and tool environments share."""

    process: HostProcess
    description: ClassVar[dict[str, Any]]

    async def request_json(self, kind: bytes, data: Any = None) -> Any:
        return await self.request(kind, encode(data))

    def decode(self, kind: bytes, data: bytes) -> Any:
        if kind == b"failed":
            raise read_failure(data)
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            value = from_json(data)
        if kind == b"refused":
            raise InvalidMessage("Invalid message", errors=value)
        return value

    async def reset(self, **arguments: Any) -> Any:
        await self.reopen()
        return await self.request_json(b"reset", arguments)

    async def state(self) -> Any:
        return await self.request_json(b"state")

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata.model_validate(self.description["metadata"])

    @classmethod
    @asynccontextmanager
    async def lifespan(cls) -> AsyncIterator[None]:
        """The process ends with the server."""
        try:
            yield
        finally:
            await asyncio.to_thread(cls.process.stop)


class TypedChildEnvironment(ChildEnvironment, Environment[Any, Any, Any]):  # type: ignore[misc]
    """Actions and observations are dicts here: the child has their types, and checks them."""

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        observation: dict[str, Any] = await self.request(b"step", encode(action))
        return observation


class ToolChildEnvironment(ChildEnvironment, ToolEnvironment):  # type: ignore[misc]
    """Its tools are those that the child listed."""

    async def step_async(self, action: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            return self._tool_list()
        try:
            self._bind(action.tool_name, action.arguments)
        except ToolFailure as error:
            return self._observe_failure(action, error)
        data = {"type": "call_tool", "tool_name": action.tool_name, "arguments": action.arguments}
        observation = await self.request_json(b"step", data)
        fields = {name: observation[name] for name in CallToolObservation.model_fields if name in observation}
        return CallToolObservation.model_validate(fields)


def environment_class(process: HostProcess, description: dict[str, Any]) -> type[Any]:
    """The class for what a loader described."""
    members: dict[str, Any] = {
        "process": process,
        "description": description,
        "concurrent_sessions": description["concurrent"],
        "__doc__": description["metadata"]["description"],
        **{name: _task_method(name) for name in TASK_METHODS if name in description["methods"]},
    }
    if description.get("tools") is not None:
        cls: type[ToolChildEnvironment] = type(description["name"], (ToolChildEnvironment,), members)
        cls.tools = {tool["name"]: ForeignTool(tool) for tool in description["tools"]}
        return cls
    schemas = description["schemas"]
    # A plain dict, because it is only passed on; the child validates it.
    members["action_type"] = Annotated[dict[str, Any], WithJsonSchema(inline_references(schemas["action"]))]
    members["observation_type"] = publish_schema(Observation, "Observation", schemas["observation"])
    members["state_type"] = publish_schema(State, "State", schemas["state"])
    return type(description["name"], (TypedChildEnvironment,), members)


def _task_method(name: str) -> Any:
    async def call(self: ChildEnvironment, *arguments: Any) -> Any:
        return await self.request_json(b"call", [name, *arguments])

    call.__name__ = name
    return call


def publish_schema(base: type[BaseModel], name: str, schema: dict[str, Any]) -> type[BaseModel]:
    """A subclass of `base` that accepts every field, and whose JSON Schema is `schema`."""
    inlined = inline_references(schema)

    def json_schema(cls: Any, core: Any, handler: Any) -> dict[str, Any]:
        return inlined

    model = create_model(name, __base__=(base, _OpenModel))
    model.__get_pydantic_json_schema__ = classmethod(json_schema)  # type: ignore[assignment, method-assign]
    model.model_rebuild(force=True)
    return model


class _OpenModel(BaseModel):
    model_config = ConfigDict(extra="allow")


def inline_references(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$ref`: each is replaced by its definition; a recursive one ends where it repeats."""
    definitions = schema.get("$defs", {})

    def resolve(part: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [resolve(member, seen) for member in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        rest = {key: resolve(value, seen) for key, value in part.items() if key not in ("$ref", "$defs")}
        if not name:
            return rest
        if name in seen or len(seen) > MAX_REFERENCE_DEPTH or name not in definitions:
            return rest
        return {**resolve(definitions[name], (*seen, name)), **rest}

    resolved: dict[str, Any] = resolve(schema, ())
    return resolved
