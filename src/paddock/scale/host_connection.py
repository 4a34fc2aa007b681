"""The connection between a host and a gateway: lines of JSON over one TCP connection that the host opens.

The host introduces itself, then reports its free slots: every half second, and at once when a slot becomes free. The
gateway requests leases over the same connection. It breaks with the process at either end, and silence is noticed
within seconds, where Ray needs fifteen. A restarted gateway knows all hosts as soon as they have reconnected.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import h11
import orjson

from paddock.net import HttpConnection
from paddock.scale.host_registry import Host, HostRegistry
from paddock.scale.queue_order import keep_connected, receive_peer_queue
from paddock.server.app import INTERNAL_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.service import Service

HEARTBEAT_SECONDS = 0.5
REPLY_SECONDS = 2.0
HELLO_SECONDS = 5.0
NO_GATEWAY_SECONDS = 10.0
"""A host that has no gateway for this long ends. While a gateway restarts, its port still accepts connections."""
COALESCE_SECONDS = 0.005
logger = logging.getLogger("paddock.scale")
Address = tuple[str, int]


# -- the host's side ----------------------------------------------------------------------------------


class PeerHosts:
    """The other hosts of the cluster, as the gateways list them. The page merges what all of them return."""

    def __init__(self) -> None:
        self.waiting = 0
        self.urls: list[str] = []

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        async def ask(url: str) -> bytes | None:
            connection = HttpConnection(url)
            try:
                async with asyncio.timeout(REPLY_SECONDS):
                    return (await connection.request("GET", path, b"", {**headers, INTERNAL_HEADER: "1"}))[2]
            except (OSError, TimeoutError, h11.ProtocolError):
                return None
            finally:
                await connection.close()

        answers = await asyncio.gather(*(ask(url) for url in self.urls))
        return [answer for answer in answers if answer is not None]


class HostReporter:
    """Keeps one connection to every gateway. Runs on the server's event loop: a blocked loop sends no heartbeat."""

    def __init__(
        self,
        service: Service,
        about: dict[str, Any],
        gateways: list[Address],
        secret: str,
        *,
        on_no_gateway: Callable[[], None] | None = None,
    ) -> None:
        self._service = service
        self._on_no_gateway = on_no_gateway
        """Called once, after `NO_GATEWAY_SECONDS` without a connection."""
        self._gateway_seen_at = time.monotonic()
        self._about = about
        self._gateways = gateways
        self._peers = PeerHosts()
        self._secret = secret
        self._writers: dict[Address, asyncio.StreamWriter] = {}
        self._waiting: dict[Address, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._evictable = 0
        self._pending_report: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._service.manager.slots.freed = self._report_soon
        self._service.peers = self._peers
        self._tasks = [asyncio.create_task(keep_connected(gateway, self._talk)) for gateway in self._gateways]
        self._tasks.append(asyncio.create_task(self._send_heartbeats()))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()

    def report(self) -> None:
        """Send the state of this host to every gateway."""
        self._pending_report = None
        line = orjson.dumps({"beat": self._state()}) + b"\n"
        for writer in self._writers.values():
            writer.write(line)

    def _report_soon(self) -> None:
        """Slots that become free together are reported once."""
        if self._pending_report is None:
            self._pending_report = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self.report)

    def _state(self) -> dict[str, Any]:
        manager = self._service.manager
        in_use, capacity = manager.slots.in_use(), manager.slots.capacity
        return {
            "free": capacity - in_use + self._evictable,
            "sessions": in_use,
            "draining": manager.is_draining(),
        }

    async def _send_heartbeats(self) -> None:
        manager = self._service.manager
        while True:
            # This visits every session, so it is done once per heartbeat and not for every report.
            self._evictable = manager.count_evictable(manager.clock())
            self.report()
            self._check_gateways()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _check_gateways(self) -> None:
        now = time.monotonic()
        if self._writers:
            self._gateway_seen_at = now
        elif self._on_no_gateway is not None and now - self._gateway_seen_at > NO_GATEWAY_SECONDS:
            on_no_gateway, self._on_no_gateway = self._on_no_gateway, None
            on_no_gateway()

    async def _talk(self, gateway: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        set_user_timeout(writer)
        hello = {"secret": self._secret, **self._about, **self._state()}
        writer.write(orjson.dumps(hello) + b"\n")
        self._writers[gateway] = writer
        try:
            while line := await reader.readline():
                self._handle(gateway, writer, orjson.loads(line))
        finally:
            self._writers.pop(gateway, None)
            self._waiting.pop(gateway, None)

    def _handle(self, gateway: Address, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        if "reserve" in message:
            leases = [self._service.manager.reserve() for _ in range(message["count"])]
            granted = [lease for lease in leases if lease is not None]
            reply = {"reserved": message["reserve"], "leases": granted, **self._state()}
            writer.write(orjson.dumps(reply) + b"\n")
            if len(self._writers) > 1:
                self._report_soon()
        elif "release" in message:
            self._service.manager.release(message["release"])
        elif "waiting" in message:
            self._waiting[gateway] = int(message["waiting"])
            self._peers.waiting = sum(self._waiting.values())
        elif "hosts" in message:
            self._peers.urls = [url for url in message["hosts"] if url != self._about["url"]]


def set_user_timeout(writer: asyncio.StreamWriter) -> None:
    """Let the kernel drop the connection when the peer acknowledges nothing: a machine without power sends no FIN."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        milliseconds = int(1000 * NO_GATEWAY_SECONDS)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, milliseconds)


# -- the gateway's side -------------------------------------------------------------------------------


class HostConnection:
    """One connected host."""

    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self.host = host
        self._writer = writer
        self._last_request = 0
        self._pending: dict[int, asyncio.Future[list[str]]] = {}

    async def reserve(self, count: int = 1) -> list[str]:
        """Leases for `count` slots of the host; fewer if it has fewer, none if it does not answer."""
        self._last_request += 1
        number = self._last_request
        reply = self._pending[number] = asyncio.get_running_loop().create_future()
        leases: list[str] = []
        try:
            self.send({"reserve": number, "count": count})
            async with asyncio.timeout(REPLY_SECONDS):
                leases = await reply
        except TimeoutError:
            pass
        finally:
            self.host.pending_leases -= count
            self._pending.pop(number, None)
        if len(leases) < count:
            # It has fewer than it reported. Assume none until its next report.
            self.host.free = 0
        return leases

    def send(self, document: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(document) + b"\n")

    def handle(self, message: dict[str, Any], now: float) -> None:
        host, state = self.host, message.get("beat", message)
        host.last_seen = now
        host.free, host.sessions = int(state["free"]), int(state["sessions"])
        host.draining = bool(state["draining"])
        if "reserved" not in message:
            return
        reply = self._pending.pop(message["reserved"], None)
        if reply is not None and not reply.done():
            reply.set_result(message["leases"])
            return
        # The request timed out: give the slots back.
        for lease in message["leases"]:
            self.send({"release": lease})

    def close(self) -> None:
        self._writer.close()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_result([])


class HostListener:
    """Accepts connections of hosts and of other gateways. `on_change` is called for each report and each loss."""

    def __init__(self, registry: HostRegistry, secret: str, on_change: Callable[[], None]) -> None:
        self.connections: dict[str, HostConnection] = {}
        self._registry = registry
        self._secret = secret
        self._on_change = on_change

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. The callback of `asyncio.start_server`."""
        connection: HostConnection | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = orjson.loads(await reader.readline() or b"{}")
            if not hmac.compare_digest(str(hello.pop("secret", "")), self._secret):
                logger.warning("a connection to the port for hosts did not have the secret")
                return
            if "gateway" in hello:
                await receive_peer_queue(self._registry.queue, hello["gateway"], reader)
                return
            host = Host(last_seen=self._registry.clock(), **hello)
            connection = HostConnection(host, writer)
            previous = self.connections.get(host.key)
            self.connections[host.key] = connection
            if previous is not None:
                previous.close()
            self._registry.add(host)
            self._send_host_list()
            self._on_change()
            while message := await reader.readline():
                connection.handle(orjson.loads(message), self._registry.clock())
                self._on_change()
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            logger.debug("a host's connection broke: %s", error)
        except asyncio.CancelledError:
            # Only the end of the gateway cancels this task. asyncio would log a cancelled callback as a failure.
            logger.debug("the gateway ends")
        finally:
            writer.close()
            if connection is not None:
                self._disconnect(connection)

    def broadcast(self, document: dict[str, Any]) -> None:
        for connection in self.connections.values():
            connection.send(document)

    def _send_host_list(self) -> None:
        """Tell every host the URLs of all."""
        self.broadcast({"hosts": [host.url for host in self._registry.hosts.values()]})

    def drop_silent_hosts(self) -> None:
        for key in self._registry.silent_hosts():
            logger.warning("host %s has sent no heartbeat: it counts as lost", key)
            self.connections[key].close()
            self._disconnect(self.connections[key])

    def _disconnect(self, connection: HostConnection) -> None:
        key = connection.host.key
        connection.close()
        if self.connections.get(key) is connection:
            del self.connections[key]
            self._registry.remove(key)
            self._send_host_list()
            self._on_change()
