"""Runs the application: uvicorn on one port, with the fast path if it is enabled, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.loopback import is_loopback
from paddock.server.app import create_app
from paddock.server.http_protocol import LimitedProtocol
from paddock.server.listening import StoppableServer, bind, loop_factory, url_of, uvicorn_config
from paddock.server.upgrades import UpgradeRouter, adopt

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    import uvicorn

    from paddock.config import ServerConfig
    from paddock.server.service import Service

logger = logging.getLogger("paddock.server")
EXECUTOR_THREADS = "paddock-executor"
LAST_WAIT_SECONDS = 2.0
"""How long the remaining tasks of environments may take to end after the drain."""


def serve(
    env: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    config: ServerConfig | None = None,
    announce: Callable[[str], None] | None = None,
    **app_options: Any,
) -> None:
    """Serve an environment class, or an app made by `create_app`, until SIGTERM or Ctrl-C.

    `announce` is called once with the URL. Raises ConfigError before the port is opened if something
    does not fit: beyond loopback a token is required.
    """
    app = env if hasattr(env, "state") and hasattr(env, "router") else create_app(env, config=config, **app_options)
    service: Service = app.state.service
    require_token(host, service)
    if workers > 1:
        from paddock.server.worker_manager import serve_workers

        serve_workers(app, host, port, workers, announce)
        return
    listening = bind(host, port)
    if announce is not None:
        announce(url_of(listening, host))
    run(app, [listening])


def run(app: Any, sockets: list[socket.socket]) -> None:
    """Serve on sockets that are bound already. Returns when the server has drained and stopped."""
    service: Service = app.state.service
    server = DrainingServer(server_config(app), service)
    tune_garbage_collector()
    runner = asyncio.Runner(loop_factory=loop_factory())
    executor = ThreadPoolExecutor(thread_name_prefix=EXECUTOR_THREADS)
    runner.get_loop().set_default_executor(executor)
    try:
        runner.run(server.serve(sockets=sockets))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        if runner.run(_end_tasks()):
            runner.close()
        else:
            # Closing the loop would wait for them forever.
            service.left_running = True
            logger.warning("an environment goes on with something that cannot be ended; it is left behind")


async def _end_tasks() -> bool:
    """Cancel what still runs on the loop. Whether it and the default executor have ended within the time limit."""
    deadline = monotonic() + LAST_WAIT_SECONDS
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    pending = (await asyncio.wait(tasks, timeout=LAST_WAIT_SECONDS))[1] if tasks else set()
    while (
        busy := any(thread.name.startswith(EXECUTOR_THREADS) for thread in threading.enumerate())
    ) and monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not pending and not busy


class DrainingServer(StoppableServer):
    """Running steps finish and every environment is closed before connections are cut."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the grace of the drain. Environments are closed in any case."""
        if self.should_exit:
            self.service.end_grace()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.service.siblings is not None:
            self.service.siblings.start(self.service, partial(adopt, self.service, self.config, self.server_state))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.service.stop()
        await super().shutdown(sockets)


def server_config(app: Any) -> uvicorn.Config:
    """uvicorn's settings. uvicorn makes the protocols itself, so the service is their class attribute."""
    service: Service = app.state.service
    limits = service.config.limits
    http_protocol = LimitedProtocol if service.fastpath is None else service.fastpath.http_protocol
    attributes = {"limits": limits, "head_seconds": limits.header_timeout, "body_seconds": limits.body_timeout}
    config = uvicorn_config(
        app,
        requests=type("Requests", (http_protocol,), {"service": service, **attributes}),
        upgrades=type("Upgrades", (UpgradeRouter,), {"service": service}),
    )
    config.ws_max_size = limits.message_bytes
    config.ws_ping_interval, config.ws_ping_timeout = limits.ping_interval, limits.ping_timeout
    config.ws_per_message_deflate = False
    return config


def require_token(host: str, service: Service) -> None:
    if not is_loopback(host) and service.config.access.token is None:
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set",
            hint="give --auth-token or PADDOCK_AUTH_TOKEN, or listen on 127.0.0.1",
        )


def tune_garbage_collector() -> None:
    """Exclude the objects that live as long as the server from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
