"""HTTP: reading bodies, writing answers, and the routes of the OpenEnv wire.

An episode over HTTP lives in a session that `/reset` hands out as a `Session-Id` header and a cookie.
Calls without either stay independent: each builds an environment, uses it once and closes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paddock.errors import (
    CapacityReached,
    EnvironmentFailure,
    InvalidMessage,
    MessageTooBig,
    NotSupported,
    PaddockError,
    ServerDraining,
    Unauthorized,
    WorkerUnavailable,
)
from paddock.protocol.codec import encode, model_fields, observation_body
from paddock.protocol.episode import GetState, Reset, Step
from paddock.protocol.finite import find_nonfinite, problem_at
from paddock.protocol.messages import ResetArguments, error_list
from paddock.protocol.redact import describe_error
from paddock.server.handshake import SESSION_HEADER, ClientHandshake
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    from paddock.server.access import Header
    from paddock.server.rpc import DisconnectWait
    from paddock.server.service import Service

logger = logging.getLogger("paddock.server")
SESSION_COOKIE = "paddock_session"
REQUEST_NUMBER_HEADER = "request-number"
MAX_NUMBER_DIGITS = 15
NOT_AN_OBJECT = "Input should be a valid dictionary or object to extract fields from"
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


class JSONBytes(Response):
    """A JSON response. Bytes are sent as they are."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content if isinstance(content, bytes) else encode(content), status, headers)


class StepBody(BaseModel):
    """The body of `/step`. Further keys go to `step()` if it takes them."""

    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)


