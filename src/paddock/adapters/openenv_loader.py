# mypy: ignore-errors
"""Loader for child processes under an interpreter that has OpenEnv: finds the environment and runs its sessions.

`pkg.mod:Class` names a class. A folder with `openenv.yaml`, or a module, names an app: it is imported, and its
arguments to `create_app` are recorded. Imports nothing of Paddock, only OpenEnv and what comes with it.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import get_args, get_origin, get_type_hints


class LazyModule(types.ModuleType):
    """Stands for OpenEnv's web page until it is used: its toolkit is most of the cost of importing OpenEnv."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **keywords):
            sys.modules.pop(PAGE, None)
            return getattr(importlib.import_module(PAGE), name)(*arguments, **keywords)

        return call


PAGE = "openenv.core.env_server.web_interface"
sys.modules.setdefault(PAGE, LazyModule(PAGE))

from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation, ListToolsAction  # noqa: E402
from openenv.core.env_server.types import Action, Observation, State  # noqa: E402
from pydantic import BaseModel, TypeAdapter, ValidationError  # noqa: E402
from pydantic_core import to_json  # noqa: E402

TASK_METHODS = ("list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")
MAKERS = ("create_app", "create_fastapi_app")
MAKER_MODULES = ("openenv.core", "openenv.core.env_server", "openenv.core.env_server.http_server")


class Refused(ValueError):
    """The action does not fit."""


class AppNotMade(Exception):
    """The app could not be made, but its arguments are recorded."""


class NotFound(ImportError):
    def __init__(self, message, hint):
        super().__init__(message)
        self.hint = hint


def load(target):
    if os.path.isdir(target):
        return LoadedEnvironment(*from_folder(target))
    module, colon, name = target.partition(":")
    if not colon:
        return LoadedEnvironment(*from_app(module))
    factory = getattr(importlib.import_module(module), name, None)
    if factory is None:
        raise NotFound(f"{module} has no {name}", "name the environment class")
    return LoadedEnvironment(factory)


def from_folder(folder):
    """The arguments to `create_app` of the app in an environment's folder."""
    folder = os.path.abspath(folder)
    try:
        with open(os.path.join(folder, "openenv.yaml"), encoding="utf-8") as file:
            written = re.search(r"^app:\s*['\"]?([\w.]+)", file.read(), re.MULTILINE)
    except OSError as error:
        raise NotFound(f"{folder} has no openenv.yaml", "name a folder that has one, or pkg.mod:Class") from error
    base = os.path.basename(folder)
    app = (written.group(1) if written else "server.app").rpartition(f"{base}.")[2]
    sys.path.insert(0, os.path.dirname(folder))
    try:
        return from_app(f"{base}.{app}")
    except ImportError:
        # Some are written to be run from inside their folder.
        sys.path.insert(0, folder)
        return from_app(app)


def from_app(name):
    """The arguments that a module gives to `create_app` when it is imported."""
    recorded = []
    before = []
    for place in MAKER_MODULES:
        module = importlib.import_module(place)
        for maker in MAKERS:
            original = getattr(module, maker, None)
            if original is not None:
                before.append((module, maker, original))
                setattr(module, maker, recording(original, recorded))
    try:
        importlib.import_module(name)
    except AppNotMade:
        pass
    finally:
        for module, maker, original in before:
            setattr(module, maker, original)
    if not recorded:
        raise NotFound(f"{name} calls no create_app when it is imported", "name the class instead: pkg.mod:Class")
    arguments = recorded[0]
    types = (arguments.get("action_cls"), arguments.get("observation_cls"), arguments.get("state_cls"))
    return arguments["env"], *types, arguments.get("env_name")


def recording(original, recorded):
    signature = inspect.signature(original)

    def record(*arguments, **keywords):
        recorded.append(signature.bind(*arguments, **keywords).arguments)
        try:
            return original(*arguments, **keywords)
        except Exception as error:
            # OpenEnv's own server refuses it; the arguments are all that is needed here.
            raise AppNotMade from error

    return record


def declared_types(cls):
    """Action, observation and state: from `Environment[A, O, S]`, else from the annotations of the methods."""
    declared = [None, None, None]
    for base in cls.__mro__:
        for written in vars(base).get("__orig_bases__", ()):
            if getattr(get_origin(written), "__name__", "") == "Environment" and len(get_args(written)) == 3:
                declared = [one if isinstance(one, type) else None for one in get_args(written)]
                break
    methods = (getattr(cls, "step", None), getattr(cls, "reset", None), getattr(cls.state, "fget", None))
    for number, (method, name) in enumerate(zip(methods, ("action", "return", "return"), strict=True)):
        try:
            annotated = get_type_hints(method).get(name)
        except (NameError, TypeError):
            continue
        if declared[number] is None and isinstance(annotated, type) and issubclass(annotated, BaseModel):
            declared[number] = annotated
    return declared


