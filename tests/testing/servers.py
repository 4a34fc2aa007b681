"""Real servers to examine: `paddock serve` in its own process, and an app whose answers are mangled."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn

STARTUP_SECONDS = 20.0
HANG_UP = object()
Document = dict[str, Any]


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The URL of `paddock serve ARGUMENTS`, ended at the end."""
    command = [sys.executable, "-m", "paddock", "serve", *arguments, "--port", "0", "--json"]
    command += ["--log-level", "error"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            wait_until_listening(url)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def wait_until_listening(url: str) -> None:
    address, deadline = urlsplit(url), time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            socket.create_connection((address.hostname, address.port), STARTUP_SECONDS).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Mangler:
    """An ASGI application in front of another, whose answers it spoils as the test says."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.be_good()

    def be_good(self) -> None:
        self.http: Callable[[str, Document, int, Any], tuple[int, Any]] | None = None
        """Gets path, request, status and answer of an HTTP exchange; returns another status and answer."""
        self.frame: Callable[[Any, Document], Any] | None = None
        """Gets a frame and its answer; returns another answer, or HANG_UP."""
        self.headers: Callable[[str], bool] = lambda name: True
        """Whether a header of an answer is let through."""
        self.refuses_sockets = False
        self.closing_code: int | None = None
        self.is_full_after_a_drop = False
        self._dropped = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        request, parts, start = bytearray(), bytearray(), {}

        async def listen() -> Any:
            event = await receive()
            request.extend(event.get("body", b""))
            return event

        async def speak(event: Any) -> None:
            if event["type"] == "http.response.start":
                start.update(event)
                return
            parts.extend(event.get("body", b""))
            if event.get("more_body"):
                return
            status, document = start["status"], _read(bytes(parts))
            if self.http is not None:
                status, document = self.http(scope["path"], _read(bytes(request)), status, document)
            body = b"" if document is None else json.dumps(document).encode()
            remaining = [pair for pair in start["headers"] if self._lets_through(pair)]
            remaining += [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": remaining})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, listen, speak)

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        collected: deque[Any] = deque()
        if self.refuses_sockets:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if self._dropped and self.is_full_after_a_drop:
            await receive()
            await send({"type": "websocket.accept"})
            full = {"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}
            await send({"type": "websocket.send", "text": json.dumps(full)})
            await send({"type": "websocket.close", "code": 1013})
            return

        async def listen() -> Any:
            event = await receive()
            if event["type"] == "websocket.receive":
                collected.append(event.get("text") if event.get("text") is not None else event["bytes"])
            if event["type"] == "websocket.disconnect" and event.get("code") not in (1000, 1001):
                self._dropped = True
            return event

        async def speak(event: Any) -> None:
            if event["type"] == "websocket.accept":
                event["headers"] = [pair for pair in event.get("headers", ()) if self._lets_through(pair)]
            elif event["type"] == "websocket.close" and self.closing_code is not None:
                event["code"] = self.closing_code
            elif event["type"] == "websocket.send" and self.frame is not None:
                request = collected.popleft() if collected else None
                answer = self.frame(_parsed(request), json.loads(event["text"]))
                if answer is HANG_UP:
                    await send({"type": "websocket.close", "code": 1000})
                    return
                event["text"] = json.dumps(answer)
            await send(event)

        await self.app(scope, listen, speak)

    def _lets_through(self, pair: tuple[bytes, bytes]) -> bool:
        name = pair[0].decode().lower()
        return name != "content-length" and self.headers(name)


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _parsed(frame: Any) -> Any:
    """What a frame says; the frame itself if it is no JSON."""
    try:
        return json.loads(frame)
    except (TypeError, ValueError, RecursionError):
        return frame


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The URL of an ASGI application on a thread of this process."""
    config = uvicorn.Config(app, port=0, log_level="critical", ws="websockets-sansio", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        threading.Event().wait(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
