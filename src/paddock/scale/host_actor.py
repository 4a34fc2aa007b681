"""An environment host: a whole Paddock server inside a Ray actor.

Ray places it and notices when it ends. No step goes through Ray. Each start of a host has a new incarnation, which is
part of all its session tokens, so a host never answers for a session that it does not hold.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import paddock
from paddock.errors import ClusterError
from paddock.scale.cluster import Resources, ray_module
from paddock.scale.host_connection import Address, HostReporter
from paddock.scale.host_registry import host_key
from paddock.scale.placement import NODE_LABEL

if TYPE_CHECKING:
    from paddock.config import ServerConfig

START_SECONDS = 60.0
LAST_ANSWER_SECONDS = 0.5
"""For the last answer to leave before the process exits."""
LOOPBACK_ADDRESS = "127.0.0.1"
logger = logging.getLogger("paddock.scale")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The configuration of a host. It is pickled for its node, so it holds plain values only."""

    target: str
    server: ServerConfig
    """With the capacity of one host, and the token that gateways send."""
    gateways: tuple[Address, ...]
    secret: str
    version: str
    single_machine: bool = False
    """Listen on loopback, not on the node's address."""
    page: bool = False

    def __repr__(self) -> str:
        return f"HostConfig({self.target!r})"


class EnvironmentHost:
    """The actor. `start` returns once it serves; `finish` drains it."""

    def __init__(self, settings: HostConfig, number: int) -> None:
        self.settings = settings
        self.key = host_key(number, secrets.token_hex(4))
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._description: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="paddock-host", daemon=True)

    def start(self) -> dict[str, Any]:
        """Serve. Returns what gateways need (key, url, node, pid, capacity), and Ray's id of the node."""
        if self.settings.version != paddock.__version__:
            raise ClusterError(
                f"this node has Paddock {paddock.__version__}, and {self.settings.version} places hosts on it",
                hint="install the same version on every node",
            )
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failed is not None:
            raise ClusterError(f"the host did not start: {self._failed or 'it took too long'}") from self._failed
        return {**self._description, "node_id": ray_module().get_runtime_context().get_node_id()}

    def finish(self, grace: float) -> None:
        """Let running steps end, close all environments, and exit: Ray ends nothing while its head is away."""
        try:
            self._stop(grace)
        finally:
            threading.Timer(LAST_ANSWER_SECONDS, os._exit, (0,)).start()

    def _stop(self, grace: float) -> None:
        loop, server = self._loop, self._server
        if loop is None or server is None or not self._thread.is_alive():
            return
        stopping = asyncio.run_coroutine_threadsafe(server.service.stop(grace), loop)
        stopping.result(grace + 5.0)
        server.should_exit = True
        self._thread.join(5.0)

    def _end_without_gateway(self) -> None:
        """Without a gateway no client can reach this host."""
        logger.error("no gateway has been connected for too long: the host ends")
        threading.Thread(target=self.finish, args=(self.settings.server.limits.drain_grace,), daemon=True).start()

    # -- the server's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        from paddock.server.listening import loop_factory

        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failed = error
            logger.exception("the host failed")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        from paddock.server.app import create_app
        from paddock.server.listening import bind
        from paddock.server.run import DrainingServer, server_config, tune_garbage_collector
        from paddock.targets import load_target

        settings = self.settings
        make, name = load_target(settings.target)
        app = create_app(make, env_name=name, config=settings.server)
        if settings.page:
            add_page(app)
        app.state.service.host = self.key
        address = LOOPBACK_ADDRESS if settings.single_machine else node_address()
        listening = bind(address, 0)
        tune_garbage_collector()
        reset_niceness()
        self._loop = asyncio.get_running_loop()
        self._server = DrainingServer(server_config(app), app.state.service)
        reporter: HostReporter | None = None
        serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            self._description = {
                "key": self.key,
                "url": f"http://{address}:{listening.getsockname()[1]}",
                "node": node_address(),
                "pid": os.getpid(),
                "capacity": settings.server.limits.max_sessions,
            }
            reporter = HostReporter(
                app.state.service,
                self._description,
                list(settings.gateways),
                settings.secret,
                on_no_gateway=self._end_without_gateway,
            )
            reporter.start()
            self._ready.set()
        try:
            await serving
        finally:
            if reporter is not None:
                reporter.stop()


def add_page(app: Any) -> None:
    """`paddock.web` imports after this package in the import order, so it is loaded by name."""
    import importlib

    importlib.import_module("paddock.web.mounts").page_in_server(app)


def reset_niceness() -> None:
    """Ray starts its workers with a niceness of 15. A server must not run at background priority."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def node_address() -> str:
    return str(ray_module().util.get_node_ip_address())


def place_host(
    settings: HostConfig, number: int, capacity: int, resources: Resources, avoided_nodes: set[str]
) -> Any:
    """Create a host with `capacity` slots on a node that Ray chooses. Returns the actor's handle at once."""
    ray = ray_module()
    limits = replace(settings.server.limits, max_sessions=capacity)
    own = replace(settings, server=replace(settings.server, limits=limits))
    actor: Any = ray.remote(EnvironmentHost)
    options: dict[str, Any] = {
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "scheduling_strategy": "SPREAD",
    }
    if avoided_nodes:
        options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoided_nodes))})"}
    return actor.options(**options, **resources.options()).remote(own, number)
