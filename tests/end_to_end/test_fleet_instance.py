"""One hosted instance, used by other people's clients and by a real browser."""

import base64
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.instance.instances import KEY, MANAGER, TOKEN, Instance, running
from paddock.fleet.instance.browser import PROGRAMS

from .messages import TAKES_A_MESSAGE
from .processes import run_client
from .shapes import Matching

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(90, func_only=True)]

CLIENTS = {
    "mcp 1": ("mcp1", "mcp1_client.py"),
    "mcp 2, auto": ("mcp2", "mcp2_client.py", "auto"),
    "mcp 2, legacy": ("mcp2", "mcp2_client.py", "legacy"),
    "mcp 2, 2026-07-28": ("mcp2", "mcp2_client.py", "2026-07-28"),
    "fastmcp, auto": ("fastmcp", "fastmcp_client.py", "auto"),
}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with running(tmp_path_factory.mktemp("echo"), target="echo", env_key="echo") as instance:
        yield instance


def said(message: str) -> list[Any]:
    return [message, {"result": message}, False]


@pytest.mark.parametrize("path", ["/mcp", "/api/v1/mcp"])
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
def test_mcp_clients_use_its_tools(echo: Instance, client: tuple[str, ...], path: str) -> None:
    peer, script, *mode = client
    answers = run_client(peer, script, f"http://127.0.0.1:{echo.port}{path}", *mode)
    assert answers["tools"] == {"echo_message": TAKES_A_MESSAGE, "echo_with_length": TAKES_A_MESSAGE}
    assert answers["calls"] == [said("hi"), [Matching("hello"), {"message": "hello", "length": 5}, False]]
    assert answers["unknown_tool"] == {"refusal": [Matching("nope"), None, True], "after": said("hi")}
    assert answers["two_at_once"] == [said("one"), said("two"), said("one again"), said("alone")]


def test_the_sdk_looks_into_it_through_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_AUTH_TOKEN", TOKEN)
    with running(tmp_path, api_key=KEY, runner_token=TOKEN) as instance:
        root = f"http://127.0.0.1:{instance.port}/"
        answers = run_client("fleet", "fleet_sdk_instance.py", root.rstrip("/") + MANAGER, root)
    assert answers["looking"] == {
        "health": "notes",
        "resources": ["current", "seed"],
        "columns": [["id", 1], ["title", 0], ["body", 0]],
        "rows": [["welcome"]],
        "missing": [False, True],
        "refused": False,
        "app": "healthy",
        "files": 0,
        "file": False,
    }
    assert answers["tools"] == {
        "without_a_key": [],
        "listed": ["add_note", "list_notes"],
        "added": [False, {"id": 2}],
        "unknown": True,
        "session": None,
    }
    assert answers["differences"] == [True, True, [[1]]]


# -- the screen -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    if not any(shutil.which(program) for program in PROGRAMS):
        pytest.skip("there is no browser on this machine")
    with running(tmp_path_factory.mktemp("screen"), image_type="mcp", api_key=KEY) as instance:
        yield instance


def use(instance: Instance, action: str, **arguments: Any) -> list[dict[str, Any]]:
    params = {"name": "computer", "arguments": {"action": action, **arguments}}
    result = instance.rpc("tools/call", params, "/api/v1/mcp", authorization=f"Bearer {KEY}")["result"]
    assert not result["isError"], result
    content: list[dict[str, Any]] = result["content"]
    return content


def titles(instance: Instance) -> list[str]:
    call = {"name": "list_notes"}
    notes = instance.rpc("tools/call", call, authorization=f"Bearer {KEY}")["result"]["structuredContent"]["result"]
    return [note["title"] for note in notes]


def test_the_screen_is_a_picture_of_the_page(screen: Instance) -> None:
    [picture] = use(screen, "screenshot")
    assert picture["mimeType"] == "image/png"
    data = base64.b64decode(picture["data"])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1280, 800)
    assert len(data) > 8192


def test_an_agent_writes_a_note_with_mouse_and_keys(screen: Instance) -> None:
    assert screen.post(f"{MANAGER}/reset")["success"]
    before = use(screen, "left_click", coordinate=[640, 122])[-1]
    use(screen, "type", text="wrong")
    use(screen, "key", text="ctrl+a")
    use(screen, "type", text="by hand")
    use(screen, "key", text="Tab")
    use(screen, "type", text="typed\ninto it")
    after = use(screen, "left_click", coordinate=[360, 278])[-1]
    assert titles(screen) == ["welcome", "by hand"]
    assert before["data"] != after["data"]
    assert use(screen, "cursor_position") == [{"type": "text", "text": "X=360,Y=278"}]


