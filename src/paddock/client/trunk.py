"""One connection that carries many sessions: each a lane with one request under way, all of them back after a drop.

Knows the frames of `/ws?vector`, and nothing of who steps which session.
"""

from __future__ import annotations

import asyncio
import secrets
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.client import result_of
from paddock.client.outgoing import write
from paddock.client.returning import Tries, episode_lost
from paddock.client.transports.link import Link, connect
from paddock.errors import (
    CapacityReached,
    ClientError,
    ConnectFailed,
    EnvironmentFailure,
    EpisodeLost,
    InvalidMessage,
    PaddockError,
    SessionClosed,
    SessionNotFound,
    from_wire,
)
from paddock.protocol.codec import encode
from paddock.types import StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.client.policy import Reconnect, Timeouts

Result = StepResult[Any] | PaddockError
OPEN_BATCH = 200
FULL_FRAME = 200
AFTER_A_LOSS = "reset_all() opens a new session"


class Round:
    """The answers that one call waits for."""

    __slots__ = ("done", "missing", "results")

    def __init__(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.missing = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, place: int, answer: Any) -> None:
        if self.results[place] is None:
            self.results[place] = answer
            self.missing -= 1
            if self.missing == 0 and not self.done.done():
                self.done.set_result(None)


class Lane:
    """One session on a shared connection, with at most one request under way."""

    __slots__ = (
        "_queues_until", "failed", "frame", "key", "lease", "number", "opened", "place", "round", "token", "trunk",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        trunk: Trunk | None,
        lease: str | None = None,
        queues_until: float | None = None,
        token: str | None = None,
    ) -> None:
        self.key = key
        self.trunk = trunk
        """The connection that carries it; None if there is none for it."""
        self.lease = lease
        self.token = token
        """Our own choice, if the server takes one: so we know it even if the answer to `open` is lost."""
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._queues_until = queues_until
        """When, on the loop's clock, it no longer waits for a slot; None if the server decides."""
        self.failed: PaddockError | None = None
        self.number = 0
        self.frame: dict[str, Any] | None = None
        self.round: Round | None = None
        self.place = 0

    def opening(self) -> dict[str, Any]:
        """The message that asks for the session, or for its return."""
        if self.opened.done():
            known: dict[str, Any] = {"resume": self.token}
        else:
            known = {"token": self.token, "lease": self.lease}
            if self._queues_until is not None:
                known["queue_timeout"] = max(0.0, self._queues_until - asyncio.get_running_loop().time())
        told = {name: value for name, value in known.items() if value is not None}
        return {"type": "open", "session": self.key, **told}

    def ask(self, message: dict[str, Any], round: Round, place: int) -> dict[str, Any]:
        self.number += 1
        self.round, self.place = round, place
        self.frame = {**message, "id": self.number, "ack": self.number - 1, "session": self.key}
        return self.frame

    def answer(self, value: Any) -> None:
        round, self.round, self.frame = self.round, None, None
        if round is not None:
            round.put(self.place, value)

    def fail(self, error: PaddockError) -> None:
        """The session is gone, and with it the episode."""
        self.failed, self.token = error, None
        if not self.opened.done():
            self.opened.set_result(None)
        self.answer(error)


