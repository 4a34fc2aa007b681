"""Names of keys as agents write them (`Return`, `ctrl+a`), and the events they are for a browser."""

from __future__ import annotations

from typing import Any

from paddock.errors import InvalidToolArguments

MODIFIERS = {"alt": 1, "ctrl": 2, "control": 2, "meta": 4, "super": 4, "cmd": 4, "shift": 8}

# Name: (key, code, number, text)
NAMED: dict[str, tuple[str, str, int, str]] = {
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
ALIASES = {"pageup": "page_up", "pagedown": "page_down", "arrowleft": "left", "arrowright": "right",
           "arrowup": "up", "arrowdown": "down", "control": "ctrl", "cmd": "meta", "super": "meta"}  # fmt: skip
EDITING = {"a": "selectAll", "c": "copy", "x": "cut", "v": "paste", "z": "undo"}
"""Headless browsers do not turn these into editing by themselves."""


def key_events(text: str) -> list[dict[str, Any]]:
    """The events of pressing and releasing one key while others are held down. Raises InvalidToolArguments."""
    *held, name = text.split("+") if text != "+" else ["+"]
    modifiers = 0
    for modifier in held:
        if modifier.strip().lower() not in MODIFIERS:
            raise _unknown(modifier, text)
        modifiers |= MODIFIERS[modifier.strip().lower()]
    key, code, number, typed = _key(name.strip() or name, text)
    plain = not modifiers & ~MODIFIERS["shift"]
    down: dict[str, Any] = {"type": "keyDown" if typed and plain else "rawKeyDown"}
    if typed and plain:
        down["text"] = typed.upper() if modifiers else typed
    if modifiers == MODIFIERS["ctrl"] and key in EDITING:
        down["commands"] = [EDITING[key]]
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


def _key(name: str, text: str) -> tuple[str, str, int, str]:
    lowered = name.lower().replace(" ", "_")
    found = NAMED.get(ALIASES.get(lowered, lowered))
    if found is not None:
        return found
    if len(name) != 1:
        raise _unknown(name, text)
    code = f"Key{name.upper()}" if name.isascii() and name.isalpha() else f"Digit{name}" if name.isdigit() else ""
    return name, code, ord(name.upper()) if name.isascii() else 0, name


def _unknown(name: str, text: str) -> InvalidToolArguments:
    return InvalidToolArguments(
        f"there is no key {name!r} in {text!r}", hint="write Return, Tab, ctrl+a, or one character"
    )