def test_a_reset_is_seen_on_the_screen(screen: Instance) -> None:
    screen.post(f"{MANAGER}/reset")
    empty = use(screen, "screenshot")[0]["data"]
    add = {"name": "add_note", "arguments": {"title": "another"}}
    screen.rpc("tools/call", add, authorization=f"Bearer {KEY}")
    use(screen, "key", text="F5")
    assert use(screen, "screenshot")[0]["data"] != empty
    screen.post(f"{MANAGER}/reset")
    assert use(screen, "screenshot")[0]["data"] == empty


def test_the_other_actions_are_there(screen: Instance) -> None:
    for action, arguments in (
        ("scroll", {"scroll_direction": "down", "coordinate": [600, 400]}),
        ("wait", {"duration": 0.01}),
        ("mouse_move", {"coordinate": [5, 6]}),
        ("double_click", {"coordinate": [640, 342]}),
        ("middle_click", {"coordinate": [640, 342]}),
        ("hold_key", {"text": "shift", "duration": 0.01}),
        ("left_click", {"coordinate": [640, 342], "text": "ctrl+shift"}),
    ):
        assert use(screen, action, **arguments)[-1]["type"] == "image"


def replaced_text(screen: Instance, *actions: tuple[str, dict[str, Any]]) -> str:
    """The title of a note that was typed, selected with the mouse in some way, and typed over."""
    assert screen.post(f"{MANAGER}/reset")["success"]
    use(screen, "left_click", coordinate=[640, 122])
    use(screen, "type", text="two words")
    for action, arguments in actions:
        use(screen, action, **arguments)
    use(screen, "type", text="new")
    use(screen, "left_click", coordinate=[360, 278])
    return titles(screen)[-1]


def test_three_clicks_select_the_line(screen: Instance) -> None:
    assert replaced_text(screen, ("double_click", {"coordinate": [330, 122]})) == "two new"
    assert replaced_text(screen, ("triple_click", {"coordinate": [330, 122]})) == "new"


def test_a_drag_selects_what_it_passes(screen: Instance) -> None:
    ends = {"start_coordinate": [900, 122], "coordinate": [250, 122]}
    assert replaced_text(screen, ("left_click_drag", ends)) == "new"
    assert use(screen, "cursor_position") == [{"type": "text", "text": "X=360,Y=278"}]
    by_hand = (
        ("left_mouse_down", {"coordinate": [900, 122]}),
        ("mouse_move", {"coordinate": [600, 122]}),
        ("mouse_move", {"coordinate": [250, 122]}),
        ("left_mouse_up", {}),
    )
    assert replaced_text(screen, *by_hand) == "new"


def test_the_size_of_the_screen_is_where_trainers_look_for_it(screen: Instance) -> None:
    listed = screen.rpc("tools/list", path="/api/v1/mcp", authorization=f"Bearer {KEY}")["result"]["tools"]
    described = next(tool["description"] for tool in listed if tool["name"] == "computer")
    match = re.search(r"Screen resolution:\s*(\d+)x(\d+)", described)
    data = base64.b64decode(use(screen, "screenshot")[0]["data"])
    assert match is not None
    assert (int(match[1]), int(match[2])) == struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(
    "arguments", [{"action": "left_click_drag"}, {"action": "dance"}, {"action": "key", "text": "?!"}]
)
def test_a_wrong_action_is_a_result(screen: Instance, arguments: dict[str, Any]) -> None:
    params = {"name": "computer", "arguments": arguments}
    result = screen.rpc("tools/call", params, "/api/v1/mcp", authorization=f"Bearer {KEY}")["result"]
    assert result["isError"]


def test_others_may_drive_the_browser_by_its_address(screen: Instance) -> None:
    use(screen, "screenshot")
    response = screen.ask("GET", f"{MANAGER}/resources/cdp/describe").json
    assert response["success"]
    assert response["cdp_browser_url"].startswith("ws://127.0.0.1:")


def test_the_browser_ends_with_the_instance(tmp_path: Path, screen: Instance) -> None:
    with running(tmp_path, image_type="mcp", api_key=KEY) as instance:
        use(instance, "screenshot")
        assert browsers(tmp_path)
        instance.process.kill()
        instance.process.wait()
        while browsers(tmp_path):
            pass


def browsers(folder: Path) -> list[str]:
    """The processes whose files are in `folder`."""
    collected = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.fsencode(folder) in (process / "cmdline").read_bytes():
                collected.append(process.name)
        except OSError:
            continue
    return collected
