"""The door of a cluster of hosts: finds the host of a request, waits for a slot, and answers for all hosts as one.

Knows no Ray. Hosts call in (see `heartbeat`), so that a door that starts anew knows them again within a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import orjson

import paddock
from paddock.errors import CapacityReached, HostLost, QueueTimeout, SessionNotFound
from paddock.scale.heartbeat import Switchboard
from paddock.scale.roster import REDIAL_GRACE, SETTLING, Host, Roster, key_in
from paddock.scale.turns import Teller
from paddock.sessions.slots import Slots
from paddock.telemetry.metrics import merge_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.config import Access
    from paddock.scale.heartbeat import Address
    from paddock.scale.splice import ClientSide

LOOK_EVERY = 0.1
NEWS_TAKES = 0.1
"""Seconds in which a slot that has just come free may be heard of: nobody is refused before."""
DEATH_TAKES = 0.3
"""Seconds in which all sockets of a process that died are seen to close."""
ASK_TIMEOUT = 2.0
CONNECT_TIMEOUT = 5.0
SUMMED = ("running", "hung", "threads")
Mode = Literal["forward", "redirect"]


@dataclass(frozen=True, slots=True)
class DoorConfig:
    access: Access
    secret: str = field(repr=False)
    """What hosts show when they call in."""
    hosts_token: str | None = field(default=None, repr=False)
    """What the door shows to hosts."""
    mode: Mode = "forward"
    queue_timeout: float = 0.0
    message_bytes: int = 100 * 1024 * 1024
    name: str = ""
    others: tuple[Address, ...] = ()
    """Where the other doors of this cluster take calls: all of them keep one queue together."""


class Door:
    """Everything one door process knows and does."""

    def __init__(self, config: DoorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.roster = Roster(clock)
        self.slots = Slots(self.roster, clock)
        self.switchboard = Switchboard(self.roster, config.secret, self._host_spoke)
        self.roster.turns.told = self._door_spoke
        self._teller = Teller(self.roster.turns, config.others, config.secret)
        self._places_moved = False
        self.sockets: dict[str, set[ClientSide]] = {}
        """Sockets that are tied to a host, by its key."""
        self.asked: dict[str, Any] = {}
        """What the autoscaler has asked of the cluster, as it told us."""
        self._clock = clock
        self._started = clock()
        self._told_waiting = 0
        self._changed = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None

    # -- lifetime ---------------------------------------------------------------------------------

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._looking = asyncio.create_task(self._look())
        self._teller.start()

    async def stop(self) -> None:
        self._teller.stop()
        if self._looking is not None:
            self._looking.cancel()
        for tied in list(self.sockets.values()):
            for socket in list(tied):
                socket.transport.close()
        if self._http is not None:
            await self._http.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    async def _look(self) -> None:
        """Ten times a second: who has become silent, whose time in the queue is up."""
        while True:
            self.switchboard.drop_silent()
            self._drop_gone()
            self.slots.expire(self._clock())
            self.slots.admit()
            if self._places_moved:
                self._places_moved = False
                self.slots.tell_places()
            if self.slots.waiting != self._told_waiting:
                self._told_waiting = self.slots.waiting
                self.switchboard.tell_all({"waiting": self._told_waiting})
            await asyncio.sleep(LOOK_EVERY)

    def _host_spoke(self) -> None:
        self.slots.admit()
        self._changed.set()
        self._changed.clear()

    def _door_spoke(self) -> None:
        self._places_moved = True
        self.slots.admit()

    def _drop_gone(self) -> None:
        """Sockets to a host that stays away may not notice by themselves."""
        for key in self.roster.gone():
            for socket in self.sockets.pop(key, set()):
                socket.drop_host()

    async def is_lost(self, key: str) -> bool:
        """Whether a host whose socket just broke is gone as a whole."""
        deadline = self._clock() + DEATH_TAKES
        while key in self.roster.hosts and self._clock() < deadline:
            await asyncio.sleep(DEATH_TAKES / 10)
        return key not in self.roster.hosts

    # -- finding a host ---------------------------------------------------------------------------

    async def place(self, wait: float | None = None, moved: Callable[[int], None] | None = None) -> tuple[Host, str]:
        """A host for a new session, and the lease of a slot there. Raises CapacityReached or QueueTimeout."""
        ((host, (lease,)),) = await self.place_some(1, wait, moved)
        return host, lease

    async def place_some(
        self, most: int, wait: float | None = None, moved: Callable[[int], None] | None = None
    ) -> list[tuple[Host, list[str]]]:
        """Hosts and leases for as many of `most` new sessions as there are slots now, or for one as soon as there is.

        Raises CapacityReached or QueueTimeout.
        """
        seconds = self.config.queue_timeout if wait is None else wait
        ticket, deadline = self.roster.new_ticket(), self._clock() + max(seconds, NEWS_TAKES)
        if not self.roster.hosts:
            deadline = max(deadline, self._started + SETTLING)
        try:
            while True:
                if not self.slots.take(ticket):
                    self.roster.turns.join(ticket)
                    left = deadline - self._clock()
                    if left <= 0:
                        raise self._full(waited=seconds > 0)
                    try:
                        await self.slots.wait(left, moved if seconds > 0 else None, ticket)
                    except QueueTimeout:
                        raise self._full(waited=seconds > 0) from None
                if placed := await self._lease(ticket, most):
                    return placed
        finally:
            # Until there is a lease it is still this one's turn: somebody at another door might be quicker.
            self.roster.turns.leave(ticket)

    async def _lease(self, ticket: int, most: int) -> list[tuple[Host, list[str]]]:
        """Ask hosts for the slot that `ticket` was let in for, and for others that are free. Some may refuse."""
        claimed = [self.roster.claim()]
        while len(claimed) < most and self.slots.take(ticket):
            claimed.append(self.roster.claim())
        counts = Counter(host.key for host in claimed if host is not None)
        lines = [self.switchboard.lines[key] for key in counts]
        asked = [line.reserve(counts[line.host.key]) for line in lines]
        leases = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
        return [(line.host, found) for line, found in zip(lines, leases, strict=True) if found]

    async def keeper(self, token: str) -> Host:
        """The host that keeps the session of `token`. Raises SessionNotFound, or HostLost if that host is gone."""
        key = key_in(token)
        if key is None:
            raise SessionNotFound(
                f"Unknown session_id: {token}", hint="it was closed, or was left unused too long; open a new one"
            )
        since = self.roster.lost.get(key)
        until = self._started + SETTLING if since is None else since + REDIAL_GRACE
        while (host := self.roster.hosts.get(key)) is None:
            left = until - self._clock()
            if left <= 0:
                raise lost(key)
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return host

    async def anybody(self) -> Host:
        """The host with least to do, for what belongs to no session. Raises CapacityReached if there is none."""
        while (host := self.roster.least_loaded()) is None:
            left = self._started + SETTLING - self._clock()
            if left <= 0:
                raise self._full(waited=False)
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return host

    def hosts_headers(self) -> dict[str, str]:
        token = self.config.hosts_token
        return {"authorization": f"Bearer {token}"} if token else {}

    def _full(self, *, waited: bool) -> CapacityReached:
        taken, most = self.roster.taken(), self.roster.capacity
        kind = QueueTimeout if waited else CapacityReached
        hint = "try again later, wait in the queue (queue_timeout), or allow more sessions or hosts"
        if not self.roster.hosts:
            return kind("No host is there yet. Cannot accept new connections.", hint=hint)
        message = f"Server at capacity: {taken}/{most} sessions active. Cannot accept new connections."
        return kind(message, hint=hint, active_sessions=taken, max_sessions=most)

    # -- the cluster as one -----------------------------------------------------------------------

    async def ask_all(self, path: str) -> dict[str, bytes]:
        """The answers of all hosts to a GET. One that does not answer in time is left out."""

        async def ask(host: Host) -> tuple[str, bytes] | None:
            try:
                async with (
                    asyncio.timeout(ASK_TIMEOUT),
                    self.http.get(host.url + path, headers=self.hosts_headers()) as answer,
                ):
                    return host.key, await answer.read()
            except (OSError, TimeoutError, aiohttp.ClientError):
                return None

        answers = await asyncio.gather(*(ask(host) for host in list(self.roster.hosts.values())))
        return dict(answer for answer in answers if answer is not None)

    async def health(self) -> dict[str, Any]:
        """What `/health` says of one server, for all together, and each host under `hosts`."""
        answers = {key: orjson.loads(body) for key, body in (await self.ask_all("/health")).items()}
        hosts = list(self.roster.hosts.values())
        states = [answer["status"] for answer in answers.values()]
        status = next(
            (name for name in ("healthy", "starting", "draining", "unhealthy") if name in states), "starting"
        )
        capacity, taken = self.roster.capacity, self.roster.taken()
        return {
            "status": status,
            "sessions": taken,
            "capacity": capacity,
            "available": max(0, capacity - taken),
            "waiting": self.waiting(),
            **{name: sum(answer.get(name, 0) for answer in answers.values()) for name in SUMMED},
            "draining": bool(hosts) and all(host.draining for host in hosts),
            "builds_ok": any(answer.get("builds_ok") for answer in answers.values()),
            "can_build": any(answer.get("can_build") for answer in answers.values()),
            "environment": self.config.name,
            "version": paddock.__version__,
            "door": self.config.mode,
            "hosts": [shown(host) for host in hosts],
            "autoscaler": self.asked,
        }

    def waiting(self) -> int:
        """Newcomers in the queue, those at other doors included."""
        return self.slots.waiting + self.roster.turns.elsewhere

    async def metrics(self) -> str:
        texts = [
            text.decode().replace('worker="0"', f'worker="{key}"')
            for key, text in (await self.ask_all("/metrics")).items()
        ]
        own = {
            "hosts": ("Hosts that are there.", len(self.roster.hosts)),
            "hosts_asked": ("Hosts that the autoscaler wants.", self.asked.get("hosts", 0)),
            "queue_waiting": ("Newcomers in the queue over all hosts.", self.waiting()),
        }
        lines = [
            f"# HELP paddock_{name} {text}\n# TYPE paddock_{name} gauge\npaddock_{name} {value}\n"
            for name, (text, value) in own.items()
        ]
        return merge_texts(["".join(lines), *texts])

    async def sessions(self) -> list[dict[str, Any]]:
        return [
            {**session, "host": key}
            for key, body in (await self.ask_all("/sessions")).items()
            for session in orjson.loads(body)
        ]

    def report(self) -> dict[str, Any]:
        """What the supervisor decides by."""
        hosts = [shown(host) for host in self.roster.hosts.values()]
        return {"hosts": hosts, "waiting": self.waiting(), "gone": self.roster.gone()}


def shown(host: Host) -> dict[str, Any]:
    return {name: value for name, value in asdict(host).items() if name not in ("asked", "seen")}


def lost(key: str) -> HostLost:
    return HostLost(
        f"the host {key} of this session is gone, and the episode with it", hint="reset() begins a new one"
    )
