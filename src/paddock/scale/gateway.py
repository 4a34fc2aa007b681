"""The gateway of a cluster of hosts: chooses the host of a request, queues clients, and answers for all hosts as one.

It does not know Ray. Hosts connect to it (`host_connection`), so a restarted gateway knows them within a second. How
requests and WebSockets reach a host is in `gateway_server`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import orjson

import paddock
from paddock.errors import CapacityReached, HostLost, QueueTimeout, SessionNotFound
from paddock.scale.host_connection import HostListener
from paddock.scale.host_registry import RECONNECT_GRACE_SECONDS, STARTUP_SECONDS, Host, HostRegistry, host_key_of
from paddock.scale.queue_order import QueuePublisher
from paddock.sessions.capacity import Slots
from paddock.telemetry.metrics import merge_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.config import Access
    from paddock.scale.host_connection import Address
    from paddock.scale.websocket_relay import ClientSocket

MAINTENANCE_SECONDS = 0.1
FREED_SLOT_REPORT_SECONDS = 0.1
"""A slot that has just become free may be reported within this time. No client is refused before."""
DEATH_DETECTION_SECONDS = 0.3
"""All sockets of a process that died are closed within this time."""
HOST_REQUEST_SECONDS = 2.0
CONNECT_SECONDS = 5.0
SUMMED_HEALTH_FIELDS = ("running", "hung", "threads")
GatewayMode = Literal["forward", "redirect"]


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The settings of one gateway of a cluster."""

    access: Access
    secret: str = field(repr=False)
    """Hosts and other gateways prove with it that they belong to this cluster."""
    host_token: str | None = field(default=None, repr=False)
    """The bearer token for requests to hosts."""
    mode: GatewayMode = "forward"
    queue_timeout: float = 0.0
    message_bytes: int = 100 * 1024 * 1024
    name: str = ""
    peers: tuple[Address, ...] = ()
    """Control addresses of the other gateways. All of them share one queue."""


