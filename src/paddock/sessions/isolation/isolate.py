"""Replaces the methods of a spec by requests to a child process. Sessions and transports do not notice."""

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
from paddock.sessions.isolation.process import HostProcess
from paddock.sessions.isolation.remote import RemoteEnvironment, open_blocking, read_failure
from paddock.sessions.spec import Affinity, Method, Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.spec import EnvironmentSpec

logger = logging.getLogger("paddock.sessions")

LOADER = Path(__file__).with_name("loader.py")
METHODS = ("reset", "step", "list_tools", "state", "call_tool", "step_by_tool", "plain_step", "plain_call")
EXTRA_METHODS = ("get_metadata", "list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range")
"""Called on an environment beside the methods of its spec."""


class Isolation:
    """The child processes of one spec."""

    def __init__(self, spec: EnvironmentSpec, target: str, sessions_per_process: int, seconds: float | None) -> None:
        self.process = HostProcess(
            sys.executable,
            LOADER,
            target,
            name=spec.name,
            sessions_per_process=sessions_per_process,
            flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
            passes_private_variables=True,
        )
        self.tools = spec.tools or {}
        self.extra_methods = frozenset(name for name in EXTRA_METHODS if callable(getattr(spec.cls, name, None)))
        self._seconds = seconds

    def build(self) -> IsolatedEnvironment:
        """Blocks. Raises what the constructor raises, EnvironmentCrashed or StepTimeout."""
        number, session_socket = open_blocking(self.process, self._seconds)
        return IsolatedEnvironment(self, number, session_socket)

    def start(self) -> None:
        """Start the host on a thread, so that the first session does not wait for the environment to load."""

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
    """Proxy for an environment of ours in a child process."""

    def __init__(self, isolation: Isolation, number: int, session_socket: Any) -> None:
        self.process = isolation.process
        self.tools = isolation.tools
        self._extra_methods = isolation.extra_methods
        self._number = number
        self._socket = session_socket

    async def call(self, method: str, argument: Any, *, stoppable: bool) -> Any:
        if method == "reset":
            await self.reopen()
        return await self.request(b"method", _encode_request(method, argument), stoppable=stoppable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._extra_methods:
            raise AttributeError(name)

        async def call(*arguments: Any) -> Any:
            return await self.request(b"call", pickle.dumps((name, arguments)))

        return call

    def decode(self, kind: bytes, data: bytes) -> Any:
        if kind == b"failed":
            raise read_failure(data)
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
    spec: EnvironmentSpec,
    *,
    sessions_per_process: int,
    find: Callable[[], Any] | None = None,
    seconds: float | None = None,
) -> Isolation:
    """Run the sessions of `spec` in child processes from now on.

    `find` returns the class in another process, if it cannot be imported by its name there. `seconds` is how long an
    environment may take to be built. Raises ConfigError.
    """
    if sessions_per_process > 1 and spec.affinity is Affinity.SHARED:
        raise ConfigError(
            f"{spec.cls.__name__} needs one thread for all instances of a process",
            hint="leave sessions_per_process at 1",
        )
    isolation = Isolation(spec, payload(spec, find), sessions_per_process, seconds)
    for attribute in METHODS:
        setattr(spec, attribute, _forward(attribute, getattr(spec, attribute)))

    def build() -> IsolatedEnvironment:
        return isolation.build()

    build.__name__ = getattr(spec.make, "__name__", spec.cls.__name__)
    spec.make = build
    spec.has_server_inside = False
    spec.affinity = Affinity.ANY
    spec.isolation = isolation
    return isolation


def _forward(attribute: str, method: Method) -> Method:
    stoppable = method.where in (Where.LOOP, Where.OVERLAPPING)

    def invoke(environment: Any, argument: Any) -> Any:
        return environment.call(attribute, argument, stoppable=stoppable)

    where = Where.OVERLAPPING if method.where is Where.OVERLAPPING else Where.LOOP
    return Method(method.name, invoke, where, method.accepts)


def payload(spec: EnvironmentSpec, find: Callable[[], Any] | None) -> str:
    """A pickle, in base64, from which another interpreter makes the same spec. Raises ConfigError."""
    options = {} if find is not None else spec.options
    make = None if find is not None else spec.make
    try:
        environment = pickle.dumps({"find": find, "make": make, "options": options})
    except Exception as error:
        raise ConfigError(
            f"{spec.cls.__name__} cannot run in a process of its own: {error}",
            hint="define the class, or the function that makes it, at the top of a module",
        ) from error
    prepare: dict[str, Any] = multiprocessing.spawn.get_preparation_data("paddock-environment")
    prepare.pop("authkey", None)
    if find is not None:
        # The main module is our own command then: the child does not need it.
        prepare = {name: value for name, value in prepare.items() if not name.startswith("init_main")}
    contents = {"prepare": prepare, "logging": _logging_options(), "environment": environment}
    return base64.b64encode(pickle.dumps(contents)).decode()


def _logging_options() -> dict[str, Any] | None:
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:
            formatter = handler.formatter
            formats = {} if formatter is None else {"format": formatter._fmt, "datefmt": formatter.datefmt}
            return {"level": root.level, **formats}
    return None


def _encode_request(method: str, argument: Any) -> bytes:
    try:
        return pickle.dumps((method, argument, False), pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not isinstance(argument, Step):
            raise
        # The action's type was made at run time. The child has its own type, and parses the fields again.
        fields = orjson.loads(encode(argument.action.model_dump(by_alias=True)))
        return pickle.dumps((method, Step(fields, argument.extras), True), pickle.HIGHEST_PROTOCOL)
