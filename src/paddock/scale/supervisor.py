"""`paddock serve --engine ray`: keeps the wanted number of hosts on the cluster, and the doors in front of them.

The process that runs this owns the hosts: when it ends, however it ends, Ray ends them and the doors end by
themselves. A door that dies is started anew on the same ports, and the hosts call in again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

import paddock
from paddock.errors import ClusterError, ConfigError
from paddock.scale import cluster
from paddock.scale.autoscale import Autoscaler, Scale, Seen, to_retire
from paddock.scale.head import Head, in_time
from paddock.scale.hosts import LOCAL, HostPlan, node_address, place
from paddock.scale.placement import Nodes, last_line
from paddock.server.access import is_loopback
from paddock.server.listening import bind, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from paddock.config import ServerConfig
    from paddock.scale.door import Mode

DECIDE_EVERY = 0.25
RESTART_PAUSE = 0.1
DOOR_ENDS_WITHIN = 5.0
PLACE_AGAIN_AFTER = 1.0
ANNOUNCE_WITHIN = 10.0
PLACE_PATIENCE = 15.0
PLACE_WITHIN = 10.0
REQUEST_WITHIN = 2.0
FINISH_TAKES = 5.0
HEADLESS_GRACE = 3.0
"""For running steps, when Ray is about to end this process."""
logger = logging.getLogger("paddock.scale")


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What `serve_on_ray` is asked for."""

    target: str
    name: str
    config: ServerConfig
    """With the capacity of the whole cluster."""
    scale: Scale = field(default_factory=Scale)
    resources: cluster.Resources = field(default_factory=cluster.Resources)
    host: str = LOCAL
    port: int = 8000
    doors: int = 1
    mode: Mode = "forward"
    ray_address: str | None = None
    folder: Path | None = None
    """Copied to every node, so that the target can be imported there."""
    page: bool = False


