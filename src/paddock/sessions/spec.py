"""What a server has to know about an environment class, determined once before the first session.

Reads Paddock's and OpenEnv's class attributes alike, so an environment written for either runs here.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import threading
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Discriminator, Tag, TypeAdapter

from paddock.env import Environment, ToolEnvironment
from paddock.errors import ConcurrencyConfigurationError, ConfigError, NotSupported
from paddock.protocol.messages import Wire
from paddock.sessions.openenv_tools import DirectMcpClient, use_direct_client
from paddock.types import (
    Action,
    CallToolAction,
    EnvironmentMetadata,
    ListToolsAction,
    ListToolsObservation,
    Observation,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.isolation.isolate import Isolation
    from paddock.tools import ToolSpec

logger = logging.getLogger("paddock.sessions")

SLOW_CALL_SECONDS = 0.010
VERY_SLOW_CALL_SECONDS = 0.500
"""One such call moves an inline method to threads."""
MIN_SLOW_CALLS = 3
SLOW_SHARE = 0.1
SLOW_WINDOW_SECONDS = 10.0
"""This many slow calls, and this share of all calls, within the window move it too."""


class Where(Enum):
    """Where a method of the environment runs."""

    INLINE = "inline"
    THREAD = "thread"
    LOOP = "loop"
    OVERLAPPING = "overlapping"
    """On the loop, at the same time as other requests of the session."""


class Affinity(Enum):
    """Which thread may run a sync environment."""

    ANY = "any"
    OWN = "own"
    SHARED = "shared"


class Method:
    """One callable of an environment class: where it runs and which keywords it takes."""

    __slots__ = ("_calls_before", "_slow", "_window_began", "accepts", "invoke", "name", "where")

    def __init__(self, name: str, invoke: Callable[[Any, Any], Any], where: Where, accepts: set[str] | None) -> None:
        self.name = name
        self.invoke = invoke
        self.where = where
        self.accepts = accepts
        self._slow = 0
        self._calls_before = 0
        self._window_began = 0.0

    def pick(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Those of `keywords` that the method takes; others are ignored."""
        if self.accepts is None:
            return {key: value for key, value in keywords.items() if key != "self"}
        return {key: value for key, value in keywords.items() if key in self.accepts}

    def record_slow_call(self, seconds: float, calls: int, now: float) -> None:
        """An inline call held up the loop; `calls` is how many there have been in all.

        On a busy machine any call may be slow once in a while. Threads take over when calls are slow often,
        or when one call was very slow.
        """
        if now - self._window_began > SLOW_WINDOW_SECONDS:
            self._window_began, self._calls_before, self._slow = now, calls - 1, 0
        self._slow += 1
        often = self._slow >= MIN_SLOW_CALLS and self._slow >= SLOW_SHARE * (calls - self._calls_before)
        if often or seconds >= VERY_SLOW_CALL_SECONDS:
            self.where = Where.THREAD
            logger.warning(
                "%s() is declared inline but took %.0f ms: it runs on threads from now on",
                self.name,
                seconds * 1e3,
            )


