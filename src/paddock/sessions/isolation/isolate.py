"""Puts child processes behind the methods of a blueprint, so that all above it stays as it is."""

from __future__ import annotations

import base64
import logging
import multiprocessing.spawn
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import ConfigError, EnvironmentFailure, PaddockError
from paddock.protocol.codec import encode
from paddock.protocol.episode import Step
from paddock.sessions.blueprint import Affinity, Method, Where
from paddock.sessions.isolation.process import Process
from paddock.sessions.isolation.remote import RemoteEnvironment, failure_of, open_blocking

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.blueprint import Blueprint

logger = logging.getLogger("paddock.sessions")

LOADER = Path(__file__).with_name("loader.py")
METHODS = ("reset", "step", "list_tools", "state", "call_tool", "step_by_tool", "plain_step", "plain_call")
BY_NAME = ("get_metadata", "list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")
"""What a session is asked for beside the methods of its blueprint."""


class Isolation:
    """The child processes of one blueprint."""

    def __init__(self, blueprint: Blueprint, place: str, sessions_per_process: int, seconds: float | None) -> None:
        self.process = Process(
            sys.executable,
            LOADER,
            place,
            name=blueprint.name,
            sessions_per_process=sessions_per_process,
            flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
            passes_our_variables=True,
        )
        self.tools = blueprint.tools or {}
        self.by_name = frozenset(name for name in BY_NAME if callable(getattr(blueprint.cls, name, None)))
        self._seconds = seconds

    def build(self) -> IsolatedEnvironment:
        """On a thread. Raises whatever the constructor does, EnvironmentCrashed or StepTimeout."""
        number, end = open_blocking(self.process, self._seconds)
        return IsolatedEnvironment(self, number, end)

    def start(self) -> None:
        """Begin to load the environment, beside the caller: the first session need not wait for it then."""

        def load() -> None:
            try:
                self.process.ensure_started()
            except PaddockError as error:
                logger.error("%s", error)

        threading.Thread(target=load, name="paddock-isolation", daemon=True).start()

    def stop(self) -> None:
        """End all processes, and wait until they have."""
        self.process.stop()


class IsolatedEnvironment(RemoteEnvironment):
    """Stands for an environment of ours in a child process."""

    def __init__(self, isolation: Isolation, number: int, end: Any) -> None:
        self.process = isolation.process
        self.tools = isolation.tools
        self._by_name = isolation.by_name
        self._number = number
        self._end = end

    async def call(self, method: str, argument: Any, *, stoppable: bool) -> Any:
        if method == "reset":
            await self.reopen()
        return await self.send(b"ask", _request(method, argument), stoppable=stoppable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._by_name:
            raise AttributeError(name)

        async def call(*arguments: Any) -> Any:
            return await self.send(b"call", pickle.dumps((name, arguments)))

        return call

    def decode(self, kind: bytes, data: bytes) -> Any:
        if kind == b"failed":
            raise failure_of(data)
        try:
            value = pickle.loads(data)
        except Exception as error:
            raise EnvironmentFailure(
                f"the answer of the environment's process cannot be read: {type(error).__name__}: {error}",
                hint="define its observation and state types at the top of a module",
            ) from error
        if kind == b"raised":
            raise value
        return value


def isolate(
    blueprint: Blueprint,
    *,
    sessions_per_process: int,
    find: Callable[[], Any] | None = None,
    seconds: float | None = None,
) -> Isolation:
    """Run the sessions of `blueprint` in child processes from now on.

    `find` finds the class in another process, where it cannot be imported by its name. `seconds` is how long an
    environment may take to be built. Raises ConfigError.
    """
    if sessions_per_process > 1 and blueprint.affinity is Affinity.SHARED:
        raise ConfigError(
            f"{blueprint.cls.__name__} needs one thread for all instances of a process",
            hint="leave sessions_per_process at 1",
        )
    isolation = Isolation(blueprint, payload(blueprint, find), sessions_per_process, seconds)
    for attribute in METHODS:
        setattr(blueprint, attribute, _remote(attribute, getattr(blueprint, attribute)))

    def build() -> IsolatedEnvironment:
        return isolation.build()

    build.__name__ = getattr(blueprint.make, "__name__", blueprint.cls.__name__)
    blueprint.make = build
    blueprint.has_server_inside = False
    blueprint.affinity = Affinity.ANY
    blueprint.isolation = isolation
    return isolation


def _remote(attribute: str, method: Method) -> Method:
    stoppable = method.where in (Where.LOOP, Where.BESIDE)

    def invoke(environment: Any, argument: Any) -> Any:
        return environment.call(attribute, argument, stoppable=stoppable)

    where = Where.BESIDE if method.where is Where.BESIDE else Where.LOOP
    return Method(method.name, invoke, where, method.accepts)


def payload(blueprint: Blueprint, find: Callable[[], Any] | None) -> str:
    """All that another interpreter needs to make the same blueprint. Raises ConfigError."""
    options = {} if find is not None else blueprint.options
    make = None if find is not None else blueprint.make
    try:
        environment = pickle.dumps({"find": find, "make": make, "options": options})
    except Exception as error:
        raise ConfigError(
            f"{blueprint.cls.__name__} cannot run in a process of its own: {error}",
            hint="define the class, or the function that makes it, at the top of a module",
        ) from error
    prepare: dict[str, Any] = multiprocessing.spawn.get_preparation_data("paddock-environment")
    prepare.pop("authkey", None)
    if find is not None:
        # The program that runs is our own command then.
        prepare = {name: value for name, value in prepare.items() if not name.startswith("init_main")}
    whole = {"prepare": prepare, "logging": _logging(), "environment": environment}
    return base64.b64encode(pickle.dumps(whole)).decode()


def _logging() -> dict[str, Any] | None:
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:
            form = handler.formatter
            style = {} if form is None else {"format": form._fmt, "datefmt": form.datefmt}
            return {"level": root.level, **style}
    return None


def _request(method: str, argument: Any) -> bytes:
    try:
        return pickle.dumps((method, argument, False), pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not isinstance(argument, Step):
            raise
        # A type that was made at run time: the other side has one of its own, and reads the action again.
        fields = orjson.loads(encode(argument.action.model_dump(by_alias=True)))
        return pickle.dumps((method, Step(fields, argument.extras), True), pickle.HIGHEST_PROTOCOL)
