"""The loader for environments of ours: runs in the host and in its children.

A `method` request is the pickled name and argument of a method of the spec; a `call` request names another method of
the environment. Sync methods run on the session's thread, async ones on an event loop that all sessions of the
process share.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import json
import logging
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.spec import EnvironmentSpec

    Respond = Callable[[int, bytes, bytes], None]

logger = logging.getLogger("paddock.environment")


def load(target: str) -> LoadedSpec:
    """`target` is what `isolate.payload` returned."""
    import multiprocessing.spawn

    payload = pickle.loads(base64.b64decode(target))
    sys.path[:] = payload["prepare"]["sys_path"]
    multiprocessing.spawn.prepare(payload["prepare"])
    if payload["logging"]:
        logging.basicConfig(**payload["logging"])
    environment = pickle.loads(payload["environment"])
    find, make = environment["find"], environment["make"]
    return LoadedSpec(make if find is None else find(), environment["options"])


class LoadedSpec:
    """Makes the sessions of one spec."""

    def __init__(self, make: Any, options: dict[str, Any]) -> None:
        self._make = make
        self._options = options
        self._spec: EnvironmentSpec | None = None
        function = make.func if isinstance(make, partial) else make
        if isinstance(function, type):
            # A factory is not called here: no environment may live in the process that forks.
            self._spec = self._make_spec()
        gc.collect()
        gc.freeze()

    def describe(self) -> dict[str, Any]:
        return {}

    def open(self) -> HostedSession:
        if self._spec is None:
            self._spec = self._make_spec()
        return HostedSession(self._spec)

    def _make_spec(self) -> EnvironmentSpec:
        from paddock.sessions.spec import EnvironmentSpec

        return EnvironmentSpec(self._make, **self._options)


class SharedLoop:
    """The event loop of this process, on its own thread. Started by the first `get`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="paddock-loop", daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    except BaseException:
        # No async request would ever be answered. Ending the process reports that to the server.
        logger.critical("the event loop of a process for sessions has failed", exc_info=True)
        os._exit(1)


LOOP = SharedLoop()


class HostedSession:
    """One environment in this process."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        from paddock.sessions.spec import Where

        self.spec = spec
        self.environment = spec.build()
        self._async = (Where.LOOP, Where.OVERLAPPING)
        self._has_async = spec.step.where in self._async
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._sync_thread: ThreadPoolExecutor | None = None

    def handle_async(self, number: int, kind: bytes, data: bytes, respond: Respond) -> None:
        if kind == b"cancel":
            LOOP.get().call_soon_threadsafe(self._cancel, number)
            return
        function, is_async = self._parse_request(kind, data)
        if is_async:
            LOOP.get().call_soon_threadsafe(
                self._start, number, function, partial(self._finished, number, kind, respond)
            )
        elif self._has_async:
            # This thread must read the next frames: async requests may follow.
            self._sync_thread = self._sync_thread or ThreadPoolExecutor(1, "paddock-sync")
            self._sync_thread.submit(lambda: respond(number, *outcome(function, kind)))
        else:
            respond(number, *outcome(function, kind))

    def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is None:
            return
        if inspect.iscoroutinefunction(close):
            asyncio.run_coroutine_threadsafe(close(), LOOP.get()).result()
        elif self._sync_thread is not None:
            self._sync_thread.submit(close).result()
        else:
            close()

    def _parse_request(self, kind: bytes, data: bytes) -> tuple[Callable[[], Any], bool]:
        if kind == b"call":
            name, arguments = pickle.loads(data)
            method = getattr(self.environment, name)
            return partial(method, *arguments), inspect.iscoroutinefunction(method)
        name, argument, is_unparsed = pickle.loads(data)
        if is_unparsed:
            argument.action = self.spec.wire.parse_action(argument.action)
        method = getattr(self.spec, name)
        return partial(method.invoke, self.environment, argument), method.where in self._async

    # -- on the loop ------------------------------------------------------------------------------

    def _start(self, number: int, function: Callable[[], Any], finished: Callable[[asyncio.Task[Any]], None]) -> None:
        from paddock.sessions.threads import call_or_await

        task = self._tasks[number] = asyncio.get_running_loop().create_task(call_or_await(function))
        task.add_done_callback(finished)

    def _finished(self, number: int, kind: bytes, respond: Respond, task: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        try:
            respond(number, *outcome(task.result, kind))
        except Exception:
            logger.debug("a response could not be sent: the channel is closed", exc_info=True)

    def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()


def outcome(function: Callable[[], Any], kind: bytes) -> tuple[bytes, bytes]:
    """Kind and data of the response: what the function returns, or raises."""
    try:
        return b"ok", encode_value(function())
    except BaseException as error:
        # An environment may raise SystemExit. It must not end this process.
        return b"raised", pickle.dumps(portable_error(error, kind))


def encode_value(value: Any) -> bytes:
    """A pickle. A value whose type was made at run time is reduced to JSON types: no other process has its type."""
    from pydantic import BaseModel

    from paddock.protocol.codec import encode, model_fields

    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        fields = model_fields(value) if isinstance(value, BaseModel) else value
        return pickle.dumps(json.loads(encode(fields)), pickle.HIGHEST_PROTOCOL)


def portable_error(error: BaseException, kind: bytes) -> BaseException:
    """The error to raise in the server: a PaddockError itself, and a LookupError or ValueError of a `call`, which its
    caller handles. Any other becomes an EnvironmentFailure, and is logged here with its traceback."""
    from paddock.errors import EnvironmentFailure, PaddockError
    from paddock.protocol.redact import describe_error

    if not isinstance(error, (PaddockError, asyncio.CancelledError)):
        logger.error("a call of the environment failed", exc_info=error)
    passed = PaddockError if kind == b"method" else (PaddockError, LookupError, ValueError)
    if isinstance(error, passed) and type(error).__module__.partition(".")[0] in ("builtins", "paddock"):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            logger.debug("an error cannot be pickled", exc_info=True)
        else:
            return error
    return EnvironmentFailure(describe_error(error), error_type=type(error).__name__)
