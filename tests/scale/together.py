"""Doors and some hosts in one thread, without Ray: the same parts, the same sockets."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from environments import Adder
from paddock import create_app
from paddock.config import Access, Limits, ServerConfig
from paddock.scale.door import Door, DoorConfig
from paddock.scale.heartbeat import Pulse
from paddock.scale.hosts import add_page
from paddock.scale.roster import host_key
from paddock.scale.router import DoorApp, Upgrade
from paddock.server.listening import StoppableServer, bind, quiet_config
from paddock.server.run import DrainingServer, server_config
from running import wait_until
from wire import Http, Socket, open_socket

SECRET = "between hosts and doors"
T = TypeVar("T")


class Predictable(Adder):
    deterministic = True


class HostHere:
    """What a host actor runs, without the actor."""

    def __init__(
        self, number: int, capacity: int, doors: list[tuple[str, int]], token: str | None, make: Any
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
        self.pulse = Pulse(self.service, about, doors, SECRET)
        self.serving: Any = None

    async def start(self) -> None:
        self.serving = asyncio.create_task(self.server.serve(sockets=[self.listening]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        self.pulse.start()

    async def die(self) -> None:
        """As by kill -9: every socket is cut without a word."""
        self.pulse.stop()
        for server in self.server.servers:
            server.close()
        self.listening.close()
        for connection in list(self.server.server_state.connections):
            transport = connection.transport
            getattr(transport, "underlying_transport", transport).abort()

    async def fall_silent(self) -> None:
        """Its process stands still: the line is open, and nothing comes."""
        self.pulse._tasks[-1].cancel()

    async def stop(self) -> None:
        self.pulse.stop()
        self.server.should_exit = True
        await self.serving


class Remembered(Upgrade):
    """A WebSocket at a door that can be cut."""

    transports: list[Any]

    def connection_made(self, transport: Any) -> None:
        self.transports.append(transport)
        super().connection_made(transport)


class DoorHere:
    """What a door process runs, without the process. It may be started again after its end, on the same ports."""

    def __init__(self, config: DoorConfig) -> None:
        self.config = config
        self.listening, self.control = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        self.calls_at: tuple[str, int] = self.control.getsockname()
        self.port: int = self.listening.getsockname()[1]
        self.door: Door

    async def start(self, others: list[tuple[str, int]]) -> None:
        self.door = Door(replace(self.config, others=tuple(others)))
        self._transports: list[Any] = []
        upgrades = type("Upgrades", (Remembered,), {"door": self.door, "transports": self._transports})
        self.server = StoppableServer(quiet_config(DoorApp(self.door), upgrades=upgrades))
        self._calls = await asyncio.start_server(self._answer, sock=self.control.dup())
        self._serving = asyncio.create_task(self.server.serve([self.listening.dup()]))
        while not self.server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """As by kill -9, as far as clients, hosts and other doors can tell."""
        self._calls.close()
        for server in self.server.servers:
            server.close()
        await self.door.stop()
        asked = [connection.transport for connection in self.server.server_state.connections]
        for transport in (*asked, *self._transports):
            transport.abort()
        self.server.should_exit = True
        await self._serving

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.append(writer.transport)
        await self.door.switchboard.answer(reader, writer)

    def close(self) -> None:
        self.listening.close()
        self.control.close()


class Together:
    """One loop thread with doors and hosts. Use it in `with`."""

    def __init__(
        self,
        hosts: int = 2,
        capacity: int = 1,
        *,
        mode: Any = "forward",
        queue_timeout: float = 0.0,
        token: str | None = None,
        make: Any = Adder,
        doors: int = 1,
    ) -> None:
        self.config = DoorConfig(Access(token), SECRET, token or "for hosts", mode, queue_timeout, name="adder")
        self.doors = [DoorHere(self.config) for _ in range(doors)]
        self.port = self.doors[0].port
        self.url = f"http://127.0.0.1:{self.port}"
        calls_at = [door.calls_at for door in self.doors]
        self.hosts = [HostHere(number, capacity, calls_at, token or "for hosts", make) for number in range(hosts)]
        self.clients = ExitStack()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def door(self) -> Door:
        return self.doors[0].door

    def __enter__(self) -> "Together":
        self.thread.start()
        for host in self.hosts:
            self.call(host.start())
        for number in range(len(self.doors)):
            self.call(self.start_door(number))
        wait_until(lambda: all(len(each.door.roster.hosts) == len(self.hosts) for each in self.doors))
        wait_until(lambda: all(each.door.roster.turns.doors == len(self.doors) - 1 for each in self.doors))
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        for host in self.hosts:
            if host.listening.fileno() != -1:
                self.call(host.stop())
        for number in range(len(self.doors)):
            self.call(self.stop_door(number))
        self.call(self._rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
        for door in self.doors:
            door.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(15)

    async def start_door(self, number: int = 0) -> None:
        await self.doors[number].start([door.calls_at for door in self.doors if door is not self.doors[number]])

    async def stop_door(self, number: int = 0) -> None:
        await self.doors[number].stop()

    async def _rest(self) -> None:
        """What those who died have left in the loop."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=2) if left else None

    def host_of(self, token: str | None) -> HostHere:
        return next(host for host in self.hosts if (token or "").startswith(host.key))

    def socket(self, path: str = "/ws", *, at: int = 0, **headers: str) -> Socket:
        return self.clients.enter_context(open_socket(self.doors[at].port, path, **headers))

    def http(self, at: int = 0) -> Http:
        client = Http(self.doors[at].port)
        self.clients.callback(client.close)
        return client

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
