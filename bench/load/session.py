"""One `/ws` session on picows, as lean as a client can be, saying what a stock client says."""

import asyncio
from typing import TypeVar

import orjson
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

RESET = b'{"type":"reset","data":{}}'
STEP = b'{"type":"step","data":{"amount":0}}'
CLOSE = b'{"type":"close"}'
OPENERS = 32
"""How many sessions are opened at the same time."""

HANDSHAKE_SECONDS = 60.0
REPLY_SECONDS = 60.0
CLOSE_SECONDS = 10.0

SessionT = TypeVar("SessionT", bound="LoadSession")


class LoadSession(WSListener):
    """A connected session that is asked one question at a time."""

    transport: WSTransport

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] | None = None

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.CLOSE:
            transport.send_close()
            transport.disconnect()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(frame.get_payload_as_bytes())

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the session"))

    async def ask(self, message: bytes) -> None:
        """Send a message and wait for its observation.

        Raises:
            RuntimeError: the server answered with something else.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.send(WSMsgType.TEXT, message)
        check_observation(await asyncio.wait_for(self._answer, REPLY_SECONDS))


def check_observation(payload: bytes) -> None:
    """Raise `RuntimeError` unless the payload is an observation message."""
    if orjson.loads(payload).get("type") != "observation":
        raise RuntimeError(f"the server answered {payload[:300]!r}")


async def open_session(kind: type[SessionT], url: str) -> SessionT:
    """Connect and reset: the session is ready to step."""
    _, session = await ws_connect(
        kind, url, websocket_handshake_timeout=HANDSHAKE_SECONDS, read_buffer_init_size=2048
    )
    assert isinstance(session, kind)
    await session.ask(RESET)
    return session


async def open_sessions(kind: type[SessionT], url: str, count: int) -> list[SessionT]:
    """Open `count` sessions, `OPENERS` at a time."""
    sessions: list[SessionT] = []
    numbers = iter(range(count))

    async def open_some() -> None:
        for _ in numbers:
            sessions.append(await open_session(kind, url))

    await asyncio.gather(*(open_some() for _ in range(min(OPENERS, count))))
    return sessions


async def close_sessions(sessions: list[SessionT]) -> None:
    """Say goodbye as a stock client does, and drop whoever does not hang up in time."""
    for session in sessions:
        if not session.transport.is_disconnected:
            session.transport.send(WSMsgType.TEXT, CLOSE)
    waits = [asyncio.ensure_future(session.transport.wait_disconnected()) for session in sessions]
    _, late = await asyncio.wait(waits, timeout=CLOSE_SECONDS)
    for wait in late:
        wait.cancel()
    for session in sessions:
        session.transport.disconnect(graceful=False)