class BadBody(InvalidMessage):
    """A body that does not match its model; `detail` is the list that FastAPI would send."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        super().__init__("Invalid request", errors=detail)
        self.detail = detail


# -- reading ------------------------------------------------------------------------------------------


async def read_body(receive: Any, limit: int) -> bytes:
    """The whole body. Raises MessageTooBig as soon as it is over `limit`."""
    event = await receive()
    if event["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = event.get("body", b"")
    if not event.get("more_body", False):
        if len(body) > limit:
            raise _too_big(limit)
        return body
    parts, size = [body], len(body)
    while event.get("more_body", False):
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_big(limit)
    return b"".join(parts)


def _too_big(limit: int) -> MessageTooBig:
    return MessageTooBig(f"the body is over {limit} bytes", hint="raise --max-message-mb, or send less")


async def read_model(request: Request, model: type[ModelT], limit: int, *, optional: bool = False) -> ModelT:
    """The body as a model. Raises BadBody with locations that begin with `body`."""
    raw = await read_body(request.receive, limit)
    if not raw:
        if optional:
            return model()
        raise BadBody([{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}])
    try:
        document = from_json(raw)
    except ValueError as error:
        raise BadBody([_not_json(raw, error)]) from None
    if not isinstance(document, dict):
        raise BadBody([{"type": "model_attributes_type", "loc": ["body"], "msg": NOT_AN_OBJECT, "input": document}])
    location = find_nonfinite(document)
    if location is not None:
        raise BadBody([problem_at(["body", *location])])
    try:
        return model.model_validate(document)
    except ValidationError as error:
        detail = error_list(error)
        for problem in detail:
            problem["loc"] = ["body", *problem["loc"]]
            problem.pop("url", None)
        raise BadBody(detail) from None


def _not_json(raw: bytes, error: ValueError) -> dict[str, Any]:
    position, reason = 0, str(error)
    try:
        json.loads(raw)
    except json.JSONDecodeError as detailed:
        position, reason = detailed.pos, detailed.msg
    except (ValueError, RecursionError):
        pass
    loc = ["body", position]
    return {
        "type": "json_invalid",
        "loc": loc,
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": reason},
    }


# -- writing ------------------------------------------------------------------------------------------


def error_response(error: PaddockError) -> JSONBytes:
    """Any Paddock error as an HTTP answer."""
    if isinstance(error, BadBody):
        return JSONBytes({"detail": error.detail}, 422)
    if isinstance(error, InvalidMessage):
        return JSONBytes({"detail": error.data.get("errors") or error.message}, 422)
    wire = error.to_wire()
    headers = {"retry-after": "1"} if isinstance(error, (CapacityReached, ServerDraining, WorkerUnavailable)) else {}
    if isinstance(error, Unauthorized):
        headers = {"www-authenticate": "Bearer"}
    return JSONBytes({"detail": wire.pop("message"), **wire}, error.http_status, headers)


def with_error_responses(endpoint: Endpoint) -> Endpoint:
    """Turn the errors of an endpoint into answers; the connection stays usable."""

    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientDisconnect, HTTPException):
            raise
        except Exception as error:
            return _error_to_response(error, request)

    return wrapped


def _error_to_response(error: Exception, request: Request) -> Response:
    if isinstance(error, PaddockError):
        return error_response(error)
    logger.error("%s failed", request.url.path, exc_info=error)
    return error_response(EnvironmentFailure(describe_error(error), error_type=type(error).__name__))


# -- the routes ---------------------------------------------------------------------------------------


class EpisodeRoutes:
    """`/reset`, `/step` and `/state`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limit = service.config.limits.message_bytes

    async def reset(self, request: Request) -> Response:
        arguments = await read_model(request, ResetArguments, self.limit, optional=True)
        async with self._episode(request, begins=True) as session:
            return await self._carry_out(request, session, Reset(arguments.sent_arguments()), observation_body)

    async def step(self, request: Request) -> Response:
        body = await read_model(request, StepBody, self.limit)
        action = self.service.spec.wire.parse_action(body.action)
        declared = {"timeout_s": body.timeout_s, "request_id": body.request_id}
        extras = {**(body.__pydantic_extra__ or {}), **{k: v for k, v in declared.items() if v is not None}}
        async with self._episode(request) as session:
            step = Step(action, extras or None)
            return await self._carry_out(request, session, step, observation_body, body.timeout_s)

    async def state(self, request: Request) -> Response:
        async with self._episode(request) as session:
            return await self._carry_out(request, session, GetState(), model_fields)

    async def _carry_out(
        self,
        request: Request,
        session: Session,
        operation: Reset | Step | GetState,
        write: Callable[[Any], dict[str, Any]],
        timeout: float | None = None,
    ) -> Response:
        """Answer a request. A numbered one, in a session that lasts, runs on when its client disconnects."""
        execute = partial(self.service.dispatch.execute, session, operation, timeout=timeout)
        number = request_number(request.headers.get)
        if number is None or not self.service.manager.knows(session.token):
            disconnect_wait = partial(wait_for_disconnect, request.receive)
            return self._response(session, write(await execute(disconnect_wait=disconnect_wait)))

        async def answer() -> Response:
            try:
                return self._response(session, write(await execute()))
            except Exception as error:
                return _error_to_response(error, request)

        response: Response = await session.http_requests.answer(number, lambda: self.service.spawn(answer()))
        return response

    @asynccontextmanager
    async def _episode(self, request: Request, *, begins: bool = False) -> AsyncIterator[Session]:
        """The session that the request names, a new one if it begins an episode, or one for this call alone."""
        manager = self.service.manager
        token = None if self.service.outlives_its_loops else session_token(request)
        if token is not None and (not begins or manager.knows(token)):
            session = self.service.manager.find(token)
            session.was_continued = session.was_continued or not begins
            session.record_activity()
            yield session
            return
        if begins:
            wait = requested_queue_timeout(request.headers.get) or 0.0
            try:
                disconnect_wait = partial(wait_for_disconnect, request.receive)
                session = await cancel_on_disconnect(disconnect_wait, manager.open(Origin.HTTP, wait=wait))
            except CapacityReached:
                pass
            else:
                yield session
                return
        async with manager.borrow() as session:
            yield session

    def _response(self, session: Session, body: dict[str, Any]) -> Response:
        response = JSONBytes(body)
        if self.service.manager.knows(session.token):
            response.headers[SESSION_HEADER] = session.token
            response.set_cookie(SESSION_COOKIE, session.token, httponly=True, samesite="strict")
        return response


