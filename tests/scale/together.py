"""Gateways and some hosts in one thread, without Ray: the same parts, the same sockets."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from environments import Adder
from paddock import create_app
from paddock.config import Access, Limits, ServerConfig
from paddock.scale.gateway import Gateway, GatewayConfig
from paddock.scale.gateway_server import ClientUpgrade, GatewayApp
from paddock.scale.host_actor import add_page
from paddock.scale.host_connection import HostReporter
from paddock.scale.host_registry import host_key
from paddock.server.listening import StoppableServer, bind, uvicorn_config
from paddock.server.run import DrainingServer, server_config
from running import wait_until
from wire import Http, Socket, open_socket

SECRET = "between hosts and gateways"
T = TypeVar("T")


class Predictable(Adder):
    deterministic = True


class HostHere:
    """What a host actor runs, without the actor."""

    def __init__(
        self, number: int, capacity: int, gateways: list[tuple[str, int]], token: str | None, make: Any
    ) -> None:
        limits = Limits(max_sessions=capacity, drain_grace=0.2)
        app = create_app(make, config=ServerConfig(limits, Access(token)))
        add_page(app)
        self.service = app.state.service
        self.service.host = self.key = host_key(number, f"{number:08x}")
        self.listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.server = DrainingServer(server_config(app), self.service)
        about = {"key": self.key, "url": self.url, "node": "here", "pid": 0, "capacity": capacity}
        self.reporter = HostReporter(self.service, about, gateways, SECRET)
        self.serving: Any = None

    async def start(self) -> None:
        self.serving = asyncio.create_task(self.server.serve(sockets=[self.listening]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        self.reporter.start()

    async def die(self) -> None:
        """As by kill -9: every socket is cut without a word."""
        self.reporter.stop()
        for server in self.server.servers:
            server.close()
        self.listening.close()
        for connection in list(self.server.server_state.connections):
            transport = connection.transport
            getattr(transport, "underlying_transport", transport).abort()

    async def fall_silent(self) -> None:
        """Its process stands still: the line is open, and nothing comes."""
        self.reporter._tasks[-1].cancel()

    async def stop(self) -> None:
        self.reporter.stop()
        self.server.should_exit = True
        await self.serving


class TrackedUpgrade(ClientUpgrade):
    """A WebSocket at a gateway that can be aborted."""

    transports: list[Any]

    def connection_made(self, transport: Any) -> None:
        self.transports.append(transport)
        super().connection_made(transport)


class GatewayHere:
    """What a gateway process runs, without the process. It may be started again after its end, on the same ports."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.listening, self.control = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        self.control_address: tuple[str, int] = self.control.getsockname()
        self.port: int = self.listening.getsockname()[1]
        self.gateway: Gateway

    async def start(self, peers: list[tuple[str, int]]) -> None:
        self.gateway = Gateway(replace(self.config, peers=tuple(peers)))
        self._transports: list[Any] = []
        upgrades = type("Upgrades", (TrackedUpgrade,), {"gateway": self.gateway, "transports": self._transports})
        self.server = StoppableServer(uvicorn_config(GatewayApp(self.gateway), upgrades=upgrades))
        self._calls = await asyncio.start_server(self._answer, sock=self.control.dup())
        self._serving = asyncio.create_task(self.server.serve([self.listening.dup()]))
        while not self.server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """As by kill -9, as far as clients, hosts and other gateways can tell."""
        self._calls.close()
        for server in self.server.servers:
            server.close()
        await self.gateway.stop()
        open_transports = [connection.transport for connection in self.server.server_state.connections]
        for transport in (*open_transports, *self._transports):
            transport.abort()
        self.server.should_exit = True
        await self._serving

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        await self.gateway.listener.serve(reader, writer)

    def close(self) -> None:
        self.listening.close()
        self.control.close()


class Together:
    """One loop thread with gateways and hosts. Use it in `with`."""

    def __init__(
        self,
        hosts: int = 2,
        capacity: int = 1,
        *,
        mode: Any = "forward",
        queue_timeout: float = 0.0,
        token: str | None = None,
        make: Any = Adder,
        gateways: int = 1,
    ) -> None:
        self.config = GatewayConfig(Access(token), SECRET, token or "for hosts", mode, queue_timeout, name="adder")
        self.gateways = [GatewayHere(self.config) for _ in range(gateways)]
        self.port = self.gateways[0].port
        self.url = f"http://127.0.0.1:{self.port}"
        addresses = [gateway.control_address for gateway in self.gateways]
        self.hosts = [HostHere(number, capacity, addresses, token or "for hosts", make) for number in range(hosts)]
        self.clients = ExitStack()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0].gateway

    def __enter__(self) -> "Together":
        self.thread.start()
        for host in self.hosts:
            self.call(host.start())
        for number in range(len(self.gateways)):
            self.call(self.start_gateway(number))
        wait_until(lambda: all(len(each.gateway.registry.hosts) == len(self.hosts) for each in self.gateways))
        wait_until(lambda: all(each.gateway.registry.queue.peers == len(self.gateways) - 1 for each in self.gateways))
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        for host in self.hosts:
            if host.listening.fileno() != -1:
                self.call(host.stop())
        for number in range(len(self.gateways)):
            self.call(self.stop_gateway(number))
        self.call(self._rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
        for gateway in self.gateways:
            gateway.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(15)

    async def start_gateway(self, number: int = 0) -> None:
        await self.gateways[number].start(
            [gateway.control_address for gateway in self.gateways if gateway is not self.gateways[number]]
        )

    async def stop_gateway(self, number: int = 0) -> None:
        await self.gateways[number].stop()

    async def _rest(self) -> None:
        """What those who died have left in the loop."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=2) if left else None

    def host_of(self, token: str | None) -> HostHere:
        return next(host for host in self.hosts if (token or "").startswith(host.key))

    def socket(self, path: str = "/ws", *, at: int = 0, **headers: str) -> Socket:
        return self.clients.enter_context(open_socket(self.gateways[at].port, path, **headers))

    def http(self, at: int = 0) -> Http:
        client = Http(self.gateways[at].port)
        self.clients.callback(client.close)
        return client

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
