"""`paddock serve --engine ray`: keeps the wanted number of hosts on the cluster, and the gateways in front of them.

This process owns the hosts. When it ends, in whatever way, Ray ends the hosts, and the gateways end with their stdin.
A gateway that dies is started again on the same ports, and the hosts reconnect.
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
from paddock.child_process import ChildProcess
from paddock.errors import ClusterError, ConfigError
from paddock.limits import MEBIBYTE
from paddock.loopback import is_loopback
from paddock.scale import cluster
from paddock.scale.autoscale import Autoscaler, HostLoad, ScalingPolicy, hosts_to_retire
from paddock.scale.cluster import ClusterHead, call_ray
from paddock.scale.host_actor import LOOPBACK_ADDRESS, HostConfig, node_address, place_host
from paddock.scale.placement import ClusterNodes, last_line
from paddock.server.listening import bind, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from paddock.config import ServerConfig
    from paddock.scale.gateway import GatewayMode

DECISION_SECONDS = 0.25
RESTART_PAUSE_SECONDS = 0.1
GATEWAY_END_SECONDS = 5.0
RETRY_PLACEMENT_SECONDS = 1.0
ANNOUNCE_SECONDS = 10.0
PLACEMENT_WARNING_SECONDS = 15.0
PLACEMENT_SECONDS = 10.0
AUTOSCALER_REQUEST_SECONDS = 2.0
FINISH_SECONDS = 5.0
HEADLESS_GRACE_SECONDS = 3.0
"""For running steps, when Ray is about to end this process."""
logger = logging.getLogger("paddock.scale")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What `serve_on_ray` serves, and how."""

    target: str
    name: str
    config: ServerConfig
    """With the capacity of the whole cluster."""
    scale: ScalingPolicy = field(default_factory=ScalingPolicy)
    resources: cluster.Resources = field(default_factory=cluster.Resources)
    host: str = LOOPBACK_ADDRESS
    port: int = 8000
    gateways: int = 1
    mode: GatewayMode = "forward"
    ray_address: str | None = None
    folder: Path | None = None
    """Copied to every node, so that the target can be imported there."""
    page: bool = False