def session_token(request: Request) -> str | None:
    return request.headers.get(SESSION_HEADER) or request.cookies.get(SESSION_COOKIE)


def request_number(header: Header) -> int | None:
    """The number of a request; None if it has none. Raises InvalidMessage for what is no number."""
    text = header(REQUEST_NUMBER_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_DIGITS):
        problem = {"type": "int", "loc": ["header", REQUEST_NUMBER_HEADER], "msg": "a whole number is needed"}
        raise InvalidMessage("Invalid message", errors=[problem])
    return int(text)


def requested_queue_timeout(header: Header) -> float | None:
    """How many seconds the client waits for a slot; None if it does not say."""
    return ClientHandshake.read("", "", header).queue_timeout


async def wait_for_disconnect(receive: Any) -> None:
    """Return when the client has disconnected. `receive` is ASGI's."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(disconnect_wait: DisconnectWait, coroutine: Coroutine[Any, Any, T]) -> T:
    """What `coroutine` returns. If `disconnect_wait` returns first, cancels it and raises ClientDisconnect."""
    task = asyncio.ensure_future(coroutine)
    watcher = asyncio.ensure_future(disconnect_wait())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


class SplitBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    split: str


class TaskBody(SplitBody):
    index: int


class TaskRangeBody(SplitBody):
    start: int | None = None
    stop: int | None = None


class TaskListRoutes:
    """The task routes: the tasks of an environment, by split."""

    SPLIT_TYPES = ("train", "validation", "test")

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limit = service.config.limits.message_bytes

    async def environments(self, request: Request) -> Response:
        return JSONBytes([self.service.spec.name])

    async def splits(self, request: Request) -> Response:
        return JSONBytes([self._split(split) for split in await self._call(request, "list_splits")])

    async def tasks(self, request: Request) -> Response:
        body = await read_model(request, SplitBody, self.limit)
        tasks = await self._call(request, "list_tasks", body.split)
        return JSONBytes({"tasks": list(tasks), "env_name": self.service.spec.name})

    async def num_tasks(self, request: Request) -> Response:
        body = await read_model(request, SplitBody, self.limit)
        return JSONBytes({"num_tasks": await self._call(request, "num_tasks", body.split)})

    async def task(self, request: Request) -> Response:
        body = await read_model(request, TaskBody, self.limit)
        return JSONBytes({"task": await self._call(request, "get_task", body.split, body.index)})

    async def task_range(self, request: Request) -> Response:
        body = await read_model(request, TaskRangeBody, self.limit)
        tasks = await self._call(request, "get_task_range", body.split, body.start, body.stop)
        return JSONBytes({"tasks": list(tasks)})

    async def _call(self, request: Request, method: str, *arguments: Any) -> Any:
        """Call a task method on an instance for this call alone."""
        name = request.path_params["environment"]
        if name.lower() != self.service.spec.name.lower():
            raise UnknownEnvironment(f"unknown environment {name!r}")
        if not callable(getattr(self.service.spec.cls, method, None)):
            raise NotSupported(f"{method} is not supported for this environment")
        async with self.service.manager.borrow() as session:
            try:
                return await session.invoke(method, *arguments)
            except IndexError:
                raise InvalidTask("Invalid task index") from None
            except KeyError as error:
                raise InvalidTask(f"Invalid split or task: {error}") from None

    def _split(self, split: Any) -> Any:
        if isinstance(split, str):
            return {"name": split, "type": split if split in self.SPLIT_TYPES else "validation"}
        return model_fields(split)


class UnknownEnvironment(PaddockError):
    code = "UNKNOWN_ENVIRONMENT"
    http_status = 404


class InvalidTask(PaddockError):
    code = "INVALID_TASK"
    http_status = 400