class LoadedEnvironment:
    """An environment class, or a factory, with its types."""

    def __init__(self, make, action=None, observation=None, state=None, name=None):
        self.make = make
        self.name = name
        self.shared = None
        self.probe = make()
        cls = self.cls = type(self.probe)
        written = declared_types(cls)
        self.is_tools = self.has_connection = hasattr(cls, "mcp_session")
        default = CallToolAction if self.is_tools else Action
        self.action = action or written[0] or default
        self.observation = observation or written[1] or (CallToolObservation if self.is_tools else Observation)
        self.state = state or written[2] or State
        self.is_tools = self.is_tools and self.action in (Action, CallToolAction, ListToolsAction)
        self.read = TypeAdapter(self.action).validator
        if getattr(cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
            self.shared = ThreadPoolExecutor(1)
        self.sync_step = implementation(cls, "step")
        self.sync_reset = implementation(cls, "reset")
        accepts = inspect.signature(getattr(cls, "reset" if self.sync_reset else "reset_async")).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepts.values())
        self.accepts = None if open_ended else set(accepts)

    def describe(self):
        probe, self.probe = self.probe, None
        session = LoadedSession(self, probe)
        try:
            about = probe.get_metadata() if hasattr(probe, "get_metadata") else None
            name = self.cls.__name__
            description = {
                "name": name,
                "called": self.name,
                "concurrent": bool(getattr(self.cls, "SUPPORTS_CONCURRENT_SESSIONS", False)),
                "methods": [method for method in TASK_METHODS if callable(getattr(probe, method, None))],
                "metadata": {
                    "name": name,
                    "description": f"{name} environment",
                    **(json.loads(text(about)) if about else {}),
                },
                "tools": None,
            }
            if self.is_tools:
                listed = session.step(ListToolsAction())
                description["tools"] = [json.loads(text(tool)) for tool in listed.tools]
            else:
                description["schemas"] = {
                    "action": TypeAdapter(self.action).json_schema(),
                    "observation": TypeAdapter(self.observation).json_schema(mode="serialization"),
                    "state": TypeAdapter(self.state).json_schema(mode="serialization"),
                }
        finally:
            session.close()
        return description

    def after_fork(self):
        """Threads do not survive a fork."""
        if self.shared is not None:
            self.shared = ThreadPoolExecutor(1)

    def open(self):
        return LoadedSession(self, self.shared.submit(self.make).result() if self.shared else self.make())


def implementation(cls, name):
    """Whether the sync method is to be called: of it and its async twin, the one in the most derived class."""
    for base in cls.__mro__:
        if base.__name__ == "Environment" and base.__module__.startswith("openenv."):
            return True
        if f"{name}_async" in vars(base):
            return False
        if name in vars(base):
            return not inspect.iscoroutinefunction(getattr(cls, name))
    return True


class LoadedSession:
    """One environment, on one thread."""

    def __init__(self, loaded, environment):
        self.loaded = loaded
        self.environment = environment
        self.runner = self.connection = None
        self.step = self.sync_method("step") if loaded.sync_step else self.async_method("step")
        self.reset = self.sync_method("reset") if loaded.sync_reset else self.async_method("reset")
        self.read = self.tool_action if loaded.is_tools else loaded.read.validate_json
        self.enter()

    def handle(self, kind, data):
        if kind == b"step":
            try:
                action = self.read(data)
            except ValidationError as error:
                raise Refused(problems(error)) from None
            return text(self.step(action))
        if kind == b"reset":
            arguments = json.loads(data) or {}
            accepts = self.loaded.accepts
            return text(self.reset(**{k: v for k, v in arguments.items() if accepts is None or k in accepts}))
        if kind == b"state":
            state = getattr(self.environment, "state", None)
            return text(state() if callable(state) else state)
        name, *arguments = json.loads(data)
        return text(self.run(getattr(self.environment, name), *arguments))

    def tool_action(self, data):
        listing = b'"list_tools"' in data and json.loads(data).get("type") == "list_tools"
        return (ListToolsAction if listing else CallToolAction).model_validate_json(data)

    def enter(self):
        """Open the connection over which OpenEnv calls tools, for as long as the session."""
        # A plain step makes loops of its own, which could not share it.
        if self.loaded.has_connection and not self.loaded.sync_step:
            self.connection = self.environment.mcp_session()
            self.run(self.connection.__aenter__)

    def sync_method(self, name):
        method = getattr(self.environment, name)
        shared = self.loaded.shared
        return (lambda *a, **k: shared.submit(method, *a, **k).result()) if shared else method

    def async_method(self, name):
        method = getattr(
            self.environment, name if not hasattr(self.environment, f"{name}_async") else f"{name}_async"
        )
        return lambda *arguments, **keywords: self.run(method, *arguments, **keywords)

    def run(self, method, *arguments, **keywords):
        value = method(*arguments, **keywords)
        if not inspect.isawaitable(value):
            return value
        if self.runner is None:
            self.runner = asyncio.Runner()
        return self.runner.run(finished(value))

    def close(self):
        try:
            if self.connection is not None:
                self.run(self.connection.__aexit__, None, None, None)
            close = getattr(self.environment, "close", None)
            if close is not None:
                if self.loaded.shared:
                    self.loaded.shared.submit(close).result()
                else:
                    self.run(close)
        finally:
            if self.runner is not None:
                self.runner.close()


async def finished(value):
    return await value


def text(value):
    """JSON bytes of what an environment returned."""
    serializer = getattr(value, "__pydantic_serializer__", None)
    if serializer is not None:
        return serializer.to_json(value, fallback=plain)
    return to_json(value, fallback=plain, inf_nan_mode="null")


def plain(value):
    """A plain value for what JSON cannot express."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if hasattr(value, "structured_content"):
        return {
            key: getattr(value, key, None) for key in ("content", "structured_content", "meta", "data", "is_error")
        }
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def problems(error):
    return json.loads(error.json(include_context=False))
