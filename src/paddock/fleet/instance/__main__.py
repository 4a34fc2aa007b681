"""The program of an instance: read one line, write one line, then serve until the input is closed or SIGTERM comes.

Further input lines replace the injected faults: `{"faults": […]}`. Standard output carries the one answer line only;
what the environment prints goes to standard error, with the log.
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
from paddock.fleet.instance.app import InstanceApp
from paddock.fleet.instance.environment import DATABASE_ERRORS, InstanceEnvironment, InstanceSpec, read_spec
from paddock.fleet.plane.faults import FaultLayer, Faults
from paddock.server.http_protocol import DeadlineProtocol
from paddock.server.listening import bind, loop_factory, url_of
from paddock.server.run import DrainingServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

logger = logging.getLogger("paddock.fleet.instance")
READ_BYTES = 65536
EXIT_GRACE_SECONDS = 10.0


class InputLines:
    """Standard input, line by line. Reads the file descriptor, so that nothing is buffered elsewhere."""

    def __init__(self) -> None:
        self._buffer = b""

    def read_line(self) -> bytes | None:
        """The next line; None at the end. Blocks."""
        while b"\n" not in self._buffer:
            part = os.read(0, READ_BYTES)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class InstanceServer(DrainingServer):
    """uvicorn that closes the browser when it shuts down."""

    def __init__(self, config: uvicorn.Config, environment: InstanceEnvironment, app: InstanceApp) -> None:
        super().__init__(config, environment.service)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.close()
        await super().shutdown(sockets)


def main() -> int:
    write_answer = _claim_output()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    lines = InputLines()
    line = lines.read_line()
    if line is None:
        return 0
    try:
        spec = read_spec(line)
        environment = InstanceEnvironment(spec)
        listener = bind(spec.host, 0)
    except (PaddockError, OSError) as error:
        return _fail(write_answer, error)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve(spec, environment, listener, lines, write_answer))


async def serve(
    spec: InstanceSpec,
    environment: InstanceEnvironment,
    listener: socket.socket,
    lines: InputLines,
    write_answer: Callable[[Any], None],
) -> int:
    """Serve until the end; the exit code."""
    app, faults = InstanceApp(spec, environment), Faults()
    app.set_origin(url_of(listener, spec.host))
    server = InstanceServer(_config(FaultLayer(app, faults, f"/{spec.instance_id}")), environment, app)
    try:
        await environment.open()
    except (PaddockError, *DATABASE_ERRORS) as error:
        await environment.service.stop()
        return _fail(write_answer, error)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0)
    if server.started:
        write_answer({"port": listener.getsockname()[1]})
        _follow_input(lines, faults)
    await serving
    return 0


def _follow_input(lines: InputLines, faults: Faults) -> None:
    """Read further lines on a daemon thread, and end the process when the input is closed."""
    loop = asyncio.get_running_loop()

    def follow() -> None:
        while (line := lines.read_line()) is not None:
            loop.call_soon_threadsafe(_replace_faults, line, faults)
        os.kill(os.getpid(), signal.SIGTERM)
        # The environment may block the loop: exit anyway, because no instance may outlive its plane.
        time.sleep(EXIT_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=follow, name="input", daemon=True).start()


def _replace_faults(line: bytes, faults: Faults) -> None:
    try:
        faults.replace(orjson.loads(line)["faults"])
    except (ValueError, KeyError, TypeError) as error:
        logger.error("an input line holds no faults: %s", error)


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
    """Keep standard output for the answer line; what others print goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)

    def write_answer(document: Any) -> None:
        os.write(output, orjson.dumps(document) + b"\n")

    return write_answer


def _fail(write_answer: Callable[[Any], None], error: Exception) -> int:
    logger.error("the instance cannot serve", exc_info=error)
    hint = getattr(error, "hint", None)
    write_answer({"error": f"{error} ({hint})" if hint else str(error)})
    return 1


if __name__ == "__main__":
    sys.exit(main())
