"""Many sessions from one process: one frame carries the steps of all of them.

Against Paddock the sessions share a few connections (`/ws?vector`), survive drops, and answer in
batches. On a cluster they are spread over its hosts (`spread`). Against a foreign server each session
gets a socket of its own. Errors are values in the result list: one failing session never hurts the
others.
"""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit, urlunsplit

import orjson

from paddock.client.client import Client, result_of
from paddock.client.outgoing import fields_of, write
from paddock.client.policy import Reconnect, Timeouts
from paddock.client.returning import Tries, episode_lost
from paddock.client.spread import Spread, is_no_door
from paddock.client.transports.link import Link, connect
from paddock.config import read_variables
from paddock.errors import (
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
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
    from collections.abc import Iterable, Mapping, Sequence

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
        self, key: str, trunk: Trunk | None, lease: str | None = None, queue_timeout: float | None = None
    ) -> None:
        self.key = key
        self.trunk = trunk
        """The connection that carries it; None if there is none for it."""
        self.lease = lease
        self.token: str | None = None
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._queues_until = None if queue_timeout is None else loop.time() + queue_timeout
        self.failed: PaddockError | None = None
        self.number = 0
        self.frame: dict[str, Any] | None = None
        self.round: Round | None = None
        self.place = 0

    def opening(self) -> dict[str, Any]:
        """The message that asks for the session, or for its return."""
        known: dict[str, Any] = {"resume": self.token} if self.token else {"lease": self.lease}
        if self.token is None and self._queues_until is not None:
            known["queue_timeout"] = max(0.0, self._queues_until - asyncio.get_running_loop().time())
        told = {name: value for name, value in known.items() if value is not None}
        return {"type": "open", "session": self.key, **told}

    def ask(self, message: dict[str, Any], round: Round, place: int) -> dict[str, Any]:
        self.number += 1
        self.round, self.place = round, place
        self.frame = {**message, "id": self.number, "session": self.key}
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
        self._link = link
        self.host = link.headers.get("Paddock-Host")
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
        self, keys: Sequence[str], queue_timeout: float | None = None, leases: Sequence[str] = ()
    ) -> list[Lane]:
        """Open a session for each key, in the slot of its lease if it has one. A refused one carries its error."""
        wanted, lanes = list(zip_longest(keys, leases)), []
        for start in range(0, len(wanted), OPEN_BATCH):
            batch = [Lane(key, self, lease, queue_timeout) for key, lease in wanted[start : start + OPEN_BATCH]]
            lanes += batch
            self.lanes |= {lane.key: lane for lane in batch}
            self.send([lane.opening() for lane in batch])
            if self.refused is not None:
                self._refuse(self.refused)
            await asyncio.gather(*(lane.opened for lane in batch))
        return lanes

    async def revive(self, queue_timeout: float | None) -> None:
        """Open new sessions in place of those that were lost or refused."""
        failed = [key for key, lane in self.lanes.items() if lane.failed is not None]
        if failed:
            await self.wait_back()
            await self.open_lanes(failed, queue_timeout)

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
            link.close()
            await link.wait_lost()
        for lane in self.lanes.values():
            lane.fail(ClientError("the client was closed"))

    def _written(self, messages: list[dict[str, Any]]) -> bytes:
        """A frame of messages. One that JSON cannot express is left out, and its session is told."""
        try:
            return encode(messages)
        except EnvironmentFailure:
            parts = [part for message in messages if (part := self._written_alone(message))]
            return b"[" + b",".join(parts) + b"]" if parts else b""

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
                lane.answer(_result(reply))
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


