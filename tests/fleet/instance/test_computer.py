"""The screen without a browser; with one it is tested end to end."""

from pathlib import Path
from typing import Any

import pytest

from paddock.errors import InvalidToolArguments
from paddock.fleet.instance.computer import key_events

from .instances import MANAGER, running


def test_without_a_browser_the_tool_says_what_to_install(tmp_path: Path) -> None:
    with running(tmp_path, image_type="mcp", process_environment={"PATH": ""}) as instance:
        result = instance.call("computer", path="/api/v1/mcp", action="screenshot")["result"]
        assert result["isError"]
        assert "apt install chromium" in result["content"][0]["text"]
        assert instance.call("computer", action="screenshot")["result"]["isError"]
        names = [tool["name"] for tool in instance.rpc("tools/list", path="/api/v1/mcp")["result"]["tools"]]
        assert names == ["add_note", "list_notes", "computer"]
        assert "computer" not in [tool["name"] for tool in instance.rpc("tools/list")["result"]["tools"]]
        assert "install" in instance.post(f"{MANAGER}/resources/cdp/start")["message"]
        assert instance.ask("GET", f"{MANAGER}/resources/cdp/describe").status == 409
        assert {"name": "cdp", "type": "cdp", "mode": "rw", "label": None} in instance.ask(
            "GET", f"{MANAGER}/resources"
        ).json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return", {"type": "keyDown", "key": "Enter", "text": "\r", "modifiers": 0}),
        ("a", {"type": "keyDown", "key": "a", "text": "a", "windowsVirtualKeyCode": 65}),
        ("shift+a", {"text": "A", "modifiers": 8}),
        ("ctrl+a", {"type": "rawKeyDown", "commands": ["selectAll"], "modifiers": 2}),
        ("Ctrl+Shift+Tab", {"type": "rawKeyDown", "key": "Tab", "modifiers": 10}),
        ("Page_Down", {"key": "PageDown"}),
        ("+", {"key": "+", "text": "+"}),
    ],
)
def test_keys_are_known_by_their_names(text: str, expected: dict[str, Any]) -> None:
    down, up = key_events(text)
    assert expected.items() <= down.items()
    assert up["type"] == "keyUp"


@pytest.mark.parametrize("text", ["bogus", "hyper+a", "ctrl+", ""])
def test_an_unknown_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidToolArguments):
        key_events(text)
