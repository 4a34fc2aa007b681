"""What the host loads for environments of ours: runs in the host and in its children.

A request is a pickled method name and argument; the methods are those of a blueprint, as the server has them. Plain
methods run on the session's thread; async ones on a loop that all sessions of the process share.
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

    from paddock.sessions.blueprint import Blueprint

    Respond = Callable[[int, bytes, bytes], None]

logger = logging.getLogger("paddock.environment")


def load(place: str) -> Hosted:
    """`place` is what `isolate.payload` has written."""
    import multiprocessing.spawn

    payload = pickle.loads(base64.b64decode(place))
    sys.path[:] = payload["prepare"]["sys_path"]
    multiprocessing.spawn.prepare(payload["prepare"])
    if payload["logging"]:
        logging.basicConfig(**payload["logging"])
    environment = pickle.loads(payload["environment"])
    find, make = environment["find"], environment["make"]
    return Hosted(make if find is None else find(), environment["options"])


class Hosted:
    def __init__(self, make: Any, options: dict[str, Any]) -> None:
        self._make = make
        self._options = options
        self._blueprint: Blueprint | None = None
        inner = make.func if isinstance(make, partial) else make
        if isinstance(inner, type):
            # A factory would be called to see what it makes, and no environment may live in the host.
            self._blueprint = self._made()
        gc.collect()
        gc.freeze()

    def describe(self) -> dict[str, Any]:
        return {}

    def open(self) -> Session:
        if self._blueprint is None:
            self._blueprint = self._made()
        return Session(self._blueprint)

    def _made(self) -> Blueprint:
        from paddock.sessions.blueprint import Blueprint

        return Blueprint(self._make, **self._options)


class Loop:
    """The event loop of a process, on a thread of its own, made when it is first needed."""

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
        # Nothing async would ever be answered again: the end of the process is an answer.
        logger.critical("the event loop of a process for sessions has failed", exc_info=True)
        os._exit(1)


LOOP = Loop()


class Session:
    """One environment."""

    def __init__(self, blueprint: Blueprint) -> None:
        from paddock.sessions.blueprint import Where

        self.blueprint = blueprint
        self.environment = blueprint.build()
        self._async = (Where.LOOP, Where.BESIDE)
        self._has_async = blueprint.step.where in self._async
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._plain: ThreadPoolExecutor | None = None

    def take(self, number: int, kind: bytes, data: bytes, respond: Respond) -> None:
        if kind == b"cancel":
            LOOP.get().call_soon_threadsafe(self._cancel, number)
            return
        function, is_async = self._wanted(kind, data)
        if is_async:
            LOOP.get().call_soon_threadsafe(
                self._start, number, function, partial(self._finished, number, kind, respond)
            )
        elif self._has_async:
            # This thread reads on: async calls may come meanwhile.
            self._plain = self._plain or ThreadPoolExecutor(1, "paddock-plain")
            self._plain.submit(lambda: respond(number, *outcome(function, kind)))
        else:
            respond(number, *outcome(function, kind))

    def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is None:
            return
        if inspect.iscoroutinefunction(close):
            asyncio.run_coroutine_threadsafe(close(), LOOP.get()).result()
        elif self._plain is not None:
            self._plain.submit(close).result()
        else:
            close()

    def _wanted(self, kind: bytes, data: bytes) -> tuple[Callable[[], Any], bool]:
        if kind == b"call":
            name, arguments = pickle.loads(data)
            method = getattr(self.environment, name)
            return partial(method, *arguments), inspect.iscoroutinefunction(method)
        name, argument, is_plain = pickle.loads(data)
        if is_plain:
            argument.action = self.blueprint.wire.parse_action(argument.action)
        chosen = getattr(self.blueprint, name)
        return partial(chosen.invoke, self.environment, argument), chosen.where in self._async

    # -- on the loop ------------------------------------------------------------------------------

    def _start(self, number: int, function: Callable[[], Any], finished: Callable[[asyncio.Task[Any]], None]) -> None:
        from paddock.sessions.jobs import awaited

        task = self._tasks[number] = asyncio.get_running_loop().create_task(awaited(function))
        task.add_done_callback(finished)

    def _finished(self, number: int, kind: bytes, respond: Respond, task: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        try:
            respond(number, *outcome(task.result, kind))
        except Exception:
            logger.debug("nobody listens to an answer any more", exc_info=True)

    def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()


def outcome(function: Callable[[], Any], kind: bytes) -> tuple[bytes, bytes]:
    """The kind and data of an answer."""
    try:
        return b"ok", written(function())
    except BaseException as error:
        # An environment may raise SystemExit; it is not for this process to obey.
        return b"raised", pickle.dumps(portable(error, kind))


def written(value: Any) -> bytes:
    """Pickled, or as JSON would have it: a type that was made at run time is known to this process alone."""
    from pydantic import BaseModel

    from paddock.protocol.codec import encode, model_fields

    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        fields = model_fields(value) if isinstance(value, BaseModel) else value
        return pickle.dumps(json.loads(encode(fields)), pickle.HIGHEST_PROTOCOL)


def portable(error: BaseException, kind: bytes) -> BaseException:
    """An error of ours as it is, and an IndexError or the like of a `call`: these mean something to the caller.
    Of any other an EnvironmentFailure tells; the log gets all of it here."""
    from paddock.errors import EnvironmentFailure, PaddockError
    from paddock.protocol.redact import told

    if not isinstance(error, (PaddockError, asyncio.CancelledError)):
        logger.error("a call of the environment failed", exc_info=error)
    kept = PaddockError if kind == b"ask" else (PaddockError, LookupError, ValueError)
    if isinstance(error, kept) and type(error).__module__.partition(".")[0] in ("builtins", "paddock"):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            logger.debug("an error cannot be passed on as it is", exc_info=True)
        else:
            return error
    return EnvironmentFailure(told(error), error_type=type(error).__name__)
