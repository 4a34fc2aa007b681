"""No wire at all: the environment lives in this process, behind the same sessions and the same dispatch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from paddock.config import Limits
from paddock.errors import ClientError, DeadlineExceeded, InvalidMessage, PaddockError
from paddock.protocol import jsonrpc, mcp
from paddock.protocol.codec import encode, model_fields, observation_data
from paddock.protocol.episode import CallTool, GetState, ListTools, Reset, Step
from paddock.protocol.finite import check_finite
from paddock.protocol.messages import ResetArguments, error_list
from paddock.sessions.blueprint import Blueprint
from paddock.sessions.dispatch import Dispatch, tools_of
from paddock.sessions.manager import SessionManager
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.work import Work

TICK = 0.1
GRACE = 1.0
"""Seconds that a request somebody still waits for has to end when the client is closed."""
CLOSE_SECONDS = 5.0
"""Seconds for the environment's own `close`."""
LONGEST_BUILD = 300.0
"""Seconds for which a build that nobody waits for any more keeps the threads that will close what it has built."""


class MemoryTransport:
    """One session of an environment class, or of a factory."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.blueprint = Blueprint(make)
        self._dispatch = Dispatch(self.blueprint, Limits().step_timeout)
        self._manager: SessionManager | None = None
        self._session: Session | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._given_up: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Build the environment, unless that has happened."""
        async with self._opening:
            if self._session is not None:
                return
            self._closed = False
            manager = SessionManager(self.blueprint, Limits(max_sessions=1))
            session = await self._open_session(manager)
            session.attach(self)
            self._manager, self._session = manager, session
            self._ticking = asyncio.create_task(self._tick(manager))

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        if self._closed:
            raise ClientError("the client is closed")
        try:
            async with asyncio.timeout(timeout) as deadline:
                await self.open()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"the environment was not built within {timeout} s") from None
        assert self._session is not None
        kind = message["type"]
        if kind == "mcp":
            return {"type": "mcp", "data": await self._call(self._session, message["data"], timeout)}
        answer = await self._dispatch.ask(self._session, self._request(message), timeout=timeout)
        if kind == "state":
            return {"type": "state", "data": _as_sent(model_fields(answer))}
        return {"type": "observation", "data": _as_sent(observation_data(answer))}

    async def fetch(self, path: str) -> Any:
        if path == "/schema":
            return self.blueprint.schemas()
        if path == "/metadata":
            await self.open()
            assert self._session is not None
            described = await self._session.invoke("get_metadata") if self.blueprint.has_metadata else None
            return self.blueprint.metadata_from(described).model_dump()
        raise InvalidMessage(f"an environment in memory has no {path}")

    def holds_back(self, work: Work) -> bool:
        """Never: answers are awaited, not sent."""
        return False

    def send(self, frame: bytes) -> None:
        """Answers are returned, not sent."""

    def session_closed(self, error: PaddockError) -> None:
        """Only `close` ends it."""

    def replaced(self) -> None:
        """Nobody else can attach."""

    async def close(self) -> None:
        """End the session. What was given up is not waited for: a thread that hangs in it goes on by itself."""
        self._closed = True
        manager, session = self._manager, self._session
        self._manager = self._session = None
        if manager is None or session is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
        awaited = any(not work.settled for work in manager.running)
        await manager.drain(GRACE if awaited else 0.0)
        await asyncio.wait([session.ended], timeout=CLOSE_SECONDS)

    def abandon(self) -> bool:
        """Leave without waiting for anything. The environment is closed on a thread: the loop may be about to end."""
        self._closed = True
        manager = self._manager
        self._manager = self._session = None
        if manager is not None:
            manager.abandon()
        if self._ticking is not None:
            self._ticking.cancel()
        return manager is not None

    async def _open_session(self, manager: SessionManager) -> Session:
        """The manager's only session. Where there is none, its threads go home."""
        try:
            return await manager.open(Door.CREATED)
        except asyncio.CancelledError:
            # The build goes on by itself, and what comes of it is closed on the same threads.
            leaving = asyncio.create_task(manager.drain(LONGEST_BUILD))
            self._given_up.add(leaving)
            leaving.add_done_callback(self._given_up.discard)
            raise
        except BaseException:
            await manager.drain(0.0)
            raise

    def _request(self, message: dict[str, Any]) -> Step | Reset | GetState:
        if message["type"] == "step":
            return Step(self.blueprint.wire.parse_action(message["data"]))
        if message["type"] == "state":
            return GetState()
        check_finite(message.get("data"), "arguments")
        try:
            return Reset(ResetArguments.model_validate(message.get("data", {})).given())
        except ValidationError as error:
            raise InvalidMessage("Invalid message", errors=error_list(error)) from None

    async def _call(self, session: Session, document: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        call = jsonrpc.read(document)
        if call.method == "tools/list":
            tools = tools_of(self.blueprint)
            if tools is None:
                tools = await self._dispatch.ask(session, ListTools(), timeout=timeout)
            return jsonrpc.result({"tools": tools, **mcp.COMPLETE}, call.id)
        request = CallTool(call.params["name"], call.params.get("arguments") or {})
        return jsonrpc.result(_as_sent(await self._dispatch.ask(session, request, timeout=timeout)), call.id)

    async def _tick(self, manager: SessionManager) -> None:
        while True:
            await asyncio.sleep(TICK)
            manager.tick()


def _as_sent(value: Any) -> Any:
    """What a client on the other end of a wire would have received."""
    return orjson.loads(encode(value))
