"""An environment class under test: instances called directly, and sessions in memory.

`DirectInstance` calls an environment as a server would, but returns its values unchanged: types and NaN are still
visible. `EnvironmentSubject.session` goes through the real sessions and the real codec.
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

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from paddock.client.client import Client
from paddock.client.reconnect import Timeouts
from paddock.errors import InvalidMessage, PaddockError, ToolFailure
from paddock.protocol.codec import encode, model_fields
from paddock.protocol.episode import Step
from paddock.sessions.spec import EnvironmentSpec, Method, Where
from paddock.sessions.threads import Completions, ThreadPool
from paddock.testing.checks import Skipped, Wrong
from paddock.testing.schema_examples import UNKNOWN_NAME, NoExample, counterexamples, example
from paddock.types import Observation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from paddock.types import ToolInfo

SEED = 7
HEARTBEAT_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class ExampleAction:
    """An action to try, as it would be sent."""

    name: str
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NoExampleAction:
    """Why there is no example for an action or a tool."""

    name: str
    reason: str


class DirectInstance:
    """One environment. Calls run on one thread, or, if it is to wander, on a new one each."""

    def __init__(self, spec: EnvironmentSpec, timeout: float, *, on_any_thread: bool = False) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """How long each call took, by the name of the method."""
        self._spec = spec
        self._timeout = timeout
        self._on_any_thread = on_any_thread
        self._threads = [ThreadPool(1, Completions(), "paddock-check")]
        self._environment: Any = None
        self._closed = False

    async def build(self) -> None:
        self._environment = await self._within("the constructor", self._on_thread(self._spec.build))

    async def reset(self, **arguments: Any) -> Any:
        return await self._call(self._spec.reset, self._spec.reset.pick(arguments))

    async def step(self, action: Any) -> Any:
        return await self._call(self._spec.step, Step(action))

    async def state(self) -> Any:
        return await self._call(self._spec.state, None)

    async def metadata(self) -> Any:
        if not self._spec.has_metadata:
            return self._spec.metadata_from(None)
        described = await self._within("get_metadata", self._on_thread(self._environment.get_metadata))
        return self._spec.metadata_from(described)

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
        if self._on_any_thread:
            # Earlier threads are kept: one that ended could pass its identity on to a later one.
            self._threads.append(ThreadPool(1, Completions(), "paddock-check"))
        return await self._threads[-1].call(function)


class MemorySession:
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


class EnvironmentSubject:
    """An environment class, or a factory, and what is known about it."""

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        self.make = make
        self.timeout = timeout
        self._spec: EnvironmentSpec | None = None
        self._example_actions: list[ExampleAction | NoExampleAction] | None = None

    @property
    def spec(self) -> EnvironmentSpec:
        assert self._spec is not None, "prepare() comes first"
        return self._spec

    async def prepare(self) -> None:
        """Read the class. A factory is called for this, so it happens on a thread."""
        threads = ThreadPool(1, Completions(), "paddock-check")
        try:
            self._spec = await threads.call(lambda: EnvironmentSpec(self.make))
        finally:
            threads.close()

    @asynccontextmanager
    async def instance(self, *, on_any_thread: bool = False) -> AsyncIterator[DirectInstance]:
        """An environment that is closed at the end, whatever its `close` has to say."""
        instance = DirectInstance(self.spec, self.timeout, on_any_thread=on_any_thread)
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
    async def session(self) -> AsyncIterator[MemorySession]:
        async with self.client() as client:
            yield MemorySession(client)

    async def tools(self) -> list[ToolInfo]:
        """The tools of a tool environment. Raises Skipped if it is none."""
        if not self.spec.has_tools:
            raise Skipped("it takes typed actions, not tool calls")
        if self.spec.tools is not None and not self.spec.tools:
            return []
        async with self.client() as client:
            return await client.tools()

    async def example_actions(self) -> list[ExampleAction | NoExampleAction]:
        """The example action, or one call of each tool; a reason where none can be made up."""
        if self._example_actions is None:
            if self.spec.has_tools:
                self._example_actions = [self._tool_example(tool) for tool in await self.tools()]
            else:
                self._example_actions = [self._typed_example()]
        return self._example_actions

    async def example_action(self) -> ExampleAction:
        """Any action that can be tried. Raises Skipped if there is none."""
        examples = await self.example_actions()
        possible = next(
            (example_action for example_action in examples if isinstance(example_action, ExampleAction)), None
        )
        if possible is None:
            raise Skipped("there is no example action to try")
        return possible

    def action(self, example_action: ExampleAction) -> Any:
        """The action as the environment gets it. Raises InvalidMessage if it does not fit."""
        return self.spec.wire.parse_action(example_action.document)

    def _typed_example(self) -> ExampleAction | NoExampleAction:
        try:
            example_action = ExampleAction("the example action", example(self.spec.schemas()["action"]))
            self.action(example_action)
        except NoExample as problem:
            return NoExampleAction("the example action", str(problem))
        except InvalidMessage as error:
            return NoExampleAction("the example action", error.problems[0] if error.problems else error.message)
        return example_action

    def _tool_example(self, tool: ToolInfo) -> ExampleAction | NoExampleAction:
        try:
            arguments = example(tool.input_schema)
        except NoExample as problem:
            return NoExampleAction(tool.name, str(problem))
        return ExampleAction(tool.name, {"type": "call_tool", "tool_name": tool.name, "arguments": arguments})


def takes(method: Method, argument: str) -> bool:
    return method.accepts is None or argument in method.accepts


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic has to say, in one line."""
    return one_line(error.errors(include_url=False, include_context=False)[0])


