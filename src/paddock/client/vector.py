"""Many sessions from one process: one frame carries the steps of all of them.

Against Paddock the sessions share a few connections (`trunk.py`), survive drops, and answer in
batches. On a cluster they are spread over its hosts (`spread.py`). Against a foreign server each session
gets a socket of its own. Errors are values in the result list: one failing session never hurts the
others.
"""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Self

from paddock.client.client import Client
from paddock.client.outgoing import authorization, fields_of
from paddock.client.ownership import Ownership
from paddock.client.policy import Reconnect, Timeouts
from paddock.client.spread import Spread, is_no_door
from paddock.client.transports.address import server_url
from paddock.client.transports.link import socket_address
from paddock.client.trunk import OPEN_BATCH, Lane, Result, Round, Trunk, result_in
from paddock.errors import ClientError, ConfigError, DeadlineExceeded, InvalidMessage, PaddockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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
        if queue_timeout is not None and not 0 <= queue_timeout < inf:
            hint = "give seconds, or None for what the server is set to"
            raise ConfigError(f"nobody can wait for {queue_timeout} s (queue_timeout)", hint=hint)
        self.url = server_url(url)
        self.sessions = sessions
        self.timeouts = timeouts or Timeouts()
        self._reconnect = reconnect or Reconnect()
        self._queue_timeout = queue_timeout
        self._headers = authorization(token)
        self._trunks: list[Trunk] = []
        """One list for the whole life: who lets go of a forgotten client holds it too."""
        self._abandon = partial(_abandon_all, self._trunks)
        self._ownership = Ownership()
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
        """Connect and open every session. Raises if not one of them could be opened, and leaves nothing open then."""
        self._ownership.check(self, self._abandon)
        try:
            await self._open_all()
        except BaseException:
            await self.close()
            raise

    async def _open_all(self) -> None:
        first = self._trunk()
        self._trunks[:] = [first]
        if not await first.open():
            await first.close()
            self._trunks.clear()
            await self._open_foreign()
            return
        if first.host is None or not await self._open_spread(first):
            rest = [self._trunk() for _ in range(self._connections - 1)]
            self._trunks += rest
            await asyncio.gather(*(trunk.open() for trunk in rest))
            await self._open_shares()
        errors = [lane.failed for lane in self._lanes if lane.failed is not None]
        if len(errors) == self.sessions:
            raise errors[0]

    async def _open_shares(self) -> None:
        """Each connection carries the same share of the sessions."""
        count = len(self._trunks)
        shares = [[str(i) for i in range(n, self.sessions, count)] for n in range(count)]
        until = self._queues_until()
        await asyncio.gather(
            *(trunk.open_lanes(keys, until) for trunk, keys in zip(self._trunks, shares, strict=True))
        )
        self._lanes = [self._trunks[i % count].lanes[str(i)] for i in range(self.sessions)]

    def _queues_until(self) -> float | None:
        """When, on the loop's clock, sessions that are opened from now on stop waiting for slots."""
        return None if self._queue_timeout is None else asyncio.get_running_loop().time() + self._queue_timeout

    def _trunk(self, lease: str | None = None) -> Trunk:
        """A connection, not opened yet, to the host that granted the lease, or to any."""
        address = socket_address(self.url, f"vector&lease={lease}" if lease else "vector")
        return Trunk(address, self._headers, self.timeouts, self._reconnect)

    async def _open_spread(self, first: Trunk) -> bool:
        """Open the sessions on the hosts that a door names; False if there is no door."""
        assert first.host is not None
        self._spread = Spread(self.url, self._headers, self._reconnect, self._trunk)
        self._spread.trunks[first.host] = first
        self._lanes = [Lane(str(i), None) for i in range(self.sessions)]
        await self._place(range(self.sessions))
        if is_no_door(self._lanes[0].failed):
            self._spread = None
            return False
        await self._spread.drop_unused()
        self._trunks[:] = self._spread.trunks.values()
        return True

    async def _place(self, indices: Iterable[int]) -> None:
        """Open sessions wherever there is room in the cluster."""
        assert self._spread is not None
        try:
            opened = await self._spread.open_lanes([str(i) for i in indices], self._queue_timeout)
        finally:
            self._trunks[:] = self._spread.trunks.values()
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
            until = self._queues_until()
            await asyncio.gather(*(trunk.revive(until) for trunk in self._trunks))
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
        self._ownership.check(self, self._abandon)
        self._check_open()
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
        if not self._ownership.release(self._abandon):
            return
        await asyncio.gather(*(trunk.close() for trunk in self._trunks), *(env.close() for env in self._foreign))

    def _check_open(self) -> None:
        if not self._lanes and not self._foreign:
            raise ClientError("the client is not open", hint="use it in `async with`, or await open() first")

    async def _ask_all(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], timeout: float | None
    ) -> list[Result]:
        """The answers to messages, by session. What is no message but an error already is its own answer."""
        self._ownership.check(self, self._abandon)
        self._check_open()
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
            Client(self.url, headers=self._headers, timeouts=self.timeouts, reconnect=self._reconnect)
            for _ in range(self.sessions)
        ]
        for start in range(0, self.sessions, OPEN_BATCH):
            batch = self._foreign[start : start + OPEN_BATCH]
            await asyncio.gather(*(env.__aenter__() for env in batch))

    async def _ask_foreign(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], limit: float | None
    ) -> list[Result]:
        async def ask(index: int, message: dict[str, Any] | InvalidMessage) -> Result:
            if isinstance(message, InvalidMessage):
                return message
            try:
                return result_in(await self._foreign[index].transport.request(message, limit))
            except PaddockError as error:
                return error

        return list(await asyncio.gather(*(ask(index, message) for index, message in messages.items())))


def _abandon_all(trunks: list[Trunk]) -> bool:
    was_open = False
    for trunk in trunks:
        try:
            was_open |= trunk.abandon()
        except RuntimeError:
            # The loop has ended, and cannot close the connection: the collector does.
            was_open = True
    return was_open


def _step_message(action: Any) -> dict[str, Any] | InvalidMessage:
    try:
        return {"type": "step", "data": fields_of(action)}
    except InvalidMessage as refused:
        return refused
