"""The `computer` tool: mouse, keyboard and screenshots of a browser that shows the page of the instance.

The browser is started on first use, and only where the image has a screen. The DevTools protocol is in `browser`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal

from paddock.errors import InvalidToolArguments, PaddockError, ToolFailure
from paddock.fleet.instance.browser import Browser
from paddock.protocol import mcp
from paddock.tools import collect_tools, tool

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.tools import ToolSpec

logger = logging.getLogger("paddock.fleet.instance")
WIDTH, HEIGHT = 1280, 800
WHEEL_PIXELS = 100
"""Pixels of one notch of the wheel."""
MAX_WAIT_SECONDS = 30.0
MAX_HOLD_SECONDS = 10.0
DRAG_MOVES = 8
"""Mouse events between the two ends of a drag. Pages that follow the mouse need more than one."""

Action = Literal[
    "screenshot", "left_click", "double_click", "triple_click", "right_click", "middle_click", "left_click_drag",
    "left_mouse_down", "left_mouse_up", "mouse_move", "type", "key", "hold_key", "scroll", "cursor_position", "wait",
]  # fmt: skip
Direction = Literal["up", "down", "left", "right"]
CLICKS = {
    "left_click": ("left", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
    "right_click": ("right", 1),
    "middle_click": ("middle", 1),
}
BUTTON_BITS = {"left": 1, "right": 2, "middle": 4}


class Computer:
    """The tool, with a screen of WIDTH by HEIGHT pixels. `call` runs it; `close` ends the browser."""

    def __init__(self, folder: Path) -> None:
        self.tool: ToolSpec = collect_tools(type(self))["computer"]
        self.url = ""
        """What the browser shows first. Set once the instance knows its port."""
        self._folder = folder / "browser"
        self._browser: Browser | None = None
        self._lock = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._cursor = (0, 0)
        self._held_buttons = 0

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
        """Reload the page after a reset. A browser that fails is closed; the next use starts another."""
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
        """A `tools/call` result. An error is a result too."""
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
        start_coordinate: list[int] | None = None,
        scroll_direction: Direction | None = None,
        scroll_amount: int = 3,
        duration: float = 1.0,
    ) -> Any:
        """Use the screen: a browser window. Acting returns a picture of it.

        Screen resolution: 1280x800 pixels. (0, 0) is top-left, (1279, 799) is bottom-right.

        Args:
            action: What to do.
            coordinate: Where, as [x, y]; without it, a click happens where the mouse is. The end of a drag.
            text: What to type, or the key to press: Return, Tab, ctrl+a. With a click or scroll, keys held meanwhile.
            start_coordinate: Where a drag starts, as [x, y]; without it, where the mouse is.
            scroll_direction: Which way to scroll.
            scroll_amount: How many notches of the wheel to scroll.
            duration: How many seconds to wait, or to hold the key.
        """
        browser = await self.browser()
        if action == "cursor_position":
            return [_text(f"X={self._cursor[0]},Y={self._cursor[1]}")]
        if action == "screenshot":
            return [await _screenshot(browser)]
        if action == "wait":
            await asyncio.sleep(min(max(duration, 0.0), MAX_WAIT_SECONDS))
        elif action == "type":
            await self._type(browser, _require(text, "text", action))
        elif action == "key":
            await self._press(browser, _require(text, "text", action))
        elif action == "hold_key":
            await self._press(browser, _require(text, "text", action), min(max(duration, 0.0), MAX_HOLD_SECONDS))
        elif action == "scroll":
            direction = _require(scroll_direction, "scroll_direction", action)
            await self._scroll(browser, coordinate, direction, scroll_amount, held_keys(text))
        elif action == "left_click_drag":
            await self._drag(browser, start_coordinate, _require(coordinate, "coordinate", action), held_keys(text))
        elif action == "mouse_move":
            await self._move(browser, _point(_require(coordinate, "coordinate", action)))
        else:
            await self._use_button(browser, action, coordinate, held_keys(text))
        await browser.settle()
        return [_text(f"{action} done"), await _screenshot(browser)]

    async def _use_button(self, browser: Browser, action: str, place: list[int] | None, keys: int) -> None:
        if place is not None:
            await self._move(browser, _point(place), modifiers=keys)
        if action == "left_mouse_down":
            await self._mouse(browser, "mousePressed", button="left", clickCount=1, modifiers=keys)
        elif action == "left_mouse_up":
            await self._mouse(browser, "mouseReleased", button="left", clickCount=1, modifiers=keys)
        else:
            button, clicks = CLICKS[action]
            for count in range(1, clicks + 1):
                await self._mouse(browser, "mousePressed", button=button, clickCount=count, modifiers=keys)
                await self._mouse(browser, "mouseReleased", button=button, clickCount=count, modifiers=keys)

    async def _drag(self, browser: Browser, start: list[int] | None, end: list[int], keys: int) -> None:
        to_x, to_y = _point(end)
        if start is not None:
            await self._move(browser, _point(start), modifiers=keys)
        from_x, from_y = self._cursor
        await self._mouse(browser, "mousePressed", button="left", clickCount=1, modifiers=keys)
        for move in range(1, DRAG_MOVES + 1):
            x, y = (round(a + (b - a) * move / DRAG_MOVES) for a, b in ((from_x, to_x), (from_y, to_y)))
            await self._move(browser, (x, y), button="left", modifiers=keys)
        await self._mouse(browser, "mouseReleased", button="left", clickCount=1, modifiers=keys)

    async def _move(self, browser: Browser, place: tuple[int, int], **more: Any) -> None:
        self._cursor = place
        await self._mouse(browser, "mouseMoved", **more)

    async def _scroll(
        self, browser: Browser, place: list[int] | None, direction: str, amount: int, keys: int
    ) -> None:
        if place is not None:
            self._cursor = _point(place)
        pixels = WHEEL_PIXELS * max(0, min(amount, 100)) * (-1 if direction in ("up", "left") else 1)
        across, down = (pixels, 0) if direction in ("left", "right") else (0, pixels)
        await self._mouse(browser, "mouseWheel", deltaX=across, deltaY=down, modifiers=keys)

    async def _mouse(self, browser: Browser, kind: str, **more: Any) -> None:
        x, y = self._cursor
        bit = BUTTON_BITS.get(more.get("button", ""), 0)
        if kind == "mousePressed":
            self._held_buttons |= bit
        elif kind == "mouseReleased":
            self._held_buttons &= ~bit
        elif self._held_buttons & BUTTON_BITS["left"]:
            more["button"] = "left"
        # `buttons` is what a page sees as `event.buttons`: without it a drag looks like a mere move.
        await browser.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more, buttons=self._held_buttons)

    async def _type(self, browser: Browser, text: str) -> None:
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n")):
            if number:
                await self._press(browser, "Return")
            if line:
                await browser.command("Input.insertText", text=line)

    async def _press(self, browser: Browser, text: str, seconds: float = 0.0) -> None:
        for key in text.split():
            if key.lower() in ("f5", "ctrl+r"):
                await browser.reload()
                continue
            down, up = key_events(key)
            await browser.command("Input.dispatchKeyEvent", **down)
            if seconds:
                await asyncio.sleep(seconds)
            await browser.command("Input.dispatchKeyEvent", **up)


def _require(value: Any, name: str, action: str) -> Any:
    if value is None:
        raise InvalidToolArguments(f"computer: {action} needs {name}")
    return value


def _point(coordinate: list[int]) -> tuple[int, int]:
    if len(coordinate) != 2 or not (0 <= coordinate[0] < WIDTH and 0 <= coordinate[1] < HEIGHT):
        raise InvalidToolArguments(f"computer: coordinate is [x, y] with x below {WIDTH} and y below {HEIGHT}")
    return coordinate[0], coordinate[1]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def _screenshot(browser: Browser) -> dict[str, Any]:
    return {"type": "image", "data": await browser.screenshot(), "mimeType": "image/png"}


MODIFIERS = {"alt": 1, "ctrl": 2, "control": 2, "meta": 4, "super": 4, "cmd": 4, "shift": 8}

# Name: (key, code, number, text)
KEYS: dict[str, tuple[str, str, int, str]] = {
    "return": ("Enter", "Enter", 13, "\r"),
    "enter": ("Enter", "Enter", 13, "\r"),
    "kp_enter": ("Enter", "NumpadEnter", 13, "\r"),
    "tab": ("Tab", "Tab", 9, ""),
    "space": (" ", "Space", 32, " "),
    "backspace": ("Backspace", "Backspace", 8, ""),
    "delete": ("Delete", "Delete", 46, ""),
    "escape": ("Escape", "Escape", 27, ""),
    "esc": ("Escape", "Escape", 27, ""),
    "home": ("Home", "Home", 36, ""),
    "end": ("End", "End", 35, ""),
    "page_up": ("PageUp", "PageUp", 33, ""),
    "prior": ("PageUp", "PageUp", 33, ""),
    "page_down": ("PageDown", "PageDown", 34, ""),
    "next": ("PageDown", "PageDown", 34, ""),
    "left": ("ArrowLeft", "ArrowLeft", 37, ""),
    "up": ("ArrowUp", "ArrowUp", 38, ""),
    "right": ("ArrowRight", "ArrowRight", 39, ""),
    "down": ("ArrowDown", "ArrowDown", 40, ""),
    "insert": ("Insert", "Insert", 45, ""),
    "shift": ("Shift", "ShiftLeft", 16, ""),
    "ctrl": ("Control", "ControlLeft", 17, ""),
    "alt": ("Alt", "AltLeft", 18, ""),
    "meta": ("Meta", "MetaLeft", 91, ""),
    **{f"f{number}": (f"F{number}", f"F{number}", 111 + number, "") for number in range(1, 13)},
}
KEY_ALIASES = {"pageup": "page_up", "pagedown": "page_down", "arrowleft": "left", "arrowright": "right",
           "arrowup": "up", "arrowdown": "down", "control": "ctrl", "cmd": "meta", "super": "meta"}  # fmt: skip
EDIT_COMMANDS = {"a": "selectAll", "c": "copy", "x": "cut", "v": "paste", "z": "undo"}
"""Editing commands of ctrl+KEY, which a headless browser does not run by itself."""


def key_events(text: str) -> list[dict[str, Any]]:
    """The events of pressing and releasing one key while others are held down. Raises InvalidToolArguments."""
    *held, name = text.split("+") if text != "+" else ["+"]
    modifiers = 0
    for modifier in held:
        if modifier.strip().lower() not in MODIFIERS:
            raise _unknown_key(modifier, text)
        modifiers |= MODIFIERS[modifier.strip().lower()]
    key, code, number, typed = _find_key(name.strip() or name, text)
    plain = not modifiers & ~MODIFIERS["shift"]
    down: dict[str, Any] = {"type": "keyDown" if typed and plain else "rawKeyDown"}
    if typed and plain:
        down["text"] = typed.upper() if modifiers else typed
    if modifiers == MODIFIERS["ctrl"] and key in EDIT_COMMANDS:
        down["commands"] = [EDIT_COMMANDS[key]]
    common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
    return [{**down, **common}, {"type": "keyUp", **common}]


def held_keys(text: str | None) -> int:
    """The modifier keys that are held while the mouse is used, as DevTools counts them: `ctrl+shift`."""
    modifiers = 0
    for name in (text or "").replace("+", " ").split():
        if name.lower() not in MODIFIERS:
            raise InvalidToolArguments(
                f"{name!r} in {text!r} is no key to hold with the mouse", hint="write ctrl, shift, alt or meta"
            )
        modifiers |= MODIFIERS[name.lower()]
    return modifiers


def _find_key(name: str, text: str) -> tuple[str, str, int, str]:
    lowered = name.lower().replace(" ", "_")
    named = KEYS.get(KEY_ALIASES.get(lowered, lowered))
    if named is not None:
        return named
    if len(name) != 1:
        raise _unknown_key(name, text)
    code = f"Key{name.upper()}" if name.isascii() and name.isalpha() else f"Digit{name}" if name.isdigit() else ""
    return name, code, ord(name.upper()) if name.isascii() else 0, name


def _unknown_key(name: str, text: str) -> InvalidToolArguments:
    return InvalidToolArguments(
        f"there is no key {name!r} in {text!r}", hint="write Return, Tab, ctrl+a, or one character"
    )
