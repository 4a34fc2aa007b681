"""An environment class under examination: instances called directly, and sessions in memory.

`Instance` calls an environment as a server would, but hands back what it returned, untouched: types
and NaN are still visible. `Trial.session` goes through the real sessions and the real codec.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paddock.client.client import Client
from paddock.client.policy import Timeouts
from paddock.errors import InvalidMessage
from paddock.protocol.episode import Step
from paddock.sessions.blueprint import Blueprint, Method, Where
from paddock.sessions.runner import Threads
from paddock.testing.checks import Skipped, Wrong
from paddock.testing.examples import NoExample, example

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from pydantic import ValidationError

    from paddock.types import ToolInfo


@dataclass(frozen=True, slots=True)
class Move:
    """An action to try, as it would be sent."""

    name: str
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NoMove:
    """Why there is no example for an action or a tool."""

    name: str
    reason: str


class Instance:
    """One environment. Calls run on one thread, or, if it is to wander, on a new one each."""

    def __init__(self, blueprint: Blueprint, timeout: float, *, wandering: bool = False) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """How long each call took, by the name of the method."""
        self._blueprint = blueprint
        self._timeout = timeout
        self._wandering = wandering
        self._threads = [Threads(1, "paddock-check")]
        self._environment: Any = None
        self._closed = False

    async def build(self) -> None:
        self._environment = await self._within("the constructor", self._on_thread(self._blueprint.build))

    async def reset(self, **arguments: Any) -> Any:
        return await self._call(self._blueprint.reset, self._blueprint.reset.pick(arguments))

    async def step(self, action: Any) -> Any:
        return await self._call(self._blueprint.step, Step(action))

    async def state(self) -> Any:
        return await self._call(self._blueprint.state, None)

    async def metadata(self) -> Any:
        if not self._blueprint.has_metadata:
            return self._blueprint.metadata_from(None)
        described = await self._within("get_metadata", self._on_thread(self._environment.get_metadata))
        return self._blueprint.metadata_from(described)

    async def close(self) -> None:
        """Close the environment, once. Raises what its `close` raises."""
        if self._closed or self._environment is None:
            return
        self._closed = True
        close = getattr(self._environment, "close", None)
        if close is not None:
            closing = close() if inspect.iscoroutinefunction(close) else self._on_thread(close)
            await self._within("close", closing)

    def release(self) -> None:
        for threads in self._threads:
            threads.close()

    async def _call(self, method: Method, argument: Any) -> Any:
        if method.where is Where.LOOP:
            calling = method.invoke(self._environment, argument)
        else:
            calling = self._on_thread(partial(method.invoke, self._environment, argument))
        started = perf_counter()
        value = await self._within(method.name, calling)
        self.seconds[method.name].append(perf_counter() - started)
        return value

    async def _within(self, name: str, calling: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await calling
        except TimeoutError:
            if not deadline.expired():
                raise
            # Its thread is lost: closing it would wait for the same call again.
            self._closed = True
            hint = "let nothing wait for ever; if it is meant to take that long, raise --timeout"
            raise Wrong(f"{name} did not answer within {self._timeout:g} s", hint) from None

    async def _on_thread(self, function: Callable[[], Any]) -> Any:
        if self._wandering:
            # Earlier threads are kept: one that ended could pass its identity on to a later one.
            self._threads.append(Threads(1, "paddock-check"))
        return await self._threads[-1].call(function)


class Session:
    """A session in memory: frames as they would cross a wire."""

    def __init__(self, client: Client[Any]) -> None:
        self._client = client

    async def reset(self, **arguments: Any) -> dict[str, Any]:
        return await self._ask({"type": "reset", "data": arguments})

    async def step(self, document: dict[str, Any]) -> dict[str, Any]:
        return await self._ask({"type": "step", "data": document})

    async def state(self) -> dict[str, Any]:
        return await self._ask({"type": "state"})

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return (await self._client.call_tool(name, **arguments)).value

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = await self._client.transport.request(message, self._client.timeouts.request)
        data: dict[str, Any] = reply["data"]
        return data


class Trial:
    """An environment class, or a factory, and what is known about it."""

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        self.make = make
        self.timeout = timeout
        self._blueprint: Blueprint | None = None
        self._moves: list[Move | NoMove] | None = None

    @property
    def blueprint(self) -> Blueprint:
        assert self._blueprint is not None, "prepare() comes first"
        return self._blueprint

    async def prepare(self) -> None:
        """Read the class. A factory is called for this, so it happens on a thread."""
        threads = Threads(1, "paddock-check")
        try:
            self._blueprint = await threads.call(lambda: Blueprint(self.make))
        finally:
            threads.close()

    @asynccontextmanager
    async def instance(self, *, wandering: bool = False) -> AsyncIterator[Instance]:
        """An environment that is closed at the end, whatever its `close` has to say."""
        instance = Instance(self.blueprint, self.timeout, wandering=wandering)
        try:
            await instance.build()
            yield instance
        finally:
            with suppress(Exception):
                await instance.close()
            instance.release()

    def client(self) -> Client[Any]:
        return Client(self.make, timeouts=Timeouts(request=self.timeout))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with self.client() as client:
            yield Session(client)

    async def tools(self) -> list[ToolInfo]:
        """The tools of a tool environment. Raises Skipped if it is none."""
        if not self.blueprint.has_tools:
            raise Skipped("it takes typed actions, not tool calls")
        if self.blueprint.tools is not None and not self.blueprint.tools:
            return []
        async with self.client() as client:
            return await client.tools()

    async def moves(self) -> list[Move | NoMove]:
        """The example action, or one call of each tool; a reason where none can be made up."""
        if self._moves is None:
            if self.blueprint.has_tools:
                self._moves = [self._tool_move(tool) for tool in await self.tools()]
            else:
                self._moves = [self._typed_move()]
        return self._moves

    async def move(self) -> Move:
        """Any action that can be tried. Raises Skipped if there is none."""
        moves = await self.moves()
        found = next((move for move in moves if isinstance(move, Move)), None)
        if found is None:
            raise Skipped("there is no example action to try")
        return found

    def action(self, move: Move) -> Any:
        """The action as the environment gets it. Raises InvalidMessage if it does not fit."""
        return self.blueprint.wire.parse_action(move.document)

    def _typed_move(self) -> Move | NoMove:
        try:
            move = Move("the example action", example(self.blueprint.schemas()["action"]))
            self.action(move)
        except NoExample as problem:
            return NoMove("the example action", str(problem))
        except InvalidMessage as error:
            return NoMove("the example action", error.problems[0] if error.problems else error.message)
        return move

    def _tool_move(self, tool: ToolInfo) -> Move | NoMove:
        try:
            arguments = example(tool.input_schema)
        except NoExample as problem:
            return NoMove(tool.name, str(problem))
        return Move(tool.name, {"type": "call_tool", "tool_name": tool.name, "arguments": arguments})


def takes(method: Method, argument: str) -> bool:
    return method.accepts is None or argument in method.accepts


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic has to say, in one line."""
    return one_line(error.errors(include_url=False, include_context=False)[0])


def one_line(problem: Mapping[str, Any]) -> str:
    place = ".".join(map(str, problem.get("loc", ())))
    message = str(problem.get("msg", "it does not fit"))
    return f"{place}: {message}" if place else message