def serve_on_ray(settings: ClusterConfig, announce: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` is called with the URL once the first host serves."""
    started_here = not cluster.ray_module().is_initialized()
    single_machine = cluster.starts_local_cluster(settings.ray_address)
    cluster.connect(settings.ray_address, folder=settings.folder)
    try:
        asyncio.run(ClusterService(settings, single_machine=single_machine).run(announce))
    finally:
        if started_here:
            cluster.disconnect()


@dataclass(slots=True)
class PlacedHost:
    """A host that this service has placed."""

    number: int
    actor: Any = None
    """None until it is requested from Ray."""
    key: str | None = None
    """None until it serves."""
    node_id: str = ""
    retired_at: float | None = None
    """When it was retired: it takes no new sessions, and ends once it is empty."""
    is_ending: bool = False
    is_lost: bool = False


class ClusterService:
    """Compares the hosts that exist with those that are wanted, four times a second, and starts or ends hosts."""

    def __init__(self, settings: ClusterConfig, *, single_machine: bool) -> None:
        self.settings = settings
        self.autoscaler = Autoscaler(settings.scale)
        self.hosts: dict[int, PlacedHost] = {}
        self.head = ClusterHead.current()
        self.nodes = ClusterNodes(head=self.head)
        self.secret = secrets.token_urlsafe(32)
        token = settings.config.access.token
        address = LOOPBACK_ADDRESS if single_machine else node_address()
        if token is None and not is_loopback(address) and settings.mode == "redirect":
            raise ConfigError(
                "clients would be sent to hosts that other machines can reach, and no token is set",
                hint="give --auth-token or PADDOCK_AUTH_TOKEN, or use --gateway forward",
            )
        self.host_token = token or (None if is_loopback(address) else secrets.token_urlsafe(32))
        self.listening = [bind(settings.host, settings.port, shared=settings.gateways > 1)]
        port = self.listening[0].getsockname()[1]
        self.listening += [bind(settings.host, port, shared=True) for _ in range(settings.gateways - 1)]
        self.controls = [bind(address, 0) for _ in range(settings.gateways)]
        self.host_settings = HostConfig(
            target=settings.target,
            server=replace(settings.config, access=replace(settings.config.access, token=self.host_token)),
            gateways=tuple((address, control.getsockname()[1]) for control in self.controls),
            secret=self.secret, version=paddock.__version__, single_machine=single_machine, page=settings.page,
        )  # fmt: skip
        self.gateways: list[GatewayProcess] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shares = settings.scale.shares(settings.config.limits.max_sessions)
        self._first_served = asyncio.Event()
        self._stop = asyncio.Event()
        self._failed: ClusterError | None = None

    async def run(self, announce: Callable[[str], None] | None) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self.gateways = [
            GatewayProcess(self._gateway_settings(), listening, control)
            for listening, control in zip(self.listening, self.controls, strict=True)
        ]
        try:
            for gateway in self.gateways:
                self._spawn(gateway.run(self._update))
            self._spawn(self._announce(announce))
            self._spawn(self._watch_head())
            while not self._stop.is_set():
                self._reconcile(loop.time())
                with suppress(TimeoutError):
                    async with asyncio.timeout(DECISION_SECONDS):
                        await self._stop.wait()
        finally:
            await self._finish_all()
        if self._failed is not None:
            raise self._failed

    async def _watch_head(self) -> None:
        """Without the head the cluster is lost: stop, and end the remaining sessions."""
        self._failed = await self.head.watch()
        self._stop.set()

    # -- decisions --------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Start or retire hosts, so that their number approaches the wanted one."""
        reports = [gateway.report for gateway in self.gateways if gateway.report]
        reported = {host["key"]: host for report in reports for host in report["hosts"]}
        lost = {key for report in reports for key in report["lost_hosts"]} - reported.keys()
        for placed in [placed for placed in self.hosts.values() if placed.key in lost and not placed.is_lost]:
            placed.is_lost = True
            self._spawn(self._drop_lost_host(placed))
        active = [placed for placed in self.hosts.values() if placed.retired_at is None and not placed.is_lost]
        loads = [
            HostLoad(placed.key, reported[placed.key]["sessions"], reported[placed.key]["capacity"])
            for placed in active
            if placed.key is not None and placed.key in reported
        ]
        waiting = max((report["waiting"] for report in reports), default=0)
        previous = self.autoscaler.wanted
        wanted = self.autoscaler.decide(now, loads, waiting)
        if wanted != previous or not self.hosts:
            logger.info("%d hosts wanted, %d there, %d clients waiting", wanted, len(loads), waiting)
            self._spawn(self._request_resources(wanted))
        if len(active) < wanted and not any(placed.is_lost for placed in self.hosts.values()):
            if self.head.is_reachable:
                self._add_hosts(wanted - len(active))
        elif len(active) > wanted and len(loads) == len(active):
            for key in hosts_to_retire(loads, wanted):
                self._retire(key, now)
        for placed in [placed for placed in self.hosts.values() if placed.retired_at is not None]:
            self._end_retired_host(placed, reported.get(placed.key or ""), now)
        for gateway in self.gateways:
            gateway.send(self._update())

    def _add_hosts(self, count: int) -> None:
        """Take retired hosts back first, then place new ones."""
        for placed in list(self.hosts.values()):
            if count and placed.retired_at is not None and not placed.is_ending:
                placed.retired_at = None
                count -= 1
        for _ in range(count):
            number = next(n for n in range(self.settings.scale.max_hosts * 2 + 1) if n not in self.hosts)
            capacity = self._shares[number % len(self._shares)]
            bundle = self.settings.resources.bundle()
            avoided_nodes = self.nodes.avoided(f"host {number}", bundle, now=time.monotonic())
            placing = partial(
                place_host, self.host_settings, number, capacity, self.settings.resources, avoided_nodes
            )
            placed = self.hosts[number] = PlacedHost(number)
            self._spawn(self._start(placed, placing))

    async def _start(self, placed: PlacedHost, placing: Callable[[], Any]) -> None:
        try:
            placed.actor = await call_ray(placing, PLACEMENT_SECONDS)
            description = await self._wait_until_started(placed)
        except Exception as error:
            reason = last_line(error)
            if not self._first_served.is_set():
                self._failed = ClusterError(f"no host starts: {reason}", hint="does the target load on the nodes?")
                self._stop.set()
            logger.error("host %d did not start: %s", placed.number, reason)
            await asyncio.sleep(RETRY_PLACEMENT_SECONDS)
            self._remove(placed, "it did not start")
            return
        placed.key, placed.node_id = description["key"], description["node_id"]
        logger.info("host %s serves at %s on node %s", description["key"], description["url"], description["node"])
        self._first_served.set()

    async def _wait_until_started(self, placed: PlacedHost) -> dict[str, Any]:
        """The description of a host once it serves. Logs a warning every 15 s until a node has room for it."""
        starting = asyncio.ensure_future(placed.actor.start.remote())
        while not (await asyncio.wait([starting], timeout=PLACEMENT_WARNING_SECONDS))[0]:
            logger.warning(
                "host %d still waits for a node with %s free", placed.number, self.settings.resources.bundle()
            )
        description: dict[str, Any] = starting.result()
        return description

    def _retire(self, key: str, now: float) -> None:
        for placed in self.hosts.values():
            if placed.key == key:
                placed.retired_at = now
                logger.info("host %s takes no new sessions and will go when it is empty", key)

    def _end_retired_host(self, placed: PlacedHost, report: dict[str, Any] | None, now: float) -> None:
        """End a retired host once it is empty and all gateways know that it is retired, or its time is up."""
        assert placed.retired_at is not None
        if placed.is_ending:
            return
        empty = report is None or (report["retiring"] and report["sessions"] == 0)
        if empty or now - placed.retired_at > self.settings.scale.finish_within:
            placed.is_ending = True
            self._spawn(self._finish(placed))

    async def _drop_lost_host(self, placed: PlacedHost) -> None:
        """Remove a lost host, and avoid its node if that is gone too. Ray notices a dead node only after a while."""
        await self.nodes.refresh()
        if not await self.nodes.is_reachable(placed.node_id):
            logger.error("node %s of host %s is gone", placed.node_id[:12], placed.key)
            self.nodes.mark_lost(placed.node_id, now=time.monotonic())
        self._remove(placed, "it sends no heartbeat any more")

    async def _finish(self, placed: PlacedHost) -> None:
        grace = self.settings.config.limits.drain_grace
        if self.head.failure is not None:
            grace = min(grace, HEADLESS_GRACE_SECONDS)
        may_answer = placed.key is not None or self.head.is_reachable
        if placed.actor is not None and not placed.is_lost and may_answer:
            with suppress(Exception):
                async with asyncio.timeout(grace + FINISH_SECONDS):
                    await placed.actor.finish.remote(grace)
        self._remove(placed, "it was drained")

    def _remove(self, placed: PlacedHost, reason: str) -> None:
        if self.hosts.get(placed.number) is placed:
            del self.hosts[placed.number]
            logger.log(
                logging.INFO if "drained" in reason else logging.ERROR,
                "host %s is removed: %s",
                placed.key or placed.number,
                reason,
            )
            if placed.actor is not None:
                with suppress(Exception):
                    cluster.ray_module().kill(placed.actor)

    async def _request_resources(self, wanted: int) -> None:
        """Request nodes from Ray's autoscaler, where there is one."""
        from ray.autoscaler.sdk import request_resources

        bundles = [self.settings.resources.bundle()] * wanted
        if self.head.is_reachable:
            with suppress(Exception):
                await call_ray(lambda: request_resources(bundles=bundles), AUTOSCALER_REQUEST_SECONDS)

    def _update(self) -> dict[str, Any]:
        autoscaler = {
            "hosts": self.autoscaler.wanted,
            "fewest": self.settings.scale.min_hosts,
            "most": self.settings.scale.max_hosts,
            "each": self.settings.resources.bundle(),
            "pending": sum(placed.key is None for placed in self.hosts.values()),
            "retiring": sum(placed.retired_at is not None for placed in self.hosts.values()),
            "head": self.head.describe(),
        }
        retired = [placed.key for placed in self.hosts.values() if placed.retired_at is not None and placed.key]
        return {"autoscaler": autoscaler, "retired": sorted(retired)}

    # -- start and end ---------------------------------------------------------------------------

    def _gateway_settings(self) -> dict[str, Any]:
        access, limits = self.settings.config.access, self.settings.config.limits
        gateway = {
            "secret": self.secret,
            "host_token": self.host_token,
            "mode": self.settings.mode,
            "queue_timeout": limits.queue_timeout,
            "message_bytes": limits.message_bytes,
            "name": self.settings.name,
        }
        return {
            "token": access.token,
            "allowed_hosts": sorted(access.hosts),
            "origins": sorted(access.origins),
            "gateways": self.host_settings.gateways,
            "gateway": gateway,
        }

    async def _announce(self, announce: Callable[[str], None] | None) -> None:
        """Announce the URL once the minimum of hosts serves, or some time after the first one."""
        await self._first_served.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                while (
                    sum(len(gateway.report.get("hosts", ())) for gateway in self.gateways) < self._expected_reports()
                ):
                    await asyncio.sleep(DECISION_SECONDS / 5)
        if announce is not None:
            announce(url_of(self.listening[0], self.settings.host))

    def _expected_reports(self) -> int:
        return self.settings.scale.min_hosts * len(self.gateways)

    async def _finish_all(self) -> None:
        for gateway in self.gateways:
            gateway.stopping = True
        await asyncio.gather(*(self._finish(placed) for placed in list(self.hosts.values())))
        await asyncio.gather(*(gateway.end() for gateway in self.gateways))
        for task in self._tasks:
            task.cancel()
        await self._request_resources(0)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the cluster service failed", exc_info=error)


class GatewayProcess:
    """One gateway, restarted on the same two ports when it dies."""

    def __init__(self, settings: dict[str, Any], listening: socket.socket, control: socket.socket) -> None:
        self.report: dict[str, Any] = {}
        self.stopping = False
        self._settings = {**settings, "listen": listening.fileno(), "control": control.fileno()}
        self._fds = (listening.fileno(), control.fileno())
        self._child: ChildProcess | None = None
        self._last_update: dict[str, Any] | None = None

    async def run(self, update: Callable[[], dict[str, Any]]) -> None:
        while not self.stopping:
            command = (sys.executable, "-m", "paddock.scale.gateway_server")
            child = self._child = await ChildProcess.start(command, pass_fds=self._fds, max_line_bytes=MEBIBYTE)
            child.send(self._settings)
            self._last_update = None
            self.send(update())
            with suppress(ValueError):
                async for line in child.lines():
                    self.report = orjson.loads(line)
            await child.end()
            self.report = {}
            if not self.stopping:
                logger.error("a gateway ended with code %s: it is started again", child.ended.result())
                await asyncio.sleep(RESTART_PAUSE_SECONDS)

    def send(self, update: dict[str, Any]) -> None:
        if self._child is not None and update != self._last_update:
            self._last_update = update
            self._child.send(update)

    async def end(self) -> None:
        self.stopping = True
        if self._child is not None:
            await self._child.end(GATEWAY_END_SECONDS)
