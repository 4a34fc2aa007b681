"""A session over WebSocket that outlives its connection.

Against Paddock every request is numbered: after a drop the transport returns to the same session
and repeats what is unanswered, and the server repeats what it has already carried out. Against
OpenEnv's own server, which knows neither, a drop is reported as EpisodeLost and never papered over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.outgoing import write
from paddock.client.policy import Reconnect, Timeouts
from paddock.client.returning import Tries, episode_lost, no_answer
from paddock.client.transports.address import server_url
from paddock.client.transports.http import NOTICE_SECONDS, close_session, get_json
from paddock.client.transports.link import Link, connect, socket_address
from paddock.errors import (
    ClientError,
    ConnectFailed,
    MessageTooBig,
    PaddockError,
    SessionClosed,
    SessionNotFound,
    from_wire,
)
from paddock.protocol.codec import encode
from paddock.protocol.resume import WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE_TOO_BIG = 1009
logger = logging.getLogger("paddock.client")


class Pending:
    """A request without its answer yet."""

    __slots__ = ("answer", "frame", "is_reset", "number")

    def __init__(self, frame: bytes, *, is_reset: bool) -> None:
        self.frame = frame
        self.is_reset = is_reset
        self.number: int | None = None
        self.answer: asyncio.Future[dict[str, Any] | PaddockError] = asyncio.get_running_loop().create_future()


class WebSocketTransport:
    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Reconnect | None = None,
        queue_timeout: float | None = None,
        on_queue: Callable[[int], None] | None = None,
        link: Callable[..., Any] = connect,
    ) -> None:
        self.base = server_url(url)
        self.timeouts = timeouts or Timeouts()
        self.reconnects = 0
        self.foreign = False
        """Whether the server is not Paddock's: then there are no numbers and no way back."""
        self.deterministic = False
        """Whether the environment declares that the same actions lead to the same observations."""
        self._headers = headers or {}
        self._reconnect = reconnect or Reconnect()
        self._tries = Tries(self._reconnect)
        self._queue_timeout = queue_timeout
        self._on_queue = on_queue
        self._open_link = link
        self._opening = asyncio.Lock()
        self._attempt = 0
        self._link: Link | None = None
        self._token: str | None = None
        self._number = 0
        self._numbered: dict[int, Pending] = {}
        """In flight, in rising order: never more than the window of `protocol/resume.py` allows."""
        self._unsent: deque[Pending] = deque()
        """Behind the window. They are numbered when they are sent."""
        self._in_order: deque[Pending] = deque()
        self._returning: asyncio.Task[None] | None = None
        self._queued_since: float | None = None
        """When we asked for a slot, once we were told that we wait for it."""
        self._asked_at = 0.0
        self._lost: PaddockError | None = None
        self._closed = False

    # -- Transport --------------------------------------------------------------------------------

    async def open(self, where: dict[str, Any] | None = None) -> None:
        """Connect, unless that has happened. A closed client may be opened again."""
        if self._closed and not self._opening.locked():
            self._closed = False
        async with self._opening:
            if self._link is not None or self._returning is not None:
                return
            self._lost = self._queued_since = None
            self._asked_at = asyncio.get_running_loop().time()
            self._settle(await self._connect(self._asking(self._queue_timeout), **(where or {})))

    def _asking(self, queue_timeout: float | None) -> dict[str, str]:
        """The headers of one who asks for a new session."""
        headers = dict(self._headers)
        if self._reconnect.within > 0:
            headers["Session-Resume"] = "new"
        if queue_timeout is not None:
            headers["Queue-Timeout"] = f"{queue_timeout:g}"
        return headers

    def _settle(self, link: Link) -> None:
        """Take a new session's connection as ours, unless it is refused or unwanted by now."""
        self.deterministic = "Paddock-Deterministic" in link.headers
        self.foreign = "Paddock-Version" not in link.headers
        if self._lost is None and not self._closed:
            self._token = link.headers.get("Session-Id")
            self._adopt(link)
        else:
            link.close()

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout) as deadline:
                reply = await self._ask(message, timeout)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise no_answer(message, timeout) from None
        if isinstance(reply, PaddockError):
            raise reply
        if reply["type"] == "error":
            raise from_wire(reply["data"])
        return reply

    async def fetch(self, path: str) -> Any:
        return await get_json(self.base + path, self._headers, self.timeouts.connect)

    async def close(self) -> None:
        """Leave: the server ends the session at once."""
        self._closed = True
        if self._returning is not None:
            self._returning.cancel()
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            link.send(b'{"type":"close"}')
            await link.leave()
        elif self._token is not None and self._lost is None:
            # The connection dropped: without a word the server would keep the session for one who returns.
            with suppress(PaddockError):
                await close_session(self.base, self._headers, self._token, NOTICE_SECONDS)
        self._token = None
        self._fail(ClientError("the client was closed"))

    def abandon(self) -> bool:
        """Leave without waiting for anything: nobody holds this client any more. False if it held nothing."""
        is_open = not self._closed and (self._link is not None or self._returning is not None)
        self._closed = True
        if self._returning is not None:
            self._returning.cancel()
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            link.send(b'{"type":"close"}')
            link.close()
        return is_open

    def drop(self) -> None:
        """Cut the connection as a broken network would, to see what happens then."""
        if self._link is not None:
            self._link.abort()

    # -- sending ----------------------------------------------------------------------------------

    async def _ask(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any] | PaddockError:
        """The answer to a message, connecting first if need be. A caller that is cancelled gives it up."""
        self._check_not_closed()
        if self._lost is not None:
            if message["type"] != "reset":
                raise self._lost
            self._forget_episode()
        await self.open()
        if self._lost is not None:
            raise self._lost
        self._check_not_closed()
        pending = self._send(message, timeout)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._give_up(pending)
            raise

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ClientError("the client is closed")

    def _send(self, message: dict[str, Any], timeout: float | None) -> Pending:
        is_reset = message["type"] == "reset"
        limit = {} if self.foreign or timeout in (None, inf) else {"timeout_s": timeout}
        pending = Pending(write({**message, **limit}, message["type"]), is_reset=is_reset)
        if self.foreign:
            self._in_order.append(pending)
            self._transmit(pending.frame)
        else:
            self._unsent.append(pending)
            self._fill_window()
        return pending

    def _fill_window(self) -> None:
        """Number and send what waits, as far as the window allows."""
        while self._unsent:
            number = self._number + 1
            lowest = next(iter(self._numbered), number)
            if number - lowest >= WINDOW:
                return
            self._number = number
            pending = self._numbered[number] = self._unsent.popleft()
            pending.number = number
            pending.frame = pending.frame[:-1] + b',"id":%d,"ack":%d}' % (number, lowest - 1)
            self._transmit(pending.frame)

    def _transmit(self, frame: bytes) -> None:
        """Send a frame, if there is a connection for it."""
        if self._link is not None and not self._link.is_lost:
            self._link.send(frame)

    def _send_again(self) -> None:
        """Repeat what is unanswered, if there is a connection for it."""
        if self._link is not None:
            for pending in self._numbered.values():
                self._link.send(pending.frame)

    def _give_up(self, pending: Pending) -> None:
        """The caller no longer waits. Paddock is told; from others the answer comes and is dropped."""
        pending.answer.cancel()
        if pending in self._unsent:
            self._unsent.remove(pending)
        number = pending.number
        if number is None or self._numbered.pop(number, None) is None:
            return
        self._transmit(encode({"type": "cancel", "data": number}))
        self._fill_window()

    # -- receiving --------------------------------------------------------------------------------

    def _received(self, attempt: int, raw: bytes) -> None:
        if attempt != self._attempt:
            return
        reply = orjson.loads(raw)
        if reply["type"] == "queued":
            self._queued_since = self._asked_at
            if self._on_queue is not None:
                self._on_queue(reply["data"]["place"])
            return
        if reply["type"] == "moved":
            self._move_on(reply["data"])
            return
        number = reply.get("id")
        if number is not None:
            pending = self._numbered.pop(number, None)
            self._fill_window()
        elif self.foreign and self._in_order:
            pending = self._in_order.popleft()
        elif reply["type"] == "error":
            self._refused(from_wire(reply["data"]))
            return
        else:
            return
        if pending is not None:
            self._tries.begin_anew()
            if not pending.answer.done():
                pending.answer.set_result(reply)

    def _refused(self, error: PaddockError) -> None:
        """The server speaks of the session itself: it is not there, or not any more."""
        if isinstance(error, SessionNotFound) and self._waits_only_for_a_reset():
            self._forget_episode()
            self._returning = asyncio.get_running_loop().create_task(self._begin_anew())
            return
        if isinstance(error, (SessionNotFound, SessionClosed)):
            error = episode_lost(error.message, self._token)
        self._token = None
        self._fail(error)

    def _move_on(self, where: dict[str, Any]) -> None:
        """A slot came free, on a host that we are told of: go there, with what is unanswered."""
        link, self._link, self._queued_since = self._link, None, None
        if link is not None:
            link.close()
        self._returning = asyncio.get_running_loop().create_task(self._begin_anew(where))

    def _waits_only_for_a_reset(self) -> bool:
        """Whether nothing is lost with the session: what is unanswered begins a new episode anyway."""
        unanswered = (*self._numbered.values(), *self._unsent)
        waiting = [pending for pending in unanswered if not pending.answer.done()]
        return len(waiting) == 1 and waiting[0].is_reset

    async def _begin_anew(self, where: dict[str, Any] | None = None) -> None:
        """Send what is unanswered to a new session; `where` there is a slot for it, if a door said so."""
        self._returning = None
        try:
            await self.open(where)
        except PaddockError as error:
            self._fail(error)
            return
        self._send_again()

    def _adopt(self, link: Link) -> None:
        """From now on this is our connection, unless it is lost already."""
        self._link = link
        if link.is_lost:
            self._dropped(link)

    def _dropped(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        if self._closed:
            return
        if link.code == MESSAGE_TOO_BIG:
            self._refuse_largest()
        if self._token is None and self._queued_since is not None and self._lost is None and self._returning is None:
            self._returning = asyncio.get_running_loop().create_task(self._line_up_again(self._queued_since))
        elif self._token is None or self._reconnect.within <= 0:
            why = f"the connection dropped ({link.code} {link.reason})".rstrip()
            if self._in_order:
                why += ", and what was unanswered may have been executed"
            self._fail(self._lost or episode_lost(why))
        elif self._returning is None:
            self._returning = asyncio.get_running_loop().create_task(self._return())

    def _refuse_largest(self) -> None:
        """The server hung up over the size of a request. Sending it again would only end the same way."""
        if not self._numbered:
            return
        number = max(self._numbered, key=lambda known: len(self._numbered[known].frame))
        pending = self._numbered.pop(number)
        if not pending.answer.done():
            size = len(pending.frame)
            pending.answer.set_result(
                MessageTooBig(f"the server refuses a message of {size} bytes", hint="see its --max-message-mb")
            )

    async def _return(self) -> None:
        """Come back to the same session and repeat what is unanswered."""
        try:
            headers = {**self._headers, "Session-Resume": self._token or ""}
            link = await self._tries.reach(lambda: self._connect(headers))
        except ConnectFailed as error:
            self._token = None
            self._fail(episode_lost(f"could not reconnect: {error}"))
            return
        finally:
            self._returning = None
        if self._lost is not None or self._closed:
            link.close()
            return
        self.reconnects += 1
        logger.info("reconnected to %s, the episode goes on", self.base)
        self._adopt(link)
        self._send_again()

    async def _line_up_again(self, since: float) -> None:
        """The door where we waited is gone, and nothing else is: wait at the next, for as long as is left."""
        left = self._queue_timeout
        if left is not None:
            left = max(0.0, since + left - asyncio.get_running_loop().time())
        try:
            headers = self._asking(left)
            link = await self._tries.reach(lambda: self._connect(headers))
        except ConnectFailed as error:
            self._fail(error)
            return
        finally:
            self._returning = None
        self._settle(link)
        self._send_again()

    def _fail(self, error: PaddockError) -> None:
        """Every waiting caller hears of it, and so does the next one, until a reset begins anew."""
        self._lost = error
        waiting = [*self._numbered.values(), *self._unsent, *self._in_order]
        self._numbered.clear()
        self._unsent.clear()
        self._in_order.clear()
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_result(error)

    def _forget_episode(self) -> None:
        self._lost = None
        self._token = None
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            link.close()

    async def _connect(self, headers: dict[str, str], url: str | None = None, lease: str | None = None) -> Link:
        address = socket_address(url or self.base, f"lease={lease}" if lease else "")
        self._attempt = attempt = self._attempt + 1
        received = partial(self._received, attempt)
        try:
            opened: Link = await self._open_link(address, headers, received, self._dropped, self.timeouts.connect)
        except asyncio.CancelledError:
            if attempt == self._attempt:
                # What a connection that nobody waits for says is not for us.
                self._attempt += 1
            raise
        return opened