class EnvironmentSpec:
    """An environment class, ready to be served."""

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        action_type: Any = None,
        observation_type: Any = None,
        state_type: Any = None,
        reset_observation_type: Any = None,
        name: str | None = None,
    ) -> None:
        if not callable(make):
            raise ConfigError(
                f"an environment instance ({type(make).__name__}) was given where a class is needed",
                hint="pass the class, or a function that makes a new instance for each session",
            )
        self.make = make
        self.options = {
            "action_type": action_type, "observation_type": observation_type, "state_type": state_type,
            "reset_observation_type": reset_observation_type, "name": name,
        }  # fmt: skip
        """As given: another process makes the same spec of them."""
        self.isolation: Isolation | None = None
        """The processes that its environments live in, if not this one."""
        self.cls = cls = environment_class(make)
        check_class(cls)
        self.name = name or cls.__name__.lower()
        written = _type_parameters(cls)
        self.action_type = action_type or _declared(make, cls, "action_type") or written[0] or _usual_action(cls)
        self.observation_type = (
            observation_type or _declared(make, cls, "observation_type") or written[1] or Observation
        )
        self.state_type = (
            state_type or _annotated_state(cls) or _declared(make, cls, "state_type") or written[2] or State
        )
        self.reset_observation_type = (
            reset_observation_type or getattr(cls, "reset_observation_type", None) or self.observation_type
        )
        self.deterministic = bool(getattr(cls, "deterministic", False))
        self.concurrent = bool(
            getattr(cls, "concurrent_sessions", False) or getattr(cls, "SUPPORTS_CONCURRENT_SESSIONS", False)
        )
        self.affinity = _affinity(cls)
        self.step_timeout: float | None = getattr(cls, "step_timeout", None)
        self.tools: dict[str, ToolSpec] | None = cls.tools if issubclass(cls, ToolEnvironment) else None
        for tool in (self.tools or {}).values():
            tool.build_schemas()
        self.mcp_calls_are_steps = bool(getattr(cls, "mcp_calls_are_steps", False))
        self.has_server_inside = hasattr(cls, "mcp_session")
        self.foreign_tool_actions = _foreign_tool_actions(cls, self.action_type) if self.tools is None else None

        plain = Where.INLINE if getattr(cls, "inline", False) else Where.THREAD
        self.reset = _reset_method(cls, plain)
        self.step = _step_method(cls, plain)
        self.list_tools = _list_tools_method(self.step)
        self.state = Method("state", _read_state, Where.LOOP if _has_async_state(cls) else plain, set())
        self.call_tool = _call_tool_method(cls, plain)
        self.step_by_tool = self.step
        if getattr(cls, "parallel_calls", False) and self.step.where is Where.LOOP:
            self.call_tool.where = Where.OVERLAPPING
            self.step_by_tool = Method("step", self.step.invoke, Where.OVERLAPPING, self.step.accepts)
        self.plain_tools = _plain_among_async(cls)
        """Tools that may block, of a class that has async ones too: a thread calls them."""
        self.plain_step = Method("step", _step_with("step"), Where.THREAD, self.step.accepts)
        self.plain_call = Method("call_tool", _call_with("call_tool"), Where.THREAD, set())
        self.wire = Wire(self.routed_action_type)

    def build(self) -> Any:
        """A new environment. Raises whatever its constructor does."""
        environment = self.make()
        return use_direct_client(environment) if self.has_server_inside else environment

    @property
    def routed_action_type(self) -> Any:
        """The action type of a step, where `type` picks between listing and calling tools if it may."""
        if self.foreign_tool_actions is not None:
            fallback = self.action_type if self.action_type.__name__ == "Action" else None
            return _routed(*self.foreign_tool_actions, fallback)
        if self.action_type is Action:
            return _routed(ListToolsAction, CallToolAction, Action)
        if self.action_type in (CallToolAction, ListToolsAction):
            return _routed(ListToolsAction, CallToolAction)
        return self.action_type

    @property
    def has_tools(self) -> bool:
        """Whether the class offers tools, Paddock's or OpenEnv's."""
        return self.tools is not None or self.foreign_tool_actions is not None

    def require_concurrency(self, max_sessions: int) -> None:
        """Refuse more sessions than the class says it can take."""
        if max_sessions > 1 and not self.concurrent:
            raise ConcurrencyConfigurationError(
                f"{self.cls.__name__} does not support concurrent sessions, but {max_sessions} were asked for",
                hint="set concurrent_sessions = True on the class if its instances share nothing, or ask for 1",
            )

    def schemas(self) -> dict[str, Any]:
        """The JSON Schemas that `/schema` publishes."""
        return {
            "action": _schema(self.action_type, "validation"),
            "observation": _schema(self.observation_type, "serialization"),
            "state": _schema(self.state_type, "serialization"),
            "reset_observation": _schema(self.reset_observation_type, "serialization"),
            "reset": self._reset_schema(),
        }

    def _reset_schema(self) -> dict[str, Any]:
        """The arguments that `reset` takes; clients warn about others."""
        accepts = self.reset.accepts
        names = {"seed", "episode_id"} if accepts is None else accepts
        return {
            "type": "object",
            "properties": {name: {} for name in sorted(names)},
            "additionalProperties": accepts is None,
        }

    @property
    def has_metadata(self) -> bool:
        """Whether the class describes itself."""
        return hasattr(self.cls, "get_metadata")

    def metadata_from(self, described: Any) -> EnvironmentMetadata:
        """What `get_metadata` returned, in our type, also for classes of OpenEnv."""
        if isinstance(described, BaseModel):
            described = described.model_dump()
        if isinstance(described, dict):
            return EnvironmentMetadata.model_validate(described)
        return EnvironmentMetadata(name=self.cls.__name__, description=f"{self.cls.__name__} environment")