def one_line(problem: Mapping[str, Any]) -> str:
    place = ".".join(map(str, problem.get("loc", ())))
    message = str(problem.get("msg", "it does not fit"))
    return f"{place}: {message}" if place else message


# -- what the checks share -------------------------------------------------------------------------


async def played(subject: EnvironmentSubject, *, with_reset: bool = False) -> list[tuple[str, Any]]:
    """What came back from each example action, in an episode of its own, with the name of the call."""
    answers = []
    for example_action in (
        [await subject.example_action()] if not subject.spec.has_tools else await subject.example_actions()
    ):
        if isinstance(example_action, NoExampleAction):
            continue
        async with subject.instance() as instance:
            first = await instance.reset(seed=SEED)
            second = await instance.step(subject.action(example_action))
        answers += [("reset", first)] if with_reset else []
        answers.append((example_action.name, second))
    return answers


async def play(subject: EnvironmentSubject, example_action: ExampleAction) -> list[Any]:
    """What a client sees of a short episode that nobody disturbs."""
    async with subject.session() as session:
        return [visible(await session.reset(seed=SEED)), visible(await session.step(example_action.document))]


async def refuse_actions(session: MemorySession, schema: dict[str, Any]) -> list[str]:
    """What is wrong with the actions that were refused. Raises Wrong if a bad one is taken."""
    refused = []
    for problem, document in counterexamples(schema):
        try:
            await session.step(document)
        except InvalidMessage:
            refused.append(problem)
        else:
            raise Wrong(f"an action with {problem} was carried out")
    return refused


async def refuse_calls(session: MemorySession, tools: list[Any]) -> list[str]:
    """Like `refuse_actions`, for calls of tools."""
    calls: list[tuple[str, str, dict[str, Any]]] = [("a tool that is not there", UNKNOWN_NAME, {})]
    for tool in tools[:1]:
        calls += [(problem, tool.name, arguments) for problem, arguments in counterexamples(tool.input_schema)]
    refused = []
    for problem, name, arguments in calls:
        try:
            await session.call_tool(name, arguments)
        except (ToolFailure, InvalidMessage):
            refused.append(problem)
        else:
            raise Wrong(f"a call with {problem} was carried out")
    return refused


async def beat(beats: list[float]) -> None:
    while True:
        beats.append(perf_counter())
        await asyncio.sleep(HEARTBEAT_SECONDS)


def field(value: Any, name: str) -> Any:
    """A field of a model or of a dict."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def seen(observation: Any) -> Any:
    """What of an observation must not depend on chance. Metadata may hold times and names."""
    return {key: value for key, value in carried(observation).items() if key != "metadata"}


def visible(data: dict[str, Any]) -> Any:
    """Like `seen`, for the data of a frame."""
    fields = {key: value for key, value in data["observation"].items() if key != "metadata"}
    return {"observation": fields, "reward": data["reward"], "done": data["done"]}


def carried(value: Any) -> dict[str, Any]:
    """The fields of a model as JSON brings them to the other side."""
    fields: dict[str, Any] = orjson.loads(encode(model_fields(value)))
    return fields


def require_same(expected: Any, actual: Any, what: str) -> None:
    if expected == actual:
        return
    if isinstance(expected, dict) and isinstance(actual, dict):
        changed = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
        expected, actual = ({key: side.get(key) for key in changed} for side in (expected, actual))
    raise Wrong(f"{what} differs: {short_json(actual)}, not {short_json(expected)}")


def require_fit(value: Any, kind: Any) -> None:
    """`value` must be what the class declares: an instance of `kind`, or a dict of its fields."""
    if isinstance(kind, type) and isinstance(value, kind):
        return
    if kind is Observation and isinstance(value, BaseModel) and hasattr(value, "done"):
        return
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and not isinstance(value, dict):
        raise Wrong(f"{type(value).__name__} came back, {name} is declared")
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise Wrong(f"what came back does not fit {name}: {first_problem(error)}") from None


def require_survival(value: Any, declared: Any, what: str) -> None:
    """What is read back from JSON must be what was written."""
    kind = type(value) if isinstance(value, BaseModel) else declared
    try:
        sent = carried(value)
    except PaddockError as error:
        raise Wrong(f"{what} cannot be written: {error}", error.hint) from None
    try:
        again = TypeAdapter(kind).validate_python(sent)
    except ValidationError as error:
        raise Wrong(f"{what} cannot be read back: {first_problem(error)}") from None
    require_same(sent, carried(again), f"{what}, read back and written again,")


def short_json(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 120 else text[:119] + "…"
