"""The `computer` tool: a real screen, on which a browser shows the page of the instance.

The browser is started when it is first needed, and only where the image has a screen.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal

from paddock.errors import InvalidToolArguments, PaddockError, ToolFailure
from paddock.fleet.instance.browser import Browser
from paddock.fleet.instance.keys import key_events
from paddock.protocol import mcp
from paddock.tools import collect_tools, tool

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.tools import ToolSpec

logger = logging.getLogger("paddock.fleet.instance")
WIDTH, HEIGHT = 1280, 800
WHEEL = 100
"""Pixels of one notch of the wheel."""
LONGEST_WAIT = 30.0

Action = Literal[
    "screenshot", "left_click", "double_click", "right_click", "mouse_move", "type", "key", "scroll",
    "cursor_position", "wait",
]  # fmt: skip
Direction = Literal["up", "down", "left", "right"]
BUTTONS = {"left_click": ("left", 1), "double_click": ("left", 2), "right_click": ("right", 1)}


class Screen:
    """A screen of 1280 by 800 pixels. `call` is the tool; `close` ends the browser, if there is one."""

    def __init__(self, folder: Path) -> None:
        self.tool: ToolSpec = collect_tools(type(self))["computer"]
        self.url = ""
        """What the browser shows first. Set once the instance knows its port."""
        self._folder = folder / "browser"
        self._browser: Browser | None = None
        self._lock = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._cursor = (0, 0)

    @property
    def running(self) -> Browser | None:
        return self._browser if self._browser is not None and self._browser.is_alive else None

    async def browser(self) -> Browser:
        """The browser, started if it is not running. Raises ToolFailure."""
        async with self._starting:
            if self.running is None:
                await self._end()
                self._browser = await Browser.start(self._folder, self.url, WIDTH, HEIGHT)
            assert self._browser is not None
            return self._browser

    async def refresh(self) -> None:
        """Show the page anew, after a reset. A browser that cannot is started anew by its next use."""
        running = self.running
        if running is not None:
            try:
                async with self._lock:
                    await running.show(self.url)
            except ToolFailure as error:
                logger.warning("the screen could not be refreshed: %s", error)
                await self.close()

    async def close(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.close()

    async def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A `tools/call` result. What goes wrong is a result too."""
        try:
            keywords = self.tool.check(arguments)
            async with self._lock:
                content = await self.computer(**keywords)
        except PaddockError as error:
            return mcp.tool_failure(f"{error.message}: {error.hint}" if error.hint else error.message)
        return {**mcp.tool_result(None), "content": content}

    @tool
    async def computer(
        self,
        action: Action,
        coordinate: list[int] | None = None,
        text: str | None = None,
        scroll_direction: Direction | None = None,
        scroll_amount: int = 3,
        duration: float = 1.0,
    ) -> Any:
        """Use the screen: a browser window of 1280 by 800 pixels. Acting returns a picture of it.

        Args:
            action: What to do.
            coordinate: Where, as [x, y] in pixels from the top left corner.
            text: What to type, or the key to press: Return, Tab, ctrl+a.
            scroll_direction: Which way to scroll.
            scroll_amount: How many notches of the wheel to scroll.
            duration: How many seconds to wait.
        """
        browser = await self.browser()
        if action == "cursor_position":
            return [_text(f"X={self._cursor[0]},Y={self._cursor[1]}")]
        if action == "screenshot":
            return [await _picture(browser)]
        if action == "wait":
            await asyncio.sleep(min(max(duration, 0.0), LONGEST_WAIT))
        elif action == "type":
            await self._type(browser, _needed(text, "text", action))
        elif action == "key":
            await self._press(browser, _needed(text, "text", action))
        elif action == "scroll":
            await self._scroll(
                browser, coordinate, _needed(scroll_direction, "scroll_direction", action), scroll_amount
            )
        else:
            await self._point(browser, action, _place(_needed(coordinate, "coordinate", action)))
        await browser.settle()
        return [_text(f"{action} done"), await _picture(browser)]

    async def _point(self, browser: Browser, action: str, place: tuple[int, int]) -> None:
        self._cursor = place
        await self._mouse(browser, "mouseMoved")
        if action == "mouse_move":
            return
        button, clicks = BUTTONS[action]
        for count in range(1, clicks + 1):
            await self._mouse(browser, "mousePressed", button=button, clickCount=count)
            await self._mouse(browser, "mouseReleased", button=button, clickCount=count)

    async def _scroll(self, browser: Browser, place: list[int] | None, direction: str, amount: int) -> None:
        if place is not None:
            self._cursor = _place(place)
        pixels = WHEEL * max(0, min(amount, 100)) * (-1 if direction in ("up", "left") else 1)
        across, down = (pixels, 0) if direction in ("left", "right") else (0, pixels)
        await self._mouse(browser, "mouseWheel", deltaX=across, deltaY=down)

    async def _mouse(self, browser: Browser, kind: str, **more: Any) -> None:
        x, y = self._cursor
        await browser.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def _type(self, browser: Browser, text: str) -> None:
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n")):
            if number:
                await self._press(browser, "Return")
            if line:
                await browser.command("Input.insertText", text=line)

    async def _press(self, browser: Browser, text: str) -> None:
        for key in text.split():
            if key.lower() in ("f5", "ctrl+r"):
                await browser.reload()
                continue
            for event in key_events(key):
                await browser.command("Input.dispatchKeyEvent", **event)


def _needed(value: Any, name: str, action: str) -> Any:
    if value is None:
        raise InvalidToolArguments(f"computer: {action} needs {name}")
    return value


def _place(coordinate: list[int]) -> tuple[int, int]:
    if len(coordinate) != 2 or not (0 <= coordinate[0] < WIDTH and 0 <= coordinate[1] < HEIGHT):
        raise InvalidToolArguments(f"computer: coordinate is [x, y] with x below {WIDTH} and y below {HEIGHT}")
    return coordinate[0], coordinate[1]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def _picture(browser: Browser) -> dict[str, Any]:
    return {"type": "image", "data": await browser.screenshot(), "mimeType": "image/png"}
