"""The base classes of environments: Environment with typed actions, ToolEnvironment with tools.

Methods may be plain or `async`. Everything OpenEnv puts on an environment class keeps its name and
meaning here: `SUPPORTS_CONCURRENT_SESSIONS`, `REQUIRES_SINGLE_THREAD_EXECUTOR`, `reset_async`,
`step_async`, `close`, `get_metadata`, `transform` and `rubric` (applied in `rubric.py`), and the task
methods `list_splits`, `list_tasks`, `num_tasks`, `get_task`, `get_task_range`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_origin

from paddock.errors import ConfigError, EnvironmentFailure, ToolFailure
from paddock.protocol.mcp import tool_info, tool_result
from paddock.protocol.redact import describe_error, redact
from paddock.rubric import Rubrics
from paddock.tools import ToolReturn, ToolSpec, collect_tools, tool, unknown_tool
from paddock.types import (
    Action,
    CallToolAction,
    CallToolObservation,
    EnvironmentMetadata,
    ListToolsAction,
    ListToolsObservation,
    Observation,
    State,
    ToolErrorInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Environment", "ToolEnvironment", "ToolReturn", "tool"]

logger = logging.getLogger("paddock.environment")
ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=Observation)
StateT = TypeVar("StateT", bound=State)


class Environment(Rubrics, Generic[ActionT, ObservationT, StateT]):
    """An environment with typed actions: `class Counter(Environment[Add, Total, State])`."""

    concurrent_sessions: ClassVar[bool] = False
    """Whether instances can live side by side in one process. Without it a server grants one session."""
    deterministic: ClassVar[bool] = False
    """Whether the same seed and the same actions give the same observations: then a client may replay an episode."""
    inline: ClassVar[bool] = False
    """Declares that reset, step and state take well under a millisecond: they run on the event loop, not on a thread.
    The server moves a class that turns out slow to threads, with a warning."""
    thread_affine: ClassVar[bool] = False
    """Whether all calls of an instance must run on one thread, as those of a SQLite connection do."""
    isolation: ClassVar[str] = "thread"
    """`"process"` runs the sessions of a server in child processes: a crash, or a step that hangs, ends its own
    session and nothing else. The class must be defined at the top of a module."""
    sessions_per_process: ClassVar[int] = 1
    """With `isolation = "process"`: how many sessions share a child process."""
    step_timeout: ClassVar[float | None] = None
    """Seconds a call may take; None leaves it to the server's `--step-timeout`."""

    action_type: ClassVar[Any] = Action
    """What `step` takes. It and the types below come from `Environment[Add, Total, State]`."""
    observation_type: ClassVar[Any] = Observation
    """What `step` returns."""
    reset_observation_type: ClassVar[Any] = None
    """What `reset` returns, if that is not `observation_type`."""
    state_type: ClassVar[Any] = State
    """What `state` returns."""

    _types: ClassVar[tuple[Any, ...]] = (ActionT, ObservationT, StateT)  # type: ignore[misc]

    def __init__(self, transform: Callable[[Any], Any] | None = None, rubric: Any = None) -> None:
        self.transform = transform
        """Changes an observation, in environments that ask it."""
        self.rubric = rubric
        """Scores an action and its observation, in environments that ask it."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set the three types from `Environment[Add, Total, State]`. A type that the class sets itself is kept."""
        super().__init_subclass__(**keywords)
        for base in vars(cls).get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Environment):
                # A class in between may leave some of the three open, and name them in another order.
                arguments = dict(zip(origin.__parameters__, get_args(base), strict=False))  # type: ignore[attr-defined]
                cls._types = tuple(arguments.get(parameter, parameter) for parameter in origin._types)
        if "_types" not in vars(cls):
            return
        for name, declared in zip(("action_type", "observation_type", "state_type"), cls._types, strict=True):
            if not isinstance(declared, TypeVar) and name not in vars(cls):
                setattr(cls, name, declared)

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> ObservationT:
        """Begin a new episode and return what the agent sees first."""
        raise EnvironmentFailure(f"{type(self).__name__} has no reset()", hint="define reset and step")

    def step(self, action: ActionT) -> ObservationT:
        """Apply one action and return what the agent sees next."""
        raise EnvironmentFailure(f"{type(self).__name__} has no step()", hint="define reset and step")

    @property
    def state(self) -> StateT | None:
        """The state of the episode. If it is None, the server answers with the episode id and its count of steps."""
        return None

    def close(self) -> None:
        """Release what the environment holds. Called exactly once."""

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and description, for `/metadata`. By default the class name and its docstring."""
        name = type(self).__name__
        text = inspect.getdoc(type(self))
        inherited = text in (inspect.getdoc(Environment), inspect.getdoc(ToolEnvironment))
        return EnvironmentMetadata(name=name, description=text if text and not inherited else f"{name} environment")


class ToolEnvironment(Environment[Action, Observation, State]):
    """An environment whose actions are calls of its `@tool` methods.

    Agents reach the tools over MCP, or as `list_tools` and `call_tool` actions of `step`.
    """

    mcp_calls_are_steps: ClassVar[bool] = True
    """Whether a call over MCP counts as a step of the episode, like the same call through `step`."""
    parallel_calls: ClassVar[bool] = False
    """Whether async tools of one session may overlap when they are called over MCP.
    Without it the calls of a session run one at a time, in order."""

    reset_observation_type: ClassVar[Any] = Observation
    observation_type: ClassVar[Any] = CallToolObservation
    tools: ClassVar[dict[str, ToolSpec]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.tools = collect_tools(cls)
        cls.action_type = CallToolAction
        if cls.inline and cls.has_async_tools():
            raise ConfigError(f"{cls.__name__} is inline but has async tools", hint="drop inline = True")

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: Any) -> Observation:
        """List the tools, or call one that is not async."""
        if isinstance(action, ListToolsAction):
            return self._tool_list()
        try:
            return self._observe(action, self.call_tool(action.tool_name, action.arguments))
        except ToolFailure as error:
            return self._observe_failure(action, error)

    async def step_async(self, action: Any) -> Observation:
        """Like `step`, for environments with async tools."""
        if isinstance(action, ListToolsAction):
            return self._tool_list()
        try:
            return self._observe(action, await self.call_tool_async(action.tool_name, action.arguments))
        except ToolFailure as error:
            return self._observe_failure(action, error)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool that is not async. Raises ToolNotFound, InvalidToolArguments or ToolFailure."""
        spec, keywords = self._bind(name, arguments)
        if spec.is_async:
            raise ToolFailure(f"tool {name!r} is async: use call_tool_async", tool_name=name)
        return _run(spec, self, keywords)

    async def call_tool_async(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call any tool. One that is not async runs on a thread, because it may block."""
        spec, keywords = self._bind(name, arguments)
        if spec.is_async:
            return await _run_async(spec, self, keywords)
        return await asyncio.to_thread(_run, spec, self, keywords)

    @classmethod
    def has_async_tools(cls) -> bool:
        """Whether a tool is an `async` method."""
        return any(spec.is_async for spec in cls.tools.values())

    def _bind(self, name: str, arguments: dict[str, Any]) -> tuple[ToolSpec, dict[str, Any]]:
        spec = self.tools.get(name)
        if spec is None:
            raise unknown_tool(name, self.tools)
        return spec, spec.check(arguments)

    def _tool_list(self) -> ListToolsObservation:
        return ListToolsObservation(tools=[tool_info(spec) for spec in self.tools.values()])

    def _observe(self, action: CallToolAction, value: Any) -> CallToolObservation:
        reward, done = None, False
        if isinstance(value, ToolReturn):
            value, reward, done = value.value, value.reward, value.done
        result = tool_result(value, self.tools.get(action.tool_name))
        return CallToolObservation(tool_name=action.tool_name, result=result, reward=reward, done=done)

    def _observe_failure(self, action: CallToolAction, error: ToolFailure) -> CallToolObservation:
        info = ToolErrorInfo(error_type=error.error_type, message=error.message)
        return CallToolObservation(tool_name=action.tool_name, error=info)


def _run(spec: ToolSpec, environment: ToolEnvironment, keywords: dict[str, Any]) -> Any:
    try:
        return spec.function(environment, **keywords)
    except ToolFailure as error:
        error.message = redact(error.message)
        raise
    except BaseException as error:
        # SystemExit and KeyboardInterrupt of a tool are failures of that tool. They must not end the server.
        raise _failed(spec, environment, error) from error


async def _run_async(spec: ToolSpec, environment: ToolEnvironment, keywords: dict[str, Any]) -> Any:
    try:
        return await spec.function(environment, **keywords)
    except ToolFailure as error:
        error.message = redact(error.message)
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _failed(spec, environment, error) from error


def _failed(spec: ToolSpec, environment: ToolEnvironment, error: BaseException) -> ToolFailure:
    logger.error("tool %s failed", spec.name, exc_info=error)
    message = describe_error(error)
    if isinstance(error, AttributeError) and error.obj is environment:
        # In the message, because answers to tool calls have no field for hints.
        message += ". If reset sets it, call reset first"
    return ToolFailure(message, tool_name=spec.name)