def serve_on_ray(plan: ServePlan, announce: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` is called with the URL once the first host is there."""
    started_here = not cluster.ray_module().is_initialized()
    alone = cluster.starts_one(plan.ray_address)
    cluster.connect(plan.ray_address, folder=plan.folder)
    try:
        asyncio.run(Supervisor(plan, alone=alone).run(announce))
    finally:
        if started_here:
            cluster.disconnect()


@dataclass(slots=True)
class Kept:
    """One host that this supervisor has placed."""

    number: int
    actor: Any = None
    """None until Ray has been asked for it."""
    key: str | None = None
    """None until it serves."""
    node_id: str = ""
    retired_at: float | None = None
    is_lost: bool = False


class Supervisor:
    def __init__(self, plan: ServePlan, *, alone: bool) -> None:
        self.plan = plan
        self.autoscaler = Autoscaler(plan.scale)
        self.hosts: dict[int, Kept] = {}
        self.head = Head.joined()
        self.nodes = Nodes(head=self.head)
        self.secret = secrets.token_urlsafe(32)
        token = plan.config.access.token
        address = LOCAL if alone else node_address()
        if token is None and not is_loopback(address) and plan.mode == "redirect":
            raise ConfigError(
                "clients would be sent to hosts that other machines can reach, and no token is set",
                hint="give --auth-token or PADDOCK_AUTH_TOKEN, or use --door forward",
            )
        self.hosts_token = token or (None if is_loopback(address) else secrets.token_urlsafe(32))
        self.listening = [bind(plan.host, plan.port, shared=plan.doors > 1)]
        taken = self.listening[0].getsockname()[1]
        self.listening += [bind(plan.host, taken, shared=True) for _ in range(plan.doors - 1)]
        self.controls = [bind(address, 0) for _ in range(plan.doors)]
        self.host_plan = HostPlan(
            target=plan.target,
            config=replace(plan.config, access=replace(plan.config.access, token=self.hosts_token)),
            doors=tuple((address, control.getsockname()[1]) for control in self.controls),
            secret=self.secret, version=paddock.__version__, on_this_machine=alone, page=plan.page,
        )  # fmt: skip
        self.doors: list[DoorProcess] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shares = plan.scale.shares(plan.config.limits.max_sessions)
        self._first_served = asyncio.Event()
        self._stop = asyncio.Event()
        self._failed: ClusterError | None = None

    async def run(self, announce: Callable[[str], None] | None) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self.doors = [
            DoorProcess(self._door_settings(), listening, control)
            for listening, control in zip(self.listening, self.controls, strict=True)
        ]
        try:
            for door in self.doors:
                self._spawn(door.keep(self._news))
            self._spawn(self._announce(announce))
            self._spawn(self._watch_head())
            while not self._stop.is_set():
                self._decide(loop.time())
                with suppress(TimeoutError):
                    async with asyncio.timeout(DECIDE_EVERY):
                        await self._stop.wait()
        finally:
            await self._finish_all()
        if self._failed is not None:
            raise self._failed

    async def _watch_head(self) -> None:
        """Nothing is left to be kept up once the head is given up: sessions that are still there are ended."""
        self._failed = await self.head.watch()
        self._stop.set()

    # -- deciding ---------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        """Bring the hosts that are there nearer to the hosts that are wanted."""
        reports = [door.report for door in self.doors if door.report]
        here = {host["key"]: host for report in reports for host in report["hosts"]}
        gone = {key for report in reports for key in report["gone"]} - here.keys()
        for kept in [kept for kept in self.hosts.values() if kept.key in gone and not kept.is_lost]:
            kept.is_lost = True
            self._spawn(self._lose(kept))
        staying = [kept for kept in self.hosts.values() if kept.retired_at is None and not kept.is_lost]
        seen = [
            Seen(kept.key, here[kept.key]["sessions"], here[kept.key]["capacity"])
            for kept in staying
            if kept.key is not None and kept.key in here
        ]
        waiting = max((report["waiting"] for report in reports), default=0)
        before = self.autoscaler.wanted
        wanted = self.autoscaler.look(now, seen, waiting)
        if wanted != before or not self.hosts:
            logger.info("%d hosts wanted, %d there, %d newcomers waiting", wanted, len(seen), waiting)
            self._spawn(self._request(wanted))
        if len(staying) < wanted and not any(kept.is_lost for kept in self.hosts.values()):
            if self.head.is_there:
                self._grow(wanted - len(staying))
        elif len(staying) > wanted and len(seen) == len(staying):
            for key in to_retire(seen, wanted):
                self._retire(key, now)
        for kept in [kept for kept in self.hosts.values() if kept.retired_at is not None]:
            self._let_go(kept, here.get(kept.key or ""), now)
        for door in self.doors:
            door.tell(self._news())

    def _grow(self, count: int) -> None:
        """Take retired hosts back first, then place new ones."""
        for kept in list(self.hosts.values()):
            if count and kept.retired_at is not None and kept.retired_at >= 0:
                kept.retired_at = None
                count -= 1
        for _ in range(count):
            number = next(n for n in range(self.plan.scale.most * 2 + 1) if n not in self.hosts)
            capacity = self._shares[number % len(self._shares)]
            bundle = self.plan.resources.bundle()
            avoided = self.nodes.avoided(f"host {number}", bundle, now=time.monotonic())
            placing = partial(place, self.host_plan, number, capacity, self.plan.resources, avoided)
            kept = self.hosts[number] = Kept(number)
            self._spawn(self._start(kept, placing))

    async def _start(self, kept: Kept, placing: Callable[[], Any]) -> None:
        try:
            kept.actor = await in_time(placing, PLACE_WITHIN)
            about = await self._started(kept)
        except Exception as error:
            why = last_line(error)
            if not self._first_served.is_set():
                self._failed = ClusterError(f"no host starts: {why}", hint="does the target load on the nodes?")
                self._stop.set()
            logger.error("host %d did not start: %s", kept.number, why)
            await asyncio.sleep(PLACE_AGAIN_AFTER)
            self._forget(kept, "it did not start")
            return
        kept.key, kept.node_id = about["key"], about["node_id"]
        logger.info("host %s serves at %s on node %s", about["key"], about["url"], about["node"])
        self._first_served.set()

    async def _started(self, kept: Kept) -> dict[str, Any]:
        """What a host says of itself once it serves. Says now and then that there is no place for it yet."""
        starting = asyncio.ensure_future(kept.actor.start.remote())
        while not (await asyncio.wait([starting], timeout=PLACE_PATIENCE))[0]:
            logger.warning("host %d still waits for a node with %s free", kept.number, self.plan.resources.bundle())
        about: dict[str, Any] = starting.result()
        return about

    def _retire(self, key: str, now: float) -> None:
        for kept in self.hosts.values():
            if kept.key == key:
                kept.retired_at = now
                logger.info("host %s takes no new sessions and will go when it is empty", key)

    def _let_go(self, kept: Kept, shown: dict[str, Any] | None, now: float) -> None:
        """End a retired host once it is empty and every door knows, or its time is up."""
        assert kept.retired_at is not None
        if kept.retired_at < 0:
            return
        empty = shown is None or (shown["retiring"] and shown["sessions"] == 0)
        if empty or now - kept.retired_at > self.plan.scale.finish_within:
            kept.retired_at = -1.0
            self._spawn(self._finish(kept))

    async def _lose(self, kept: Kept) -> None:
        """Let go of a host that is gone, and avoid its node if that is gone too: Ray will not know for a while."""
        await self.nodes.refresh()
        if not await self.nodes.is_there(kept.node_id):
            logger.error("node %s of host %s is gone", kept.node_id[:12], kept.key)
            self.nodes.lose(kept.node_id, now=time.monotonic())
        self._forget(kept, "it is not heard of any more")

    async def _finish(self, kept: Kept) -> None:
        grace = self.plan.config.limits.drain_grace
        if self.head.given_up is not None:
            grace = min(grace, HEADLESS_GRACE)
        may_answer = kept.key is not None or self.head.is_there
        if kept.actor is not None and not kept.is_lost and may_answer:
            with suppress(Exception):
                async with asyncio.timeout(grace + FINISH_TAKES):
                    await kept.actor.finish.remote(grace)
        self._forget(kept, "it was drained")

    def _forget(self, kept: Kept, why: str) -> None:
        if self.hosts.get(kept.number) is kept:
            del self.hosts[kept.number]
            logger.log(
                logging.INFO if "drained" in why else logging.ERROR,
                "host %s is let go: %s",
                kept.key or kept.number,
                why,
            )
            if kept.actor is not None:
                with suppress(Exception):
                    cluster.ray_module().kill(kept.actor)

    async def _request(self, wanted: int) -> None:
        """Tell Ray's own autoscaler, where there is one, what will be needed."""
        from ray.autoscaler.sdk import request_resources

        bundles = [self.plan.resources.bundle()] * wanted
        if self.head.is_there:
            with suppress(Exception):
                await in_time(lambda: request_resources(bundles=bundles), REQUEST_WITHIN)

    def _news(self) -> dict[str, Any]:
        asked = {
            "hosts": self.autoscaler.wanted,
            "fewest": self.plan.scale.fewest,
            "most": self.plan.scale.most,
            "each": self.plan.resources.bundle(),
            "pending": sum(kept.key is None for kept in self.hosts.values()),
            "retiring": sum(kept.retired_at is not None for kept in self.hosts.values()),
            "head": self.head.shown(),
        }
        retired = [kept.key for kept in self.hosts.values() if kept.retired_at is not None and kept.key]
        return {"asked": asked, "retired": sorted(retired)}

    # -- beginning and ending ---------------------------------------------------------------------

    def _door_settings(self) -> dict[str, Any]:
        access, limits = self.plan.config.access, self.plan.config.limits
        door = {
            "secret": self.secret,
            "hosts_token": self.hosts_token,
            "mode": self.plan.mode,
            "queue_timeout": limits.queue_timeout,
            "message_bytes": limits.message_bytes,
            "name": self.plan.name,
        }
        return {
            "token": access.token,
            "allowed_hosts": sorted(access.hosts),
            "origins": sorted(access.origins),
            "doors": self.host_plan.doors,
            "door": door,
        }

    async def _announce(self, announce: Callable[[str], None] | None) -> None:
        """Once all hosts that have to be there serve, or the first one has for a while."""
        await self._first_served.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_WITHIN):
                while sum(len(door.report.get("hosts", ())) for door in self.doors) < self._expected():
                    await asyncio.sleep(DECIDE_EVERY / 5)
        if announce is not None:
            announce(url_of(self.listening[0], self.plan.host))

    def _expected(self) -> int:
        return self.plan.scale.fewest * len(self.doors)

    async def _finish_all(self) -> None:
        for door in self.doors:
            door.stopping = True
        await asyncio.gather(*(self._finish(kept) for kept in list(self.hosts.values())))
        await asyncio.gather(*(door.end() for door in self.doors))
        for task in self._tasks:
            task.cancel()
        await self._request(0)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("supervising failed", exc_info=error)


class DoorProcess:
    """One door, kept alive on its two ports."""

    def __init__(self, settings: dict[str, Any], listening: socket.socket, control: socket.socket) -> None:
        self.report: dict[str, Any] = {}
        self.stopping = False
        self.restarts = 0
        self._settings = {**settings, "listen": listening.fileno(), "control": control.fileno()}
        self._fds = (listening.fileno(), control.fileno())
        self._process: asyncio.subprocess.Process | None = None
        self._told = b""

    async def keep(self, news: Callable[[], dict[str, Any]]) -> None:
        while not self.stopping:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "paddock.scale.router", pass_fds=self._fds,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(orjson.dumps(self._settings) + b"\n")
            self._told = b""
            self.tell(news())
            with suppress(ValueError):
                while line := await self._process.stdout.readline():
                    self.report = orjson.loads(line)
            code = await self._process.wait()
            self.report = {}
            if not self.stopping:
                self.restarts += 1
                logger.error("the door ended with code %s: another takes its place", code)
                await asyncio.sleep(RESTART_PAUSE)

    def tell(self, news: dict[str, Any]) -> None:
        line = orjson.dumps(news) + b"\n"
        process = self._process
        if line != self._told and process is not None and process.returncode is None and process.stdin is not None:
            self._told = line
            with suppress(OSError):
                process.stdin.write(line)

    async def end(self) -> None:
        self.stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(DOOR_ENDS_WITHIN):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