class VectorClient:
    """`sessions` episodes at once. Use it in `async with`, or call `close` when done."""

    def __init__(
        self,
        url: str,
        sessions: int,
        *,
        connections: int = 1,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Reconnect | None = None,
        queue_timeout: float | None = None,
    ) -> None:
        if sessions < 1 or connections < 1:
            raise ClientError("a vector needs at least one session and one connection")
        self.url = url.rstrip("/")
        self.sessions = sessions
        self.timeouts = timeouts or Timeouts()
        self._reconnect = reconnect or Reconnect()
        self._queue_timeout = queue_timeout
        self._token = token or read_variables().auth_token
        self._trunks: list[Trunk] = []
        self._spread: Spread | None = None
        self._lanes: list[Lane] = []
        self._foreign: list[Client[Any]] = []
        self._connections = min(connections, sessions)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return self.sessions

    async def open(self) -> None:
        """Connect and open every session. Raises if not one of them could be opened."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        scheme, host, path, _, _ = urlsplit(self.url)
        address = urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}/ws", "vector", ""))
        first = Trunk(address, headers, self.timeouts, self._reconnect)
        if not await first.open():
            await first.close()
            await self._open_foreign()
            return
        self._trunks = [first]
        if first.host is None or not await self._open_spread(first, address, headers):
            rest = [Trunk(address, headers, self.timeouts, self._reconnect) for _ in range(self._connections - 1)]
            await asyncio.gather(*(trunk.open() for trunk in rest))
            self._trunks += rest
            await self._open_shares()
        errors = [lane.failed for lane in self._lanes if lane.failed is not None]
        if len(errors) == self.sessions:
            await self.close()
            raise errors[0]

    async def _open_shares(self) -> None:
        """Each connection carries the same share of the sessions."""
        count = len(self._trunks)
        shares = [[str(i) for i in range(n, self.sessions, count)] for n in range(count)]
        await asyncio.gather(
            *(trunk.open_lanes(keys, self._queue_timeout) for trunk, keys in zip(self._trunks, shares, strict=True))
        )
        self._lanes = [self._trunks[i % count].lanes[str(i)] for i in range(self.sessions)]

    async def _open_spread(self, first: Trunk, address: str, headers: dict[str, str]) -> bool:
        """Open the sessions on the hosts that a door names; False if there is no door."""
        assert first.host is not None

        def trunk_for(lease: str) -> Trunk:
            return Trunk(f"{address}&lease={lease}", headers, self.timeouts, self._reconnect)

        self._spread = Spread(self.url, headers, self._reconnect, trunk_for)
        self._spread.trunks[first.host] = first
        self._lanes = [Lane(str(i), None) for i in range(self.sessions)]
        try:
            await self._place(range(self.sessions))
        except BaseException:
            await self.close()
            raise
        if is_no_door(self._lanes[0].failed):
            self._spread = None
            return False
        await self._spread.drop_unused()
        self._trunks = list(self._spread.trunks.values())
        return True

    async def _place(self, indices: Iterable[int]) -> None:
        """Open sessions wherever there is room in the cluster."""
        assert self._spread is not None
        try:
            opened = await self._spread.open_lanes([str(i) for i in indices], self._queue_timeout)
        finally:
            self._trunks = list(self._spread.trunks.values())
        for key, found in opened.items():
            if isinstance(found, PaddockError):
                lane = Lane(key, None)
                lane.fail(found)
            else:
                lane = found
            self._lanes[int(key)] = lane

    async def _revive(self) -> None:
        """Open new sessions in place of those that were lost or refused."""
        if self._spread is None:
            await asyncio.gather(*(trunk.revive(self._queue_timeout) for trunk in self._trunks))
            self._lanes = [lane.trunk.lanes[lane.key] for lane in self._lanes if lane.trunk is not None]
            return
        failed = {i: lane for i, lane in enumerate(self._lanes) if lane.failed is not None}
        for lane in failed.values():
            if lane.trunk is not None:
                lane.trunk.lanes.pop(lane.key, None)
        if failed:
            await self._place(failed)

    async def reset_all(
        self, seeds: Sequence[int] | None = None, *, timeout: float | None = None, **arguments: Any
    ) -> list[Result]:
        """Begin an episode in every session, each with its own seed if `seeds` are given.

        Sessions that were lost are opened anew first, and `timeout` counts from then on.
        """
        if seeds is not None and len(seeds) != self.sessions:
            raise ClientError(f"{len(seeds)} seeds for {self.sessions} sessions", hint="give one seed per session")
        await self._revive()
        own = [{"seed": seed} for seed in seeds] if seeds is not None else [{}] * self.sessions
        messages = {i: {"type": "reset", "data": {**arguments, **own[i]}} for i in range(self.sessions)}
        return await self._ask_all(messages, timeout)

    async def reset(
        self, arguments: Mapping[int, Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[Result]:
        """Begin a new episode in some sessions, each with its own arguments."""
        messages = {i: {"type": "reset", "data": dict(given)} for i, given in arguments.items()}
        return await self._ask_all(messages, timeout)

    async def step_all(self, actions: Sequence[Any], *, timeout: float | None = None) -> list[Result]:
        """One step in every session, in the order of the sessions."""
        if len(actions) != self.sessions:
            raise ClientError(f"{len(actions)} actions for {self.sessions} sessions", hint="give one per session")
        return await self.step(dict(enumerate(actions)), timeout=timeout)

    async def step(self, actions: Mapping[int, Any], *, timeout: float | None = None) -> list[Result]:
        """One step in some sessions: results come in the order of `actions`."""
        return await self._ask_all({i: _step_message(action) for i, action in actions.items()}, timeout)

    async def close(self) -> None:
        """End every session."""
        await asyncio.gather(*(trunk.close() for trunk in self._trunks), *(env.close() for env in self._foreign))

    async def _ask_all(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], timeout: float | None
    ) -> list[Result]:
        """The answers to messages, by session. What is no message but an error already is its own answer."""
        limit = self.timeouts.request if timeout is None else timeout
        for index in messages:
            if not 0 <= index < self.sessions:
                raise ClientError(f"there is no session {index}", hint=f"they are numbered 0 to {self.sessions - 1}")
            if not self._foreign and self._lanes[index].frame is not None:
                raise ClientError(f"session {index} has a request under way", hint="await it before the next")
        if self._foreign:
            return await self._ask_foreign(messages, limit)
        if not messages:
            return []
        round = Round(len(messages))
        outgoing: dict[Trunk, list[dict[str, Any]]] = {trunk: [] for trunk in self._trunks}
        for place, (index, message) in enumerate(messages.items()):
            lane = self._lanes[index]
            if isinstance(message, InvalidMessage):
                round.put(place, message)
            elif lane.failed is not None or lane.trunk is None:
                round.put(place, lane.failed)
            else:
                outgoing[lane.trunk].append(lane.ask(message, round, place))
        try:
            for trunk, frames in outgoing.items():
                trunk.send(frames)
            async with asyncio.timeout(limit):
                await round.done
        except TimeoutError:
            self._give_up(messages, round, limit)
        except BaseException:
            self._give_up(messages, round, limit)
            raise
        return round.results

    def _give_up(self, indices: Iterable[int], round: Round, limit: float | None) -> None:
        """Tell the server to stop what nobody waits for any more."""
        for index in indices:
            lane = self._lanes[index]
            if lane.round is round and lane.trunk is not None:
                lane.trunk.send([{"type": "cancel", "session": lane.key, "data": lane.number}])
                lane.answer(DeadlineExceeded(f"no answer within {limit} s"))

    async def _open_foreign(self) -> None:
        self._foreign = [
            Client(self.url, token=self._token, timeouts=self.timeouts, reconnect=self._reconnect)
            for _ in range(self.sessions)
        ]
        try:
            for start in range(0, self.sessions, OPEN_BATCH):
                batch = self._foreign[start : start + OPEN_BATCH]
                await asyncio.gather(*(env.__aenter__() for env in batch))
        except BaseException:
            await self.close()
            raise

    async def _ask_foreign(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], limit: float | None
    ) -> list[Result]:
        async def ask(index: int, message: dict[str, Any] | InvalidMessage) -> Result:
            if isinstance(message, InvalidMessage):
                return message
            try:
                return _result(await self._foreign[index].transport.request(message, limit))
            except PaddockError as error:
                return error

        return list(await asyncio.gather(*(ask(index, message) for index, message in messages.items())))


def _step_message(action: Any) -> dict[str, Any] | InvalidMessage:
    try:
        return {"type": "step", "data": fields_of(action)}
    except InvalidMessage as refused:
        return refused


def _result(reply: dict[str, Any]) -> Result:
    return from_wire(reply["data"]) if reply["type"] == "error" else result_of(reply["data"])
