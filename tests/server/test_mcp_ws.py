"""What a socket asks for its calls and its session: how long either may take."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from environments import AsyncKit, Kit, Watched
from paddock.config import Limits, ServerConfig
from paddock.server.mcp_ws import McpConversation
from paddock.server.rpc import SocketCaller, answer
from paddock.server.service import Service
from paddock.sessions.session import Origin
from paddock.sessions.spec import EnvironmentSpec

pytestmark = pytest.mark.anyio


class Listening:
    """The client's end of a socket: what it was sent, and how it ended."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.code: int | None = None

    def send(self, frame: bytes) -> None:
        self.heard.append(json.loads(frame))

    def close(self, code: int, reason: str = "") -> None:
        self.code = code


@pytest.fixture
async def service(lives: list[Watched]) -> AsyncIterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(kind: Any) -> Service:
        made.append(Service(EnvironmentSpec(kind), ServerConfig(limits=Limits(max_sessions=1))))
        return made[-1]

    yield make
    for one in made:
        await one.stop(0)
    assert [life.closes for life in lives] == [1] * len(lives)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_socket_waits_for_a_slot_as_long_as_it_says(service: Callable[..., Service]) -> None:
    one = service(Kit)
    await one.manager.open(Origin.SOCKET)
    socket = Listening()
    McpConversation(one, socket, 0.2).begin()
    await until(lambda: one.manager.slots.waiting == 1)
    await until(lambda: socket.code == 1013)
    (refused,) = socket.heard
    assert refused["error"]["data"]["kind"] == "queue_timeout"


async def test_a_call_ends_at_the_deadline_of_its_caller(service: Callable[..., Service]) -> None:
    one = service(AsyncKit)
    session = await one.manager.open(Origin.SOCKET)
    document = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hang"}}
    response = await answer(one, SocketCaller(session), document, timeout=0.2)
    assert response is not None
    assert response["error"]["data"]["code"] == "STEP_TIMEOUT"
