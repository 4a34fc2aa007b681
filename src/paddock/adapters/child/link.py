"""The connection of one session to its process: requests go out as lines, answers come back by number."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import orjson
from pydantic_core import from_json

from paddock.errors import EnvironmentFailure, InvalidMessage
from paddock.protocol.codec import encode
from paddock.protocol.redact import redact

if TYPE_CHECKING:
    import socket

PARTING_SECONDS = 1.0


class Link(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: Any = None
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._rest = bytearray()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.lost = False

    @classmethod
    async def over(cls, end: socket.socket) -> Link:
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, sock=end)
        return link

    def ask(self, kind: bytes, data: Any = None) -> asyncio.Future[Any]:
        """What the other side will answer. Who stops waiting gives up the answer, not what is being done for it.

        The future raises InvalidMessage if the other side refuses, EnvironmentFailure if it fails or is gone.
        """
        answered: asyncio.Future[Any] = self._loop.create_future()
        if self.lost:
            answered.set_exception(_gone())
            return answered
        number = b"%d" % next(self._numbers)
        self._waiting[number] = answered
        self._transport.write(b"%b %b %b\n" % (kind, number, encode(data)))
        return answered

    async def close(self) -> None:
        """The other side closes the environment when it has done what it was asked for."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._ended], timeout=PARTING_SECONDS)

    # -- what the transport calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._rest or data[-1] != 10:
            known = len(self._rest)
            self._rest += data
            end = self._rest.rfind(b"\n", known)
            if end < 0:
                return
            data, self._rest = bytes(self._rest[: end + 1]), self._rest[end + 1 :]
        for line in data.splitlines() if data.count(b"\n") > 1 else (data,):
            kind, number, answer = line.split(b" ", 2)
            waiting = self._waiting.pop(number, None)
            if waiting is None or waiting.done():
                continue
            try:
                value = _value(kind, answer)
            except Exception as error:
                waiting.set_exception(error)
            else:
                waiting.set_result(value)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if not self._ended.done():
            self._ended.set_result(None)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_gone())


def _value(kind: bytes, answer: bytes) -> Any:
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        value = from_json(answer)
    if kind == b"ok":
        return value
    if kind == b"refused":
        raise InvalidMessage("Invalid message", errors=value)
    text = redact(str(value["message"]))
    kind_name = str(value["type"])
    raise EnvironmentFailure(f"{kind_name}: {text}" if text else kind_name, error_type=kind_name)


def _gone() -> EnvironmentFailure:
    return EnvironmentFailure(
        "the environment's process has ended", hint="reset begins a new episode in a new one; its log tells why"
    )
