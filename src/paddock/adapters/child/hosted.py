"""Our environment classes in front of a process: they pass on what they are asked."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from paddock.adapters.child.link import Link
from paddock.adapters.child.schemas import inlined, published
from paddock.adapters.tools import ForeignTool
from paddock.env import Environment, ToolEnvironment
from paddock.errors import ToolFailure
from paddock.types import CallToolObservation, EnvironmentMetadata, ListToolsAction, Observation, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.adapters.child.process import Process

TASK_METHODS = ("list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")


class Remote:
    """What both kinds share: one link, opened when it is first needed."""

    process: ClassVar[Process]
    about: ClassVar[dict[str, Any]]
    _link: Link | None = None
    _opening: asyncio.Lock | None = None

    async def ask(self, kind: bytes, data: Any = None) -> Any:
        link = self._link
        return await (await self._opened() if link is None else link).ask(kind, data)

    async def _opened(self) -> Link:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._link is None:
                link = await Link.over(await asyncio.to_thread(self.process.open))
                try:
                    await link.ask(b"open")
                except BaseException:
                    await link.close()
                    raise
                self._link = link
            return self._link

    async def reset(self, **arguments: Any) -> Any:
        if self._link is not None and self._link.lost:
            self._link = None
        return await self.ask(b"reset", arguments)

    async def state(self) -> Any:
        return await self.ask(b"state")

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

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
        # The way of `ask`, without its detour: most of what a server does is this.
        link = self._link or await self._opened()
        seen: dict[str, Any] = await link.ask(b"step", action)
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
