"""An environment host: a whole Paddock server inside a Ray actor.

Ray places it and notices when it ends; no step goes through Ray. Each life of a host has a new incarnation, which
all of its session tokens carry, so that no host ever answers for a session that it does not hold.
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
from paddock.scale.heartbeat import Address, Pulse
from paddock.scale.placement import NODE_LABEL
from paddock.scale.roster import host_key

if TYPE_CHECKING:
    from paddock.config import ServerConfig

START_WITHIN = 60.0
LAST_WORD = 0.5
"""Seconds for an answer to leave before the process ends."""
LOCAL = "127.0.0.1"
logger = logging.getLogger("paddock.scale")


@dataclass(frozen=True, slots=True)
class HostPlan:
    """All that a host needs to know. Sent to its node, so it holds plain values only."""

    target: str
    config: ServerConfig
    """With the capacity of one host, and the token that the doors show."""
    doors: tuple[Address, ...]
    secret: str
    version: str
    on_this_machine: bool = False
    """Listen on loopback, not on the node's address."""
    page: bool = False

    def __repr__(self) -> str:
        return f"HostPlan({self.target!r})"


class EnvironmentHost:
    """The actor. `start` returns once it serves; `finish` drains it."""

    def __init__(self, plan: HostPlan, number: int) -> None:
        self.plan = plan
        self.key = host_key(number, secrets.token_hex(4))
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._about: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="paddock-host", daemon=True)

    def start(self) -> dict[str, Any]:
        """Serve. Returns what the doors are told (key, url, node, pid, capacity), and Ray's id of the node."""
        if self.plan.version != paddock.__version__:
            raise ClusterError(
                f"this node has Paddock {paddock.__version__}, and {self.plan.version} places hosts on it",
                hint="install the same version on every node",
            )
        self._thread.start()
        if not self._ready.wait(START_WITHIN) or self._failed is not None:
            raise ClusterError(f"the host did not start: {self._failed or 'it took too long'}") from self._failed
        return {**self._about, "node_id": ray_module().get_runtime_context().get_node_id()}

    def finish(self, grace: float) -> None:
        """Let running steps end, close every environment, then end this process: Ray may have no head to do so."""
        try:
            self._stop(grace)
        finally:
            threading.Timer(LAST_WORD, os._exit, (0,)).start()

    def _stop(self, grace: float) -> None:
        loop, server = self._loop, self._server
        if loop is None or server is None or not self._thread.is_alive():
            return
        stopping = asyncio.run_coroutine_threadsafe(server.service.stop(grace), loop)
        stopping.result(grace + 5.0)
        server.should_exit = True
        self._thread.join(5.0)

    def _leave(self) -> None:
        """Nobody is there any more for whom this host would serve."""
        logger.error("no door has been there for too long: the host ends")
        threading.Thread(target=self.finish, args=(self.plan.config.limits.drain_grace,), daemon=True).start()

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
        from paddock.server.run import DrainingServer, calm_collector, server_config
        from paddock.targets import load_target

        plan = self.plan
        make, name = load_target(plan.target)
        app = create_app(make, env_name=name, config=plan.config)
        if plan.page:
            add_page(app)
        app.state.service.host = self.key
        address = LOCAL if plan.on_this_machine else node_address()
        listening = bind(address, 0)
        calm_collector()
        be_as_eager_as_others()
        self._loop = asyncio.get_running_loop()
        self._server = DrainingServer(server_config(app), app.state.service)
        serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            self._about = {
                "key": self.key,
                "url": f"http://{address}:{listening.getsockname()[1]}",
                "node": node_address(),
                "pid": os.getpid(),
                "capacity": plan.config.limits.max_sessions,
            }
            pulse = Pulse(app.state.service, self._about, list(plan.doors), plan.secret, alone=self._leave)
            pulse.start()
            self._ready.set()
        try:
            await serving
        finally:
            pulse.stop()


def add_page(app: Any) -> None:
    """The page is above this package, so it is found by name."""
    import importlib

    importlib.import_module("paddock.web.doors").page_in_server(app)


def be_as_eager_as_others() -> None:
    """Ray starts its workers with a niceness of 15; a server is no background job. Not everybody may change that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def node_address() -> str:
    return str(ray_module().util.get_node_ip_address())


def place(plan: HostPlan, number: int, capacity: int, resources: Resources, avoided: set[str]) -> Any:
    """A new host somewhere in the cluster, with `capacity` slots. Returns the actor's handle at once."""
    ray = ray_module()
    limits = replace(plan.config.limits, max_sessions=capacity)
    own = replace(plan, config=replace(plan.config, limits=limits))
    actor: Any = ray.remote(EnvironmentHost)
    options: dict[str, Any] = {
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "scheduling_strategy": "SPREAD",
    }
    if avoided:
        options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoided))})"}
    return actor.options(**options, **resources.options()).remote(own, number)
