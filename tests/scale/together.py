"""A door and some hosts in one thread, without Ray: the same parts, the same sockets."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
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
    ) -> None:
        self.config = DoorConfig(Access(token), SECRET, token or "for hosts", mode, queue_timeout, name="adder")
        self.listening, self.control = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        self.port: int = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.spare = bind("127.0.0.1", 0)
        doors = [("127.0.0.1", control.getsockname()[1]) for control in (self.control, self.spare)]
        self.hosts = [HostHere(number, capacity, doors, token or "for hosts", make) for number in range(hosts)]
        self.clients = ExitStack()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.door: Door
        self._calls: Any = None

    def __enter__(self) -> "Together":
        self.thread.start()
        for host in self.hosts:
            self.call(host.start())
        self.call(self.start_door())
        wait_until(lambda: len(self.door.roster.hosts) == len(self.hosts))
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        for host in self.hosts:
            if host.listening.fileno() != -1:
                self.call(host.stop())
        self.call(self.stop_door())
        self.call(self._rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
        self.listening.close()
        self.control.close()
        self.spare.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(15)

    async def start_door(self) -> None:
        self.door = Door(self.config)
        upgrades = type("Upgrades", (Upgrade,), {"door": self.door})
        self.server = StoppableServer(quiet_config(DoorApp(self.door), upgrades=upgrades))
        self._calls = await asyncio.start_server(self.door.switchboard.answer, sock=self.control.dup())
        self._serving = asyncio.create_task(self.server.serve([self.listening.dup()]))
        while not self.server.started:
            await asyncio.sleep(0.005)

    async def second_door(self) -> Door:
        """Another door for the same hosts, which nobody but the test talks to."""
        door = Door(self.config)
        calls = await asyncio.start_server(door.switchboard.answer, sock=self.spare.dup())
        await door.start()

        async def stop() -> None:
            calls.close()
            await door.stop()

        self.clients.callback(lambda: self.call(stop()))
        return door

    async def stop_door(self) -> None:
        """As by kill -9, as far as clients and hosts can tell."""
        self._calls.close()
        for server in self.server.servers:
            server.close()
        await self.door.stop()
        for line in list(self.door.switchboard.lines.values()):
            line.close()
        self.server.should_exit = True
        await self._serving

    async def _rest(self) -> None:
        """What those who died have left in the loop."""
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=2) if left else None

    def host_of(self, token: str | None) -> HostHere:
        return next(host for host in self.hosts if (token or "").startswith(host.key))

    def socket(self, path: str = "/ws", **headers: str) -> Socket:
        return self.clients.enter_context(open_socket(self.port, path, **headers))

    def http(self) -> Http:
        client = Http(self.port)
        self.clients.callback(client.close)
        return client

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