def environment_class(make: Callable[[], Any]) -> type:
    """The class that a factory makes. A plain function is called once to find out."""
    if isinstance(make, partial):
        return environment_class(make.func)
    if isinstance(make, type):
        return make
    probe = make()
    try:
        return type(probe)
    finally:
        close = getattr(probe, "close", None)
        if inspect.iscoroutinefunction(close):
            # A loop may be running here; the coroutine gets one of its own.
            closing = threading.Thread(target=lambda: asyncio.run(close()))
            closing.start()
            closing.join()
        elif close is not None:
            close()


def _declared(make: Any, cls: type, name: str) -> Any:
    """A type that the factory or the class names."""
    return getattr(make, name, None) or getattr(cls, name, None)


def check_class(cls: type) -> None:
    """Raises ConfigError for a class without `reset` or `step`."""
    for name in ("reset", "step"):
        method = getattr(cls, name, None)
        is_written = method is not getattr(Environment, name) or hasattr(cls, f"{name}_async")
        if not callable(method) or not is_written:
            raise ConfigError(f"{cls.__name__} has no {name}() method", hint="an environment has reset and step")


def list_tools_action(spec: EnvironmentSpec) -> Any:
    """The action that makes an environment of OpenEnv's kind list its tools through `step`."""
    if spec.foreign_tool_actions is None:
        raise NotSupported("Environment does not support MCP", hint="derive from ToolEnvironment to offer tools")
    return spec.foreign_tool_actions[0]()


def call_tool_action(spec: EnvironmentSpec, name: str, arguments: dict[str, Any]) -> Any:
    """The action that calls a tool through `step`."""
    if spec.tools is not None:
        return CallToolAction(tool_name=name, arguments=arguments)
    if spec.foreign_tool_actions is None:
        raise NotSupported("Environment does not support MCP", hint="derive from ToolEnvironment to offer tools")
    return spec.foreign_tool_actions[1](tool_name=name, arguments=arguments)


def _reset_method(cls: type, plain: Where) -> Method:
    name, is_async = _implementation(cls, "reset")

    def invoke(environment: Any, arguments: Any) -> Any:
        return getattr(environment, name)(**arguments)

    return Method("reset", invoke, Where.LOOP if is_async else plain, _keywords(getattr(cls, name)))


def _step_method(cls: type, plain: Where) -> Method:
    name, is_async = _implementation(cls, "step")
    return Method("step", _step_with(name), Where.LOOP if is_async else plain, _keywords(getattr(cls, name)))


def _step_with(name: str) -> Callable[[Any, Any], Any]:
    def invoke(environment: Any, request: Any) -> Any:
        if request.extras:
            return getattr(environment, name)(request.action, **request.extras)
        return getattr(environment, name)(request.action)

    return invoke


def _list_tools_method(step: Method) -> Method:
    """Past the `step` of an OpenEnv environment, which may count, where its tools can be asked for without it."""

    async def listed(environment: Any) -> Any:
        client = getattr(environment, "mcp_client", None)
        tools = await client.list_without_client() if isinstance(client, DirectMcpClient) else None
        return None if tools is None else ListToolsObservation.model_construct(tools=tools)

    async def on_loop(environment: Any, request: Any) -> Any:
        return await listed(environment) or await step.invoke(environment, request)

    def on_thread(environment: Any, request: Any) -> Any:
        return asyncio.run(listed(environment)) or step.invoke(environment, request)

    return Method("step", on_loop if step.where is Where.LOOP else on_thread, step.where, set())


def _implementation(cls: type, name: str) -> tuple[str, bool]:
    """Which attribute to call, and whether it is async: of `step` and `step_async`, the one an author wrote last."""
    for base in cls.__mro__:
        if base is ToolEnvironment and name == "step":
            is_async = issubclass(cls, ToolEnvironment) and cls.has_async_tools()
            return ("step_async" if is_async else "step"), is_async
        if base.__name__ == "Environment" and base.__module__.startswith("openenv."):
            break
        if f"{name}_async" in vars(base):
            return f"{name}_async", True
        if name in vars(base):
            break
    return name, inspect.iscoroutinefunction(getattr(cls, name))