class Gateway:
    """The state and the rules of one gateway process."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.registry = HostRegistry(clock)
        self.slots = Slots(self.registry, clock)
        self.listener = HostListener(self.registry, config.secret, self._on_host_report)
        self.registry.queue.on_change = self._on_peer_queue_change
        self._publisher = QueuePublisher(self.registry.queue, config.peers, config.secret)
        self._positions_changed = False
        self.sockets: dict[str, set[ClientSocket]] = {}
        """Client sockets that are relayed to a host, by its key."""
        self.autoscaler_status: dict[str, Any] = {}
        """What the autoscaler has requested, as the cluster service last sent it."""
        self._clock = clock
        self._started = clock()
        self._announced_waiting = 0
        self._hosts_changed = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None
        self._maintenance: asyncio.Task[None] | None = None

    # -- lifetime ---------------------------------------------------------------------------------

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._maintenance = asyncio.create_task(self._maintain())
        self._publisher.start()

    async def stop(self) -> None:
        self._publisher.stop()
        if self._maintenance is not None:
            self._maintenance.cancel()
        for relayed in list(self.sockets.values()):
            for socket in list(relayed):
                socket.transport.close()
        if self._http is not None:
            await self._http.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    async def _maintain(self) -> None:
        """Ten times a second: drop silent hosts, and refuse clients whose queue timeout is over."""
        while True:
            self.listener.drop_silent_hosts()
            self._drop_lost_sockets()
            self.slots.expire(self._clock())
            self.slots.admit()
            if self._positions_changed:
                self._positions_changed = False
                self.slots.notify_places()
            if self.slots.waiting != self._announced_waiting:
                self._announced_waiting = self.slots.waiting
                self.listener.broadcast({"waiting": self._announced_waiting})
            await asyncio.sleep(MAINTENANCE_SECONDS)

    def _on_host_report(self) -> None:
        self.slots.admit()
        self._hosts_changed.set()
        self._hosts_changed.clear()

    def _on_peer_queue_change(self) -> None:
        self._positions_changed = True
        self.slots.admit()

    def _drop_lost_sockets(self) -> None:
        """A socket to a host that vanished may stay open for long."""
        for key in self.registry.lost_hosts():
            for socket in self.sockets.pop(key, set()):
                socket.drop_host()

    async def is_lost(self, key: str) -> bool:
        """Whether a host whose socket just broke has died. Waits for the close of its other sockets."""
        deadline = self._clock() + DEATH_DETECTION_SECONDS
        while key in self.registry.hosts and self._clock() < deadline:
            await asyncio.sleep(DEATH_DETECTION_SECONDS / 10)
        return key not in self.registry.hosts

    # -- finding a host ---------------------------------------------------------------------------

    async def reserve_slot(
        self, wait: float | None = None, on_position: Callable[[int], None] | None = None
    ) -> tuple[Host, str]:
        """A host for a new session, and a lease for a slot of it. Raises CapacityReached or QueueTimeout."""
        ((host, (lease,)),) = await self.reserve_slots(1, wait, on_position)
        return host, lease

    async def reserve_slots(
        self, count: int, wait: float | None = None, on_position: Callable[[int], None] | None = None
    ) -> list[tuple[Host, list[str]]]:
        """Hosts and leases for up to `count` new sessions: for all slots that are free now, or for the next free one.

        Raises CapacityReached or QueueTimeout.
        """
        seconds = self.config.queue_timeout if wait is None else wait
        ticket, deadline = self.registry.new_ticket(), self._clock() + max(seconds, FREED_SLOT_REPORT_SECONDS)
        if not self.registry.hosts:
            deadline = max(deadline, self._started + STARTUP_SECONDS)
        try:
            while True:
                if not self.slots.take(ticket):
                    self.registry.queue.add(ticket)
                    seconds_left = deadline - self._clock()
                    if seconds_left <= 0:
                        raise self._capacity_error(waited=seconds > 0)
                    try:
                        await self.slots.wait(seconds_left, on_position if seconds > 0 else None, ticket)
                    except QueueTimeout:
                        raise self._capacity_error(waited=seconds > 0) from None
                if placed := await self._lease(ticket, count):
                    return placed
        finally:
            # Until the lease is granted the ticket keeps its turn, or a client at another gateway could overtake it.
            self.registry.queue.remove(ticket)

    async def _lease(self, ticket: int, count: int) -> list[tuple[Host, list[str]]]:
        """Request a lease for the admitted `ticket`, and for more free slots up to `count`. Hosts may refuse."""
        claimed = [self.registry.claim()]
        while len(claimed) < count and self.slots.take(ticket):
            claimed.append(self.registry.claim())
        counts = Counter(host.key for host in claimed if host is not None)
        connections = [self.listener.connections[key] for key in counts]
        requests = [connection.reserve(counts[connection.host.key]) for connection in connections]
        granted = [await requests[0]] if len(requests) == 1 else await asyncio.gather(*requests)
        return [(each.host, leases) for each, leases in zip(connections, granted, strict=True) if leases]

    async def host_of_session(self, token: str) -> Host:
        """The host that holds the session of `token`. Raises SessionNotFound, or HostLost if that host is gone."""
        key = host_key_of(token)
        if key is None:
            raise SessionNotFound(
                f"Unknown session_id: {token}", hint="it was closed, or was left unused too long; open a new one"
            )
        since = self.registry.lost.get(key)
        until = self._started + STARTUP_SECONDS if since is None else since + RECONNECT_GRACE_SECONDS
        host = await self._wait_for_host(lambda: self.registry.hosts.get(key), until)
        if host is None:
            raise host_lost(key)
        return host

    async def least_loaded_host(self) -> Host:
        """The host for a request without a session. Raises CapacityReached if there is none."""
        host = await self._wait_for_host(self.registry.least_loaded, self._started + STARTUP_SECONDS)
        if host is None:
            raise self._capacity_error(waited=False)
        return host

    async def _wait_for_host(self, find: Callable[[], Host | None], until: float) -> Host | None:
        """What `find` returns, once a host has connected. None if there is no such host at the time `until`."""
        while (host := find()) is None and (seconds_left := until - self._clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._hosts_changed.wait()
        return host

    def host_headers(self) -> dict[str, str]:
        token = self.config.host_token
        return {"authorization": f"Bearer {token}"} if token else {}

    def _capacity_error(self, *, waited: bool) -> CapacityReached:
        in_use, capacity = self.registry.in_use(), self.registry.capacity
        kind = QueueTimeout if waited else CapacityReached
        hint = "try again later, wait in the queue (queue_timeout), or allow more sessions or hosts"
        if not self.registry.hosts:
            return kind("No host is there yet. Cannot accept new connections.", hint=hint)
        message = f"Server at capacity: {in_use}/{capacity} sessions active. Cannot accept new connections."
        return kind(message, hint=hint, active_sessions=in_use, max_sessions=capacity)

    # -- the cluster as one -----------------------------------------------------------------------

    async def request_all(self, path: str) -> dict[str, bytes]:
        """GET `path` from all hosts. A host that does not answer in time is left out."""

        async def request(host: Host) -> tuple[str, bytes] | None:
            try:
                async with (
                    asyncio.timeout(HOST_REQUEST_SECONDS),
                    self.http.get(host.url + path, headers=self.host_headers()) as answer,
                ):
                    return host.key, await answer.read()
            except (OSError, TimeoutError, aiohttp.ClientError):
                return None

        answers = await asyncio.gather(*(request(host) for host in list(self.registry.hosts.values())))
        return dict(answer for answer in answers if answer is not None)

    async def health(self) -> dict[str, Any]:
        """The fields of `/health` of a single server, summed over the hosts, and each host under `hosts`."""
        answers = {key: orjson.loads(body) for key, body in (await self.request_all("/health")).items()}
        hosts = list(self.registry.hosts.values())
        states = [answer["status"] for answer in answers.values()]
        status = next(
            (name for name in ("healthy", "starting", "draining", "unhealthy") if name in states), "starting"
        )
        capacity, in_use = self.registry.capacity, self.registry.in_use()
        return {
            "status": status,
            "sessions": in_use,
            "capacity": capacity,
            "available": max(0, capacity - in_use),
            "waiting": self.waiting(),
            **{name: sum(answer.get(name, 0) for answer in answers.values()) for name in SUMMED_HEALTH_FIELDS},
            "draining": bool(hosts) and all(host.draining for host in hosts),
            "builds_ok": any(answer.get("builds_ok") for answer in answers.values()),
            "can_build": any(answer.get("can_build") for answer in answers.values()),
            "environment": self.config.name,
            "version": paddock.__version__,
            "gateway": self.config.mode,
            "hosts": [describe_host(host) for host in hosts],
            "autoscaler": self.autoscaler_status,
        }

    def waiting(self) -> int:
        """Clients in the queue of all gateways."""
        return self.slots.waiting + self.registry.queue.remote_count

    async def metrics(self) -> str:
        texts = [
            text.decode().replace('worker="0"', f'worker="{key}"')
            for key, text in (await self.request_all("/metrics")).items()
        ]
        own = {
            "hosts": ("Hosts that are there.", len(self.registry.hosts)),
            "hosts_asked": ("Hosts that the autoscaler wants.", self.autoscaler_status.get("hosts", 0)),
            "queue_waiting": ("Clients in the queue over all hosts.", self.waiting()),
        }
        lines = [
            f"# HELP paddock_{name} {text}\n# TYPE paddock_{name} gauge\npaddock_{name} {value}\n"
            for name, (text, value) in own.items()
        ]
        return merge_texts(["".join(lines), *texts])

    async def sessions(self) -> list[dict[str, Any]]:
        return [
            {**session, "host": key}
            for key, body in (await self.request_all("/sessions")).items()
            for session in orjson.loads(body)
        ]

    def report(self) -> dict[str, Any]:
        """What the cluster service bases its decisions on."""
        hosts = [describe_host(host) for host in self.registry.hosts.values()]
        return {"hosts": hosts, "waiting": self.waiting(), "lost_hosts": self.registry.lost_hosts()}


def describe_host(host: Host) -> dict[str, Any]:
    return {name: value for name, value in asdict(host).items() if name not in ("pending_leases", "last_seen")}


def host_lost(key: str) -> HostLost:
    return HostLost(
        f"the host {key} of this session is gone, and the episode with it", hint="reset() begins a new one"
    )
