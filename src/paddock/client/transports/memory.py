"""The in-memory transport: the environment runs in this process, with the sessions and the dispatch of the server."""

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
from paddock.sessions.dispatch import Dispatch, tools_of
from paddock.sessions.manager import SessionManager
from paddock.sessions.session import Origin, Session
from paddock.sessions.spec import EnvironmentSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.work import Work

TICK_SECONDS = 0.1
DRAIN_SECONDS = 1.0
"""How long a request with a waiting caller has to end when the client is closed."""
CLOSE_SECONDS = 5.0
"""For the environment's own `close`."""
MAX_BUILD_SECONDS = 300.0
"""How long a build whose caller was cancelled keeps its threads. They close the environment when it is built."""


class MemoryTransport:
    """One session of an environment class, or of a factory."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.spec = EnvironmentSpec(make)
        self._dispatch = Dispatch(self.spec, Limits().step_timeout)
        self._manager: SessionManager | None = None
        self._session: Session | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._abandoned_builds: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Build the environment, unless that has happened."""
        async with self._opening:
            if self._session is not None:
                return
            self._closed = False
            manager = SessionManager(self.spec, Limits(max_sessions=1))
            session = await self._open_session(manager)
            session.attach(self)
            self._manager, self._session = manager, session
            self._ticker = asyncio.create_task(self._tick(manager))

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
        answer = await self._dispatch.execute(self._session, self._request(message), timeout=timeout)
        if kind == "state":
            return {"type": "state", "data": _as_received(model_fields(answer))}
        return {"type": "observation", "data": _as_received(observation_data(answer))}

    async def fetch(self, path: str) -> Any:
        if path == "/schema":
            return self.spec.schemas()
        if path == "/metadata":
            await self.open()
            assert self._session is not None
            described = await self._session.invoke("get_metadata") if self.spec.has_metadata else None
            return self.spec.metadata_from(described).model_dump()
        raise InvalidMessage(f"an environment in memory has no {path}")

    def is_blocked(self, work: Work) -> bool:
        """Never: the answer is returned to a caller that waits for it."""
        return False

    def send(self, frame: bytes) -> None:
        """Answers are returned, not sent."""

    def on_session_closed(self, error: PaddockError) -> None:
        """Never called: only `close` ends the session."""

    def on_replaced(self) -> None:
        """Never called: only this client can attach."""

    async def close(self) -> None:
        """End the session. Cancelled requests are not waited for: a thread that hangs in one is left to itself."""
        self._closed = True
        manager, session = self._manager, self._session
        self._manager = self._session = None
        if manager is None or session is None:
            return
        if self._ticker is not None:
            self._ticker.cancel()
        has_waiting = any(not work.settled for work in manager.running)
        await manager.drain(DRAIN_SECONDS if has_waiting else 0.0)
        await asyncio.wait([session.ended], timeout=CLOSE_SECONDS)

    def abandon(self) -> bool:
        """Close without waiting. The environment is closed on a thread, because the loop may be about to end."""
        self._closed = True
        manager = self._manager
        self._manager = self._session = None
        if manager is not None:
            manager.abandon()
        if self._ticker is not None:
            self._ticker.cancel()
        return manager is not None

    async def _open_session(self, manager: SessionManager) -> Session:
        """The manager's only session. If it cannot be opened, the manager's threads end."""
        try:
            return await manager.open(Origin.CREATED)
        except asyncio.CancelledError:
            # The build continues by itself, and its environment is closed on the same threads.
            draining = asyncio.create_task(manager.drain(MAX_BUILD_SECONDS))
            self._abandoned_builds.add(draining)
            draining.add_done_callback(self._abandoned_builds.discard)
            raise
        except BaseException:
            await manager.drain(0.0)
            raise

    def _request(self, message: dict[str, Any]) -> Step | Reset | GetState:
        if message["type"] == "step":
            return Step(self.spec.wire.parse_action(message["data"]))
        if message["type"] == "state":
            return GetState()
        check_finite(message.get("data"), "arguments")
        try:
            return Reset(ResetArguments.model_validate(message.get("data", {})).sent_arguments())
        except ValidationError as error:
            raise InvalidMessage("Invalid message", errors=error_list(error)) from None

    async def _call(self, session: Session, document: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        call = jsonrpc.read(document)
        if call.method == "tools/list":
            tools = tools_of(self.spec)
            if tools is None:
                tools = await self._dispatch.execute(session, ListTools(), timeout=timeout)
            return jsonrpc.result({"tools": tools, **mcp.COMPLETE}, call.id)
        request = CallTool(call.params["name"], call.params.get("arguments") or {})
        return jsonrpc.result(_as_received(await self._dispatch.execute(session, request, timeout=timeout)), call.id)

    async def _tick(self, manager: SessionManager) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            manager.tick()


def _as_received(value: Any) -> Any:
    """The value as a client of a server would receive it."""
    return orjson.loads(encode(value))