def _keywords(function: Callable[..., Any]) -> set[str] | None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}


def _read_state(environment: Any, _: Any) -> Any:
    state = getattr(environment, "state", None)
    return state() if callable(state) else state


def _has_async_state(cls: type) -> bool:
    state = inspect.getattr_static(cls, "state", None)
    return inspect.iscoroutinefunction(getattr(state, "fget", state))


def _call_tool_method(cls: type, plain: Where) -> Method:
    is_async = issubclass(cls, ToolEnvironment) and cls.has_async_tools()
    name = "call_tool_async" if is_async else "call_tool"
    return Method("call_tool", _call_with(name), Where.LOOP if is_async else plain, set())


def _call_with(name: str) -> Callable[[Any, Any], Any]:
    def invoke(environment: Any, request: Any) -> Any:
        return getattr(environment, name)(request.name, request.arguments)

    return invoke


def _plain_among_async(cls: type) -> frozenset[str]:
    """The sync tools of a class that has async ones too. Empty if the class overrides how tools are called."""
    if not issubclass(cls, ToolEnvironment) or not cls.has_async_tools():
        return frozenset()
    methods = ("step", "step_async", "call_tool", "call_tool_async")
    if any(getattr(cls, method) is not getattr(ToolEnvironment, method) for method in methods):
        return frozenset()
    return frozenset(name for name, spec in cls.tools.items() if not spec.is_async)


def _affinity(cls: type) -> Affinity:
    """Environments written for OpenEnv may count on one thread per session, as its server gives them."""
    if getattr(cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
        return Affinity.SHARED
    if any(base.__module__.startswith("openenv.") for base in cls.__mro__) or getattr(cls, "thread_affine", False):
        return Affinity.OWN
    return Affinity.ANY


def _type_parameters(cls: type) -> tuple[Any, Any, Any]:
    """Action, observation and state as OpenEnv's generic `Environment[A, O, S]` names them."""
    for base in cls.__mro__:
        for written in vars(base).get("__orig_bases__", ()):
            arguments = get_args(written)
            if getattr(get_origin(written), "__name__", "") == "Environment" and len(arguments) == 3:
                action, observation, state = (None if isinstance(t, TypeVar) else t for t in arguments)
                return action, observation, state
    return None, None, None


def _annotated_state(cls: type) -> Any:
    getter = getattr(getattr(cls, "state", None), "fget", None)
    if getter is None:
        return None
    try:
        annotated = get_type_hints(getter).get("return")
    except (NameError, TypeError):
        return None
    return annotated if isinstance(annotated, type) and issubclass(annotated, BaseModel) else None


def _usual_action(cls: type) -> Any:
    """What a class that names no action is given: OpenEnv's tool environments look for their own library's."""
    if hasattr(cls, "mcp_session") and any(base.__module__.startswith("openenv.") for base in cls.__mro__):
        return importlib.import_module("openenv.core.env_server.types").Action
    return Action


def _foreign_tool_actions(cls: type, action_type: Any) -> tuple[Any, Any] | None:
    """OpenEnv's own two tool actions, where an environment takes one of them, or has tools and names no action."""
    module = inspect.getmodule(action_type)
    if action_type is CallToolAction or module is None or not module.__name__.startswith("openenv."):
        return None
    name = getattr(action_type, "__name__", "")
    if name == "Action" and hasattr(cls, "mcp_session"):
        module = importlib.import_module("openenv.core.env_server.mcp_types")
    elif name not in ("CallToolAction", "ListToolsAction"):
        return None
    return module.ListToolsAction, module.CallToolAction


def _routed(listing: Any, calling: Any, fallback: Any = None) -> Any:
    """One of the two tool actions, by `type`. Without a type it is a call, or the action `fallback`."""
    default = "call_tool" if fallback is None else "action"

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return kind if kind in ("list_tools", "call_tool") else default

    either: Any = Annotated[listing, Tag("list_tools")] | Annotated[calling, Tag("call_tool")]
    if fallback is not None:
        either = either | Annotated[fallback, Tag("action")]
    return Annotated[either, Discriminator(tag)]


def _schema(kind: Any, mode: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema(mode=mode)
