"""A headless Chromium with one page, controlled over the DevTools protocol.

It reaches this machine only: other host names do not resolve. The kernel kills it when its parent process ends.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import itertools
import json
import os
import shutil
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paddock.errors import ToolFailure

if TYPE_CHECKING:
    from pathlib import Path

    from websockets.asyncio.client import ClientConnection

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "headless_shell")
START_SECONDS = 20.0
COMMAND_SECONDS = 15.0
SETTLE_SECONDS = 3.0
POLL_SECONDS = 0.02
CLOSE_SECONDS = 2.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def find_browser() -> str:
    """The program to start. Raises ToolFailure that says what to install."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise ToolFailure(
            f"this machine has no browser: none of {', '.join(PROGRAMS)} is on the PATH",
            hint="install Chromium, for example with 'apt install chromium', and make a new instance",
        )
    return program


class Browser:
    """A running browser. Create it with `start`; its owner must `close` it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._connection: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._origin = ""
        self._path = ""
        self._page = ""

    @classmethod
    async def start(cls, folder: Path, url: str, width: int, height: int) -> Browser:
        """A browser that shows `url`, with its files in `folder`. Raises ToolFailure."""
        program = find_browser()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        process = await asyncio.create_subprocess_exec(
            program,
            *_flags(folder, width, height),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        browser = cls(process, folder)
        try:
            async with asyncio.timeout(START_SECONDS):
                await browser._connect(width, height)
                await browser.show(url)
        except BaseException as error:
            await browser.close()
            if isinstance(error, (OSError, TimeoutError)):
                raise ToolFailure(
                    f"{program} did not start: {error or f'no answer within {START_SECONDS:g} s'}",
                    hint="try 'chromium --headless --dump-dom about:blank' on this machine",
                ) from error
            raise
        return browser

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and self._reader is not None and not self._reader.done()

    def addresses(self) -> dict[str, str]:
        """Where other DevTools clients find this browser."""
        page = f"ws://{self._origin}/devtools/page/{self._page}"
        return {
            "cdp_page_url": page,
            "cdp_browser_url": f"ws://{self._origin}{self._path}",
            "cdp_devtools_url": f"http://{self._origin}/devtools/inspector.html?ws={page.removeprefix('ws://')}",
        }

    async def show(self, url: str) -> None:
        await self.command("Page.navigate", url=url)
        await self.settle()

    async def reload(self) -> None:
        await self.command("Page.reload")
        await self.settle()

    async def screenshot(self) -> str:
        """The page as a PNG in base64."""
        screenshot = await self.command("Page.captureScreenshot", format="png")
        data: str = screenshot["data"]
        base64.b64decode(data[:64], validate=True)
        return data

    async def settle(self) -> None:
        """Wait until the page has loaded, a few seconds at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_SECONDS
        while loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            # During a navigation there is no document to evaluate in.
            with suppress(ToolFailure):
                evaluation = await self.command("Runtime.evaluate", expression="document.readyState")
                if evaluation.get("result", {}).get("value") == "complete":
                    return

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a DevTools command. Raises ToolFailure."""
        if self._connection is None or not self.is_alive:
            raise ToolFailure("the browser has ended")
        number = next(self._numbers)
        response: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = response
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
                message = await response
        except TimeoutError:
            raise ToolFailure(f"the browser did not answer {method} within {COMMAND_SECONDS:g} s") from None
        except OSError as error:
            raise ToolFailure(f"the browser has ended: {error}") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in message:
            raise ToolFailure(f"{method}: {message['error'].get('message')}")
        result: dict[str, Any] = message.get("result", {})
        return result

    async def close(self) -> None:
        """End the browser with all its processes."""
        if self._connection is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._connection.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # -- the connection -------------------------------------------------------------------------------

    async def _connect(self, width: int, height: int) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        port, self._path = await self._listening()
        self._origin = f"127.0.0.1:{port}"
        try:
            self._page = await self._first_page()
            address = f"ws://{self._origin}/devtools/page/{self._page}"
            self._connection = await connect(address, max_size=None, ping_interval=None, compression=None, proxy=None)
        except WebSocketException as error:
            raise ConnectionError(f"it does not speak DevTools: {error}") from error
        self._reader = asyncio.create_task(self._read(self._connection))
        await self.command("Page.enable")
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def _listening(self) -> tuple[str, str]:
        """The port and path that the browser wrote to its profile folder."""
        file = self._folder / "DevToolsActivePort"
        while True:
            if self._process.returncode is not None:
                raise ConnectionError(f"it ended with code {self._process.returncode}")
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            await asyncio.sleep(POLL_SECONDS)

    async def _first_page(self) -> str:
        from websockets.asyncio.client import connect

        async with connect(f"ws://{self._origin}{self._path}", ping_interval=None, proxy=None) as connection:
            await connection.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            while (message := json.loads(await connection.recv())).get("id") != 1:
                pass
        pages = [target["targetId"] for target in message["result"]["targetInfos"] if target["type"] == "page"]
        if not pages:
            raise ConnectionError("it shows no page")
        page: str = pages[0]
        return page

    async def _read(self, connection: ClientConnection) -> None:
        async for text in connection:
            message = json.loads(text)
            response = self._waiting.get(message.get("id", 0))
            if response is not None and not response.done():
                response.set_result(message)
        for response in self._waiting.values():
            if not response.done():
                response.set_exception(ConnectionResetError("the connection was closed"))


def _flags(folder: Path, width: int, height: int) -> list[str]:
    # The sandbox of Chromium cannot be made by root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return [
        "--headless",
        *sandbox,
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-breakpad",
        "--disable-sync",
        "--no-first-run",
        "--no-default-browser-check",
        "--mute-audio",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        f"--window-size={width},{height}",
        "about:blank",
    ]


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