class Trunk:
    """One connection and the lanes on it. Comes back after a drop, with every session it had."""

    def __init__(self, url: str, headers: dict[str, str], timeouts: Timeouts, reconnect: Reconnect) -> None:
        self._address = url
        self._headers = headers
        self._timeouts = timeouts
        self._reconnect = reconnect
        self._tries = Tries(reconnect)
        self._link: Link | None = None
        self._returning: asyncio.Task[None] | None = None
        self._closed = False
        self._tokens_begin: str | None = None
        """With what the tokens that we choose have to begin; None if the server chooses them."""
        self.lanes: dict[str, Lane] = {}
        self.host: str | None = None
        """Which host of a cluster answers, if it is one."""
        self.refused: PaddockError | None = None
        """Why nobody takes this connection: its host is gone, or there is none."""
        self.reconnects = 0

    async def open(self) -> bool:
        """Connect; False if the server does not know vectors."""
        # The token of any lane leads back to the process that keeps them all.
        kept = next((lane.token for lane in self.lanes.values() if lane.token is not None), None)
        headers = {**self._headers, **({"Session-Resume": kept} if kept else {})}
        self.refused = None
        link = await connect(self._address, headers, self._received, self._dropped, self._timeouts.connect)
        if self._closed:
            # It was closed while we connected, when another connection of the same client failed.
            link.close()
            raise ClientError("the client was closed")
        self._link = link
        self.host = link.headers.get("Paddock-Host")
        self._tokens_begin = link.headers.get("Session-Id")
        if link.is_lost:
            self._link = None
            raise self.refused or ConnectFailed("the server hung up at once", hint="is it shutting down?")
        return "Paddock-Version" in link.headers

    @property
    def is_gone(self) -> bool:
        """Whether the connection is lost and will not come back by itself."""
        return self._link is None and (self._returning is None or self._returning.done())

    async def wait_back(self) -> None:
        """Until the connection is there, if it had dropped. Raises ConnectFailed, or why it is refused."""
        if self._link is None and self._returning is not None:
            await self._returning
        if self._link is None:
            await self.open()

    async def open_lanes(
        self, keys: Sequence[str], queues_until: float | None = None, leases: Sequence[str] = ()
    ) -> list[Lane]:
        """Open a session for each key, in the slot of its lease if it has one. A refused one carries its error.

        `queues_until` is one deadline for all of them, however many batches they are asked for in. Without one the
        server's own applies, and once it has refused somebody, those behind do not wait for it again.
        """
        wanted, lanes = list(zip_longest(keys, leases)), []
        for start in range(0, len(wanted), OPEN_BATCH):
            batch = [
                Lane(key, self, lease, queues_until, self._new_token())
                for key, lease in wanted[start : start + OPEN_BATCH]
            ]
            lanes += batch
            self.lanes |= {lane.key: lane for lane in batch}
            self.send([lane.opening() for lane in batch])
            if self.refused is not None:
                self._refuse(self.refused)
            await asyncio.gather(*(lane.opened for lane in batch))
            if queues_until is None and any(isinstance(lane.failed, CapacityReached) for lane in batch):
                queues_until = asyncio.get_running_loop().time()
        return lanes

    async def revive(self, queues_until: float | None) -> None:
        """Open new sessions in place of those that were lost or refused."""
        failed = [key for key, lane in self.lanes.items() if lane.failed is not None]
        if failed:
            await self.wait_back()
            await self.open_lanes(failed, queues_until)

    def send(self, messages: list[dict[str, Any]]) -> None:
        """In frames of a size that lets the server begin while the rest is still being written."""
        if self._link is not None and not self._link.is_lost:
            for start in range(0, len(messages), FULL_FRAME):
                if frame := self._written(messages[start : start + FULL_FRAME]):
                    self._link.send(frame)

    def drop(self) -> None:
        """Cut the connection as a broken network would, to see what happens then."""
        if self._link is not None:
            self._link.abort()

    async def close(self) -> None:
        self._closed = True
        if self._returning is not None:
            self._returning.cancel()
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            await link.leave()
        for lane in self.lanes.values():
            lane.fail(ClientError("the client was closed"))

    def abandon(self) -> bool:
        """Leave without waiting for anything: nobody holds the client of these sessions. False if it held nothing."""
        is_open = not self._closed and (self._link is not None or self._returning is not None)
        self._closed = True
        if self._returning is not None:
            self._returning.cancel()
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            link.close()
        return is_open

    def _new_token(self) -> str | None:
        return None if self._tokens_begin is None else f"{self._tokens_begin}-{secrets.token_hex(16)}"

    def _written(self, messages: list[dict[str, Any]]) -> bytes:
        """A frame of messages. One that JSON cannot express is left out, and its session is told."""
        try:
            written = encode(messages)
        except EnvironmentFailure:
            written = b""
        # A null may stand for a number that JSON cannot express: then each message is looked at by itself.
        if not written or b"null" in written:
            parts = [part for message in messages if (part := self._written_alone(message))]
            written = b"[" + b",".join(parts) + b"]" if parts else b""
        return written

    def _written_alone(self, message: dict[str, Any]) -> bytes:
        try:
            return write(message, message["type"])
        except InvalidMessage as refused:
            self.lanes[message["session"]].answer(refused)
            return b""

    def _received(self, raw: bytes) -> None:
        replies = orjson.loads(raw)
        if isinstance(replies, dict):
            # Not of one session: the door of a cluster refuses the connection itself.
            if replies.get("type") == "error":
                self._refuse(from_wire(replies["data"]))
            return
        for reply in replies:
            lane = self.lanes.get(reply.get("session"))
            if lane is None:
                continue
            if reply["type"] == "opened":
                self._opened(lane, reply["data"])
            elif reply.get("id") == lane.number:
                self._tries.begin_anew()
                lane.answer(result_in(reply))
            elif reply["type"] == "error" and "id" not in reply:
                self._session_error(lane, from_wire(reply["data"]))

    def _opened(self, lane: Lane, data: dict[str, Any]) -> None:
        lane.token = data["token"]
        lane.failed = None
        if not lane.opened.done():
            lane.opened.set_result(None)
        elif lane.frame is not None:
            self.send([lane.frame])

    def _refuse(self, error: PaddockError) -> None:
        """All that this connection carries is lost, and nothing is gained by coming back."""
        self.refused = error
        for lane in self.lanes.values():
            if lane.failed is None:
                self._session_error(lane, error)

    def _session_error(self, lane: Lane, error: PaddockError) -> None:
        if isinstance(error, (SessionNotFound, SessionClosed)) and lane.opened.done():
            error = episode_lost(error.message, lane.token, AFTER_A_LOSS)
        lane.fail(error)

    def _dropped(self, link: Link) -> None:
        if link is not self._link or self._closed:
            return
        self._link = None
        if self.refused is not None:
            return
        lost = episode_lost(f"the connection dropped ({link.code} {link.reason}".rstrip() + ")", hint=AFTER_A_LOSS)
        if self._reconnect.within <= 0:
            self._lose_all(lost)
        else:
            self._returning = asyncio.get_running_loop().create_task(self._return(lost))

    def _lose_all(self, lost: EpisodeLost) -> None:
        for lane in self.lanes.values():
            lane.fail(lost)

    async def _return(self, lost: EpisodeLost) -> None:
        """Come back to the same sessions, or lose them all."""
        try:
            await self._tries.reach(self.open)
        except ConnectFailed:
            self._lose_all(lost)
            return
        except PaddockError:
            return
        self.reconnects += 1
        kept = [lane for lane in self.lanes.values() if lane.token is not None or not lane.opened.done()]
        self.send([lane.opening() for lane in kept])


def result_in(reply: dict[str, Any]) -> Result:
    """What a reply of the server says: a result, or what went wrong."""
    return from_wire(reply["data"]) if reply["type"] == "error" else result_of(reply["data"])
