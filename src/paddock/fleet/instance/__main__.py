"""The program of an instance: one line in, one line out, then serve until the input ends or SIGTERM comes.

Lines that follow on the input put faults in force: `{"faults": […]}`. Standard output carries the one line and
nothing else; whatever the environment prints goes to standard error, with the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn

from paddock.errors import PaddockError
from paddock.fleet.control.faults import FaultLayer, Faults
from paddock.fleet.instance.app import InstanceApp
from paddock.fleet.instance.hosted import FAILURES, HostedEnvironment
from paddock.fleet.instance.order import Order, read_order
from paddock.server.listening import bind, loop_factory, url_of
from paddock.server.request_deadlines import DeadlineProtocol
from paddock.server.run import DrainingServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

logger = logging.getLogger("paddock.fleet.instance")
CHUNK = 65536
LAST_GRACE = 10.0


class Input:
    """Standard input, line by line, without reading ahead of a line that somebody else waits for."""

    def __init__(self) -> None:
        self._seen = b""

    def line(self) -> bytes | None:
        """The next line; None at the end. Blocks."""
        while b"\n" not in self._seen:
            part = os.read(0, CHUNK)
            if not part:
                return None
            self._seen += part
        line, _, self._seen = self._seen.partition(b"\n")
        return line


class InstanceServer(DrainingServer):
    """uvicorn, that says when it serves and takes the browser with it when it ends."""

    def __init__(self, config: uvicorn.Config, hosted: HostedEnvironment, app: InstanceApp) -> None:
        super().__init__(config, hosted.service)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.close()
        await super().shutdown(sockets)


def main() -> int:
    say = _claim_output()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    source = Input()
    line = source.line()
    if line is None:
        return 0
    try:
        order = read_order(line)
        hosted = HostedEnvironment(order)
        listening = bind(order.host, 0)
    except (PaddockError, OSError) as error:
        return _failed(say, error)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve(order, hosted, listening, source, say))


async def serve(
    order: Order, hosted: HostedEnvironment, listening: socket.socket, source: Input, say: Callable[[Any], None]
) -> int:
    """Serve until the end; the code to exit with."""
    app, faults = InstanceApp(order, hosted), Faults()
    app.serves_at(url_of(listening, order.host))
    server = InstanceServer(_config(FaultLayer(app, faults, f"/{order.instance_id}")), hosted, app)
    try:
        await hosted.open()
    except (PaddockError, *FAILURES) as error:
        await hosted.service.stop()
        return _failed(say, error)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0)
    if server.started:
        say({"port": listening.getsockname()[1]})
        _listen(source, faults)
    await serving
    return 0


def _listen(source: Input, faults: Faults) -> None:
    """Follow the input on a thread, which need not be ended: it is a daemon and only waits."""
    loop = asyncio.get_running_loop()

    def follow() -> None:
        while (line := source.line()) is not None:
            loop.call_soon_threadsafe(_told, line, faults)
        os.kill(os.getpid(), signal.SIGTERM)
        # The loop may be held up by the environment: nothing may outlive the plane.
        time.sleep(LAST_GRACE)
        os._exit(1)

    threading.Thread(target=follow, name="input", daemon=True).start()


def _told(line: bytes, faults: Faults) -> None:
    try:
        given = orjson.loads(line)
        faults.replace(given["faults"])
    except (ValueError, KeyError, TypeError) as error:
        logger.error("a line on the input is of no use: %s", error)


def _config(app: Any) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=False,
        backlog=1024,
    )
    config.load()
    config.http_protocol_class = DeadlineProtocol
    return config


def _claim_output() -> Callable[[Any], None]:
    """Keep standard output for the protocol; what others print goes to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)

    def say(document: Any) -> None:
        os.write(kept, orjson.dumps(document) + b"\n")

    return say


def _failed(say: Callable[[Any], None], error: Exception) -> int:
    logger.error("the instance cannot serve", exc_info=error)
    hint = getattr(error, "hint", None)
    say({"error": f"{error} ({hint})" if hint else str(error)})
    return 1


if __name__ == "__main__":
    sys.exit(main())
